"""Layer: one process, ranks are threads. Only saved tensors hold the features of a step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from family_cases import BATCHES, CROSS_ATTENTION
from family_harness import family_module, forward, inputs_of, model_of, slow_unless
from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.runtime.offload import HostFeatures
from mllm_seqpar.runtime.visual_features import VisualFeatures

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
