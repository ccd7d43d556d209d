"""Digests of model directories: of a whole model, and of the part that computes visual features."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from mllm_seqpar.digests import file_samples
from mllm_seqpar.errors import DataError

from .hub import local_directory
from .loading import ADAPTER_CONFIG, model_directories


def model_digest(path: str) -> str:
    """Return a digest of a model directory: its config, and name, size and evenly spaced samples of each weight file.

    Two trainings of one architecture differ in every sample. A few megabytes are read, however large the model is.
    """
    digest, folders = hashlib.sha256(), model_directories(path)
    for file in [folder / name for folder in folders for name in ("config.json", ADAPTER_CONFIG)]:
        if file.is_file():
            digest.update(file.read_bytes())
    weights = [sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]) for folder in folders]
    for file in [file for files in weights for file in files]:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        for sample in file_samples(file):
            digest.update(sample)
    return digest.hexdigest()[:16]


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

    directory, file_of = local_directory(directory), dict[str, Path]()
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            file_of |= {name: path for name in file.keys() if name.startswith(prefixes)}  # noqa: SIM118 (no mapping)
    if not file_of:
        raise DataError(f"{directory}: no safetensors weights named {' or '.join(prefixes)}; give a model directory")
    digest = hashlib.blake2b(digest_size=16)
    # transformers 5 writes the image preprocessing into the second file, as a part of the processor.
    preprocessing = (Path(directory) / name for name in ("preprocessor_config.json", "processor_config.json"))
    digest.update(next((path.read_bytes() for path in preprocessing if path.exists()), b""))
    if (of_videos := Path(directory) / "video_preprocessor_config.json").exists():
        digest.update(of_videos.read_bytes())
    for name, path in sorted(file_of.items()):
        with safe_open(path, "pt") as file:
            tensor = file.get_tensor(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
