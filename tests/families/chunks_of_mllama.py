"""Llama 3.2 Vision with its MLPs in chunks, as `harness` looks for it."""

from tiny_mllama import Case, inputs_of, local_frames, model_of

__all__ = ["CASES", "inputs_of", "local_frames", "model_of"]

CHUNKS = {"mlp_chunk_size": 5, "vision_chunk_size": 1}
CASES = {"two samples, holes": Case(images=((2, 3, 1), (1,)), mask="scattered").with_options(**CHUNKS)}
