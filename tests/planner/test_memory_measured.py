"""Layer: one process. The planner's formulas for what is kept for backward against what autograd saves of real modules.

K and V kept by whole models of the other families: `tests/test_memory_benchmark.py`.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mllm_seqpar import patch_model
from mllm_seqpar.patches.mllama.adapter import _keys_values
from mllm_seqpar.patches.mplug_owl3.testing import tiny_frames, tiny_model, tiny_text
from mllm_seqpar.planner import ParallelSpec
from mllm_seqpar.planner.activation_memory import kept, kept_before
from mllm_seqpar.planner.hf_config import _mplug_owl3
from mllm_seqpar.planner.memory import memory, tower_at_work
from mllm_seqpar.planner.model import CrossAttentionSizes, ModelSizes, ResamplerSizes, TextSizes, VisionSizes
from mllm_seqpar.planner.workload import Workload

pytestmark = pytest.mark.rounding

WIDTHS = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2}
ALONE = ParallelSpec("lv-xattn", (1, 1))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def saved(run: Callable[[], object], *given: torch.Tensor) -> int:
    """Bytes of the storages that a forward pass saves for backward, but for the given tensors'."""
    left_out = {x.untyped_storage()._cdata for x in given}
    sizes, alive = {}, []

    def save(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in left_out:
            sizes[storage._cdata] = storage.nbytes()
            alive.append(x.detach())  # or its place would be given away, and counted once for two
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        run()
    return sum(sizes.values())


class Peak(TorchDispatchMode):
    """Collects the most bytes that results of operators take at one time, those of the given tensors left out.

    Scratch memory inside an operator is not counted: it depends on the processor, and the planner leaves it out.
    """

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.live = self.bytes = 0
        self._known = {x.untyped_storage()._cdata for x in given}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._known:
                self._follow(x.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        place, count = storage._cdata, storage.nbytes()
        self._known.add(place)
        self.live += count
        self.bytes = max(self.bytes, self.live)

        def gone() -> None:
            self._known.discard(place)
            self.live -= count

        weakref.finalize(storage, gone)


@DTYPES
@pytest.mark.parametrize("chunk", [None, 64])
def test_activations_of_a_real_model(dtype: torch.dtype, chunk: int | None) -> None:
    """By the difference between two lengths of text: what a token costs. Logits are counted apart (test_plan)."""
    model = tiny_model(num_hidden_layers=6, hyper_layers=[1, 4], vocab_size=256, **WIDTHS).to(dtype)
    model.vision_model.requires_grad_(False)
    sizes = _mplug_owl3(model.config.to_dict(), "tiny")
    model = patch_model(model, strategy="lv-xattn", mlp_chunk_size=chunk).train()
    weights = list(model.parameters())

    def found(length: int) -> int:
        ids, frames = tiny_text(4, length=length), tiny_frames(4).to(dtype)
        return saved(lambda: model(input_ids=ids, pixel_values=frames, labels=ids), *weights)

    def planned(text: int) -> int:
        run = Workload(model=sizes, frames=4, text=text, gpus=1, element=dtype.itemsize, mlp_chunk_size=chunk)
        return memory(run, ALONE)["activations"] - text * 256 * (dtype.itemsize + 8)

    logits = 256 * 256 * 4  # in float32, of 256 tokens and words
    assert planned(512) - planned(256) == pytest.approx(found(512) - found(256) - logits, rel=0.04)


@DTYPES
@pytest.mark.parametrize("trained", ["no-vision", "connector"])
def test_what_a_frame_costs_in_a_real_model(dtype: torch.dtype, trained: str) -> None:
    """K and V kept: by the difference between two numbers of frames, the projector's input among it."""
    model = tiny_model(num_hidden_layers=6, hyper_layers=[1, 4], vocab_size=256, **WIDTHS).to(dtype)
    model.vision_model.requires_grad_(False)
    if trained == "connector":
        model.language_model.requires_grad_(False)
        for number in model.config.hyper_layers:
            model.language_model.model.layers[number - 1].self_attn.v_kv_proj.requires_grad_(True)
    sizes = _mplug_owl3(model.config.to_dict(), "tiny")
    model = patch_model(model, strategy="lv-xattn", recompute_visual=False).train()
    weights = list(model.parameters())

    def found(frames: int) -> int:
        ids, pixels = tiny_text(frames, length=64), tiny_frames(frames).to(dtype)
        return saved(lambda: model(input_ids=ids, pixel_values=pixels, labels=ids), *weights)

    def planned(frames: int) -> int:
        element = dtype.itemsize
        run = Workload(model=sizes, frames=frames, text=64, gpus=1, element=element, recompute=False, trained=trained)
        features = frames * 4 * 256 * element if dtype == torch.float32 else 0  # in bf16 its norm keeps a copy instead
        return kept(run, ALONE) + kept_before(run) + features

    assert planned(32) - planned(16) == pytest.approx(found(32) - found(16), rel=0.04)  # rotary factors of each frame


@DTYPES
def test_keys_and_values_of_llama(dtype: torch.dtype) -> None:
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig
    from transformers.models.mllama.modeling_mllama import MllamaTextCrossAttention

    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    attention: Any = MllamaTextCrossAttention(MllamaTextConfig(**shape, cross_attention_layers=[0]), 0).to(dtype)
    features = torch.randn(3, 8, 64, dtype=dtype, requires_grad=True)

    def project() -> torch.Tensor:
        k, v = _keys_values(attention, features, torch.zeros(3))
        return (k * v).sum()  # keeps both, as attention does

    cross = CrossAttentionSizes(layers=1, heads=4, kv_heads=2, head_dim=16, visual_dim=64, key_norm="float32")
    run = Workload(model=model_of(cross=cross, keys=8), frames=3, text=1, gpus=1, element=dtype.itemsize)
    planned = kept(replace(run, recompute=False), ALONE) - kept(run, ALONE)
    assert planned == pytest.approx(saved(project, features, *attention.parameters()), rel=0.01)


@DTYPES
@pytest.mark.parametrize("code", ["idefics", "flamingo"])
def test_a_resampler(code: str, dtype: torch.dtype) -> None:
    """8 latents of width 32 look at 24 patches, with 2 heads of 24, in 3 layers."""
    shape = {"depth": 3, "n_heads": 2, "head_dim": 24, "n_latents": 8}
    patches = torch.randn(5, 24, 32, dtype=dtype)
    if code == "idefics":
        from transformers import IdeficsConfig
        from transformers.models.idefics.perceiver import IdeficsPerceiverResampler

        config = IdeficsConfig(
            vision_config={"embed_dim": 32}, perceiver_config={"qk_layer_norms_perceiver": True}, use_resampler=True
        )
        module: Any = IdeficsPerceiverResampler(config, 32, **shape).to(dtype)
    else:
        sys.modules.setdefault("open_clip", types.ModuleType("open_clip"))  # which the package imports, and needs not
        helpers = pytest.importorskip("open_flamingo.src.helpers", reason="installed with --no-deps by scripts/test.sh")
        module = helpers.PerceiverResampler(dim=32, depth=3, dim_head=24, heads=2, num_latents=8).to(dtype)
        patches = patches[None, :, None]  # one sample's frames
    found = saved(lambda: module(patches), *module.parameters())
    resampler = ResamplerSizes(layers=3, heads=2, head_dim=24, mlp_inner=128, code=code)
    model = replace(model_of(keys=8), resampler=resampler)
    run = Workload(model=model, frames=5, text=1, gpus=1, element=dtype.itemsize)
    assert kept_before(run) == pytest.approx(found, rel=0.02)


def fake_tower(dtype: torch.dtype, frames: int) -> tuple[ModelSizes, Any, Any]:
    """Return the planner's sizes of a model, its SigLIP tower on 64 patches a frame, and frames, as fake tensors.

    They have shapes and no numbers, so what is allocated does not depend on the libraries that a processor can use.
    """
    model = tiny_model(vision={"image_size": 112, "hidden_size": 128, "intermediate_size": 480}).to(dtype)
    fake = FakeTensorMode().from_tensor
    return (
        _mplug_owl3(model.config.to_dict(), "tiny"),
        model.vision_model._apply(fake),
        fake(torch.empty(frames, 3, 112, 112, dtype=dtype)),
    )


@DTYPES
def test_a_trained_tower(dtype: torch.dtype) -> None:
    """The last of its layers does not run."""
    sizes, tower, frames = fake_tower(dtype, 4)
    with frames.fake_mode:
        found = saved(lambda: tower.penultimate(frames), frames, *tower.parameters())
    vision = replace(sizes.vision, layers=sizes.vision.layers - 1)
    run = Workload(
        model=replace(sizes, vision=vision, projector=None),
        frames=4,
        text=1,
        gpus=1,
        trained="all",
        element=dtype.itemsize,
    )
    assert kept_before(run) == pytest.approx(found, rel=0.01)


def test_a_frozen_tower_at_work() -> None:
    """SigLIP in bf16 on 8 frames: the most bytes that its tensors take at one time."""
    sizes, tower, frames = fake_tower(torch.bfloat16, 8)
    with frames.fake_mode, torch.no_grad(), Peak(frames, *tower.parameters()) as peak:
        tower.penultimate(frames)
    run = Workload(model=sizes, frames=8, text=1, gpus=1, trained="none")
    assert peak.bytes == pytest.approx(tower_at_work(run), rel=0.02)


def model_of(keys: int, cross: CrossAttentionSizes | None = None) -> ModelSizes:
    """Sizes with 24 patches of width 32 to a frame."""
    text = TextSizes(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, mlp_inner=8, mlp_matrices=3, vocabulary=9)
    vision = VisionSizes(width=32, layers=1, heads=2, mlp_inner=8, tokens=24, keys=keys)
    return ModelSizes(
        name="tiny",
        text=text,
        cross=cross or CrossAttentionSizes(layers=1, heads=4, kv_heads=2, head_dim=16, visual_dim=32),
        vision=vision,
    )
