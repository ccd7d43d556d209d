"""The visual features of one video on disk, which `ask` stores and reads.

Each rank that writes a `FeatureStore` writes one file, `features-00000-of-00004.safetensors`, whose rows have the shape
(tokens per frame, hidden). Frames that differ in size have one row for each token, (1, hidden). Rank 0 also writes the
index `features.json`: the frame ranges of each file, sizes, dtype, and metadata of the caller about video, sampling and
model. The ranges follow from `FrameSizes.spans`, so rank 0 needs no data from the other ranks. A store with an absent
file, or one of another run, is refused.

A file of rows (`write_rows`) is a safetensors file. It has the tensor `embeds` with one row for each frame of some
ranges, and the identity of the run that wrote it. It is written under a temporary name and renamed, so it is complete
or absent. Ranks read any rows.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import PASSED, ConfigError, DataError
from mllm_seqpar.models.hub import local_directory
from mllm_seqpar.sharding import FrameSizes, Spans, describe_spans, join_spans, part_of_spans, span_length
from mllm_seqpar.videos.files import atomic_write, digest_of, reading_index, require_made_with, write_json

INDEX = "features.json"
_TENSOR = "embeds"
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_REDO = "encode the video again with --save_features"


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
    folder = Path(directory)
    index = {
        "total_frames": total,
        "tokens_per_frame": embeds.shape[1],
        "hidden": embeds.shape[2],
        "dtype": str(embeds.dtype).removeprefix("torch."),
        "files": [
            {"file": _file_name(number, world), "ranges": [list(span) for span in spans]}
            for number, spans in enumerate(by_rank)
        ],
        "meta": dict(meta or {}),
    }
    if isinstance(rows.per_frame, Tensor):
        index["sizes"] = rows.per_frame.tolist()
    identity = digest_of(json.dumps(index, sort_keys=True))
    path = folder / _file_name(rank, world)
    write_rows(path, embeds, identity)
    if rank == 0:
        write_json(folder / INDEX, {"identity": identity, **index})
    return path


class FeatureStore:
    """A complete feature store, opened for reading. It keeps no tensor in memory and no file open.

    The features have the shape (total_frames, tokens_per_frame, hidden), or, if frames differ in size, (tokens of all,
    1, hidden). `sizes` are the rows of each frame; `meta` is the writer's metadata.
    """

    def __init__(self, directory: Path, index: Mapping[str, Any]) -> None:
        self.directory = directory
        self.total_frames: int = index["total_frames"]
        self.tokens_per_frame: int = index["tokens_per_frame"]
        self.sizes = _rows_of(self.total_frames, index.get("sizes"))
        self.hidden: int = index["hidden"]
        self.dtype = _DTYPES[index["dtype"]]
        self.meta: dict[str, Any] = index["meta"]
        self._identity: str = index["identity"]
        self._files = [(join_spans((a, b) for a, b in f["ranges"]), directory / f["file"]) for f in index["files"]]

    def read(self, *frames: tuple[int, int], device: str | torch.device = "cpu") -> Tensor:
        """Return the frames of some ranges (start, stop), one range after another, (rows, tokens, hidden).

        Only these rows are read from the files.
        """
        self._check(frames)
        shape, files = (self.sizes.count(frames), self.tokens_per_frame, self.hidden), self._files
        out = torch.empty(shape, dtype=self.dtype, device=device)
        rows = [(self.sizes.units(spans), path) for spans, path in files]
        return read_rows(out, rows, self.sizes.units(frames), self._identity, _REDO)

    def map(self, *frames: tuple[int, int]) -> Tensor:
        """Return some frames as `read` does, mapped from their file, so that only used rows are read.

        If they are not one after another in one file, because other ranks wrote the store, they are read into memory.
        The tensor must not be written to.
        """
        from safetensors import safe_open

        self._check(frames)
        place = self._place(join_spans(frames))
        if place is None:
            return self.read(*frames)
        path, first = place
        with safe_open(path, "pt") as file:
            return file.get_slice(_TENSOR)[first : first + self.sizes.count(frames)]

    def can_map(self, by_rank: Iterable[Spans]) -> bool:
        """Return whether `map` maps the frames of each of several ranks."""
        return all(not spans or self._place(spans) is not None for spans in by_rank)

    def _place(self, frames: Spans) -> tuple[Path, int] | None:
        """Return the file that has these frames one after another, and the row of the first."""
        frames = join_spans(self.sizes.units(frames))
        for of_file, path in self._files:
            spans, first = self.sizes.units(of_file), 0
            for begin, end in spans:
                if frames and begin <= frames[0][0] < end:
                    first += frames[0][0] - begin
                    same = part_of_spans(spans, first, first + span_length(frames)) == frames
                    return (path, first) if same else None
                first += end - begin
        return None

    def _check(self, frames: Sequence[tuple[int, int]]) -> None:
        for start, stop in frames:
            if not 0 <= start <= stop <= self.total_frames:
                raise ConfigError(
                    f"frames {start} to {stop} asked of {self.directory}, which has {self.total_frames}; pass "
                    "0 <= start <= stop <= total_frames"
                )

    def _fault(self, spans: Spans, path: Path) -> str | None:
        """Return why a file cannot be used."""
        from safetensors import safe_open

        try:
            with safe_open(path, "pt") as file:
                shape = tuple(file.get_slice(_TENSOR).get_shape())
                found = (file.metadata() or {}).get("identity")
        except FileNotFoundError:
            return "missing"
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - of safetensors, or of the file system
            return f"damaged: {error}"
        if found != self._identity:
            return "from another run"
        expected = (self.sizes.count(spans), self.tokens_per_frame, self.hidden)
        return None if shape == expected else f"shape {shape}, expected {expected}"

    def require(self, **expected: Any) -> None:
        """Raise DataError unless these entries of `meta` have the given values."""
        remedy = f"{_REDO}, or use what they were made with"
        require_made_with(f"{self.directory}: these features", self.meta, expected, remedy)


def _rows_of(total: int, sizes: Sequence[int] | Tensor | None) -> FrameSizes:
    """Return how many rows of a file each frame has: one, or one for each token if frames differ in size."""
    found = FrameSizes(total, sizes)
    return found if isinstance(found.per_frame, Tensor) else FrameSizes(total)


def open_features(directory: str | os.PathLike[str]) -> FeatureStore:
    """Open a store whose files are complete and belong to one run; otherwise a DataError names the files."""
    folder = Path(directory)
    if not (folder / INDEX).exists():
        shards = len(list(folder.glob("features-*-of-*.safetensors")))
        found = f"{shards} shards but no index, so rank 0 did not finish" if shards else "no features"
        raise DataError(f"{folder}: {found} ({INDEX} is missing); {_REDO}")
    with reading_index(folder / INDEX, "features", _REDO):
        index = json.loads((folder / INDEX).read_text())
        store = FeatureStore(folder, index)
    checked = ((path.name, store._fault(spans, path)) for spans, path in store._files)
    if faults := [f"{name} ({fault})" for name, fault in checked if fault]:
        listed = ", ".join(faults[:4])
        raise DataError(f"{folder}: {len(faults)} of {len(store._files)} shards cannot be used: {listed}; {_REDO}")
    return store


def model_fingerprint(
    directory: str | os.PathLike[str], prefixes: tuple[str, ...] = ("vision_model.", "vision2text_model.")
) -> str:
    """Return a digest of everything that determines visual features: weights (safetensors) and image preprocessing.

    Fine-tuning the language model alone does not change the digest, so stored features stay usable.

    Args:
        directory: the model directory.
        prefixes: name prefixes of the weights that compute features; DataError if it has none of them.
    """
    from safetensors import safe_open

    directory, found = local_directory(directory), dict[str, Path]()
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: path for name in file.keys() if name.startswith(prefixes)}  # noqa: SIM118 (no mapping)
    if not found:
        raise DataError(f"{directory}: no safetensors weights named {' or '.join(prefixes)}; give a model directory")
    digest = hashlib.blake2b(digest_size=16)
    # transformers 5 writes the image preprocessing into the second file, as a part of the processor.
    preprocessing = (Path(directory) / name for name in ("preprocessor_config.json", "processor_config.json"))
    digest.update(next((path.read_bytes() for path in preprocessing if path.exists()), b""))
    for name, path in sorted(found.items()):
        with safe_open(path, "pt") as file:
            tensor = file.get_tensor(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _file_name(rank: int, world: int) -> str:
    return f"features-{rank:05d}-of-{world:05d}.safetensors"


def write_rows(path: Path, rows: Tensor, identity: str) -> None:
    """Write one row for each frame to a file, and the identity of the run."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        save_file({_TENSOR: rows.detach().cpu().contiguous()}, temporary, metadata={"identity": identity})


def read_rows(out: Tensor, files: Iterable[tuple[Spans, Path]], frames: Spans, identity: str, remedy: str) -> Tensor:
    """Fill `out` with the rows of ranges of frames, from files that have the frames of some ranges each; return it.

    Raises:
        DataError: a file is damaged, or of another run; ends with `remedy`.
    """
    from safetensors import safe_open

    files, done = list(files), 0
    for start, stop in frames:
        for spans, path in files:
            first = 0
            for begin, end in spans:
                low, high = max(begin, start), min(end, stop)
                if low < high:
                    rows = slice(first + low - begin, first + high - begin)
                    try:
                        with safe_open(path, "pt") as file:
                            if (file.metadata() or {}).get("identity") != identity:
                                raise DataError(f"{path}: from another run; {remedy}")
                            (name,) = file.keys()  # a tower's in version 0.2 was `states`
                            out[done + low - start : done + high - start] = file.get_slice(name)[rows]
                    except PASSED:
                        raise
                    except Exception as error:
                        raise DataError(f"{path}: damaged ({error}); {remedy}") from error
                first += end - begin
        done += stop - start
    return out
