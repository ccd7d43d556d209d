"""Rows of clips on disk: a store is a directory with an index, and with one row or more for each frame of its clips.

    kind       index            files                                   written by
    frames     frames.json      videos/DIGEST/TIMES.frames and .json    check-data --store (module `frame_store`)
    tower      tower.json       frames/CLIP/START-STOP.safetensors      finetune --features
    features   features.json    features-RANK-of-WORLD.safetensors      ask --save_features, of one clip

The index states what the rows were made with. All files are written under a temporary name and renamed, so they are
complete or absent, whichever processes write them. Rows are read in any ranges, by any number of ranks.

Outputs of a tower and features are safetensors files with the tensor `embeds`, one row for each frame of some ranges,
and the identity of the run that wrote it. Outputs have a file for each range that a rank encoded, and frames without a
file are encoded later. Features have one file for each rank, and are refused if one is missing or from another run.
Frames that differ in size have one feature row for each token, (1, hidden), instead of one row (tokens, hidden).
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mllm_seqpar.digests import digest_of
from mllm_seqpar.errors import ConfigError, DataError, reading, writing
from mllm_seqpar.sharding import FrameSizes, Spans, describe_spans, join_spans
from mllm_seqpar.videos.files import atomic_write, require_made_with, write_json

_TENSOR = "embeds"
_ELSEWHERE = "give --features another directory"


class Store:
    """A directory of rows and its index. A subclass is a kind of store.

    Attributes:
        directory: of the store.
        INDEX: file name of the index.
        ROWS: what messages call the rows.
        IF_DAMAGED, IF_FULL: the ends of messages, if the index is damaged and if rows cannot be written.
    """

    INDEX: ClassVar[str]
    ROWS: ClassVar[str]
    IF_DAMAGED: ClassVar[str]
    IF_FULL: ClassVar[str]

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    @property
    def index(self) -> Path:
        return self.directory / self.INDEX

    @contextmanager
    def reading_index(self) -> Iterator[Any]:
        """Yield the index; raise DataError if it is damaged, or lacks an entry that is read inside."""
        with reading(f"{self.index}: not an index of {self.ROWS}", self.IF_DAMAGED):
            yield json.loads(self.index.read_text())

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which an error of writing becomes a DataError."""
        return writing(self.directory, f"the {self.ROWS}", self.IF_FULL)


class Segment(NamedTuple):
    """Rows start <= r < stop of a clip, which a file has one after another from its row `first`."""

    start: int
    stop: int
    path: Path
    first: int = 0


def cover(segments: Sequence[Segment], rows: Spans) -> list[Segment] | None:
    """Return parts of segments that together are exactly these rows, in their order; None if some row is absent."""
    parts = list[Segment]()
    for start, stop in rows:
        while start < stop:
            having = [segment for segment in segments if segment.start <= start < segment.stop]
            if not having:
                return None
            segment = max(having, key=lambda x: x.stop)
            end = min(segment.stop, stop)
            parts.append(Segment(start, end, segment.path, segment.first + start - segment.start))
            start = end
    return parts


def read_segments(out: Tensor, segments: Iterable[Segment], identity: str, remedy: str) -> Tensor:
    """Fill `out` with the rows of segments, one after another, and return it. Only these are read from the files.

    Raises:
        DataError: a file is damaged, or of another run than `identity`; ends with `remedy`.
    """
    from safetensors import safe_open

    done = 0
    for start, stop, path, first in segments:
        with reading(f"{path}: damaged", remedy), safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("identity") != identity:
                raise DataError(f"{path}: from another run; {remedy}")
            (name,) = file.keys()  # a tower's in version 0.2 was `states`
            out[done : done + stop - start] = file.get_slice(name)[first : first + stop - start]
        done += stop - start
    return out


def _write_rows(path: Path, rows: Tensor, identity: str) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        save_file({_TENSOR: rows.detach().cpu().contiguous()}, temporary, metadata={"identity": identity})


class TowerStore(Store):
    """Outputs of a vision tower for the frames of many clips, opened for reading and writing.

    Args:
        directory: created with the first output.
        settings: everything that the outputs depend on, other than the frames; serialisable as JSON, equal on all
            ranks.

    Attributes:
        shape, dtype, order: of the output for one frame, with the order of its dimensions in memory; the shape is None
            as long as nothing is stored.

    Raises:
        DataError: the directory has outputs that were computed with other settings, or other files.
    """

    INDEX = "tower.json"
    ROWS = "features"
    IF_DAMAGED = f"delete the directory, or {_ELSEWHERE}"
    IF_FULL = f"free some space, or {_ELSEWHERE}"

    def __init__(self, directory: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        super().__init__(directory)
        self._settings = dict(settings)
        self._segments: dict[str, list[Segment]] = {}
        self._identity = ""
        self.shape: tuple[int, ...] | None = None
        self.dtype: torch.dtype | None = None
        self.order: list[int] = []
        if (self.directory / FeatureStore.INDEX).exists():
            raise DataError(
                f"{directory}: it has features that `mllm-seqpar ask` stored, of one video; {_ELSEWHERE} for training"
            )
        if self.index.exists():
            self._open()

    def _open(self) -> None:
        with self.reading_index() as index:
            shape, dtype, order = tuple(index["shape"]), getattr(torch, index["dtype"]), list(index["order"])
            settings = dict(index["settings"])
            identity = digest_of(self.index.read_text())
        remedy = f"{_ELSEWHERE}, or use what they were made with"
        require_made_with(f"{self.directory}: these features", settings, self._settings, remedy)
        self.shape, self.dtype, self.order, self._identity = shape, dtype, order, identity

    def create(self, shape: tuple[int, ...], dtype: torch.dtype, order: list[int]) -> None:
        """Set the shape of the output for one frame, its dtype and the order of its dimensions in memory.

        Raises:
            DataError: the directory has outputs of another shape or dtype, or cannot be written.
        """
        if self.shape is None:
            if not self.index.exists():
                index = {"settings": self._settings, "shape": list(shape), "order": order}
                with self.writing():
                    write_json(self.index, index | {"dtype": str(dtype).removeprefix("torch.")})
            self._open()  # another rank may have written it
        if (self.shape, self.dtype) != (tuple(shape), dtype):
            raise DataError(
                f"{self.directory}: these features have shape {self.shape} and dtype {self.dtype}, but the vision "
                f"tower returns {tuple(shape)} in {dtype}; {_ELSEWHERE}"
            )

    def has(self, clip: str, start: int, stop: int) -> bool:
        """Return whether there are outputs of frames start <= f < stop of a clip."""
        return self._find(clip, start, stop) is not None

    def read(self, clip: str, start: int, stop: int) -> Tensor:
        """Return the outputs of frames start <= f < stop of a clip, (frames, *shape), which `has` has found."""
        segments = self._find(clip, start, stop)
        assert segments is not None and self.shape is not None
        out = torch.empty(stop - start, *self.shape, dtype=self.dtype)
        return read_segments(out, segments, self._identity, "delete it, and its frames are encoded again")

    def write(self, clip: str, start: int, states: Tensor) -> None:
        """Store the outputs of the frames of a clip, beginning with frame `start`; DataError if that is impossible."""
        path = self.directory / "frames" / clip / f"{start}-{start + len(states)}.safetensors"
        with self.writing():
            _write_rows(path, states, self._identity)

    def _find(self, clip: str, start: int, stop: int) -> list[Segment] | None:
        segments = cover(self._segments.get(clip, []), ((start, stop),))
        if segments is None:  # another rank may have written them
            files = (self.directory / "frames" / clip).glob("*-*.safetensors")
            ranges = [(re.fullmatch(r"(\d+)-(\d+)", path.stem), path) for path in files]
            self._segments[clip] = [Segment(int(ends[1]), int(ends[2]), path) for ends, path in ranges if ends]
            segments = cover(self._segments[clip], ((start, stop),))
        return segments


class FeatureStore(Store):
    """The complete visual features of one clip, opened for reading. It keeps no tensor in memory and no file open.

    The features have the shape (total_frames, tokens_per_frame, hidden), or, if frames differ in size, (tokens of all,
    1, hidden). `sizes` are the rows of each frame; `meta` is the writer's metadata.

    Raises:
        DataError: there is no store, or some of its files are missing, damaged or of another run; names them.
    """

    INDEX = "features.json"
    ROWS = "features"
    IF_DAMAGED = "encode the video again with --save_features"
    IF_FULL = "free some space, or give --save_features another directory"

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__(directory)
        if not self.index.exists():
            shards = len(list(self.directory.glob("features-*-of-*.safetensors")))
            contents = f"{shards} shards but no index, so rank 0 did not finish" if shards else "no features"
            raise DataError(f"{directory}: {contents} ({self.INDEX} is missing); {self.IF_DAMAGED}")
        with self.reading_index() as index:
            self.total_frames: int = index["total_frames"]
            self.tokens_per_frame: int = index["tokens_per_frame"]
            self.hidden: int = index["hidden"]
            self.sizes = _rows_of(self.total_frames, index.get("sizes"))
            self.meta: dict[str, Any] = index["meta"]
            self.dtype: torch.dtype = getattr(torch, index["dtype"])
            self._identity: str = index["identity"]
            self._segments: list[Segment] = []
            rows_of_file: dict[Path, int] = {}
            for entry in index["files"]:
                path, rows = self.directory / entry["file"], 0
                for start, stop in self.sizes.units(join_spans((a, b) for a, b in entry["ranges"])):
                    self._segments.append(Segment(start, stop, path, rows))
                    rows += stop - start
                rows_of_file[path] = rows
        faults = [(path.name, self._fault(path, rows)) for path, rows in rows_of_file.items()]
        if unusable := [f"{name} ({fault})" for name, fault in faults if fault]:
            listed = f"{len(unusable)} of {len(faults)} shards cannot be used: {', '.join(unusable[:4])}"
            raise DataError(f"{directory}: {listed}; {self.IF_DAMAGED}")

    def read(self, *frames: tuple[int, int], device: str | torch.device = "cpu") -> Tensor:
        """Return the frames of some ranges (start, stop), one range after another, (rows, tokens, hidden).

        Only these rows are read from the files.
        """
        segments, shape = self._find(frames), (self.sizes.count(frames), self.tokens_per_frame, self.hidden)
        out = torch.empty(shape, dtype=self.dtype, device=device)
        return read_segments(out, segments, self._identity, self.IF_DAMAGED)

    def map(self, *frames: tuple[int, int]) -> Tensor:
        """Return some frames as `read` does, mapped from their file, so that only used rows are read.

        If they are not one after another in one file, because other ranks wrote the store, they are read into memory.
        The tensor must not be written to.
        """
        from safetensors import safe_open

        segments = self._find(frames)
        if not segments or not _is_one_range(segments):
            return self.read(*frames)
        with safe_open(segments[0].path, "pt") as file:
            first = segments[0].first
            return file.get_slice(_TENSOR)[first : first + self.sizes.count(frames)]

    def can_map(self, by_rank: Iterable[Spans]) -> bool:
        """Return whether `map` maps the frames of each of several ranks."""
        return all(_is_one_range(self._find(spans)) for spans in by_rank)

    def _find(self, frames: Sequence[tuple[int, int]]) -> list[Segment]:
        for start, stop in frames:
            if not 0 <= start <= stop <= self.total_frames:
                raise ConfigError(
                    f"frames {start} to {stop} asked of {self.directory}, which has {self.total_frames}; pass "
                    "0 <= start <= stop <= total_frames"
                )
        segments = cover(self._segments, self.sizes.units(tuple(frames)))
        assert segments is not None
        return segments

    def _fault(self, path: Path, rows: int) -> str | None:
        """Return why a file cannot be used, which should have so many rows."""
        from safetensors import safe_open

        try:
            with safe_open(path, "pt") as file:
                shape = tuple(file.get_slice(_TENSOR).get_shape())
                identity = (file.metadata() or {}).get("identity")
        except FileNotFoundError:
            return "missing"
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - of safetensors, or of the file system
            return f"damaged: {error}"
        if identity != self._identity:
            return "from another run"
        expected = (rows, self.tokens_per_frame, self.hidden)
        return None if shape == expected else f"shape {shape}, expected {expected}"

    def require(self, **expected: Any) -> None:
        """Raise DataError unless these entries of `meta` have the given values."""
        remedy = f"{self.IF_DAMAGED}, or use what they were made with"
        require_made_with(f"{self.directory}: these features", self.meta, expected, remedy)


def _is_one_range(segments: Sequence[Segment]) -> bool:
    """Return whether the rows of segments are one after another in one file."""
    return all(a.path == b.path and a.first + a.stop - a.start == b.first for a, b in pairwise(segments))


def open_features(directory: str | os.PathLike[str]) -> FeatureStore:
    """Open a store whose files are complete and belong to one run; otherwise a DataError names the files."""
    return FeatureStore(directory)


def save_features(
    directory: str | os.PathLike[str],
    embeds: Tensor,
    *,
    start: int,
    total: int,
    rank: int,
    world: int,
    layout: str = "contiguous",
    sizes: Sequence[int] | Tensor | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """Write this rank's frames and return the file's path; every rank calls this, and rank 0 also writes the index.

    The index follows from the arguments, so rank 0 needs no data from the other ranks.

    Args:
        directory: created if it does not exist. A store that it already contains is replaced.
        embeds: (frames, tokens, hidden), the features of this rank's frames, of which there may be none.
        start, total: the number of this rank's first frame; number of frames of the whole video.
        rank, world: this rank and the number of ranks.
        layout: how frames map to ranks; see `frame_ranges`.
        sizes: (total,) the tokens of each frame, if they differ; embeds are then (tokens, 1, hidden). None: they are
            equal.
        meta: metadata about the origin of the features, serialisable as JSON and equal on every rank; see
            `source_meta` and `model_fingerprint`.

    Raises:
        ConfigError: the frames are not this rank's frame range.
        DataError: the features cannot be written.
    """
    rows = _rows_of(total, sizes)
    by_rank = rows.spans(world, layout)
    own = by_rank[rank] if 0 <= rank < world else None
    if own is None or embeds.ndim != 3 or rows.count(own) != embeds.shape[0] or any(own[:1]) and own[0][0] != start:
        owned = "there is no such rank" if own is None else f"this rank has {describe_spans(own)}"
        raise ConfigError(
            f"save_features: rank {rank} of {world} passed embeds {tuple(embeds.shape)} from frame {start}; of {total} "
            f"frames, {owned}; expected embeds of shape (frames, tokens, hidden)"
        )
    names = [f"features-{number:05d}-of-{world:05d}.safetensors" for number in range(world)]
    index = {
        "total_frames": total,
        "tokens_per_frame": embeds.shape[1],
        "hidden": embeds.shape[2],
        "dtype": str(embeds.dtype).removeprefix("torch."),
        "files": [
            {"file": name, "ranges": [list(span) for span in spans]} for name, spans in zip(names, by_rank, strict=True)
        ],
        "meta": dict(meta or {}),
    }
    if isinstance(rows.per_frame, Tensor):
        index["sizes"] = rows.per_frame.tolist()
    identity = digest_of(json.dumps(index, sort_keys=True))
    path = Path(directory) / names[rank]
    with writing(directory, "the features", FeatureStore.IF_FULL):
        _write_rows(path, embeds, identity)
        if rank == 0:
            write_json(path.with_name(FeatureStore.INDEX), {"identity": identity, **index})
    return path


def _rows_of(total: int, sizes: Sequence[int] | Tensor | None) -> FrameSizes:
    """Return how many rows of a file each frame has: one, or one for each token if frames differ in size."""
    by_frame = FrameSizes(total, sizes)
    return by_frame if isinstance(by_frame.per_frame, Tensor) else FrameSizes(total)
