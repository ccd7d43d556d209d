"""The features store: encoded frames of one video on disk, readable in slices by any number of ranks.

A directory holds one safetensors shard per writing rank, `features-00000-of-00004.safetensors`, with a tensor `embeds`
(frames of that rank, tokens per frame, hidden), and `features.json`, the index, by rank 0: frame ranges per file,
sizes, dtype and whatever the caller says about origin (video, sampling, model). Which rank wrote which frames follows
from `frame_bounds`, so rank 0 needs to hear nothing from the others. Every shard and the index carry one identity, a
digest of all that; a shard left over from another run is found by it. Files appear under their names complete or not at
all (written beside and renamed), and a store of which a rank is missing is reported, not read in part.
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
from mllm_seqpar.sharding import frame_bounds

from .video import FramePlan

INDEX = "features.json"
_TENSOR = "embeds"
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_REDO = "encode the video again with --save-features"


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
    """Writes this rank's frames; every rank calls it with its own, and rank 0 writes the index too.

    Args:
        directory: made if it does not exist; a store already in it is replaced.
        embeds: (frames, tokens, hidden), this rank's frames, the range that `frame_range` gives it; may hold none.
        start: number of its first frame.
        total: frames of the whole video.
        rank, world: this rank and how many write.
        meta: what JSON can hold about where the features come from, the same on every rank; see `source_meta` and
            `model_fingerprint`.

    Returns:
        The shard's path.

    Raises:
        ConfigError: the frames are not those of this rank.
    """
    from safetensors.torch import save_file

    bounds = frame_bounds(total, world)
    if not 0 <= rank < world or embeds.ndim != 3 or bounds[rank] != (start, start + embeds.shape[0]):
        owned = bounds[rank] if 0 <= rank < world else "nothing"
        raise ConfigError(
            f"save_features: rank {rank} of {world} passed embeds {tuple(embeds.shape)} from frame {start}; of {total} "
            f"frames it holds {owned}, as (frames, tokens, hidden)"
        )
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    index = {
        "total_frames": total,
        "tokens_per_frame": embeds.shape[1],
        "hidden": embeds.shape[2],
        "dtype": str(embeds.dtype).removeprefix("torch."),
        "files": [{"file": _name(r, world), "start": a, "stop": b} for r, (a, b) in enumerate(bounds)],
        "meta": dict(meta or {}),
    }
    identity = hashlib.blake2b(json.dumps(index, sort_keys=True).encode(), digest_size=16).hexdigest()
    path = folder / _name(rank, world)
    tensors = {_TENSOR: embeds.detach().cpu().contiguous()}
    with _Renamed(path) as temporary:
        save_file(tensors, temporary, metadata={"identity": identity, "start": str(start)})
    if rank == 0:
        with _Renamed(folder / INDEX) as temporary:
            temporary.write_text(json.dumps({"identity": identity, **index}, indent=1) + "\n")
    return path


class FeatureStore:
    """A complete store, opened for reading; holds no tensor in memory and no file open.

    Attributes:
        total_frames, tokens_per_frame, hidden: its shape.
        dtype: of the features.
        meta: what the writer said about their origin.
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
        """Frames start <= f < stop as (frames, tokens, hidden); of each shard only the rows asked for are read."""
        from safetensors import safe_open

        if not 0 <= start <= stop <= self.total_frames:
            raise ConfigError(f"frames {start} to {stop} asked of {self.directory}, which has {self.total_frames}")
        out = torch.empty(stop - start, self.tokens_per_frame, self.hidden, dtype=self.dtype, device=device)
        for first, last, path in self._files:
            low, high = max(first, start), min(last, stop)
            if low < high:
                with safe_open(path, "pt") as file:
                    out[low - start : high - start] = file.get_slice(_TENSOR)[low - first : high - first]
        return out

    def require(self, **expected: Any) -> None:
        """DataError unless each of these entries of `meta` has the given value: the features of something else."""
        for key, value in expected.items():
            if self.meta.get(key) != value:
                raise DataError(
                    f"{self.directory}: these features were made with {key} = {self.meta.get(key)!r}, now it is "
                    f"{value!r}; {_REDO}, or use what they were made with"
                )


def open_features(directory: str | os.PathLike[str]) -> FeatureStore:
    """Opens a store after checking that all of it is there and belongs together.

    Raises:
        DataError: no store, an incomplete one, or shards of different runs; names the files.
    """
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
    wrong = {
        path.name: why for start, stop, path in store._files if (why := _fault(store, identity, start, stop, path))
    }
    if wrong:
        listed = ", ".join(f"{name} ({why})" for name, why in sorted(wrong.items())[:4])
        raise DataError(f"{folder}: {len(wrong)} of {len(store._files)} shards cannot be used: {listed}; {_REDO}")
    return store


def source_meta(plan: FramePlan) -> dict[str, Any]:
    """What identifies the frames of a plan: the file's path, size and mtime, and a digest of the planned times."""
    facts = os.stat(plan.path)
    times = hashlib.blake2b(repr((plan.ticks, plan.time_base)).encode(), digest_size=16).hexdigest()
    return {
        "source_path": os.path.abspath(plan.path),
        "source_size": facts.st_size,
        "source_mtime": int(facts.st_mtime),
        "frames": len(plan),
        "frame_times": times,
    }


def model_fingerprint(
    directory: str | os.PathLike[str], prefixes: tuple[str, ...] = ("vision_model.", "vision2text_model.")
) -> str:
    """A digest of the weights (safetensors) that make features, and of how pictures are prepared for them.

    Fine-tuning the language model alone leaves it as it was, so stored features stay usable.

    Raises:
        DataError: the directory has no such weights.
    """
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: path for name in file.keys() if name.startswith(prefixes)}  # noqa: SIM118 (no mapping)
    if not found:
        raise DataError(f"{directory}: no safetensors weights named {' or '.join(prefixes)}; give a model directory")
    digest = hashlib.blake2b(digest_size=16)
    # transformers 5 writes how pictures are prepared into the second, as a part of the processor
    prepared = (Path(directory) / name for name in ("preprocessor_config.json", "processor_config.json"))
    digest.update(next((path.read_bytes() for path in prepared if path.exists()), b""))
    for name, path in sorted(found.items()):
        with safe_open(path, "pt") as file:
            tensor = file.get_tensor(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _name(rank: int, world: int) -> str:
    return f"features-{rank:05d}-of-{world:05d}.safetensors"


def _fault(store: FeatureStore, identity: str, start: int, stop: int, path: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            shape = tuple(file.get_slice(_TENSOR).get_shape())
            other = (file.metadata() or {}).get("identity")
    except FileNotFoundError:
        return "missing"
    except (SafetensorError, OSError) as error:
        return f"damaged: {error}"
    if other != identity:
        return "from another run"
    wanted = (stop - start, store.tokens_per_frame, store.hidden)
    return None if shape == wanted else f"shape {shape} in place of {wanted}"


class _Renamed:
    """Gives a temporary path beside `path` and renames it to `path` when all went well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Path:
        return self._temporary

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink(missing_ok=True)
