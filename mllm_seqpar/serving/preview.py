"""Previews of an uploaded file for the page: the length of a video, and single frames as small images.

The server decodes the frames, because a browser cannot play every format that the model reads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from mllm_seqpar.data.frame_choice import FrameChoice
from mllm_seqpar.data.images import jpeg_of
from mllm_seqpar.data.reader import read_frames
from mllm_seqpar.data.video import VideoInfo, probe
from mllm_seqpar.errors import ConfigError, VideoError
from mllm_seqpar.inference.engine import MediaFile

from .media import MediaStore
from .protocol import ApiError, MediaReference

WIDTH = 240
"""Pixels of a frame's image."""


class Previews:
    """Facts and frames of the uploads in `store`. One frame is decoded at a time, to leave the cores to the model."""

    def __init__(self, store: MediaStore) -> None:
        self._store, self._decoding = store, threading.Lock()
        self._probed = lru_cache(maxsize=16)(probe)

    def describe(self, file_id: str) -> dict[str, Any]:
        """Return whether an upload is a video or an image, and the seconds and frames per second of a video.

        Raises:
            ApiError: 404, or 400 if the file is not a readable video.
        """
        with self._file(file_id) as file:
            if file.kind == "image":
                return {"kind": "image"}
            info = self._probed(file.path)
            return {"kind": "video", "seconds": info.duration, "fps": info.fps}

    def frame(self, file_id: str, seconds: float) -> bytes:
        """Return the frame of a video that is shown at a time, or the last one before it, as a JPEG.

        Raises:
            ApiError: 404, or 400 if the upload has no readable frame at that time.
        """
        with self._file(file_id) as file, self._decoding:
            if file.kind == "image":
                raise ApiError(400, f"{file.name}: an image has no time; give the id of a video", param="seconds")
            plan = self._probed(file.path).plan([_tick(self._probed(file.path), seconds)])
            return jpeg_of(next(read_frames(plan, threads=1))[0], WIDTH)

    @contextmanager
    def _file(self, file_id: str) -> Iterator[MediaFile]:
        self._store.upload(file_id)
        with self._store.files([MediaReference(kind=None, file_id=file_id, param="id")], FrameChoice()) as (file,):
            try:
                yield file
            except (VideoError, ConfigError) as error:
                raise ApiError(400, str(error).replace(file.path, file.name), param="id") from error


def _tick(info: VideoInfo, seconds: float) -> int:
    return info.start + min(max(0, int(seconds / info.time_base)), info.length - 1)
