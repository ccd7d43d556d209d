"""Layer: gloo ranks. `HostFrames` reach the patched model as the caller passed them, whatever wraps the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from family_cases import BATCHES
from family_harness import TOLERANCE, family_module, inputs_of, model_of, reference
from fsdp2_on_cpu import whole
from mllm_seqpar import HostFrames, patch_model
from mllm_seqpar.patching.registry import find_adapter
from outcomes import worst_gradient
from ranks import ranks
from selections import slow_unless
from tiny_models.mplug_owl3 import Case as Owl

VIDEO = Owl(frames=(12,), length=40, features="projected")


class Casts(TorchDispatchMode):
    """Counts the operators that make a copy of `whole`, or of as many values in another dtype."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self._whole, self.found = whole, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **kwargs or {})
        is_copy = function.overloadpacket.__name__ in ("_to_copy", "copy_", "clone")
        self.found += is_copy and made.numel() == self._whole.numel() and made.dtype is not self._whole.dtype
        return made


def casts_at_the_root(rank: int, world: int, holder: bool) -> int:
    """Return how often the root of FSDP2 casts all features of this rank, before the patched forward begins."""
    model = model_of("mplug_owl3", VIDEO).train()
    patch_model(model, visual_offload="cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*family_module("mplug_owl3").shard_units(model), model):
        fully_shard(unit, mp_policy=policy)
    inputs = family_module("mplug_owl3").local_frames(inputs_of("mplug_owl3", VIDEO, model), layout="zigzag")
    features = inputs["image_embeds"]
    if holder:
        inputs["image_embeds"] = HostFrames(features)
    counts: list[int] = []
    with Casts(features) as casts:
        # registered after FSDP2's hooks, so it runs when they have cast the arguments
        model.register_forward_pre_hook(lambda *_: counts.append(casts.found), with_kwargs=False)
        model(**inputs).loss.backward()
    return counts[0]


def test_root_of_fsdp2_does_not_cast_frames_on_the_host() -> None:
    assert ranks(2).run(casts_at_the_root, holder=False) == [1, 1]
    assert ranks(2).run(casts_at_the_root, holder=True) == [0, 0]


def loss_and_gradients(rank: int, world: int, family: str, wrapper: str) -> tuple[float, dict[str, Any]]:
    case = BATCHES[family]
    model = patch_model(model_of(family, case).train(), vision_chunk_size=1)
    inputs = inputs_of(family, case, model)
    for name in find_adapter(model)[0].frame_arguments:  # type: ignore[attr-defined]
        if name in inputs:
            inputs[name] = HostFrames(inputs[name])
    if wrapper == "fsdp2":
        for unit in (*family_module(family).shard_units(model), model):
            fully_shard(unit)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True) if wrapper == "ddp" else model
    loss = wrapped(**inputs).loss
    loss.backward()
    return loss.item(), whole({name: weight.grad for name, weight in model.named_parameters()})


@pytest.mark.parametrize("wrapper", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", slow_unless(lambda family: family == "mplug_owl3", BATCHES))
def test_host_frames_give_the_gradients_of_the_tensor(family: str, wrapper: str) -> None:
    expected = reference(family, BATCHES[family])
    for loss, grads in ranks(2).run(loss_and_gradients, family, wrapper):
        assert loss == pytest.approx(expected.loss, rel=TOLERANCE)
        assert worst_gradient(grads, expected.grads)[0] < TOLERANCE
