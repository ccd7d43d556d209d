"""Evidence: the moments of a video that an answer attends to most.

While a patched model generates, `record_attention` records the share of attention that each frame receives;
`inference.attention_record` defines and computes the shares. They are averaged over the tokens of the answer, without
special tokens. A moment begins with the frame of the largest share that is in no moment yet. It extends to the frames
before and after it while their shares are at least the midpoint of that share and the median of all frames. The
moments with the largest sums are reported. A share does not prove that a frame caused the answer;
docs/concepts/evidence.md explains what it shows and what it does not show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from torch import nn

from mllm_seqpar.chats.clip import FrameSource
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.inference.attention_record import AttentionRecord, FrameAttention
from mllm_seqpar.patching import patch_of

MOMENTS = 5
"""The number of moments, unless the user states one."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Neighbouring frames that an answer attends to.

    Attributes:
        share: the sum of the shares of its frames, between 0 and 1.
        first, last, peak: numbers of the first and last frame, and of the one with the largest share.
        start, end: seconds in the video; None for frames without times.
        medium: the number of the video among the media of the conversation.
    """

    share: float
    first: int
    last: int
    peak: int
    start: float | None = None
    end: float | None = None
    medium: int = 0

    @property
    def frames(self) -> str:
        return f"frame {self.first}" if self.first == self.last else f"frames {self.first} to {self.last}"

    @property
    def span(self) -> str:
        """The times, or the frames if there are no times."""
        if self.start is not None and self.end is not None:
            return f"{clock(self.start)} to {clock(self.end)}"
        return self.frames

    def __str__(self) -> str:
        where = "" if self.start is None else f"  {self.frames}"
        medium = f"  in video {self.medium + 1}" if self.medium else ""
        return f"{self.share:6.1%}  {self.span}{where}{medium}"


class FrameTime(NamedTuple):
    """When a frame is shown.

    Attributes:
        medium: the number of its video or image among those of the conversation.
        start, end: seconds in the video, until the next sampled frame; None if they are not known.
    """

    medium: int
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What an answer attends to.

    Attributes:
        moments: the largest first; none if the model's mask leaves no choice between frames.
        shares: for each frame, the mean over the answer's tokens.
        text: the mean share of the text, in a model with one softmax over text and frames; else 0.
        note: why there are no moments, or an empty text.
        attention: of each token.
        pieces: the text of each token.
        times: of each frame.
    """

    moments: tuple[Moment, ...]
    shares: tuple[float, ...]
    text: float
    note: str
    attention: FrameAttention
    pieces: tuple[str, ...]
    times: tuple[FrameTime, ...]

    def describe(self) -> str:
        """Return lines for a terminal."""
        if self.note:
            return self.note
        lines = ["moments that the answer attends to, and their shares of its attention:"]
        lines += [f"{number:3d}. {moment}" for number, moment in enumerate(self.moments, 1)]
        if self.text:
            lines.append(f"     the text: {self.text:.1%}")
        return "\n".join(lines)


def evidence_values(evidence: Evidence | None) -> dict[str, Any]:
    """Return the moments of an answer, and the note that may replace them, as JSON has them."""
    moments = () if evidence is None else evidence.moments
    return {
        "evidence": [asdict(moment) for moment in moments],
        "evidence_note": "" if evidence is None else evidence.note,
    }


def evidence_of(
    attention: FrameAttention, tokens: Sequence[int], tokenizer: Any, sources: Sequence[FrameSource], count: int
) -> Evidence:
    """Return the evidence of an answer of T `tokens`, special ones included: at most `count` moments.

    The `sources` of the media have F frames in all.
    """
    times, special = frame_times(sources), set(tokenizer.all_special_ids)
    written = [number for number, token in enumerate(tokens) if token not in special] or list(range(len(tokens)))
    mean = attention.frames[written].double().mean(0).tolist()
    note = ""
    if not attention.ranks_frames:  # each token attends to a single frame only, or to none
        frames = attention.visible.any(0).nonzero().flatten().tolist()[:3]
        starts = [times[frame].start for frame in frames]
        named = zip(frames, starts, strict=True)
        where = ", ".join(f"frame {frame}" + ("" if x is None else f" at {clock(x)}") for frame, x in named)
        note = (
            f"the model's mask lets each token of the answer attend to a single frame only ({where}); the attention "
            "says nothing about other frames, and moments are not ranked"
            if frames
            else "no token of the answer attends to a frame: the model's mask hides all of them"
        )
    return Evidence(
        moments=() if note else find_moments(mean, times, count),
        shares=tuple(mean),
        text=float(attention.text[written].double().mean()),
        note=note,
        attention=attention,
        pieces=token_texts(tokenizer, tokens),
        times=times,
    )


def frame_times(sources: Sequence[FrameSource]) -> tuple[FrameTime, ...]:
    """Return when the frames of the sources are shown."""
    times: list[FrameTime] = []
    for medium, source in enumerate(sources):
        starts = [time for number in range(len(source)) if (time := source.seconds(number)) is not None]
        if not starts:
            times += [FrameTime(medium)] * len(source)
            continue
        step = (starts[-1] - starts[0]) / (len(starts) - 1) if len(starts) > 1 else 0.0
        times += map(partial(FrameTime, medium), starts, [*starts[1:], starts[-1] + step])
    return tuple(times)


def find_moments(shares: Sequence[float], times: Sequence[FrameTime], count: int) -> tuple[Moment, ...]:
    """Return at most `count` moments by the rule of the module's docstring, the largest share first."""
    free, found, background = [True] * len(shares), [], median(shares or [0.0])

    def joins(frame: int, peak: int) -> bool:
        if not (0 <= frame < len(shares) and free[frame] and times[frame].medium == times[peak].medium):
            return False
        return shares[frame] >= min(shares[peak], (shares[peak] + background) / 2)

    for peak in sorted(range(len(shares)), key=lambda frame: (-shares[frame], frame)):
        if not free[peak] or shares[peak] <= 0:
            continue
        first = last = peak
        while joins(first - 1, peak):
            first -= 1
        while joins(last + 1, peak):
            last += 1
        free[first : last + 1] = [False] * (last + 1 - first)
        share, start, end = sum(shares[first : last + 1]), times[first].start, times[last].end
        span = {"first": first, "last": last, "peak": peak, "medium": times[peak].medium}
        found.append(Moment(share=share, start=start, end=end, **span))
    return tuple(sorted(found, key=lambda moment: -moment.share)[:count])


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, ...]:
    """Return the text that each token adds. A character that several tokens spell belongs to the last of them."""
    pieces, before = [], ""
    for number in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:number], skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and number < len(tokens):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        before = text
    return tuple(pieces)


def clock(seconds: float) -> str:
    """Return seconds as minutes and seconds, 1:02.5, or hours, minutes and seconds, 1:00:02.5."""
    tenths = round(seconds * 10)
    minutes, rest = divmod(tenths, 600)
    text = f"{minutes % 60 if minutes >= 60 else minutes:d}:{rest / 10:04.1f}"
    return f"{minutes // 60}:{text.zfill(7)}" if minutes >= 60 else text


@contextmanager
def record_attention(model: nn.Module) -> Iterator[AttentionRecord]:
    """Record the attention over frames of each `generate` within this context. Read `result()` within it too.

    The generated tokens do not change. Each pass stores the queries of one row, H * D elements for each cross-attention
    layer and token. Every rank of the model's group enters the context.

    Args:
        model: patched by `patch_model`.

    Raises:
        ConfigError: the model is not patched, or its attention is being recorded already. Within the context, by
            `generate`: several samples, beams, assisted generation, or no cache.
    """
    patch = patch_of(model)
    if patch is None:
        raise ConfigError("record_attention: the model is not patched; call patch_model(model) first")
    records = patch.context.records
    if records:
        raise ConfigError("record_attention: the attention of this model is being recorded already; use that record")
    record = AttentionRecord(patch.context.comm)
    records.append(record)
    try:
        yield record
    finally:
        records.clear()
        record.begin_answer()  # it refers to K of the frames


def attention_over_frames(model: nn.Module, *args: Any, **kwargs: Any) -> FrameAttention:
    """Generate an answer, and return the share of attention that each frame receives for each of its tokens.

    Args:
        model: patched by `patch_model`. Every rank of its group calls this.
        *args, **kwargs: the arguments of `model.generate`, of one sample.

    Returns:
        The attention (tokens, frames), with the output of `generate` as `output`.

    Raises:
        ConfigError: as for `record_attention`.
    """
    with record_attention(model) as recorded:
        output = model.generate(*args, **kwargs)  # type: ignore[operator]
        return replace(recorded.result(), output=output)
