"""Training steps of one model on the ranks of a group, for `memory.py`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from memory_measure import held_by
from memory_models import CONFIGS, FAMILIES, Subject
from torch import Tensor

from mllm_seqpar import FrameShard, frame_range, patch_model, unpatch_model
from mllm_seqpar.comm import Communicator, as_communicator
from mllm_seqpar.planner.candidates import ParallelSpec
from mllm_seqpar.planner.memory import memory_behind_features
from mllm_seqpar.planner.model import read_model
from mllm_seqpar.planner.workload import Workload
from mllm_seqpar.runtime import visual_features

DTYPE = torch.bfloat16
WHOLE_VIDEO = 1024
"""Frames of the published sizes' video, for the share of it that is projected at once."""
WORDS = 8
"""Words of the text at least, beside the frames' placeholders."""
STEPS = 12
"""Sizes tried at most to find the largest video."""


@dataclass(frozen=True)
class Mode:
    """A strategy, and whether K and V of the frames are recomputed."""

    strategy: str
    recompute: bool

    def way(self, ranks: int) -> ParallelSpec:
        """As the planner has it."""
        tile = {"ring": (1, ranks), "mesh": (2, ranks // 2), "ulysses": (1, 1)}.get(self.strategy, (ranks, 1))
        return ParallelSpec(self.strategy, tile, ranks if self.strategy == "ulysses" else 1)


@dataclass
class Bench:
    """One model on this rank.

    Attributes:
        family: of `memory_models.FAMILIES`.
        scale: what its widths are divided by.
        text: tokens.
        device: of the model.
        largest: frames of the larger of the two sizes.
    """

    family: str
    scale: int
    text: int
    device: torch.device
    largest: int
    comm: Communicator = field(default_factory=lambda: as_communicator(None))
    subject: Subject = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.subject = FAMILIES[self.family](self.scale)
        self.subject.model.to(self.device, DTYPE).train()
        for parameter in self.subject.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    @property
    def frame_bytes(self) -> int:
        """Features of one frame."""
        sizes = self.subject.sizes
        return sizes.vision.keys * sizes.cross.visual_dim * DTYPE.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Features projected at once, the share of the video that they are at full width; at full width as they are."""
        whole = visual_features.CHUNK_BYTES
        if self.scale == 1:
            return whole
        real = read_model(CONFIGS / f"{self.subject.sizes.name}.yaml").cross.visual_dim
        width = self.subject.sizes.cross.visual_dim
        return whole * self.largest * width // (WHOLE_VIDEO * real)

    def facts(self, mode: Mode) -> dict[str, Any]:
        """What every row says."""
        return {
            "benchmark": "memory",
            "family": self.family,
            "model": self.subject.sizes.name,
            "ranks": self.comm.size,
            "scale": self.scale,
            "text": self.text,
            "device": self.device.type,
            "dtype": "bfloat16",
            "frame_bytes": self.frame_bytes,
            "chunk_bytes": self.chunk_bytes,
            "strategy": mode.strategy,
            "recompute": mode.recompute,
        }

    @contextmanager
    def patched(self, mode: Mode) -> Iterator[None]:
        """The model, patched; text by ring."""
        tile = {"tile": mode.way(self.comm.size).mesh_shape} if mode.strategy == "mesh" else {}
        before, visual_features.CHUNK_BYTES = (
            visual_features.CHUNK_BYTES,
            self.chunk_bytes,
        )
        patch_model(self.subject.model, mode.strategy, recompute_visual=mode.recompute, **tile)
        try:
            yield
        finally:
            unpatch_model(self.subject.model)
            visual_features.CHUNK_BYTES = before

    def features(self, frames: int) -> Tensor:
        """Those of this rank, (f, tokens, width); they want a gradient."""
        own, sizes = frame_range(frames), self.subject.sizes
        shape = own.stop - own.start, sizes.vision.keys, sizes.cross.visual_dim
        return torch.randn(shape, device=self.device, dtype=DTYPE, requires_grad=True)

    def loss(self, frames: int, features: Tensor) -> Tensor:
        """The forward pass."""
        own = frame_range(frames)
        given = self.subject.arguments(self.text, features, FrameShard(own.start, own.stop, frames))
        return self.subject.model(**given).loss

    def held(self, mode: Mode, frames: int) -> dict[str, int]:
        """Bytes of a step, of the rank with most, and the planner's estimate."""
        if frames > self.text - WORDS:
            raise SystemExit(f"memory.py: {frames} placeholders and {WORDS} words in {self.text} tokens; raise --text")
        with self.patched(mode):
            gc.collect()
            found = held_by(partial(self.features, frames), partial(self.loss, frames), self.subject.model.parameters())
        everyone = self.comm.gather_ints([found.kept, found.peak])
        kept, peak = (max(row[i] for row in everyone) for i in range(2))
        planned = self._planned(mode, frames)
        return {"frames": frames, "kept_bytes": kept, "peak_bytes": peak, "planned_bytes": planned}

    def _planned(self, mode: Mode, frames: int) -> int:
        run = Workload(
            model=self.subject.sizes,
            frames=frames,
            text=self.text,
            gpus=self.comm.size,
            recompute=mode.recompute,
            element=DTYPE.itemsize,
        )
        return sum(memory_behind_features(run, mode.way(self.comm.size)).values())

    def largest_in(self, mode: Mode, budget: int, small: dict[str, Any], large: dict[str, Any]) -> dict[str, int]:
        """The most frames, in equal numbers on all ranks, whose peak is at most `budget`; and the next one's peak, or
        that the text has no place for more ("capped").

        Args:
            mode: the strategy.
            budget: bytes.
            small, large: the rows of two sizes.
        """
        n = self.comm.size
        known = {row["frames"] // n: row["peak_bytes"] for row in (small, large)}
        for attempt in range(STEPS):
            below = max((count for count, peak in known.items() if peak <= budget), default=0)
            above = min((count for count, peak in known.items() if peak > budget), default=None)
            if above == below + 1:
                return {"frames": below * n, "peak_bytes": known.get(below, 0), "next_peak_bytes": known[above]}
            if attempt % 2 and above is not None:
                count = (below + above) // 2  # where the peak is no line at all, as where another moment becomes it
            else:
                count = min(_guess(known, budget, below, above), (self.text - WORDS) // n)
            if count in known:
                return {"frames": below * n, "peak_bytes": known[below], "capped": True}
            known[count] = self.held(mode, count * n)["peak_bytes"]
        raise SystemExit(f"memory.py: {mode} on {n} ranks: no largest video in {budget} bytes among {known}")


def _guess(known: dict[int, int], budget: int, below: int, above: int | None) -> int:
    """Where the line through the two sizes next to the budget crosses it, between what fits and what does not."""
    one, other = sorted(sorted(known, key=lambda count: abs(known[count] - budget))[:2])
    line = (known[other] - known[one]) / (other - one)
    count = min(2 * max(known), int(one + (budget - known[one]) / line)) if line > 0 else 2 * max(known)
    count = count + 1 if count <= below else count
    return max(below + 1, count if above is None else min(count, above - 1))
