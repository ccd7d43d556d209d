"""The evidence page: one HTML file that shows which moments of a video the answers attend to.

The page loads nothing from elsewhere. Its data is JSON inside the file, which its script shows as text only.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mllm_seqpar.data.sources import ImageListSource, VideoSource
from mllm_seqpar.data.thumbnails import jpeg_of
from mllm_seqpar.errors import ConfigError, VideoError

from .evidence import Evidence
from .moments import Moment, clock

BINS = 400
"""Columns of the plot; in longer videos, a column is the sum of several frames."""

_TEMPLATE = Path(__file__).parent / "page" / "evidence.html"
_PLACE = "/* data */"


def write_evidence_page(
    path: str | os.PathLike[str], answers: Sequence[tuple[str, Evidence]], sources: Sequence[Any]
) -> None:
    """Write the page of questions about the same media, with their evidence. One rank calls this.

    Args:
        path: of the HTML file.
        answers: questions and evidence.
        sources: the frame sources of the media. Those that can be read give the thumbnails.

    Raises:
        ConfigError: the file cannot be written.
    """
    data = {"answers": [_answer(question, evidence, sources, Path(path)) for question, evidence in answers]}
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":  # so that nothing in the data can end the element that contains it
        text = text.replace(character, f"\\u{ord(character):04x}")
    before, after = _TEMPLATE.read_text(encoding="utf-8").split(_PLACE)
    try:
        Path(path).write_text(before + text + after, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another path") from error


def _answer(question: str, evidence: Evidence, sources: Sequence[Any], page: Path) -> dict[str, Any]:
    frames, rows = len(evidence.shares), evidence.attention.frames.tolist()
    edges = [column * frames // min(BINS, frames) for column in range(min(BINS, frames) + 1)]
    starts = [evidence.times[edge].start for edge in edges[:-1]]
    by_time = len(sources) == 1 and None not in starts
    labels = [clock(x) for x in starts if x is not None] if by_time else [f"frame {edge}" for edge in edges[:-1]]
    return {
        "question": question,
        "tokens": [
            {"text": piece, "row": _columns(row, edges), "textShare": _short(text)}
            for piece, row, text in zip(evidence.pieces, rows, evidence.attention.text.tolist(), strict=True)
        ],
        "mean": _columns(evidence.shares, edges),
        "textShare": _short(evidence.text),
        "labels": labels,
        "note": evidence.note,
        "moments": [_moment(moment, sources, page) for moment in evidence.moments],
    }


def _columns(shares: Sequence[float], edges: Sequence[int]) -> list[float]:
    return [_short(sum(shares[a:b])) for a, b in zip(edges, edges[1:], strict=False)]


def _short(share: float) -> float:
    return float(f"{share:.4g}")


def _moment(moment: Moment, sources: Sequence[Any], page: Path) -> dict[str, Any]:
    source = sources[moment.medium]
    first = sum(len(other) for other in sources[: moment.medium])
    found = {"label": moment.span, "share": f"{moment.share:.1%}", "image": _thumbnail(source, moment.peak - first)}
    if isinstance(source, VideoSource) and moment.start is not None:
        found["href"] = f"{_link(source.plan.path, page)}#t={moment.start:.1f}"
    return found


def _link(video: str, page: Path) -> str:
    """Return a URL of the video: relative to the page, or the video's own URL."""
    if "://" in video:
        return video if video.startswith(("http://", "https://")) else ""
    return quote(Path(os.path.relpath(video, page.resolve().parent)).as_posix())


def _thumbnail(source: Any, frame: int) -> str:
    """Return a frame as a data: URI; empty if the source has no pixels or cannot be read."""
    if not isinstance(source, (VideoSource, ImageListSource)):
        return ""
    try:
        picture = jpeg_of(next(iter(source.read(frame, frame + 1, batch=1)))[0])
    except (VideoError, ImportError):
        return ""
    return "data:image/jpeg;base64," + base64.b64encode(picture).decode()
