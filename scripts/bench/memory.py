"""Measure the memory of one training step per strategy, with K and V recomputed in backward and without.

    python scripts/bench/memory.py [--family mplug_owl3 open_flamingo idefics] [--ranks 1 2 4]
        [--device cpu|cuda] [--scale 16] [--frames F --frame-tokens K --text L] [--repeats 4] [--out rows.jsonl]

The models are the real classes with every width divided by --scale (see `models`), in bfloat16, on real ranks. A
step starts at the visual features. Bytes are those of the rank with the most. There are three kinds of rows:

    bytes     bytes saved for backward and peak, with F and 2 F frames, beside the planner's estimate of the peak
    largest   the longest video whose peak stays within one budget for all modes: the peak of lv-xattn without
              recomputation with 2 F frames, plus 1%
    cost      time of a step with recomputation over one without, the median over repetitions that time both; only for
              as many ranks as there are cores

"Saved" bytes are saved by autograd for backward, each storage once, without parameters and visual features. The peak is
the largest number of bytes allocated at one time. It includes the visual features and their gradient, but neither
parameters nor their gradients, which exist before the measurement starts.

With recomputation, the features are projected in chunks of a fixed size. Here the chunks have the same fraction of the
video as the published size has of 1,024 frames at full width. Half of the frames of MOSS-VL have a quarter fewer visual
tokens than the mean, and half a quarter more. With --frame-tokens, the only row is `bytes` of lv-xattn with
recomputation and F frames, and a chunk has as many tokens as at the published width.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any
from unittest import mock

import harness
import report
import torch
from models import ScaledModel, scaled
from torch import Tensor

from memory_meters import SavedBytes, peak_memory
from mllm_seqpar import FrameShard, patch_model, unpatch_model
from mllm_seqpar.attention import call_spec
from mllm_seqpar.comm import Communicator, as_communicator
from mllm_seqpar.planner import ParallelSpec
from mllm_seqpar.planner.memory import memory_after_tower
from mllm_seqpar.planner.model_sizes import read_model
from mllm_seqpar.planner.workload import Workload
from mllm_seqpar.runtime import visual_features
from mllm_seqpar.schedules.mesh_shapes import STRATEGIES

DEFAULTS = {"mplug_owl3": (4, 128), "open_flamingo": (32, 352), "idefics": (8, 128), "moss_vl": (8, 128)}
"""Frames and text tokens of the smaller of the two sizes."""
SLACK = 1.01
"""Budget over the peak it comes from, so that small differences of text buffers do not change the longest video."""
DTYPE = torch.bfloat16
PUBLISHED_FRAMES = 1024
"""Frames of a video at the published sizes, which sets the fraction of a video that is projected at once."""
WORDS = 8
"""Minimum number of text tokens in addition to the frame placeholders."""


@dataclass(frozen=True)
class Mode:
    """A strategy, and whether K and V of the frames are recomputed in backward."""

    strategy: str
    recompute: bool

    def spec(self, ranks: int) -> ParallelSpec:
        tile = {"ring": (1, ranks), "mesh": (2, ranks // 2), "ulysses": (1, 1)}.get(self.strategy, (ranks, 1))
        return ParallelSpec(self.strategy, tile, ranks if self.strategy == "ulysses" else 1)


@dataclass
class MemoryBenchmark:
    family: str
    scale: int  # divisor of all widths
    text: int  # number of text tokens
    device: torch.device
    largest: int  # frames of the larger of the two video lengths that are measured
    frame_tokens: int | None = None  # mean visual tokens of a frame; None: as published
    comm: Communicator = field(default_factory=lambda: as_communicator(None))
    scaled: ScaledModel = field(init=False)
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        self.scaled = scaled(self.family, self.scale)
        if self.frame_tokens:
            self.scaled = replace(self.scaled, sizes=self.scaled.sizes.with_frame_tokens(self.frame_tokens))
        self.model = self.scaled.build().to(self.device, DTYPE).train()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of visual features projected at once: the same fraction of the video as at the published sizes, or the
        same number of tokens if the frames have a given number."""
        published, sizes = visual_features.CHUNK_BYTES, self.scaled.sizes
        if self.device.type == "cuda":
            published = visual_features.CUDA_CHUNK_BYTES
        if self.scale == 1:
            return published
        if self.frame_tokens:
            return published // self.scale
        published_width = read_model(sizes.name).cross.visual_dim
        return published * self.largest * sizes.cross.visual_dim // (PUBLISHED_FRAMES * published_width)

    def columns(self, mode: Mode) -> dict[str, Any]:
        sizes = self.scaled.sizes
        row = {"benchmark": "memory", "family": self.family, "model": sizes.name, "ranks": self.comm.size}
        row |= {"scale": self.scale, "text": self.text, "device": self.device.type, "dtype": "bfloat16"}
        return row | {"chunk_bytes": self.chunk_bytes, "strategy": mode.strategy, "recompute": mode.recompute}

    @contextmanager
    def patched(self, mode: Mode) -> Iterator[None]:
        """Patch the model inside the block; its self-attention uses Ring Attention."""
        options = {"tile": mode.spec(self.comm.size).mesh_shape} if mode.strategy == "mesh" else {}
        prefix, chunk = "CUDA_" if self.device.type == "cuda" else "", self.chunk_bytes
        with (
            mock.patch.object(visual_features, f"{prefix}CHUNK_BYTES", chunk),
            mock.patch.object(call_spec, f"{prefix}GRADIENT_BYTES", chunk),
        ):
            patch_model(self.model, mode.strategy, recompute_visual=mode.recompute, **options)
            try:
                yield
            finally:
                unpatch_model(self.model)

    def features(self, frames: int) -> Tensor:
        """Return random features of this rank's frames, which require a gradient; see `ScaledModel.arguments`."""
        local, sizes = self.local_frames(frames), self.scaled.sizes
        own = self.scaled.frame_tokens(frames)[local.start : local.stop]
        tokens = (sum(own),) if self.family == "moss_vl" else (len(own), sizes.vision.keys)
        shape = *tokens, sizes.cross.visual_dim
        return torch.randn(shape, device=self.device, dtype=DTYPE, requires_grad=True)

    def local_frames(self, frames: int) -> FrameShard:
        return FrameShard.of(frames, sizes=self.scaled.frame_tokens(frames))

    def loss(self, frames: int, features: Tensor) -> Tensor:
        inputs = self.scaled.arguments(self.text, features, self.local_frames(frames))
        return self.model(**inputs).loss

    def step_bytes(self, mode: Mode, frames: int) -> dict[str, int]:
        """Return the saved and the peak bytes of one step, each of the rank with the most, and the planner's
        estimate."""
        if frames > self.text - WORDS:
            raise SystemExit(
                f"memory.py: {self.text} text tokens cannot hold {frames} placeholders and {WORDS} words; raise --text"
            )
        with self.patched(mode):
            gc.collect()
            with peak_memory(self.device) as peak:
                features = self.features(frames)
                saved = SavedBytes([*self.model.parameters(), features])
                with saved.counting():
                    loss = self.loss(frames, features)
                loss.backward()
                del loss, features
        saved_bytes, peak_bytes = map(max, zip(*self.comm.gather_ints([saved.bytes, peak.bytes]), strict=True))
        sizes, n = self.scaled.sizes, self.comm.size
        options: dict[str, Any] = {"frame_tokens": self.scaled.frame_tokens(frames), "element": DTYPE.itemsize}
        step = Workload(model=sizes, frames=frames, text=self.text, gpus=n, recompute=mode.recompute, **options)
        planned = sum(memory_after_tower(step, mode.spec(n)).values())
        found = {"frames": frames, "visual_tokens": sum(self.scaled.frame_tokens(frames))}
        return found | {"kept_bytes": saved_bytes, "peak_bytes": peak_bytes, "planned_bytes": planned}

    def largest_in(self, mode: Mode, budget: int, small: dict[str, Any], large: dict[str, Any]) -> dict[str, Any]:
        """Return the largest number of frames, equal on all ranks, whose peak is at most `budget` bytes.

        `small` and `large` are results of `step_bytes` for two video lengths. The columns are frames, peak_bytes, and
        the peak with one more frame per rank (next_peak_bytes), or "capped" if the text cannot hold more placeholders.
        """
        n, most = self.comm.size, (self.text - WORDS) // self.comm.size
        known = {row["frames"] // n: row["peak_bytes"] for row in (small, large)}
        while True:
            below = max((count for count, peak in known.items() if peak <= budget), default=0)
            above = min((count for count, peak in known.items() if count > below and peak > budget), default=None)
            if above == below + 1:
                return {"frames": below * n, "peak_bytes": known.get(below, 0), "next_peak_bytes": known[above]}
            if below == most:
                return {"frames": below * n, "peak_bytes": known[below], "capped": True}
            count = min(2 * below, most) if above is None else (below + above) // 2
            known[count] = self.step_bytes(mode, count * n)["peak_bytes"]

    def recomputation_cost(self, frames: int, repeats: int) -> dict[str, Any]:
        """Return the seconds of a step with and without recomputation of K and V, by LV-XAttn, and their ratio.

        Each repetition times both, and the ratio is the median of the repetitions' ratios: the speed of a shared
        machine changes over minutes.
        """
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for recompute, timed in harness.rounds(seconds, repeats):
            found = self.step_s(Mode("lv-xattn", recompute), frames)
            if timed:
                seconds[recompute].append(found)
        ratio = median(again / kept for again, kept in zip(seconds[True], seconds[False], strict=True))
        times = {"again_s": median(seconds[True]), "kept_s": median(seconds[False])}
        return {"frames": frames, "repeats": repeats, **times, "ratio": ratio, "share": 1 - 1 / ratio}

    def step_s(self, mode: Mode, frames: int) -> float:
        with self.patched(mode):
            features = self.features(frames)
            with harness.slowest_rank(self.comm, self.device) as timer:
                self.loss(frames, features).backward()
            return timer.seconds


def main() -> None:
    harness.run(parse(), rows_of, report.memory_tables)


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for ranks in args.ranks:
        yield from harness.run_on_ranks(ranks, args, rows_on_rank)[0]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = harness.options(__doc__, repeats=4)
    parser.add_argument("--family", nargs="+", default=["mplug_owl3", "open_flamingo"], choices=list(DEFAULTS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--scale", type=int, default=16, help="divisor of all widths; use 1 on a GPU")
    parser.add_argument("--frames", type=int, help="frames of the smaller size (default: by family)")
    parser.add_argument("--frame-tokens", type=int, help="moss_vl: mean visual tokens of a frame (default: published)")
    parser.add_argument("--text", type=int, help="text tokens (default: by family)")
    parser.add_argument("--cost-text", type=int, default=512, help="text tokens of the timed steps; 0: time none")
    return parser.parse_args(argv)


def rows_on_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure on this group of ranks; return all rows, the same on each rank."""
    rows: list[dict[str, Any]] = []
    for family in args.family:
        frames, text = DEFAULTS[family]
        frames, text = args.frames or frames, args.text or text
        device, tokens = torch.device(args.device), args.frame_tokens if family == "moss_vl" else None
        bench = MemoryBenchmark(family, args.scale, text, device, largest=2 * frames, frame_tokens=tokens)
        if tokens:
            mode = Mode("lv-xattn", True)
            rows.append(bench.columns(mode) | {"measure": "bytes"} | bench.step_bytes(mode, frames))
            continue
        found = [
            bench.columns(mode) | {"measure": "bytes"} | bench.step_bytes(mode, count)
            for mode in modes(bench.comm.size)
            for count in (frames, 2 * frames)
        ]
        found += list(largest_rows(bench, found))
        if args.cost_text and (args.device == "cuda" or bench.comm.size <= (os.cpu_count() or 1)):
            bench.text = args.cost_text
            cost = bench.recomputation_cost(2 * frames, args.repeats)
            found.append(bench.columns(Mode("lv-xattn", True)) | {"measure": "cost"} | cost)
        rows += found
    return rows


def modes(ranks: int) -> list[Mode]:
    """Return the modes to compare: all strategies from 4 ranks on, where meshes differ from them; else lv-xattn."""
    strategies = STRATEGIES if ranks >= 4 else ("lv-xattn",)
    return [Mode(name, recompute) for name in strategies for recompute in (False, True)]


def largest_rows(bench: MemoryBenchmark, measured: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the longest video of every mode; the budget comes from the first mode's peak at the larger size."""
    budget, before = int(SLACK * measured[1]["peak_bytes"]), dict[str, Any]()
    assert measured[1]["strategy"] == "lv-xattn" and not measured[1]["recompute"]
    for index in range(0, len(measured), 2):
        small, large = measured[index : index + 2]
        mode = Mode(small["strategy"], small["recompute"])
        fits = bench.largest_in(mode, budget, small, large)
        row = bench.columns(mode) | {"measure": "largest", "budget_bytes": budget} | fits
        if mode.recompute:  # `before` is the same strategy without recomputation
            if before["frames"] and "capped" not in before:
                row["longer"] = fits["frames"] / before["frames"]
        before = fits
        yield row


if __name__ == "__main__":
    main()
