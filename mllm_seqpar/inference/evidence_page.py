"""The evidence page: one HTML file that shows which moments of a video the answers attend to; an index of several.

The page loads nothing but the video itself, from its original place. Its data is JSON inside the file, which its script
shows as text only.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mllm_seqpar.chats.clip import FrameSource
from mllm_seqpar.errors import ConfigError, SeqParError, writing
from mllm_seqpar.videos.images import jpeg_of

from .evidence import Evidence, Moment, clock

COLUMNS = 400
"""The minimum number of columns of the plot; in longer videos, a column is the sum of several frames."""

NUMBERS = 200_000
"""The number of columns of all tokens of an answer together, if that allows more than `COLUMNS` for each."""

_TEMPLATE = Path(__file__).parent / "page" / "evidence.html"
_INDEX = Path(__file__).parent / "page" / "index.html"
_PLACE = "/* data */"


def write_evidence_page(
    path: str | os.PathLike[str],
    answers: Sequence[tuple[str, Evidence]],
    sources: Sequence[FrameSource],
    *,
    name: str = "",
    model: str = "",
) -> None:
    """Write the page of questions about the same media, with their evidence. One rank calls this.

    Args:
        sources: the frame sources of the media. Those that can be read give the thumbnails; videos can be played.
        name: the name of the media on the page; default: their files.

    Raises:
        ConfigError: the file cannot be written.
    """
    page = Path(path)
    media = [
        {
            "name": os.path.basename(source.name),
            "href": link(source.name, page) if source.name and source.seconds(0) is not None else "",  # playable
        }
        for source in sources
    ]
    data = {
        "facts": _facts(answers, sources, name, model),
        "media": media,
        "answers": [_answer(question, evidence, sources) for question, evidence in answers],
    }
    write_page(page, _TEMPLATE, data)


def write_page(path: Path, template: Path, data: Any) -> None:
    """Write a page from a template and the data of its script; raise ConfigError if it cannot be written."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # so that the data cannot close the element that contains it
        text = text.replace(character, f"\\u{ord(character):04x}")
    before, after = template.read_text(encoding="utf-8").split(_PLACE)
    with writing(path, "", "free some space, or choose another path", ConfigError):
        path.write_text(before + text + after, encoding="utf-8")


def _facts(
    answers: Sequence[tuple[str, Evidence]], sources: Sequence[FrameSource], name: str, model: str
) -> list[tuple[str, str]]:
    """Return the contents of the page's header."""
    names = name or ", ".join(os.path.basename(source.name) for source in sources)
    times = answers[0][1].times if answers else ()
    frames = len(times)
    count = f"{frames:,} frame{'s' * (frames != 1)}"
    first, last = (times[0].start, times[-1].start) if times else (None, None)
    if len(sources) == 1 and first is not None and last is not None and last > first:
        count += f", {(frames - 1) / (last - first):.3g} per second"
    end = times[-1].end if len(sources) == 1 and times else None
    facts = [("Video", names or "features without a name"), ("Model", model), ("Frames", count)]
    facts += [("Length", clock(end).removesuffix(".0"))] if end else []
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return [(label, text) for label, text in [*facts, ("Written", written)] if text]


def _answer(question: str, evidence: Evidence, sources: Sequence[FrameSource]) -> dict[str, Any]:
    frames, rows = len(evidence.shares), evidence.attention.frames.tolist()
    columns = min(frames, max(COLUMNS, NUMBERS // max(1, len(rows))))
    edges = [column * frames // columns for column in range(columns + 1)]
    starts, end = [evidence.times[edge].start for edge in edges[:-1]], evidence.times[-1].end
    by_time = len(sources) == 1 and None not in starts and end is not None
    return {
        "question": question,
        "tokens": [
            {"text": piece, "row": _columns(row, edges), "textShare": _short(text)}
            for piece, row, text in zip(evidence.pieces, rows, evidence.attention.text.tolist(), strict=True)
        ],
        "mean": _columns(evidence.shares, edges),
        "textShare": _short(evidence.text),
        "byTime": by_time,
        "edges": [round(x, 3) for x in (*starts, end) if x is not None] if by_time else edges,
        "framesInColumn": -(-frames // columns),
        "note": evidence.note,
        "moments": [moment_data(moment, sources, by_time) for moment in evidence.moments],
    }


def _columns(shares: Sequence[float], edges: Sequence[int]) -> list[float]:
    return [_short(sum(shares[a:b])) for a, b in zip(edges, edges[1:], strict=False)]


def _short(share: float) -> float:
    return float(f"{share:.4g}")


def moment_data(moment: Moment, sources: Sequence[FrameSource], by_time: bool = False) -> dict[str, Any]:
    """Return a moment for the script of a page; `from` and `to` are its place in the plot."""
    before = sum(len(other) for other in sources[: moment.medium])
    number = moment.peak - before
    try:
        jpeg = jpeg_of(next(iter(sources[moment.medium].read(number, number + 1, batch=1)))[0], width=160)
        image = "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()
    except SeqParError:  # the source has no pixels, or cannot be read
        image = ""
    return {
        "label": moment.span,
        "frames": moment.frames.replace(" to ", "\N{EN DASH}"),
        "share": round(moment.share, 6),  # the page rounds it to a tenth of a percent, as a terminal shows it
        "start": moment.start,
        "end": moment.end,
        "from": moment.start if by_time else moment.first,
        "to": moment.end if by_time else moment.last + 1,
        "medium": moment.medium,
        "image": image,
    }


def link(video: str, page: Path) -> str:
    """Return a URL of the video: relative to the page, or the video's own URL."""
    if "://" in video:
        return video if video.startswith(("http://", "https://")) else ""
    return quote(Path(os.path.relpath(video, page.resolve().parent)).as_posix())


def index_entry(
    name: str, page: str, answers: Sequence[tuple[str, Evidence]], sources: Sequence[FrameSource]
) -> dict[str, Any]:
    """Return what the index shows of a page: each question with its answer, and the largest moment if there is one."""
    rows = []
    for question, evidence in answers:
        row: dict[str, Any] = {"question": question, "answer": "".join(evidence.pieces).strip()}
        if evidence.moments:
            row["moment"] = moment_data(evidence.moments[0], sources)
        rows.append(row)
    return {"name": name, "page": page, "answers": rows}


def write_evidence_index(path: str, entries: Sequence[dict[str, Any]], faults: Sequence[str], model: str) -> None:
    """Write the index of pages (`index_entry`), with the videos that could not be used.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = Path(path)
    pages = [
        {"name": entry["name"], "href": link(entry["page"], target), "answers": entry["answers"]} for entry in entries
    ]
    write_page(target, _INDEX, {"model": model, "pages": pages, "faults": list(faults)})
