"""Telling checkpoints apart without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLES = 64
_BYTES = 4096


def weight_files(folder: Path) -> list[Path]:
    """Return the files that a model directory keeps its weights in, safetensors or pickled."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])


def model_digest(path: str) -> str:
    """A digest of a model directory: its config, and of each weight file the name, size and evenly spread samples.

    Two trainings of one architecture differ in every sample; a few megabytes are read, however large the model.
    """
    folder, digest = Path(path), hashlib.sha256()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_BYTES))
    return digest.hexdigest()[:16]
