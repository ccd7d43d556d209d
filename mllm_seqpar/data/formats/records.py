"""The records of a data set in a fixed order, with the place of each and the media that it names: JSON and folders."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mllm_seqpar.data.media_files import VIDEO_SUFFIXES, is_remote, local_media, media_digest
from mllm_seqpar.data.store_files import digest_of
from mllm_seqpar.errors import DataError, VideoError

VIDEO_ID = "video-id:"
"""The prefix of the name of a video if only the stem of its file is known."""

_VIDEO_FOLDERS = ("", "data", "videos", "video")


class Records(ABC):
    """The records of one data set; they are read and converted on access.

    Attributes:
        path: what was opened.
        digest: a digest of the records, without the media files that they name.
        folders: the folders at which relative names of media start; the first one that has the file counts.
    """

    path: Path
    digest: str
    folders: tuple[Path, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def record(self, index: int) -> Any:
        """Return a record as JSON would have it; DataError if it cannot be parsed, without its place."""

    @abstractmethod
    def place(self, index: int) -> str:
        """Return the place of a record, for messages: FILE:LINE of JSONL, FILE:ROW of tables, FILE:KEY of tar shards,
        each from 1, and the record's number otherwise."""

    def locate(self, index: int, name: str) -> str:
        """Return the local name (see `media_files`) of a file that record `index` names; downloads a URL.

        Raises:
            VideoError: there is no such file.
        """
        if name.startswith(VIDEO_ID):
            return self._video_of(name.removeprefix(VIDEO_ID))
        local = local_media(name)
        if local != name:
            return local
        for folder in self.folders:
            if (folder / name).is_file():
                return str(folder / name)
        others = f" (nor in {', '.join(map(str, self.folders[1:]))})" if self.folders[1:] else ""
        raise VideoError(f"{self.folders[0] / name}: no such file{others}")

    def identify(self, index: int, name: str) -> object:
        """Return a key that is equal for equal files; nothing is downloaded or written."""
        return name if is_remote(name) else self.locate(index, name)

    def check(self, index: int, name: str) -> None:
        """Raise VideoError if a file that record `index` names is missing; a URL is not opened."""
        if not is_remote(name):
            self.locate(index, name)

    def _video_of(self, stem: str) -> str:
        for folder in self.folders:
            for inner in _VIDEO_FOLDERS:
                for suffix in sorted(VIDEO_SUFFIXES):
                    path = folder / inner / (stem + suffix)
                    if path.is_file():
                        return str(path)
        where = ", ".join(str(folder) for folder in self.folders)
        raise VideoError(f"no file {stem}.mp4 (or another video format) in {where}, or data, videos, video there")


class JsonRecords(Records):
    """The records of a JSONL file, whose places have its lines, or of a JSON file that holds one list."""

    def __init__(self, path: Path) -> None:
        self.path, self.folders = path, (path.parent,)
        self._file, content = path, read_file(path)
        self.digest = digest_of(content)
        self._rows = list(self._numbered(content))

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, index: int) -> str:
        number, row = self._rows[index]
        return f"{self._file}:{number}" if isinstance(row, bytes) else f"{self._file}, record {number}"

    def record(self, index: int) -> Any:
        row = self._rows[index][1]
        try:
            return json.loads(row) if isinstance(row, bytes) else row
        except ValueError as error:
            raise DataError(f"not JSON ({error}); each line holds one record") from error

    def _numbered(self, content: bytes) -> Iterator[tuple[int, Any]]:
        """Yield (number, record) from 1; the records of JSONL are lines that are parsed on access."""
        start = content.removeprefix(codecs.BOM_UTF8).lstrip()
        if start[:1] == b"[":
            try:
                yield from enumerate(json.loads(start), 1)
            except ValueError as error:
                raise DataError(f"{self._file}: not JSON ({error}); expected one list of records") from error
            return
        lines = [(number, row) for number, row in enumerate(content.splitlines(), 1) if row.strip()]
        if self._file.suffix == ".json" and start[:1] == b"{" and len(lines) > 1 and _is_object(start):
            raise DataError(
                f"{self._file}: contains a single JSON object; expected a list of records, or JSONL with one on each "
                "line"
            )
        yield from lines


class FolderRecords(JsonRecords):
    """An image or video folder with `metadata.jsonl` or `metadata.csv`, as Hugging Face datasets defines it.

    The column `file_name` (or `file_names`, or `*_file_name`) names a file relative to the metadata. Its kind follows
    from the suffix of the name. The other columns are those of any record.
    """

    def __init__(self, path: Path, metadata: Path) -> None:
        super().__init__(metadata)
        self.path = path

    def record(self, index: int) -> Any:
        record = super().record(index)
        return with_file_names(record) if isinstance(record, dict) else record

    def _numbered(self, content: bytes) -> Iterator[tuple[int, Any]]:
        if self._file.suffix == ".csv":
            return enumerate(csv.DictReader(io.StringIO(content.decode("utf-8-sig"))), 1)
        return super()._numbered(content)


def with_file_names(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of a folder with `image` or `video` instead of the columns that name files."""
    result: dict[str, Any] = {}
    for key, value in record.items():
        if key in ("file_name", "file_names") or key.endswith(("_file_name", "_file_names")):
            names = value if isinstance(value, list) else [value]
            for name in names:
                kind = "video" if Path(str(name)).suffix.lower() in VIDEO_SUFFIXES else "image"
                result.setdefault(kind, []).append(name)
        else:
            result[key] = value
    return result


def _is_object(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except ValueError:
        return False


def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a file or directory of chats") from error


def sampled_digest(files: Iterable[Path]) -> str:
    """Return a digest of names, sizes and evenly spaced samples of large files."""
    content = "\n".join(f"{path.name} {media_digest(os.fspath(path))}" for path in files)
    return digest_of(content)
