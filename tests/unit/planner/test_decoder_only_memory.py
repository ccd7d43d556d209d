"""Layer: one process, loopback ranks. The planner's formulas for decoder-only models against tiny ones.

Compared are the bytes that autograd saves and a frozen tower allocates, and, over two ranks, the K and V of an answer
and the bytes that are sent.
"""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from clusters import ROUND
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration

from family_cases import QWENS
from family_harness import on_ranks, settings
from memory_meters import Peak, saved
from mllm_seqpar import patch_model
from mllm_seqpar._compat import cache_of
from mllm_seqpar.patches import sizes as sizes_of
from mllm_seqpar.planner import ParallelSpec
from mllm_seqpar.planner.memory import frozen_tower_memory, peak_memory, saved_before_features
from mllm_seqpar.planner.model_sizes import ModelSizes
from mllm_seqpar.planner.plan import make_plan
from mllm_seqpar.planner.workload import Workload
from mllm_seqpar.runtime.visual_tokens import LABEL

pytestmark = pytest.mark.rounding

CLASSES = {"qwen2_5_vl": Qwen2_5_VLForConditionalGeneration, "qwen3_vl": Qwen3VLForConditionalGeneration}
FAMILIES = pytest.mark.parametrize("family", CLASSES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
TEXT = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2}
TEXT |= {"head_dim": 32, "num_hidden_layers": 6}
TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
GRID = (4, 6)
"""Patches of a temporal patch; four of them are one token."""
TOKENS, WORDS = 6, 96
RING = ParallelSpec("ring", (1, 1))


def tiny(family: str, dtype: torch.dtype) -> tuple[Any, Any, ModelSizes]:
    """Return the family's module for tests, a model of width 256 with a tower of width 128, and its sizes."""
    testing = import_module(f"tiny_models.{family}")
    config = testing.tiny_config(**TEXT)
    for name, value in {"hidden_size": 128, "intermediate_size": 352, "out_hidden_size": 256}.items():
        setattr(config.vision_config, name, value)
    model = CLASSES[family](config).to(dtype)
    sizes = getattr(sizes_of, family)(config.to_dict(), "tiny")
    return testing, model, sizes.with_frame_tokens(TOKENS)


def workload(sizes: ModelSizes, dtype: torch.dtype, frames: int, text: int, **changes: Any) -> Workload:
    return Workload(model=sizes, frames=2 * frames, text=text, gpus=1, element=dtype.itemsize, **changes)


def saved_in_training(
    family: str, dtype: torch.dtype, frames: int, length: int, trained: str = "language", **options: Any
) -> int:
    """Return the bytes that a pass over `length` tokens saves, those of `frames` temporal patches included."""
    testing, model, _ = tiny(family, dtype)
    for name, parameter in model.model.visual.named_parameters():
        parameter.requires_grad_(trained == "all" or (trained == "no-vision" and "merger" in name))
    case = testing.Case(frames=(((frames, *GRID),),), length=length)
    inputs = testing.inputs_of(case, model)
    inputs["pixel_values_videos"] = inputs["pixel_values_videos"].to(dtype)
    inputs["labels"] = inputs["input_ids"]
    # With "auto", one process computes with torch's own attention, which saves less than the block kernels.
    model = patch_model(model, kernel="torch_cpu", **options).train()
    return saved(lambda: model(**inputs), *model.parameters())


@FAMILIES
@pytest.mark.parametrize(("dtype", "chunk"), [(torch.float32, None), (torch.bfloat16, 64)])
def test_token_saves_as_many_bytes_as_planned(family: str, dtype: torch.dtype, chunk: int | None) -> None:
    """The difference between two lengths; the norm before the head, once in a model, is not planned."""
    _, _, sizes = tiny(family, dtype)

    def planned(text: int) -> int:
        run = workload(sizes, dtype, 1, text, trained="language", mlp_chunk_size=chunk)
        logits = text * WORDS * (dtype.itemsize + 8)
        return peak_memory(run, RING)["activations"] - logits + text * 256 * (4 + 2 * dtype.itemsize)

    options = {"mlp_chunk_size": chunk}
    measured = saved_in_training(family, dtype, 1, 256, **options) - saved_in_training(family, dtype, 1, 128, **options)
    assert planned(256) - planned(128) == pytest.approx(measured - 128 * WORDS * 4, rel=0.02)  # logits in float32


@FAMILIES
@pytest.mark.parametrize(
    ("dtype", "trained", "tolerance"), [(torch.float32, "no-vision", 0.01), (torch.bfloat16, "all", 0.06)]
)
def test_frame_saves_as_many_bytes_as_planned(family: str, dtype: torch.dtype, trained: str, tolerance: float) -> None:
    """The difference between two numbers of frames in texts of one length; rotary factors are not planned."""
    _, _, sizes = tiny(family, dtype)

    def planned(frames: int) -> int:
        run = workload(sizes, dtype, frames, 256 - TOKENS * frames, trained=trained)
        return saved_before_features(run) + peak_memory(run, RING)["features"]

    measured = saved_in_training(family, dtype, 8, 256, trained) - saved_in_training(family, dtype, 4, 256, trained)
    assert planned(8) - planned(4) == pytest.approx(measured, rel=tolerance)


@FAMILIES
@DTYPES
def test_frozen_tower_allocates_as_many_bytes_as_planned(family: str, dtype: torch.dtype) -> None:
    testing, model, sizes = tiny(family, dtype)
    tower, patches = model.model.visual, 8 * GRID[0] * GRID[1]
    pixels = torch.randn(patches, testing.PIXELS if family == "qwen2_5_vl" else 3 * 2 * 4 * 4, dtype=dtype)
    with torch.no_grad(), Peak(pixels, *tower.parameters()) as peak:
        tower(pixels, grid_thw=torch.tensor([[8, *GRID]]))
    run = workload(sizes, dtype, 8, 1, trained="none")
    assert frozen_tower_memory(run) == pytest.approx(peak.bytes, rel=0.02)


@FAMILIES
def test_answer_keeps_and_sends_as_many_bytes_as_planned(family: str) -> None:
    """Two ranks generate 6 tokens after 48 visual ones and text; the first of them comes from the prompt's pass."""
    frames, length, answer = 8, 96, 6
    case = replace(QWENS[family], frames=(((frames, *GRID),),), length=length, labels=None)

    def run(model: Any, inputs: dict[str, Any], comm: Any) -> tuple[dict[str, Any], int, dict[str, int]]:
        options = settings(use_cache=True, return_dict_in_generate=True, max_new_tokens=answer)
        cache = cache_of(model.generate(**inputs, **options))
        kept = [x for layer in cache.layers for x in (layer.keys, layer.values) if x is not None]
        return model.config.to_dict(), sum(x.nbytes for x in kept), dict(comm.bytes.sent)

    ranks = on_ranks(2, family, case.with_options(shard_prompt_from=8), run)
    sizes = getattr(sizes_of, family)(ranks[0][0], "tiny")
    prompt = workload(sizes.with_frame_tokens(TOKENS), torch.float32, frames, length - TOKENS * frames)
    asked = replace(prompt, gpus=2, trained="none", self_attention="ring", answer=answer)
    row = make_plan(asked, ROUND).best
    assert max(kept for _, kept, _ in ranks) == row.memory["cache"]
    for _, _, sent in ranks:
        assert sent["o"] == row.parts["decoding"].both.node_bytes * (answer - 1) // answer
        assert sent["k"] + sent["v"] == row.parts["self-attention"].both.node_bytes
    moved = sum(sent.get(LABEL, 0) for *_, sent in ranks)
    assert moved <= 2 * row.parts["vision tower"].both.node_bytes  # on average half of them, by the layout of the text
