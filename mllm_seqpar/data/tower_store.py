"""Outputs of a frozen vision tower on disk, by source of frames, so that each frame is encoded once.

    DIRECTORY/tower.json                             what the outputs were made with, their shape and dtype
    DIRECTORY/frames/KEY/START-STOP.safetensors      the tensor `states` of these frames of one source

`KEY` is a digest of a video or of images and of the times of the frames (`source_key`). Each rank writes the frames
that it encodes, and a later run may read any rows of the files. A file is written under a temporary name and renamed,
so it is complete or absent; frames without a file are encoded. All files contain the digest of tower.json.
"""

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import ConfigError, DataError

from .feature_store import INDEX as VIDEO_INDEX
from .sources import FrameSource
from .store_files import atomic_write, digest_of, reading_index, require_made_with, write_json, writing

INDEX = "tower.json"
_TENSOR = "states"
_ELSEWHERE = "give --features another directory"


class TowerStore:
    """A directory of outputs, opened for reading and writing.

    Args:
        directory: created with the first output.
        settings: everything that the outputs depend on, other than the frames; serialisable as JSON, equal on all
            ranks.

    Raises:
        DataError: the directory has outputs that were computed with other settings, or other files.
    """

    def __init__(self, directory: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.directory = Path(directory)
        self._settings = dict(settings)
        self._files: dict[str, list[tuple[int, int]]] = {}
        self._identity = ""
        self.shape: tuple[int, ...] | None = None
        self.dtype: torch.dtype | None = None
        self.order: list[int] = []
        if (self.directory / VIDEO_INDEX).exists():
            raise DataError(
                f"{directory}: it has features that `mllm-seqpar ask` stored, of one video; {_ELSEWHERE} for training"
            )
        if (self.directory / INDEX).exists():
            self._open()

    def _open(self) -> None:
        path = self.directory / INDEX
        with reading_index(path, "features", f"delete the directory, or {_ELSEWHERE}"):
            text = path.read_text()
            index = json.loads(text)
            found = dict(index["settings"])
            shape, dtype, order = tuple(index["shape"]), getattr(torch, index["dtype"]), list(index["order"])
        remedy = f"{_ELSEWHERE}, or use what they were made with"
        require_made_with(f"{self.directory}: these features", found, self._settings, remedy)
        self.shape, self.dtype, self.order, self._identity = shape, dtype, order, digest_of(text)

    def create(self, shape: tuple[int, ...], dtype: torch.dtype, order: list[int]) -> None:
        """Set the shape of the output for one frame, its dtype and the order of its dimensions in memory.

        Raises:
            DataError: the directory has outputs of another shape or dtype, or cannot be written.
        """
        if self.shape is None and not (self.directory / INDEX).exists():
            index = {"settings": self._settings, "shape": list(shape), "order": order}
            index["dtype"] = str(dtype).removeprefix("torch.")
            with self._writing():
                write_json(self.directory / INDEX, index)
        if self.shape is None:
            self._open()
        if (self.shape, self.dtype) != (tuple(shape), dtype):
            raise DataError(
                f"{self.directory}: these features have shape {self.shape} and dtype {self.dtype}, but the vision "
                f"tower returns {tuple(shape)} in {dtype}; {_ELSEWHERE}"
            )

    def has(self, key: str, start: int, stop: int) -> bool:
        """Return whether there are outputs of frames start <= f < stop of a source."""
        return start == stop or self._cover(key, start, stop) is not None

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Return the outputs of frames start <= f < stop of a source, (frames, *shape), which `has` has found.

        Raises:
            DataError: a file is damaged, or of another run.
        """
        from safetensors import SafetensorError, safe_open

        assert self.shape is not None
        out = torch.empty(stop - start, *self.shape, dtype=self.dtype)
        for first, last in self._cover(key, start, stop) or ():
            path = self._path(key, first, last)
            low, high = max(first, start), min(last, stop)
            try:
                with safe_open(path, "pt") as file:
                    if (file.metadata() or {}).get("identity") != self._identity:
                        raise DataError(f"{path}: from another run; delete it, and its frames are encoded again")
                    out[low - start : high - start] = file.get_slice(_TENSOR)[low - first : high - first]
            except (SafetensorError, OSError, RuntimeError) as error:
                raise DataError(f"{path}: damaged ({error}); delete it, and its frames are encoded again") from error
        return out

    def write(self, key: str, start: int, states: Tensor) -> None:
        """Store the outputs of the frames of a source, beginning with frame `start`; DataError if they cannot be
        written."""
        from safetensors.torch import save_file

        path = self._path(key, start, start + len(states))
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as temporary:
                save_file({_TENSOR: states.contiguous()}, temporary, metadata={"identity": self._identity})

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.directory, "the features", f"free some space, or {_ELSEWHERE}")

    def _path(self, key: str, start: int, stop: int) -> Path:
        return self.directory / "frames" / key / f"{start}-{stop}.safetensors"

    def _cover(self, key: str, start: int, stop: int) -> list[tuple[int, int]] | None:
        """Return ranges of files, ascending, that together have these frames; None if there are none."""
        for files in (self._files.get(key, []), self._listed(key)):
            chosen, reached = [], start
            while reached < stop:
                following = max((item for item in files if item[0] <= reached), key=lambda item: item[1], default=None)
                if following is None or following[1] <= reached:
                    break
                chosen.append(following)
                reached = following[1]
            if reached >= stop:
                return chosen
        return None

    def _listed(self, key: str) -> list[tuple[int, int]]:
        names = (path.stem.partition("-") for path in (self.directory / "frames" / key).glob("*-*.safetensors"))
        self._files[key] = [(int(a), int(b)) for a, _, b in names if a.isdigit() and b.isdigit()]
        return self._files[key]


@lru_cache(maxsize=65_536)
def source_key(source: FrameSource) -> str:
    """Return the name of a source in the store, a digest of its `key`.

    Raises:
        ConfigError: the source has none.
    """
    try:
        return digest_of(source.key())
    except ConfigError as error:
        raise ConfigError(f"--features: {error}; leave it out") from error
