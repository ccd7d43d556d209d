"""Layer: one process, loopback ranks. The planner's memory formulas against real modules and calls.

Compared are the bytes that autograd saves, that a frozen tower allocates, of the cache and the transfers of an answer,
and of the receive buffers that calls leave allocated. The K and V of whole models of the other families are compared in
the tests of the memory benchmark.
"""

import functools
import sys
import types
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from clusters import ROUND
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration

from attention_cases import Case, problem, run_case
from family_cases import QWENS
from family_harness import on_ranks, settings
from memory_meters import Peak, saved
from mllm_seqpar import patch_model
from mllm_seqpar._compat import cache_of
from mllm_seqpar.patches import sizes as family_sizes
from mllm_seqpar.patches.sizes import mplug_owl3 as model_sizes
from mllm_seqpar.planner import ParallelSpec
from mllm_seqpar.planner.memory import (
    frozen_tower_memory,
    peak_memory,
    pixels_on_device,
    receive_buffer_bytes,
    saved_before_features,
    saved_for_backward,
)
from mllm_seqpar.planner.model_sizes import CrossAttentionSizes, ModelSizes, ResamplerSizes, TextSizes, VisionSizes
from mllm_seqpar.planner.plan import make_plan
from mllm_seqpar.planner.workload import Workload
from mllm_seqpar.runtime.projections import KVProjection
from mllm_seqpar.runtime.visual_tokens import LABEL
from model_copies import copy_of, tiny_model
from nccl_model import NcclCommunicator, run_nccl_model
from tiny_models.mplug_owl3 import tiny_frames, tiny_text

pytestmark = pytest.mark.rounding

KERNEL = "torch_cpu"
"""With "auto", one process computes text with torch's own attention, which saves less than the block kernels."""

WIDTHS = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2}
ONE_RANK = ParallelSpec("lv-xattn", (1, 1))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def workload(model: ModelSizes, dtype: torch.dtype, frames: int, text: int = 1, **changes: Any) -> Workload:
    return Workload(model=model, frames=frames, text=text, gpus=1, element=dtype.itemsize, **changes)


def owl(dtype: torch.dtype) -> tuple[Any, ModelSizes]:
    """Return a small mPLUG-Owl3 with a frozen vision tower, and its sizes."""
    model = tiny_model(num_hidden_layers=6, hyper_layers=[1, 4], vocab_size=256, **WIDTHS).to(dtype)
    model.vision_model.requires_grad_(False)
    return model, model_sizes(model.config.to_dict(), "tiny")


def saved_in_training(model: Any, dtype: torch.dtype, frames: int, length: int) -> int:
    ids, pixels = tiny_text(frames, length=length), tiny_frames(frames).to(dtype)
    return saved(lambda: model(input_ids=ids, pixel_values=pixels, labels=ids), *model.parameters())


@pytest.mark.parametrize(
    ("dtype", "trained"),
    [
        (torch.float32, "connector"),
        (torch.bfloat16, "no-vision"),
        (torch.bfloat16, "connector"),
        (torch.bfloat16, "language"),
    ],
)
def test_frame_saves_as_many_bytes_as_planned_without_recomputation(dtype: torch.dtype, trained: str) -> None:
    """The difference between two numbers of frames, with K and V saved, and the input of the projector."""
    model, sizes = owl(dtype)
    if trained == "connector":
        model.language_model.requires_grad_(False)
        for number in model.config.hyper_layers:
            model.language_model.model.layers[number - 1].self_attn.v_kv_proj.requires_grad_(True)
    elif trained == "language":  # features without a gradient: their norm saves less
        model.requires_grad_(False)
        model.language_model.requires_grad_(True)
    model = patch_model(model, strategy="lv-xattn", recompute_visual=False).train()

    def planned(frames: int) -> int:
        run = workload(sizes, dtype, frames, 64, recompute=False, trained=trained)
        # In float32 the norm saves the features themselves, in bf16 a float32 copy, which the formula contains.
        features = frames * 4 * 256 * 4 if dtype == torch.float32 else 0
        return saved_for_backward(run, ONE_RANK) + saved_before_features(run) + features

    measured = saved_in_training(model, dtype, 32, 64) - saved_in_training(model, dtype, 16, 64)
    assert planned(32) - planned(16) == pytest.approx(measured, rel=0.04)  # the rotary factors are not planned


@DTYPES
def test_mllama_keys_and_values_save_as_many_bytes_as_planned(dtype: torch.dtype) -> None:
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig
    from transformers.models.mllama.modeling_mllama import MllamaTextCrossAttention

    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    attention: Any = MllamaTextCrossAttention(MllamaTextConfig(**shape, cross_attention_layers=[0]), 0).to(dtype)
    features = torch.randn(3, 8, 64, dtype=dtype, requires_grad=True)

    def project() -> torch.Tensor:
        linears = attention.k_proj, attention.v_proj
        k, v = KVProjection(linears, attention.head_dim, key_norm=attention.k_norm)(features, torch.zeros(3))
        return (k * v).sum()  # saves both, as attention does

    cross = CrossAttentionSizes(layers=1, heads=4, kv_heads=2, head_dim=16, visual_dim=64, key_norm="float32")
    run = workload(sizes_of(cross=cross, keys=8), dtype, 3)
    planned = saved_for_backward(replace(run, recompute=False), ONE_RANK) - saved_for_backward(run, ONE_RANK)
    assert planned == pytest.approx(saved(project, features, *attention.parameters()), rel=0.01)


@DTYPES
@pytest.mark.parametrize("code", ["idefics", "flamingo"])
def test_resampler_saves_as_many_bytes_as_planned(code: str, dtype: torch.dtype) -> None:
    """8 latents of width 32 attend to 24 patches, with 2 heads of 24, in 3 layers."""
    patches = torch.randn(5, 24, 32, dtype=dtype)
    if code == "idefics":
        from transformers import IdeficsConfig
        from transformers.models.idefics.perceiver import IdeficsPerceiverResampler

        perceiver = {"vision_config": {"embed_dim": 32}, "perceiver_config": {"qk_layer_norms_perceiver": True}}
        config = IdeficsConfig(**perceiver, use_resampler=True)
        module: Any = IdeficsPerceiverResampler(config, 32, 3, 2, 24, 8).to(dtype)
    else:
        sys.modules.setdefault("open_clip", types.ModuleType("open_clip"))  # imported by the package, not used here
        helpers = pytest.importorskip("open_flamingo.src.helpers", reason="installed with --no-deps by scripts/test.sh")
        module = helpers.PerceiverResampler(dim=32, depth=3, dim_head=24, heads=2, num_latents=8).to(dtype)
        patches = patches[None, :, None]  # the frames of one sample
    measured = saved(lambda: module(patches), *module.parameters())
    resampler = ResamplerSizes(layers=3, heads=2, head_dim=24, mlp_inner=128, code=code)
    model = replace(sizes_of(keys=8), resampler=resampler)
    assert saved_before_features(workload(model, dtype, 5)) == pytest.approx(measured, rel=0.02)


def fake_tower(dtype: torch.dtype, frames: int) -> tuple[ModelSizes, Any, Any]:
    """Return a model's sizes, its SigLIP tower with 64 patches per frame, and frames, as fake tensors.

    Fake tensors have shapes and no numbers, so that what is allocated does not depend on the processor's libraries.
    """
    model = tiny_model(vision={"image_size": 112, "hidden_size": 128, "intermediate_size": 480}).to(dtype)
    fake, sizes = FakeTensorMode().from_tensor, model_sizes(model.config.to_dict(), "tiny")
    return sizes, model.vision_model._apply(fake), fake(torch.empty(frames, 3, 112, 112, dtype=dtype))


@DTYPES
def test_trained_tower_saves_as_many_bytes_as_planned(dtype: torch.dtype) -> None:
    """The last layer of the tower does not run."""
    sizes, tower, frames = fake_tower(dtype, 4)
    with frames.fake_mode:
        measured = saved(lambda: tower.penultimate(frames), frames, *tower.parameters())
    model = replace(sizes, vision=replace(sizes.vision, layers=sizes.vision.layers - 1), projector=None)
    assert saved_before_features(workload(model, dtype, 4, trained="all")) == pytest.approx(measured, rel=0.01)


def test_frozen_tower_allocates_as_many_bytes_as_planned() -> None:
    sizes, tower, frames = fake_tower(torch.bfloat16, 8)
    with frames.fake_mode, torch.no_grad(), Peak(frames, *tower.parameters()) as peak:
        tower.penultimate(frames)
    run = workload(sizes, torch.bfloat16, 8, trained="none")
    assert peak.bytes == pytest.approx(frozen_tower_memory(run), rel=0.02)
    long = replace(run, frames=800, vision_chunk_size=None)
    held = peak_memory(long, ONE_RANK)  # no text: the tower is the peak
    tower = frozen_tower_memory(long) + pixels_on_device(long, long.vision_chunk_size)
    assert held["features"] + held["activations"] + held["buffers"] == tower


def sizes_of(keys: int, cross: CrossAttentionSizes | None = None) -> ModelSizes:
    """Return sizes with 24 patches of width 32 per frame."""
    attention = {"layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 16}
    return ModelSizes(
        name="tiny",
        text=TextSizes(hidden=64, mlp_inner=8, mlp_matrices=3, vocabulary=9, **attention),
        cross=cross or CrossAttentionSizes(visual_dim=32, **attention),
        vision=VisionSizes(width=32, layers=1, heads=2, mlp_inner=8, tokens=24, keys=keys),
    )


CLASSES = {"qwen2_5_vl": Qwen2_5_VLForConditionalGeneration, "qwen3_vl": Qwen3VLForConditionalGeneration}
FAMILIES = pytest.mark.parametrize("family", CLASSES)
QWEN_TEXT = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2}
QWEN_TEXT |= {"head_dim": 32, "num_hidden_layers": 6}
QWEN_TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
GRID = (4, 6)
"""Patches of a temporal patch; four of them are one token."""
TOKENS, WORDS = 6, 96
ONE_RING = ParallelSpec("ring", (1, 1))


def qwen_config(family: str) -> Any:
    """Return the configuration of a model of width 256 with a tower of width 128."""
    config = import_module(f"tiny_models.{family}").tiny_config(**QWEN_TEXT)
    for name, value in {"hidden_size": 128, "intermediate_size": 352, "out_hidden_size": 256}.items():
        setattr(config.vision_config, name, value)
    return config


def qwen_sizes(family: str) -> ModelSizes:
    return getattr(family_sizes, family)(qwen_config(family).to_dict(), "tiny").with_frame_tokens(TOKENS)


def qwen(family: str) -> Any:
    return CLASSES[family](qwen_config(family))


def qwen_workload(sizes: ModelSizes, dtype: torch.dtype, frames: int, text: int, **changes: Any) -> Workload:
    return Workload(model=sizes, frames=2 * frames, text=text, gpus=1, element=dtype.itemsize, **changes)


def saved_by_qwen(
    family: str, dtype: torch.dtype, frames: int, length: int, trained: str = "language", **options: Any
) -> int:
    """Return the bytes that a pass over `length` tokens saves, those of `frames` temporal patches included."""
    testing, model = import_module(f"tiny_models.{family}"), copy_of(qwen, family).to(dtype)
    for name, parameter in model.model.visual.named_parameters():
        parameter.requires_grad_(trained == "all" or (trained == "no-vision" and "merger" in name))
    case = testing.Case(frames=(((frames, *GRID),),), length=length)
    inputs = testing.inputs_of(case, model)
    inputs["pixel_values_videos"] = inputs["pixel_values_videos"].to(dtype)
    inputs["labels"] = inputs["input_ids"]
    model = patch_model(model, kernel=KERNEL, **options).train()
    return saved(lambda: model(**inputs), *model.parameters())


@pytest.mark.parametrize("family", ["mplug_owl3", *CLASSES])
@pytest.mark.parametrize(("dtype", "chunk"), [(torch.float32, None), (torch.bfloat16, 64)])
def test_text_token_saves_as_many_bytes_as_planned(family: str, dtype: torch.dtype, chunk: int | None) -> None:
    """The difference between two lengths; the norm before Qwen's head, once in a model, is not planned."""
    if family == "mplug_owl3":
        (model, sizes), words, norm = owl(dtype), 256, 0
        model = patch_model(model, strategy="lv-xattn", mlp_chunk_size=chunk, kernel=KERNEL).train()
        saved_by = functools.partial(saved_in_training, model, dtype, 4)
    else:
        sizes, words, norm = qwen_sizes(family), WORDS, 256 * (4 + 2 * dtype.itemsize)
        saved_by = functools.partial(saved_by_qwen, family, dtype, 1, mlp_chunk_size=chunk)

    def planned(text: int) -> int:
        run = workload(sizes, dtype, 4, text, trained="language", mlp_chunk_size=chunk)
        logits = words * (dtype.itemsize + 8)
        return peak_memory(run, ONE_RING)["activations"] + text * (norm - logits)

    measured = saved_by(length=192) - saved_by(length=128)
    assert planned(192) - planned(128) == pytest.approx(measured - 64 * words * 4, rel=0.02)  # logits in float32


@FAMILIES
@pytest.mark.parametrize(
    ("dtype", "trained", "tolerance"), [(torch.float32, "no-vision", 0.01), (torch.bfloat16, "all", 0.06)]
)
def test_qwen_frame_saves_planned_bytes(family: str, dtype: torch.dtype, trained: str, tolerance: float) -> None:
    """The difference between two numbers of frames in texts of one length; rotary factors are not planned."""
    sizes = qwen_sizes(family)

    def planned(frames: int) -> int:
        run = qwen_workload(sizes, dtype, frames, 96 - TOKENS * frames, trained=trained)
        return saved_before_features(run) + peak_memory(run, ONE_RING)["features"]

    measured = saved_by_qwen(family, dtype, 8, 96, trained) - saved_by_qwen(family, dtype, 4, 96, trained)
    assert planned(8) - planned(4) == pytest.approx(measured, rel=tolerance)


@FAMILIES
@DTYPES
def test_frozen_qwen_tower_allocates_as_many_bytes_as_planned(family: str, dtype: torch.dtype) -> None:
    testing, sizes = import_module(f"tiny_models.{family}"), qwen_sizes(family)
    tower, patches = copy_of(qwen, family).to(dtype).model.visual, 8 * GRID[0] * GRID[1]
    pixels = torch.randn(patches, testing.PIXELS if family == "qwen2_5_vl" else 3 * 2 * 4 * 4, dtype=dtype)
    with torch.no_grad(), Peak(pixels, *tower.parameters()) as peak:
        tower(pixels, grid_thw=torch.tensor([[8, *GRID]]))
    run = qwen_workload(sizes, dtype, 8, 1, trained="none")
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
    sizes = getattr(family_sizes, family)(ranks[0][0], "tiny")
    prompt = qwen_workload(sizes.with_frame_tokens(TOKENS), torch.float32, frames, length - TOKENS * frames)
    asked = replace(prompt, gpus=2, trained="none", self_attention="ring", answer=answer)
    row = make_plan(asked, ROUND).best
    assert max(kept for _, kept, _ in ranks) == row.memory["cache"]
    for _, _, sent in ranks:
        assert sent["o"] == row.parts["decoding"].both.node_bytes * (answer - 1) // answer
        assert sent["k"] + sent["v"] == row.parts["self-attention"].both.node_bytes
    moved = sum(sent.get(LABEL, 0) for *_, sent in ranks)
    assert moved <= 2 * row.parts["vision tower"].both.node_bytes  # on average half of them, by the layout of the text


BF16 = {"dtype": torch.bfloat16, "rows": 24, "frames": 12}
CALLS: dict[str, list[tuple[Case, ParallelSpec]]] = {
    "lv-xattn": [(Case(op="lv", **BF16), ParallelSpec("lv-xattn", (4, 1)))],
    "ring": [(Case(op="ring", **BF16), ParallelSpec("ring", (1, 4)))],
    "mesh": [(Case(op="mesh", tile=(2, 2), **BF16), ParallelSpec("mesh", (2, 2)))],
    "hybrid": [(Case(op="ulysses", tile=(2, 1), **BF16), ParallelSpec("ulysses", (2, 1), 2))],
    "ulysses": [(Case(op="ulysses", **BF16), ParallelSpec("ulysses", (1, 1), 4))],
    "all pairs": [(Case(op="direct", **BF16), ParallelSpec("lv-xattn", (4, 1), all_pairs=True))],
    "float32 results": [(Case(op="mesh", tile=(2, 2), accumulate=torch.float32, **BF16), ParallelSpec("mesh", (2, 2)))],
    "float32": [(Case(op="lv", rows=24, frames=12), ParallelSpec("lv-xattn", (4, 1)))],
    "text and frames": [
        (Case(op="ring", **BF16), ParallelSpec("ring", (1, 4))),
        (Case(op="causal", layout="zigzag", **BF16), ParallelSpec("ring", (1, 4))),
    ],
    "short text, other heads": [
        (Case(op="causal", **{**BF16, "rows": 8}), ParallelSpec("ring", (1, 4))),
        (Case(op="lv", heads=8, **BF16), ParallelSpec("lv-xattn", (4, 1))),
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_receive_buffers_take_the_planned_bytes(name: str) -> None:
    calls = CALLS[name]

    def allocated(comm: NcclCommunicator) -> int:
        for _ in range(2):
            for case, _ in calls:
                run_case(comm, case)
        return comm.kept.buffers.nbytes

    planned = receive_buffer_bytes([(problem(case, 4, 0), spec) for case, spec in calls], training=True)
    assert run_nccl_model(4, allocated) == [planned] * 4
    assert planned > 0 or name == "ulysses"
