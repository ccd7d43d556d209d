"""Layer: one process, ranks are threads. Only saved tensors hold the features of a step, and only caches their keys."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from family_cases import BATCHES, CROSS_ATTENTION
from family_harness import family_module, forward, inputs_of, model_of, settings, slow_unless
from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.runtime.offload import HostFeatures
from mllm_seqpar.runtime.visual_features import VisualFeatures
from mllm_seqpar.runtime.visual_kv_cache import VisualKVCache

OPTIONS: dict[str, dict[str, Any]] = {
    "features": {},
    "offload": {"visual_offload": "cpu", "vision_chunk_size": 1},
    "ulysses, local text": {"strategy": "ulysses", "self_attention": "local"},
    "replicate": {"strategy": "replicate"},
    "K and V saved": {"recompute_visual": False},
}
SETTINGS = [(f, name, (i + j) % 2 == 1) for i, f in enumerate(CROSS_ATTENTION) for j, name in enumerate(OPTIONS)]
"""Every second combination of a family and options is checkpointed."""


@pytest.mark.parametrize(
    ("family", "options", "checkpointing"),
    slow_unless(lambda s: s[0] == "mplug_owl3" or s[1] == "offload", SETTINGS),
)
def test_nothing_holds_the_features_after_backward(
    family: str, options: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller keeps the whole output, as loops do that log the loss at the end of a step."""
    family_module(family)
    memory: list[StorageWeakRef] = []

    def watch(kind: type[VisualFeatures]) -> None:
        make = kind.__init__

        def watched(visual: VisualFeatures, *args: Any, **kwargs: Any) -> None:
            make(visual, *args, **kwargs)
            if visual.features.numel():
                memory.append(StorageWeakRef(visual.features.untyped_storage()))

        monkeypatch.setattr(kind, "__init__", watched)

    watch(VisualFeatures)
    watch(HostFeatures)

    def step(comm: Communicator) -> tuple[Any, Any]:
        model = model_of(family, BATCHES[family]).train()
        if checkpointing and family != "open_flamingo":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        inputs = inputs_of(family, BATCHES[family], model)
        patch_model(model, group=comm, **OPTIONS[options])
        out = forward(family, model, inputs)
        out.loss.backward()
        return model, out

    kept = run_loopback(2, step)
    gc.collect()
    alive = sum(not storage.expired() for storage in memory)
    assert memory and not alive, f"{alive} of {len(memory)} features are alive"
    del kept


CACHES: tuple[dict[str, Any], ...] = ({}, {"visual_offload": "cpu"}, {"shard_prompt_from": 2})


@pytest.mark.parametrize(
    ("family", "options"), [(family, CACHES[index % len(CACHES)]) for index, family in enumerate(CROSS_ATTENTION)]
)
def test_generation_frees_the_keys_of_frames_without_the_garbage_collector(
    family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference cycle would hold them until the collector runs, which does not depend on the size of tensors."""
    family_module(family)
    case = BATCHES[family]
    caches: list[weakref.ref[VisualKVCache]] = []
    make = VisualKVCache.__init__

    def watched(cache: VisualKVCache, *args: Any, **kwargs: Any) -> None:
        make(cache, *args, **kwargs)
        caches.append(weakref.ref(cache))

    monkeypatch.setattr(VisualKVCache, "__init__", watched)

    def generate(comm: Communicator) -> None:
        model = model_of(family, case)
        inputs = {name: x for name, x in inputs_of(family, case, model).items() if "labels" not in name}
        patch_model(model, group=comm, **options).generate(**inputs, **settings(max_new_tokens=3, use_cache=True))

    gc.disable()
    try:
        run_loopback(2, generate)
        alive = sum(cache() is not None for cache in caches)
    finally:
        gc.enable()
    assert caches and not alive, f"{alive} of {len(caches)} caches are alive"
