"""The records of a data set in a fixed order, with the place of each and the media that it names: JSON and folders."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mllm_seqpar.data.media_files import VIDEO_SUFFIXES, is_remote, local_media
from mllm_seqpar.errors import DataError, VideoError

VIDEO_ID = "video-id:"
"""The prefix of the name of a video if only the stem of its file is known."""

_VIDEO_FOLDERS = ("", "data", "videos", "video")
_SAMPLES, _SAMPLE_BYTES = 64, 65_536


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
        """Return FILE:LINE of a record; for tables, the row counts from 1, and for tar shards the key stands for it."""

    def line(self, index: int) -> int:
        """Return the number after the colon of `place`, or the record's number from 1."""
        return index + 1

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
    """A JSONL file, or a JSON file that holds one list."""

    def __init__(self, path: Path, folders: Sequence[Path] = ()) -> None:
        self.path, self.folders = path, tuple(folders) or (path.parent,)
        self._content = read_file(path)
        self.digest = hashlib.blake2b(self._content, digest_size=16).hexdigest()
        start = self._content.removeprefix(codecs.BOM_UTF8).lstrip()
        self._rows = list(self._elements() if start[:1] == b"[" else self._lines())
        if path.suffix == ".json" and start[:1] == b"{" and _is_object(start) and len(self._rows) > 1:
            raise DataError(
                f"{path}: contains a single JSON object; expected a list of records, or JSONL with one on each line"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def line(self, index: int) -> int:
        return self._rows[index][0]

    def place(self, index: int) -> str:
        return f"{self.path}:{self.line(index)}"

    def record(self, index: int) -> Any:
        try:
            return json.loads(self._rows[index][1])
        except ValueError as error:
            raise DataError(f"not JSON ({error}); each line holds one conversation") from error

    def _lines(self) -> Iterator[tuple[int, str | bytes]]:
        return ((number, row) for number, row in enumerate(self._content.splitlines(), 1) if row.strip())

    def _elements(self) -> Iterator[tuple[int, str | bytes]]:
        """Yield (line, text) of each element of the list."""
        text, decoder = self._content.decode(errors="replace"), json.JSONDecoder()
        position, line, counted = text.index("[") + 1, 1, 0
        while True:
            while text[position : position + 1] in (" ", "\t", "\r", "\n"):
                position += 1
            if text[position : position + 1] == "]":
                return
            line, counted = line + text.count("\n", counted, position), position
            try:
                end = decoder.raw_decode(text, position)[1]
            except ValueError as error:
                raise DataError(f"{self.path}:{line}: not JSON ({error}); expected one list of records") from error
            yield line, text[position:end]
            position = end
            while text[position : position + 1] in (" ", "\t", "\r", "\n"):
                position += 1
            if text[position : position + 1] == ",":
                position += 1
            elif text[position : position + 1] != "]":
                raise DataError(f"{self.path}:{line}: not JSON: after this record, a comma or ] is missing")


class FolderRecords(Records):
    """An image or video folder with `metadata.jsonl` or `metadata.csv`, as Hugging Face datasets defines it.

    The column `file_name` (or `file_names`, or `*_file_name`) names a file relative to the metadata. Its kind follows
    from the suffix of the name. The other columns are those of any record.
    """

    def __init__(self, path: Path, metadata: Path) -> None:
        self.path, self._metadata, self.folders = path, metadata, (metadata.parent,)
        content = read_file(metadata)
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        self._rows = list(self._csv_rows(content) if metadata.suffix == ".csv" else self._json_rows(content))

    def __len__(self) -> int:
        return len(self._rows)

    def line(self, index: int) -> int:
        return self._rows[index][0]

    def place(self, index: int) -> str:
        return f"{self._metadata}:{self.line(index)}"

    def record(self, index: int) -> Any:
        record = self._rows[index][1]
        if isinstance(record, bytes):
            try:
                record = json.loads(record)
            except ValueError as error:
                raise DataError(f"not JSON ({error}); each line describes one file") from error
        return with_file_names(record) if isinstance(record, dict) else record

    def _json_rows(self, content: bytes) -> Iterator[tuple[int, Any]]:
        return ((number, row) for number, row in enumerate(content.splitlines(), 1) if row.strip())

    def _csv_rows(self, content: bytes) -> Iterator[tuple[int, Any]]:
        reader = csv.DictReader(io.StringIO(content.decode("utf-8-sig")))
        return ((reader.line_num, row) for row in reader)


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
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        size = os.path.getsize(path)
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES if size > _SAMPLES * _SAMPLE_BYTES else 1):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES if size > _SAMPLES * _SAMPLE_BYTES else size))
    return digest.hexdigest()
