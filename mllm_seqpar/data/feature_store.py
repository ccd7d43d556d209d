"""The feature store: encoded frames of one video on disk, readable in slices by any number of ranks.

Each writing rank writes one safetensors file, `features-00000-of-00004.safetensors`, with the tensor `embeds` (frames
of that rank, tokens per frame, hidden). Rank 0 also writes the index `features.json`: the frame range of each file,
sizes, dtype, and metadata of the caller about video, sampling and model. The frame ranges follow from `frame_bounds`,
so rank 0 needs no data from the other ranks. All files contain the same identity, a digest of the index, which detects
files of another run. A file is written under a temporary name and renamed, so it is complete or absent, and a store
with an absent file is refused.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.hub import local_directory
from mllm_seqpar.sharding import frame_bounds

from .downloads import atomic_write
from .media_files import media_digest, media_size, underlying_file
from .video import FramePlan

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
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """Write this rank's frames and return the file's path; every rank calls this, and rank 0 also writes the index.

    Args:
        directory: created if it does not exist. A store that it already contains is replaced.
        embeds: (frames, tokens, hidden), the features of this rank's `frame_range`, which may be empty.
        start, total: the number of this rank's first frame; number of frames of the whole video.
        rank, world: this rank and the number of ranks.
        meta: metadata about the origin of the features, serialisable as JSON and equal on every rank; see
            `source_meta` and `model_fingerprint`.

    Raises:
        ConfigError: the frames are not this rank's frame range.
    """
    from safetensors.torch import save_file

    bounds = frame_bounds(total, world)
    if not 0 <= rank < world or embeds.ndim != 3 or bounds[rank] != (start, start + embeds.shape[0]):
        owned = bounds[rank] if 0 <= rank < world else "no such rank"
        raise ConfigError(
            f"save_features: rank {rank} of {world} passed embeds {tuple(embeds.shape)} from frame {start}; of {total} "
            f"frames, this rank's range is {owned}; expected embeds of shape (frames, tokens, hidden)"
        )
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    index = {
        "total_frames": total,
        "tokens_per_frame": embeds.shape[1],
        "hidden": embeds.shape[2],
        "dtype": str(embeds.dtype).removeprefix("torch."),
        "files": [{"file": _file_name(r, world), "start": a, "stop": b} for r, (a, b) in enumerate(bounds)],
        "meta": dict(meta or {}),
    }
    identity = hashlib.blake2b(json.dumps(index, sort_keys=True).encode(), digest_size=16).hexdigest()
    path = folder / _file_name(rank, world)
    tensors = {_TENSOR: embeds.detach().cpu().contiguous()}
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata={"identity": identity, "start": str(start)})
    if rank == 0:
        with atomic_write(folder / INDEX) as temporary:
            temporary.write_text(json.dumps({"identity": identity, **index}, indent=1) + "\n")
    return path


class FeatureStore:
    """A complete feature store, opened for reading. It keeps no tensor in memory and no file open.

    The features have the shape (total_frames, tokens_per_frame, hidden); `meta` is the writer's metadata.
    """

    def __init__(self, directory: Path, index: Mapping[str, Any]) -> None:
        self.directory = directory
        self.total_frames: int = index["total_frames"]
        self.tokens_per_frame: int = index["tokens_per_frame"]
        self.hidden: int = index["hidden"]
        self.dtype = _DTYPES[index["dtype"]]
        self.meta: dict[str, Any] = index["meta"]
        self._files = [(f["start"], f["stop"], directory / f["file"]) for f in index["files"]]

    def read(self, start: int, stop: int, device: str | torch.device = "cpu") -> Tensor:
        """Return frames start <= f < stop, (frames, tokens, hidden); only these rows are read from the files."""
        from safetensors import safe_open

        if not 0 <= start <= stop <= self.total_frames:
            raise ConfigError(
                f"frames {start} to {stop} asked of {self.directory}, which has {self.total_frames}; pass "
                "0 <= start <= stop <= total_frames"
            )
        out = torch.empty(stop - start, self.tokens_per_frame, self.hidden, dtype=self.dtype, device=device)
        for first, last, path in self._files:
            low, high = max(first, start), min(last, stop)
            if low < high:
                with safe_open(path, "pt") as file:
                    out[low - start : high - start] = file.get_slice(_TENSOR)[low - first : high - first]
        return out

    def map(self, start: int, stop: int) -> Tensor:
        """Return frames start <= f < stop as `read` does, mapped from their file, so that only used rows are read.

        If the frames are in several files, because several ranks wrote them, they are read into memory. The tensor must
        not be modified.
        """
        from safetensors import safe_open

        for first, last, path in self._files:
            if first <= start < stop <= last:
                with safe_open(path, "pt") as file:
                    return file.get_slice(_TENSOR)[start - first : stop - first]
        return self.read(start, stop)

    def require(self, **expected: Any) -> None:
        """Raise DataError unless these entries of `meta` have the given values."""
        for key, value in expected.items():
            if self.meta.get(key) != value:
                raise DataError(
                    f"{self.directory}: these features were made with {key} = {self.meta.get(key)!r}, now it is "
                    f"{value!r}; {_REDO}, or use what they were made with"
                )


def open_features(directory: str | os.PathLike[str]) -> FeatureStore:
    """Open a store whose files are complete and belong to one run; otherwise a DataError names the files."""
    folder = Path(directory)
    try:
        index = json.loads((folder / INDEX).read_text())
        store, identity = FeatureStore(folder, index), index["identity"]
    except FileNotFoundError as error:
        shards = len(list(folder.glob("features-*-of-*.safetensors")))
        found = f"{shards} shards but no index, so rank 0 did not finish" if shards else "no features"
        raise DataError(f"{folder}: {found} ({INDEX} is missing); {_REDO}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / INDEX}: not an index of features ({error!r}); {_REDO}") from error
    checked = ((path.name, _fault(store, identity, start, stop, path)) for start, stop, path in store._files)
    if faults := [f"{name} ({fault})" for name, fault in checked if fault]:
        listed = ", ".join(faults[:4])
        raise DataError(f"{folder}: {len(faults)} of {len(store._files)} shards cannot be used: {listed}; {_REDO}")
    return store


def source_meta(plan: FramePlan) -> dict[str, Any]:
    """Return metadata that identifies the frames of a plan: path, size, mtime and digest of the file; the times."""
    path = underlying_file(plan.path)
    times = hashlib.blake2b(repr((plan.ticks, plan.time_base)).encode(), digest_size=16).hexdigest()
    return {
        "source_path": os.path.abspath(path),
        "source_size": media_size(plan.path),
        "source_mtime": int(os.stat(path).st_mtime),
        "source_digest": media_digest(plan.path),
        "frames": len(plan),
        "frame_times": times,
    }


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


def _fault(store: FeatureStore, identity: str, start: int, stop: int, path: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            shape = tuple(file.get_slice(_TENSOR).get_shape())
            found = (file.metadata() or {}).get("identity")
    except FileNotFoundError:
        return "missing"
    except (SafetensorError, OSError) as error:
        return f"damaged: {error}"
    if found != identity:
        return "from another run"
    expected = (stop - start, store.tokens_per_frame, store.hidden)
    return None if shape == expected else f"shape {shape}, expected {expected}"
