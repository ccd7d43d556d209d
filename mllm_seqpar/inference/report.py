"""What a run tells besides its answers: how far it is, and at the end how long each stage took and what it held."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from mllm_seqpar.cli.memory import peak_memory
from mllm_seqpar.cli.progress import progress_bar
from mllm_seqpar.comm import Communicator

from .encoding import EncodedVideo
from .generation import Answer

ENCODE = "read and encode"
"""The stage whose frames per second are told."""


@dataclass
class Stages:
    """Seconds of the named stages of a run, in order.

    Attributes:
        device: waited for before the clock is read.
        seconds: by name.
    """

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times what is inside."""
        begun = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun


@contextmanager
def frames_bar(total: int, what: str, show: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar of frames on stderr, if it is to be shown; yields what takes the number done so far."""
    if not show:
        yield lambda done: None
        return
    with progress_bar(total, "frame", what) as bar:
        yield lambda done: bar.update(done - bar.n)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run in numbers.

    Attributes:
        frames, visual_tokens: of the whole video.
        ranks: in the group.
        seconds: of each stage, on rank 0.
        answers: (question, answer) in order.
        peak_memory_mib: by rank: allocated on a GPU, resident on a CPU.
        bytes_sent: to other ranks, by rank.
    """

    frames: int
    visual_tokens: int
    ranks: int
    seconds: dict[str, float]
    answers: list[tuple[str, Answer]]
    peak_memory_mib: list[float]
    bytes_sent: list[int]
    device: str

    def line(self) -> str:
        """The closing line."""
        stages = [f"{name} {value:.2f} s{self._rate(name, value)}" for name, value in self.seconds.items()]
        if self.answers:
            told = [answer for _, answer in self.answers]
            stages.append(f"prefill {sum(a.prefill_seconds for a in told):.2f} s")
            after_first = sum(len(a.tokens) - 1 for a in told)
            decoding = sum(a.decode_seconds for a in told)
            rate_text = f" at {after_first / decoding:.1f} tokens/s" if decoding > 0 else ""
            stages.append(f"decode {sum(len(a.tokens) for a in told)} tokens{rate_text}")
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        kind = "allocated" if self.device == "cuda" else "resident"
        memory = ", ".join(f"{mib:.0f}" for mib in self.peak_memory_mib)
        return (
            f"{self.frames} frames, {self.visual_tokens} visual tokens on {ranks}; {', '.join(stages)}; "
            f"peak memory by rank ({kind}) {memory} MiB"
        )

    def _rate(self, stage: str, seconds: float) -> str:
        return f" ({self.frames / seconds:.1f} frames/s)" if stage == ENCODE and seconds > 0 else ""

    def write(self, path: str) -> None:
        """Writes all of it as JSON."""
        values = asdict(self) | {"answers": [{"question": q, **asdict(a)} for q, a in self.answers]}
        Path(path).write_text(json.dumps(values, indent=1) + "\n")


def make_report(
    comm: Communicator,
    device: torch.device,
    video: EncodedVideo,
    seconds: dict[str, float],
    answers: Sequence[tuple[str, Answer]],
    bytes_sent: int,
) -> Report:
    """Gathers what each rank held and sent. Every rank calls it; all get the same but for the times."""
    rows = comm.gather_ints([round(peak_memory(device) * 1024), bytes_sent])
    return Report(
        frames=video.frames,
        visual_tokens=video.visual_tokens,
        ranks=comm.size,
        seconds={name: round(value, 4) for name, value in seconds.items()},
        answers=list(answers),
        peak_memory_mib=[round(kib / 1024, 1) for kib, _ in rows],
        bytes_sent=[sent for _, sent in rows],
        device=device.type,
    )
