"""Training on stored outputs of a frozen vision tower (`finetune --features`).

In the first epoch the tower runs, and its outputs are stored unchanged. Later, frames are not decoded: the model
receives blank images, and the tower's method returns the stored outputs instead of computing them. Modules behind the
tower, such as a projector, run in every pass, so they may be trained.

In a pass, either all ranks compute or all ranks read, because FSDP gathers the weights of a module when it runs;
`BatchReader` agrees on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.chats.chat import ChatBatch
from mllm_seqpar.chats.chat_family import ChatFamily
from mllm_seqpar.chats.feature_store import INDEX, read_rows, write_rows
from mllm_seqpar.chats.sources import FrameSource
from mllm_seqpar.errors import ConfigError, DataError, writing
from mllm_seqpar.patching.registry import find_adapter
from mllm_seqpar.sharding import FrameShard
from mllm_seqpar.videos.files import digest_of, reading_index, require_made_with, write_json

ARGUMENT = "tower_rows"
"""The name under which a `TowerRows` is among the arguments of a batch."""

TOWER_INDEX = "tower.json"
_ELSEWHERE = "give --features another directory"
_BLANK = "blank"


class TowerStore:
    """A directory of outputs by source of frames, opened for reading and writing.

        DIRECTORY/tower.json                             what the outputs were made with, their shape and dtype
        DIRECTORY/frames/KEY/START-STOP.safetensors      the rows of these frames of one source (`write_rows`)

    `KEY` is a digest of a video or of images and of the times of the frames (`source_key`). Each rank writes the frames
    that it encodes, and a later run may read any rows of the files. Frames without a file are encoded.

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
        if (self.directory / INDEX).exists():
            raise DataError(
                f"{directory}: it has features that `mllm-seqpar ask` stored, of one video; {_ELSEWHERE} for training"
            )
        if (self.directory / TOWER_INDEX).exists():
            self._open()

    def _open(self) -> None:
        path = self.directory / TOWER_INDEX
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
        if self.shape is None and not (self.directory / TOWER_INDEX).exists():
            index = {"settings": self._settings, "shape": list(shape), "order": order}
            index["dtype"] = str(dtype).removeprefix("torch.")
            with self._writing():
                write_json(self.directory / TOWER_INDEX, index)
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
        assert self.shape is not None
        out = torch.empty(stop - start, *self.shape, dtype=self.dtype)
        files = [(((a, b),), self._path(key, a, b)) for a, b in self._cover(key, start, stop) or ()]
        return read_rows(out, files, ((start, stop),), self._identity, "delete it, and its frames are encoded again")

    def write(self, key: str, start: int, states: Tensor) -> None:
        """Store the outputs of the frames of a source, beginning with frame `start`; DataError if they cannot be
        written."""
        with self._writing():
            write_rows(self._path(key, start, start + len(states)), states, self._identity)

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


@dataclass(frozen=True)
class TowerRows:
    """The frames of this rank in one pass.

    Attributes:
        segments: (key of the source, first frame, last frame + 1), in the order of the pass.
        states: their stored outputs, (frames, ...); None if the tower computes them.
    """

    segments: tuple[tuple[str, int, int], ...]
    states: Tensor | None


class StoredTower:
    """The vision tower of a model whose outputs are stored.

    Raises:
        ConfigError: a part that computes the outputs is trained or random, or the family has no tower that can be
            stored.
    """

    def __init__(self, store: TowerStore, chat_format: ChatFamily, model: nn.Module) -> None:
        if chat_format.ragged:
            raise ConfigError(
                f"--features: outputs of the vision tower of {chat_format.model_class} cannot be stored: its images "
                "have different numbers of patches; leave it out"
            )
        self.store, self._chat_format = store, chat_format
        path, self._method = chat_format.tower
        self._tower = find_adapter(model)[1].get_submodule(path)
        _require_fixed(self._tower)

    def rows(self, batch: ChatBatch, shard: FrameShard, read: bool) -> TowerRows:
        """Return this rank's frames of a batch; with `read`, also their outputs if all of them are stored."""
        slots = batch.text.slots
        places = [(source, number) for source in batch.sources for number in range(len(source))]
        segments: list[tuple[str, int, int]] = []
        for slot in chain(*shard.ranges):
            source, number = places[slots[slot]] if slots[slot] >= 0 else (None, 0)
            key = _BLANK if source is None else source_key(source)
            if segments and source is not None and segments[-1][0] == key and segments[-1][2] == number:
                segments[-1] = (key, segments[-1][1], number + 1)
            else:
                segments.append((key, number, number + 1))
        states = None
        if read and self.store.shape is not None and all(self.store.has(*segment) for segment in segments):
            parts = [self.store.read(*segment) for segment in segments]
            states = torch.cat(parts) if parts else torch.empty(0, *self.store.shape)
        return TowerRows(tuple(segments), states)

    @contextmanager
    def running(self, rows: TowerRows) -> Iterator[None]:
        """Return a context in which the tower returns the outputs of `rows`, or stores what it computes."""
        compute, states, found, done = getattr(self._tower, self._method), rows.states, [], 0
        replaced = vars(self._tower).get(self._method)  # by the autocast of accelerate, or by FSDP
        order: list[int] = []

        def returned(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            pixels = kwargs["pixel_values"] if "pixel_values" in kwargs else args[0]
            if states is None:
                output = compute(*args, **kwargs)
                computed = self._chat_format.tower_states(output).detach()
                # Dropout after the tower fills its masks in the order of memory, so the order is stored too.
                strides = computed.stride()
                order[:] = sorted(range(computed.dim()), key=lambda dim: -strides[dim])
                found.append(computed.cpu())
                return output
            count = self._chat_format.tower_frames(pixels)
            part = states[done : done + count]
            if len(part) < count:  # a call whose result is dropped, on a rank with fewer frames than others
                part = torch.cat([part, part.new_zeros(count - len(part), *part.shape[1:])])
            done += count
            moved = copy_to_device(part.to(self.store.dtype), pixels.device)
            ordered = moved.permute(self.store.order).contiguous()
            return self._chat_format.tower_output(
                ordered.permute([self.store.order.index(dim) for dim in range(moved.dim())])
            )

        setattr(self._tower, self._method, returned)
        try:
            yield
        finally:
            if replaced is None:
                delattr(self._tower, self._method)
            else:
                setattr(self._tower, self._method, replaced)
        if found:
            self._save(rows, torch.cat(found), order)

    def _save(self, rows: TowerRows, states: Tensor, order: list[int]) -> None:
        self.store.create(tuple(states.shape[1:]), states.dtype, order)
        first = 0
        for key, start, stop in rows.segments:
            if not self.store.has(key, start, stop):
                self.store.write(key, start, states[first : first + stop - start])
            first += stop - start


def _require_fixed(tower: nn.Module) -> None:
    trained = [name for name, parameter in tower.named_parameters() if parameter.requires_grad]
    if trained:
        raise ConfigError(
            f"--features stores what the vision tower returns, but {len(trained)} of its tensors are trained, such as "
            f"{trained[0]}; freeze it (--freeze vision), or leave out --features"
        )
    config: Any = getattr(tower, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    rates = {name: value for name, value in values.items() if "dropout" in name and isinstance(value, (int, float))}
    rates |= {name: module.p for name, module in tower.named_modules() if isinstance(module, nn.Dropout)}
    random = {name: rate for name, rate in rates.items() if rate > 0}
    if random:
        name, rate = next(iter(random.items()))
        raise ConfigError(
            f"--features stores what the vision tower returns, which is random in training ({name} = {rate}); set it "
            "to 0 in config.json, or leave out --features"
        )
