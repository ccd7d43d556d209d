"""Directories by name: a path, or USER/NAME on the Hugging Face Hub, whose files are downloaded into its cache."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mllm_seqpar.errors import ConfigError, first_line

_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
_HUB_ID = re.compile(r"^([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?$")
_UNUSED = ["original/*", "*.gguf", "*.onnx", "*.h5", "*.msgpack"]
"""Other forms of the same weights, which are large: Llama 3.2's `original`, and files for other frameworks."""


def local_directory(name: str | os.PathLike[str], kind: str = "model") -> str:
    """Return the directory of a model or data set; a path is returned unchanged.

    A name that is not an existing path and has the form USER/NAME, or USER/NAME@REVISION, is an id on the Hub. Files
    that are in the Hub's cache are used without a network. Any other name is returned unchanged, for the caller's own
    error.

    Args:
        kind: "model" or "dataset".

    Raises:
        ConfigError: the id cannot be downloaded and is not in the cache.
    """
    options = {"ignore_patterns": _UNUSED} if kind == "model" else {}
    return _from_hub(os.fspath(name), kind, "snapshot_download", repo_type=kind, **options)


def local_config(name: str | os.PathLike[str]) -> str:
    """Return the path of the `config.json` of a model on the Hub, without its weights; otherwise as `local_directory`.

    Raises:
        ConfigError: the id cannot be downloaded and is not in the cache.
    """
    return _from_hub(os.fspath(name), "model", "hf_hub_download", filename="config.json")


def hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `from_pretrained` that locate files on the Hub."""
    return {name: options[name] for name in _HUB_OPTIONS if options.get(name) is not None}


def local_file(path: str | os.PathLike[str], name: str, **hub: Any) -> Path | None:
    """Return a file of a directory, or of a repository on the Hub; None if there is none of that name."""
    from transformers.utils import cached_file

    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
    return None if file is None else Path(file)


def _from_hub(name: str, kind: str, function: str, **options: Any) -> str:
    """Return what a function of huggingface_hub returns for an id; a name that is not an id is returned unchanged."""
    match = _HUB_ID.match(name)
    if os.path.exists(name) or match is None:
        return name
    import huggingface_hub

    get, options = getattr(huggingface_hub, function), {"revision": match[2], **options}
    try:
        return get(match[1], **options)
    except Exception as error:  # of the Hub's client, of its HTTP client, or of the file system
        with suppress(Exception):  # some versions ask for the list of files of a given revision, also offline
            return get(match[1], local_files_only=True, **options)
        raise ConfigError(
            f"{name}: no such directory here, and as the id of a {kind} on the Hub it cannot be downloaded: "
            f"{first_line(error)} Without a network, download it elsewhere (hf download {match[1]}) and give the "
            "directory"
        ) from error
