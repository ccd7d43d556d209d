"""Batches whose frames `Trainer` leaves in host memory; see `HostFrames`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mllm_seqpar.patching.registry import find_adapter
from mllm_seqpar.sharding import HostFrames


def frame_arguments_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments that hold frames and may be `HostFrames`."""
    return getattr(find_adapter(model)[0], "frame_arguments", ())


@dataclass(frozen=True)
class HostFramesCollator:
    """Makes `HostFrames` of the frames that a data collator returns, so that `Trainer` does not move all of them."""

    collate: Any
    names: tuple[str, ...]

    def __call__(self, samples: Any) -> Any:
        return with_host_frames(self.collate(samples), self.names)


def with_host_frames(batch: Any, names: Sequence[str]) -> Any:
    """Return the batch with `HostFrames` for the tensors with these names."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: HostFrames(x) if name in names and isinstance(x, Tensor) else x for name, x in batch.items()}
