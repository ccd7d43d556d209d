"""Reading with torchcodec, of the videos in which it finds the frames that PyAV finds."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar.errors import PASSED, VideoError, translated

from .container import index_of, open_video
from .cursors import TimeCursor, undecodable
from .media_files import file_version
from .rgb import display_matrix
from .video import FramePlan

_TORCHCODEC_CONTAINERS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
"""FFmpeg's names of the containers in which torchcodec 0.13 finds every frame by its time."""


def read_with_torchcodec(
    decoders: Any,
    plan: FramePlan,
    stream: int,
    entries: Sequence[int],
    size: tuple[int, int] | None,
    batch: int,
    threads: int,
    device: torch.device | str,
) -> Iterator[Tensor]:
    """Decode entries of a plan from a stream of its file, as `read_frames` does; `decoders` is torchcodec's module."""
    first = entries[0]
    with translated(lambda why: undecodable(plan, first, why)):
        video = decoders.VideoDecoder(plan.path, stream_index=stream, num_ffmpeg_threads=threads, device=device)
        begin, end, last = video.metadata.begin_stream_seconds, video.metadata.end_stream_seconds, len(video) - 1
        for done in range(0, len(entries), batch):
            first = entries[done]
            ticks = [plan.ticks[entry] for entry in entries[done : done + batch]]
            # Presentation times are whole ticks, so half a tick later the same frame is shown, however floats round.
            times = [max(float((2 * tick + 1) * plan.time_base / 2), begin) for tick in ticks]
            inside = [time for time in times if time < end]
            images = [video.get_frame_at(last).data[None]] * (len(times) - len(inside))
            if inside:
                shown = video.get_frames_played_at(inside)
                if any(start > time for start, time in zip(shown.pts_seconds.tolist(), inside, strict=True)):
                    raise VideoError(f"{plan.path}: torchcodec finds other frames than PyAV; use the decoder pyav")
                images.insert(0, shown.data)
            batch_images = torch.cat(images)
            if size is not None and batch_images.shape[2:] != size:
                scaled = F.interpolate(batch_images.float(), size, mode="bicubic", antialias=True)
                batch_images = scaled.round().clamp(0, 255).to(torch.uint8)
            yield batch_images


def stream_for_torchcodec(plan: FramePlan) -> int | None:
    """Return the number of the stream of which torchcodec gives the frames of PyAV; None if PyAV must read the video.

    torchcodec 0.13 finds other frames in other containers, after edit lists, and after keyframes at which decoding
    cannot begin (the last one is tried). It does not open some files with several streams, ignores mirrors, and
    converts colours of more than 8 bits in another way.
    """
    return None if plan.numbers else _stream_of(plan.only(len(plan) - 1), file_version(plan.path))


@lru_cache(maxsize=4096)
def _stream_of(last: FramePlan, _version: tuple[int, ...]) -> int | None:
    with open_video(last.path) as (container, stream):
        entries: Any = getattr(stream, "index_entries", ())
        hidden = any(entry.is_discard for entry in entries)
        if hidden or container.format.name not in _TORCHCODEC_CONTAINERS or len(container.streams.video) > 1:
            return None
        number, keys = int(stream.index), [entry.timestamp for entry in index_of(stream) if entry.is_keyframe]
        tick = keys[-1] + last.start - entries[0].timestamp if keys else last.ticks[0]
    try:
        with ExitStack() as resources:
            cursor = TimeCursor(replace(last, ticks=(tick,)), resources)
            frame = cursor.first_after_seek(tick)
    except PASSED:
        raise
    except Exception:  # noqa: BLE001 - PyAV reads what is readable, and says what is not
        return None
    if frame is None:
        return None
    a, b, c, d = display_matrix(frame)
    deep = any(component.bits > 8 for component in frame.format.components)
    tilted = getattr(frame, "rotation", 0) % 90 != 0
    return None if deep or tilted or a * d - b * c < 0 else number
