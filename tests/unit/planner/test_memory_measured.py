"""Layer: one process. The planner's memory formulas against what autograd saves of real modules.

The K and V of whole models of the other families are compared in the tests of the memory benchmark.
"""

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memory_meters import Peak, saved
from mllm_seqpar import patch_model
from mllm_seqpar.patches.sizes import mplug_owl3 as model_sizes
from mllm_seqpar.planner import ParallelSpec
from mllm_seqpar.planner.memory import (
    frozen_tower_memory,
    peak_memory,
    pixels_on_device,
    saved_before_features,
    saved_for_backward,
)
from mllm_seqpar.planner.model_sizes import CrossAttentionSizes, ModelSizes, ResamplerSizes, TextSizes, VisionSizes
from mllm_seqpar.planner.workload import Workload
from mllm_seqpar.runtime.visual_features import KVProjection
from tiny_models.mplug_owl3 import tiny_frames, tiny_model, tiny_text

pytestmark = pytest.mark.rounding

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


@pytest.mark.parametrize(("dtype", "chunk"), [(torch.float32, None), (torch.bfloat16, 64)], ids=str)
def test_text_token_saves_as_many_bytes_as_planned(dtype: torch.dtype, chunk: int | None) -> None:
    """The difference between two lengths of text."""
    model, sizes = owl(dtype)
    # With "auto", one process computes text with torch's own attention, which saves less than the block kernels.
    model = patch_model(model, strategy="lv-xattn", mlp_chunk_size=chunk, kernel="torch_cpu").train()

    def planned(text: int) -> int:
        run = workload(sizes, dtype, 4, text, mlp_chunk_size=chunk)
        return peak_memory(run, ONE_RANK)["activations"] - text * 256 * (dtype.itemsize + 8)  # without logits

    measured = saved_in_training(model, dtype, 4, 256) - saved_in_training(model, dtype, 4, 128)
    logits = 128 * 256 * 4  # 128 tokens, 256 words, float32
    assert planned(256) - planned(128) == pytest.approx(measured - logits, rel=0.04)


@pytest.mark.parametrize(
    ("dtype", "trained"), [(torch.float32, "connector"), (torch.bfloat16, "no-vision"), (torch.bfloat16, "connector")]
)
def test_frame_saves_as_many_bytes_as_planned_without_recomputation(dtype: torch.dtype, trained: str) -> None:
    """The difference between two numbers of frames, with K and V saved, and the input of the projector."""
    model, sizes = owl(dtype)
    if trained == "connector":
        model.language_model.requires_grad_(False)
        for number in model.config.hyper_layers:
            model.language_model.model.layers[number - 1].self_attn.v_kv_proj.requires_grad_(True)
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
    tower = frozen_tower_memory(long) + pixels_on_device(long, long.vision_chunk_size or long.local_frames)
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
