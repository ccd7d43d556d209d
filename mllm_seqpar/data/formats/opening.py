"""Opening a data set: the files of a path, a pattern or a Hub id determine which reader of this package opens it."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Sequence
from glob import glob, has_magic
from pathlib import Path

from mllm_seqpar.data.media_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from mllm_seqpar.errors import DataError
from mllm_seqpar.models.hub import local_directory

from .records import FolderRecords, JsonRecords, Records
from .tables import TableRecords
from .tar_shards import TarRecords

KNOWN = (
    "JSONL, a JSON list, parquet, arrow (a directory of save_to_disk), tar shards (WebDataset), a folder with "
    "metadata.jsonl, or the id of a data set on the Hub"
)
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SPLIT = re.compile(r"^(.*?)(?:-\d{5}-of-\d{5}.*)?$")  # test-00000-of-00002.parquet
_FILES = frozenset({".jsonl", ".json", ".parquet", ".arrow", ".tar", ".csv", ".gz"})
"""Suffixes of files; a missing file is not looked up on the Hub."""

_METADATA = ("metadata.jsonl", "metadata.csv")


def open_records(path: str | os.PathLike[str], *, media_root: str | os.PathLike[str] | None = None) -> Records:
    """Return the records of a data set.

    Args:
        path: a file, a directory, a pattern of files (`shard-*.tar`, `shard-{000..012}.tar`), or USER/NAME on the Hub.
        media_root: the folder at which relative names of media start; default: that of the file which names them, and
            for tables also the folder above it.

    Raises:
        DataError: there is no data, or several splits, or the format is unknown; names what was found.
        ConfigError: a Hub id that cannot be downloaded, or a package for the format is not installed.
    """
    name = os.fspath(path)
    folders = () if media_root is None else (Path(media_root),)
    files = _matching(name)
    if files:
        records = _open_files(Path(name), files)
    elif Path(name).is_dir() or not (Path(name).exists() or Path(name).suffix.lower() in _FILES):
        records = _open_directory(Path(local_directory(name, "dataset")))
    else:
        records = _open_files(Path(name), [Path(name)])
    if folders:
        records.folders = folders
    if not len(records):
        raise DataError(f"{name}: contains no conversation; give a file with at least one record")
    return records


def _matching(name: str) -> list[Path]:
    """Return the files of a pattern, in order; nothing if `name` is not a pattern."""
    if Path(name).exists():
        return []
    braces = _BRACES.search(name)
    if braces:
        first, last = braces.groups()
        numbers = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
        found = [Path(f"{name[: braces.start()]}{number}{name[braces.end() :]}") for number in numbers]
        missing = [path for path in found if not path.is_file()]
        if missing:
            raise DataError(f"{name}: {len(missing)} of {len(found)} files are missing, first {missing[0]}")
        return found
    if not has_magic(name):
        return []
    found = sorted(map(Path, glob(name, recursive=True)))
    if not found:
        raise DataError(f"{name}: no file matches; check the pattern")
    return found


def _open_files(path: Path, files: Sequence[Path]) -> Records:
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1:
        raise DataError(f"{path}: matches files of several kinds ({', '.join(sorted(kinds))}); give files of one kind")
    (kind,) = kinds
    if kind in ("parquet", "arrow"):
        return TableRecords(path, files)
    if kind == "tar":
        return TarRecords(path, files)
    if len(files) > 1:
        raise DataError(
            f"{path}: {len(files)} {kind} files; only parquet, arrow and tar data may consist of several files"
        )
    if kind == "json":
        return FolderRecords(path, path) if path.name in _METADATA and _names_files(path) else JsonRecords(path)
    raise DataError(f"{path}: it is {kind}, which cannot be read; expected {KNOWN}")


def _kind(path: Path) -> str:
    """Return the kind of a file by its first bytes, because names are not reliable."""
    try:
        with path.open("rb") as file:
            head = file.read(512).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected {KNOWN}") from error
    if head[:4] == b"PAR1":
        return "parquet"
    if head[:6] == b"ARROW1" or (head[:4] == b"\xff\xff\xff\xff" and path.suffix == ".arrow"):
        return "arrow"
    if head[257:262] == b"ustar" or path.suffix == ".tar":
        return "tar"
    if head[:2] == b"\x1f\x8b":
        return "a gzip file (unpack it: gunzip)"
    if not head.strip() or head.lstrip()[:1] in (b"{", b"["):
        return "json"
    if path.name in _METADATA:
        return "json"
    return f"a file that begins with {head[:12]!r}"


def _names_files(path: Path) -> bool:
    """Return whether the records of a metadata file name files in the column of a folder."""
    if path.suffix == ".csv":
        return True
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"{}")
    try:
        return any("file_name" in key for key in json.loads(first))
    except (ValueError, TypeError):
        return False


def _open_directory(folder: Path) -> Records:
    if not folder.is_dir():
        raise DataError(f"{folder}: cannot be read (no such file or directory); expected {KNOWN}")
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return _open_directory(folder / _only_split(folder, splits))
    if (folder / "state.json").is_file():
        state = json.loads((folder / "state.json").read_text())
        if state.get("_indices_data_files"):
            raise DataError(f"{folder}: a selection of rows that was not written out; call flatten_indices() and save")
        return TableRecords(folder, [folder / entry["filename"] for entry in state["_data_files"]])
    for name in _METADATA:
        if (folder / name).is_file():
            return FolderRecords(folder, folder / name)
    for suffix in ("parquet", "arrow", "tar"):
        files = sorted(path for path in folder.rglob(f"*.{suffix}") if not path.name.startswith("."))
        if files:
            return _open_files(folder, _of_one_split(folder, files))
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.json")])
    files = [path for path in files if not path.name.startswith("dataset_info")]  # describes a data set of the Hub
    if len(files) == 1:
        return _open_files(files[0], files)
    return _refuse(folder, files)


def _of_one_split(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Return the files if they belong to one split: their folder and the name before the number are equal."""
    splits: dict[str, list[Path]] = {}
    for path in files:
        stem = re.sub(r"[-_.]?\d+$", "", _SPLIT.sub(r"\1", path.stem))
        splits.setdefault(str(path.parent.relative_to(folder) / stem), []).append(path)
    if len(splits) > 1:
        listed = ", ".join(f"{folder / name}*" for name in sorted(splits)[:6])
        raise DataError(f"{folder}: it has several splits or subsets; give one of them: {listed}")
    return list(files)


def _only_split(folder: Path, splits: Sequence[str]) -> str:
    if len(splits) != 1:
        listed = ", ".join(str(folder / name) for name in splits)
        raise DataError(f"{folder}: it has several splits; give one of them: {listed}")
    return splits[0]


def _refuse(folder: Path, files: Sequence[Path]) -> Records:
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    complete = [path for path in inner if any((path / name).is_file() for name in (*_METADATA, "state.json"))]
    if len(complete) == 1:
        return _open_directory(complete[0])
    if files or complete:
        listed = ", ".join(map(str, [*files, *complete][:6]))
        raise DataError(f"{folder}: it has several data sets; give one of them: {listed}")
    media = next((p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES), None)
    if media is not None:
        raise DataError(
            f"{folder}: it has media such as {media.name} but no texts; add metadata.jsonl with lines such as "
            f'{{"file_name": "{media.relative_to(folder)}", "text": "..."}}'
        )
    found = ", ".join(path.name for path in sorted(folder.iterdir())[:6]) or "nothing"
    raise DataError(f"{folder}: no data set was found there (found: {found}); expected {KNOWN}")
