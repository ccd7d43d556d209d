"""The frame store: the planned frames of videos on disk, so that a video is decoded once and not in every epoch.

    DIRECTORY/frames.json                    how frames are stored, and whether the run that wrote them has finished
    DIRECTORY/videos/DIGEST/TIMES.frames     the frames of one plan of a video, one after another
    DIRECTORY/videos/DIGEST/TIMES.json       their size, and position and checksum of each; or the reason why there are
    none

`DIGEST` is that of the media file and `TIMES` that of the times of the frames, so a video is found even if it was moved
or renamed. A frame is raw RGB (height, width, 3), or a JPEG image. `mllm-seqpar check-data --store` writes a store.
Both files of a plan are written under a temporary name and renamed, TIMES.json last, so a plan is complete or absent.
Absent frames are an error: decoding the video instead would silently slow down training.
"""

import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mllm_seqpar.errors import DataError, VideoError, reading
from mllm_seqpar.videos.decode_options import decode_threads
from mllm_seqpar.videos.files import atomic_write, write_json
from mllm_seqpar.videos.frame_batches import FrameBatches
from mllm_seqpar.videos.images import jpeg_of
from mllm_seqpar.videos.prefetch import read_ahead
from mllm_seqpar.videos.video import FramePlan, source_meta

from .store import Store

_AGAIN = "run `mllm-seqpar check-data --store` with this directory"


@dataclass(frozen=True)
class FrameFile:
    """The file in which a frame store has the frames of one plan.

    Attributes:
        path: the file of the frames.
        size: (height, width).
        quality: of JPEG; None for raw frames.
        pixels: how the pixels differ from those of the video; None if they are equal.
        ends: the byte at which each frame ends.
        checksums: CRC-32 of the bytes of each frame.
    """

    path: Path
    size: tuple[int, int]
    quality: int | None
    pixels: str | None
    ends: tuple[int, ...]
    checksums: tuple[int, ...]

    def read(self, numbers: Sequence[int], batch: int, threads: int | None = None) -> Iterator[Tensor]:
        """Yield the frames with these numbers, as `VideoSource.read` does; only their bytes are read.

        Raises:
            DataError: the file is missing or damaged.
        """
        threads = decode_threads() if threads is None else threads
        with self._reading():
            file = open(self.path, "rb")  # noqa: SIM115 - closed below
        batches = FrameBatches(len(numbers), batch)

        def read(position: int) -> None:
            batches.write(position, self._frame(file.fileno(), numbers[position]))

        with file, closing(read_ahead(range(len(numbers)), read, threads, threads)) as parts:
            for _ in parts:
                yield from batches.finish(1)

    def _frame(self, file: int, number: int) -> np.ndarray:
        first = self.ends[number - 1] if number else 0
        with self._reading():
            content = os.pread(file, self.ends[number] - first, first)
            if zlib.crc32(content) != self.checksums[number]:
                raise ValueError(f"frame {number} does not have the checksum that it was written with")
            if self.quality is None:
                return np.frombuffer(content, np.uint8).reshape(*self.size, 3)
            from PIL import Image

            with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
                return np.array(image)

    def _reading(self) -> AbstractContextManager[None]:
        return reading(f"{self.path}: damaged", f"delete the file, and {_AGAIN}")


class FrameStore(Store):
    """A store of frames; `FrameStore.open` reads it, `FrameStore.create` writes it.

    Attributes:
        quality: of JPEG, 1 to 100; None stores the pixels of the video.
        shorter_side: frames are scaled so that their shorter side has at most this many pixels; None: not scaled.
    """

    INDEX = "frames.json"
    ROWS = "frames"
    IF_DAMAGED = f"delete the directory, and {_AGAIN}"
    IF_FULL = "free some space or give another directory, and run the same command again, which keeps what is written"

    def __init__(
        self, directory: str | os.PathLike[str], quality: int | None = None, shorter_side: int | None = None
    ) -> None:
        super().__init__(directory)
        self.quality, self.shorter_side = quality, shorter_side

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> "FrameStore":
        """Open a store that a run of check-data has finished.

        Raises:
            DataError: there is no store, or it is incomplete.
        """
        store = cls(directory)
        if not store.index.exists():
            raise DataError(f"{directory}: no frame store ({cls.INDEX} is missing); {_AGAIN}")
        if not store._read_index():
            raise DataError(
                f"{directory}: the frame store is incomplete, because the run that writes it has not finished; "
                f"{_AGAIN} again, which writes only what is missing"
            )
        return store

    @classmethod
    def create(
        cls, directory: str | os.PathLike[str], *, quality: int | None = None, shorter_side: int | None = None
    ) -> "FrameStore":
        """Open a store for writing. It is incomplete until `finish`; frames that it already has are kept.

        Raises:
            DataError: it stores frames with other settings, or cannot be written.
        """
        store, earlier = cls(directory, quality, shorter_side), cls(directory)
        if earlier.index.exists():
            earlier._read_index()
            if earlier.description != store.description:
                raise DataError(
                    f"{directory}: this frame store has frames {earlier.description}, not {store.description}; give "
                    "the same --store_quality and --store_size, or another directory"
                )
        store._write_index(complete=False)
        return store

    def _read_index(self) -> bool:
        """Read the settings from the index, and return whether the store is complete."""
        with self.reading_index() as index:
            self.quality, self.shorter_side = index["quality"], index["shorter_side"]
            return bool(index["complete"])

    def _write_index(self, *, complete: bool) -> None:
        with self.writing():
            settings = {"quality": self.quality, "shorter_side": self.shorter_side}
            write_json(self.index, settings | {"complete": complete})

    def finish(self) -> None:
        """Mark the store as complete."""
        self._write_index(complete=True)

    @property
    def description(self) -> str:
        """The form in which frames are stored, for messages."""
        kind = "as raw pixels" if self.quality is None else f"as JPEG of quality {self.quality}"
        size = "in full size" if self.shorter_side is None else f"with a shorter side of {self.shorter_side}"
        return f"{kind} {size}"

    def frame_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) in which frames of this size are stored."""
        least = min(height, width)
        if self.shorter_side is None or least <= self.shorter_side:
            return height, width
        return round(height * self.shorter_side / least), round(width * self.shorter_side / least)

    def find(self, plan: FramePlan) -> FrameFile:
        """Return the frames of a plan.

        Raises:
            DataError: the store has none, or others of this video, or they are damaged.
            VideoError: the video could not be decoded when the store was written.
        """
        path = self._path(plan)
        if not path.exists():
            raise self._absent(plan, path)
        with reading(f"{path}: damaged", f"delete the file, and {_AGAIN}"):
            header = json.loads(path.read_text())
            if header.get("fault"):
                raise VideoError(header["fault"])
            height, width = header["size"]
            exact = self.quality is None and self.shorter_side is None
            frames = FrameFile(
                path=path.with_suffix(".frames"),
                size=(height, width),
                quality=self.quality,
                pixels=None if exact else self.description,
                ends=tuple(header["ends"]),
                checksums=tuple(header["checksums"]),
            )
            if len(frames.ends) != len(plan) or frames.path.stat().st_size != frames.ends[-1]:
                raise ValueError(f"{frames.path.name} does not have the bytes of {len(plan)} frames")
        return frames

    def has(self, plan: FramePlan) -> bool:
        """Return whether `find` returns frames of this plan."""
        try:
            self.find(plan)
        except (DataError, VideoError):
            return False
        return True

    def write(self, plan: FramePlan, frames: Iterable[Tensor]) -> None:
        """Store the frames of a plan, uint8 tensors (n, 3, height, width) of one size.

        Raises:
            DataError: they cannot be written.
            VideoError: they cannot be decoded; the reason is stored instead.
        """
        path = self._path(plan)
        ends: list[int] = []
        checksums: list[int] = []
        header: dict[str, Any] = {"source": plan.path, "seconds": [plan.seconds(0), plan.seconds(-1)]}
        with self.writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with atomic_write(path.with_suffix(".frames")) as temporary, temporary.open("wb") as file:
                    for batch in frames:
                        size = header.setdefault("size", list(batch.shape[2:]))
                        if list(batch.shape[2:]) != size:
                            raise VideoError(f"{plan.path}: its frames have several sizes, which are not stored")
                        for content in map(self._encoded, batch):
                            file.write(content)
                            ends.append(file.tell())
                            checksums.append(zlib.crc32(content))
            except VideoError as error:
                write_json(path, {"fault": str(error)})
                raise
            write_json(path, header | {"ends": ends, "checksums": checksums})

    def _encoded(self, frame: Tensor) -> bytes:
        if self.quality is None:
            return frame.permute(1, 2, 0).contiguous().numpy().tobytes()
        return jpeg_of(frame, quality=self.quality)

    def _path(self, plan: FramePlan) -> Path:
        meta = source_meta(plan)
        return self.directory / "videos" / meta["source_digest"] / f"{meta['frame_times']}.json"

    def _absent(self, plan: FramePlan, path: Path) -> DataError:
        """Return the error for a plan that the store does not have; it names the frames of this video that it has."""
        wanted = f"the {len(plan)} frames from {plan.seconds(0):.2f} to {plan.seconds(-1):.2f} s of {plan.path}"
        others = []
        for other in sorted(path.parent.glob("*.json")):
            with suppress(OSError, ValueError):  # a damaged file is refused when it is used
                others.append(json.loads(other.read_text()))
        others = [header for header in others if "ends" in header]
        if not others:
            return DataError(f"{self.directory}: the frame store does not have {wanted}; {_AGAIN} and its data")
        has = ", ".join(f"{len(x['ends'])} from {x['seconds'][0]:.2f} to {x['seconds'][1]:.2f} s" for x in others[:3])
        return DataError(
            f"{self.directory}: the frame store does not have {wanted}, but others ({has}); give the --fps, "
            f"--num_frames and --max_frames that it was made with, or {_AGAIN} and these"
        )
