"""Directories by name: a path, or USER/NAME on the Hugging Face Hub, whose files are downloaded into its cache."""

from __future__ import annotations

import os
import re

from mllm_seqpar.errors import ConfigError

_HUB_ID = re.compile(r"^([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?$")
_UNUSED = ["original/*", "*.gguf", "*.onnx", "*.h5", "*.msgpack"]
"""Other forms of the same weights, which are large: Llama 3.2's `original`, and files for other frameworks."""


def local_directory(name: str | os.PathLike[str], kind: str = "model") -> str:
    """Return the directory of a model or data set; a path is returned unchanged.

    A name that is no existing path and has the form USER/NAME, or USER/NAME@REVISION, is an id on the Hub. Files that
    are in the Hub's cache are used without a network. Any other name is returned unchanged, for the caller's own error.

    Args:
        kind: "model" or "dataset".

    Raises:
        ConfigError: the id cannot be downloaded and is not in the cache.
    """
    path = os.fspath(name)
    found = _HUB_ID.match(path)
    if os.path.exists(path) or found is None:
        return path
    from huggingface_hub import snapshot_download

    options = {"ignore_patterns": _UNUSED} if kind == "model" else {}
    try:
        return snapshot_download(found[1], repo_type=kind, revision=found[2], **options)
    except Exception as error:  # of the Hub's client, of its HTTP client, or of the file system
        first = next(iter(str(error).strip().splitlines()), repr(error))
        raise ConfigError(
            f"{path}: no such directory here, and as the id of a {kind} on the Hub it cannot be downloaded: {first} "
            f"Without a network, download it elsewhere (hf download {found[1]}) and give the directory"
        ) from error
