"""IDEFICS with its MLPs in chunks, as `harness` looks for it."""

from tiny_idefics import Case, inputs_of, local_frames, model_of

__all__ = ["CASES", "GENERATED", "inputs_of", "local_frames", "model_of"]

CHUNKS = {"mlp_chunk_size": 5, "vision_chunk_size": 1}
CASES = {"two samples": Case(images=(4, 1), mask="holes").with_options(**CHUNKS)}
GENERATED = {
    "read by all": (Case(images=(3, 1), padding="left", labels=False).with_options(**CHUNKS), {}),
    "dealt": (Case(images=(3, 1), labels=False).with_options(shard_prompt_from=2, **CHUNKS), {"num_beams": 2}),
}
