"""Data sets by path: their records in a fixed order, the place of each, and the media that it names.

JSONL, JSON and CSV are read here, so that an error names FILE:LINE. Parquet, arrow and directories of `save_to_disk`
are read by `datasets`. It copies parquet files into its own cache when they are opened first; a lock of the cache makes
the other processes of the machine wait. Images and videos inside tables and WebDataset shards are written to the media
cache (`media_files`) on first use, because decoders read files.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from glob import escape, glob, has_magic
from itertools import chain, product
from pathlib import Path
from typing import Any

from mllm_seqpar._compat import optional_import
from mllm_seqpar.digests import digest_of, file_digest
from mllm_seqpar.errors import PASSED, DataError, VideoError, first_line, reading
from mllm_seqpar.models.hub import local_directory
from mllm_seqpar.videos.media_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES, is_remote, local_media, media_cache

VIDEO_ID = "video-id:"
"""The prefix of the name of a video if only the stem of its file is known."""

KNOWN = (
    "JSONL, a JSON list, CSV, parquet, arrow (a directory of save_to_disk), tar shards (WebDataset), a folder with "
    "metadata.jsonl, or the id of a data set on the Hub"
)
_VIDEO_FOLDERS = ("", "data", "videos", "video")
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
_BINARY = (*_BUILDERS, ".tar")
_SUFFIXES = (".jsonl", ".json", ".csv", *_BINARY)
"""Suffixes of files; a missing file is not looked up on the Hub."""

_SAVED = "state.json"
"""The file that `save_to_disk` writes beside the arrow files of a split."""

_MARKS = (_SAVED, "metadata.jsonl", "metadata.csv")
"""Files that make a directory a data set."""

_TEXTS = ("txt", "text", "caption")
_EMBEDDED = "column:"
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SHARD = re.compile(r"-\d{5}-of-\d{5}.*$")  # test-00000-of-00002.parquet
_NUMBER = re.compile(r"[-_.]?\d+$")  # shard-000.tar, 0000.parquet


def open_records(path: str | os.PathLike[str], *, media_root: str | os.PathLike[str] | None = None) -> Records:
    """Return the records of a data set.

    Args:
        path: a file, a directory, a pattern of files (`shard-*.tar`, `shard-{000..012}.tar`), or USER/NAME on the Hub.
        media_root: the folder at which relative names of media start; default: that of the file which names them, and
            for tables also the folder above it.

    Raises:
        DataError: there is no data, or several splits, or the format is unknown; names what was found.
        ConfigError: a Hub id that cannot be downloaded, or `datasets` is not installed.
    """
    name = os.fspath(path)
    files = _matching(name)
    if not files and (Path(name).is_dir() or not (Path(name).exists() or Path(name).suffix.lower() in _SUFFIXES)):
        files = _files_of(Path(local_directory(name, "dataset")))
    files = files or [Path(name)]
    kinds = {_SAVED if file.name == _SAVED else file.suffix.lower() for file in files}
    if len(kinds) > 1:
        raise DataError(f"{name}: matches files of several kinds ({', '.join(sorted(kinds))}); give files of one kind")
    (kind,) = kinds
    records: Records
    if kind == ".tar":
        records = TarRecords(files)
    elif kind == _SAVED or kind in _BUILDERS:
        records = TableRecords(files)
    else:
        records = JsonRecords(files)
    records.path = Path(name)
    if media_root is not None:
        records.folders = (Path(media_root),)
    if not len(records):
        raise DataError(f"{name}: contains no conversation; give a file with at least one record")
    return records


def _matching(name: str) -> list[Path]:
    """Return the files of a pattern, in order; nothing if `name` is not a pattern."""
    braces = _BRACES.search(name)
    if Path(name).exists() or not (braces or has_magic(name)):
        return []
    if braces:
        first, last = braces.groups()
        numbers = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
        files = [Path(name.replace(braces[0], number, 1)) for number in numbers]
        if missing := [path for path in files if not path.is_file()]:
            raise DataError(f"{name}: {len(missing)} of {len(files)} files are missing, first {missing[0]}")
        return files
    files = sorted(map(Path, glob(name, recursive=True)))
    if not files:
        raise DataError(f"{name}: no file matches; check the pattern")
    return files


def _files_of(folder: Path) -> list[Path]:
    """Return the files of the only data set, and of its only split, in a directory."""
    if not folder.is_dir():
        raise DataError(f"{folder}: cannot be read (no such file or directory); expected {KNOWN}")
    if (folder / "dataset_dict.json").is_file():
        with reading(f"{folder / 'dataset_dict.json'}: not an index of splits", "was the download complete?"):
            splits = [folder / name for name in json.loads((folder / "dataset_dict.json").read_text())["splits"]]
        return _files_of(_only(folder, "splits", splits))
    for mark in _MARKS:
        if (folder / mark).is_file():
            return [folder / mark]
    inside = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES)
    # Hidden files have no records, and `dataset_info` files describe a data set of the Hub.
    inside = [path for path in inside if not path.name.startswith("dataset_info")]
    inside = [path for path in inside if not any(x.startswith(".") for x in path.relative_to(folder).parts)]
    texts = [path for path in inside if path.suffix not in _BINARY]
    # Folders inside may have texts that describe one medium each, and CSV beside other texts may have results.
    marked = [path for path in texts if path.name in _MARKS]
    texts = [path for path in texts if path.parent == folder] or marked or texts
    texts = [path for path in texts if path.suffix != ".csv"] or texts
    for files in (*([path for path in inside if path.suffix == suffix] for suffix in _BINARY), texts):
        if files:
            _only(folder, "splits or subsets", sorted({path.parent / _pattern_of(path) for path in files}))
            return files
    media = next((p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES), None)
    if media is not None:
        raise DataError(
            f"{folder}: it has media such as {media.name} but no texts; add metadata.jsonl with lines such as "
            f'{{"file_name": "{media.relative_to(folder)}", "text": "..."}}'
        )
    listed = ", ".join(path.name for path in sorted(folder.iterdir())[:6]) or "nothing"
    raise DataError(f"{folder}: no data set was found there (found: {listed}); expected {KNOWN}")


def _pattern_of(path: Path) -> str:
    """Return the pattern of the files of the split that a file belongs to, by its name."""
    split = _SHARD.sub("", path.stem)
    if path.suffix in _BINARY:  # texts with other numbers may be versions of one another
        split = _NUMBER.sub("", split)
    return f"{split}*{path.suffix}"


def _only(folder: Path, what: str, names: Sequence[Any]) -> Any:
    if len(names) > 1:
        raise DataError(f"{folder}: it has several {what}; give one of them: {', '.join(map(str, names[:6]))}")
    return names[0]


class Records(ABC):
    """The records of one data set; they are read and converted on access.

    Attributes:
        path: what was opened.
        digest: a digest of the records, without the media files that they name.
        folders: the folders at which relative names of media start; none: those of a record depend on its file.
    """

    path: Path
    digest: str
    folders: tuple[Path, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _row(self, index: int) -> Any:
        """Return a record as JSON would have it; DataError if it cannot be parsed, without its place."""

    def record(self, index: int) -> Any:
        """Return a record without the keys whose value is null, as which tables store absent keys.

        Raises:
            DataError: it cannot be parsed; does not name its place.
        """
        with reading("cannot be read", "check that the download is complete"):
            row = self._row(index)
        return {name: value for name, value in row.items() if value is not None} if isinstance(row, dict) else row

    def place(self, index: int) -> str:
        """Return the place of a record, for messages: FILE:LINE of JSONL, its number otherwise, each from 1."""
        return f"{self.path}, record {index + 1}"

    def locate(self, index: int, name: str) -> str:
        """Return the path of a file that record `index` names; downloads a URL.

        Raises:
            VideoError: there is no such file.
        """
        folders = self._folders(index)
        if name.startswith(VIDEO_ID):
            stem = name.removeprefix(VIDEO_ID)
            for folder, inner, suffix in product(folders, _VIDEO_FOLDERS, sorted(VIDEO_SUFFIXES)):
                if (path := folder / inner / (stem + suffix)).is_file():
                    return str(path)
            where = f"{', '.join(map(str, folders))}, or {', '.join(filter(None, _VIDEO_FOLDERS))} there"
            raise VideoError(f"no file {stem}.mp4 (or another video format) in {where}")
        local = local_media(name)
        if local != name:
            return local
        for folder in folders:
            if os.path.isfile(folder / name):  # Path.is_file raises for a name that is too long
                return str(folder / name)
        if any(os.path.isdir(folder / name) for folder in folders):
            raise VideoError(
                f"{name:.300}: is a directory, not a file; list the frames of a video in a content part: "
                '{"type": "video", "images": ["NAME/0.jpg", ...]}'
            )
        others = f" (nor in {', '.join(map(str, folders[1:]))})" if folders[1:] else ""
        raise VideoError(f"{folders[0] / name!s:.300}: no such file{others}")

    def identify(self, index: int, name: str) -> str | tuple[int, str]:
        """Return what is equal for equal files: a path, a URL, or the place of a file inside a table.

        Nothing is downloaded or written.

        Raises:
            VideoError: there is no such file.
        """
        return name if is_remote(name) else self.locate(index, name)

    def _folders(self, index: int) -> Sequence[Path]:
        """Return the folders at which relative names of a record start; the first one that has the file counts."""
        return self.folders


class JsonRecords(Records):
    """The records of JSONL files, whose places have their lines, of JSON files that hold one list each, or of CSV."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.path, self.folders, digests = files[0], (), []
        self._rows: list[tuple[Path, int, Any]] = []
        for file in files:
            with reading(f"{file}: cannot be read", f"expected {KNOWN}"):
                content = file.read_bytes()
            if content.startswith(b"\x1f\x8b"):
                raise DataError(
                    f"{file}: is compressed by gzip; decompress it, e.g. gunzip < {file.name} > OUT{file.suffix}"
                )
            digests.append(digest_of(content))
            self._rows += [(file, number, row) for number, row in self._numbered(file, content)]
        self.digest = "\n".join(digests)

    def _numbered(self, file: Path, content: bytes) -> Iterable[tuple[int, Any]]:
        """Return (number, record) from 1; the records of JSONL are lines that are parsed on access."""
        if file.suffix.lower() == ".csv":  # a cell may have 131,072 characters
            with reading(f"{file}: not CSV in UTF-8", "save it so, or as JSONL or parquet"):
                rows = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline="")))
            return enumerate(({name: cell or None for name, cell in row.items()} for row in rows), 1)
        start = content.removeprefix(codecs.BOM_UTF8).lstrip()
        if start[:1] == b"[":
            with reading(f"{file}: not JSON", "expected one list of records"):
                return enumerate(json.loads(start), 1)
        # A large file with a record on each line is not decoded here.
        if file.suffix.lower() == ".json" and not _is_json(io.BytesIO(start).readline()) and _is_json(start):
            keys = ", ".join(map(repr, list(json.loads(start))[:8])) or "none"
            raise DataError(
                f"{file}: is one object over several lines (keys: {keys}); expected one list of records, or a record "
                "on each line"
            )
        return ((number, row) for number, row in enumerate(content.splitlines(), 1) if row.strip())

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, index: int) -> str:
        file, number, row = self._rows[index]
        return f"{file}:{number}" if isinstance(row, bytes) else f"{file}, record {number}"

    def _folders(self, index: int) -> Sequence[Path]:
        return self.folders or [self._rows[index][0].parent]

    def _row(self, index: int) -> Any:
        row = self._rows[index][-1]
        if isinstance(row, dict) and None in row:  # of csv.DictReader
            raise DataError("has more cells than the header has columns; put a text that has a comma in quotes")
        with reading("not JSON", "each line holds one record"):
            return json.loads(row) if isinstance(row, bytes) else row


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class EmbeddedRecords(Records):
    """Records in files that also have their images and videos, or some of them.

    `locate` writes such a medium to the media cache on first use, and returns its file there.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.path = files[0]
        common = Path(os.path.commonpath([file.parent for file in files]))  # the file of a row is not known
        self.folders = common, common.parent
        if saved := files[0].name == _SAVED:
            files = sorted(path for path in files[0].parent.iterdir() if path.is_file())
        try:
            self._open([self.path] if saved else files)
            self.digest = digest_of("\n".join(f"{path.name} {file_digest(path)}" for path in files))
            # The digest is of samples of large files, and the media cache must not have the content of an earlier file.
            self._version = digest_of("\n".join([self.digest, *(str(path.stat().st_mtime_ns) for path in files)]))
        except PASSED:
            raise
        except Exception as error:  # of pyarrow, tarfile, the file system, or `datasets` itself
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            others = f" or another of these {len(files)} files" if len(files) > 1 else ""
            last = str(cause).strip().rpartition("\n")[2]  # of a cast: why, after the columns of both files
            why = first_line(cause) + (f" {last}" if last.startswith("because") else "")
            raise DataError(
                f"{self.path}{others}: cannot be read ({why}); check that the download is complete, and that a column "
                "has the same type in all files"
            ) from error

    @abstractmethod
    def _open(self, files: Sequence[Path]) -> None:
        """Prepare reading; any error means that the files are damaged."""

    @abstractmethod
    def _embedded(self, index: int, name: str) -> tuple[str, int] | None:
        """Return the column of a medium in the files, and its number there; None for other files."""

    @abstractmethod
    def _content(self, index: int, column: str, number: int) -> tuple[Callable[[], bytes] | None, str]:
        """Return what reads a medium, None if only its path is known, and its path, which may be empty."""

    def locate(self, index: int, name: str) -> str:
        fault, where = f"{name}: cannot be read", f"it is inside {self.path}"
        with reading(fault, where, VideoError):
            place = self._embedded(index, name)
        if place is None:
            return super().locate(index, name)
        column, number = place
        with reading(fault, where, VideoError):
            read, path = self._content(index, column, number)
        if read is not None:

            def content() -> Iterator[bytes]:
                with reading(fault, where, VideoError):  # otherwise, the cache would say that it cannot be written
                    medium = read()
                yield medium

            key = digest_of(f"{self._version} {index} {column} {number}")
            return str(media_cache().file(key + Path(path).suffix, "a file inside a table", content))
        if not path:
            raise VideoError(f"column {column} has neither bytes nor a path in this row")
        return super().locate(index, path)

    def identify(self, index: int, name: str) -> str | tuple[int, str]:
        return super().identify(index, name) if self._embedded(index, name) is None else (index, name)


class TableRecords(EmbeddedRecords):
    """The rows of parquet or arrow files of one split, in order; a record has a name for each image and video."""

    def _open(self, files: Sequence[Path]) -> None:
        datasets = optional_import("datasets", extra="data", needed_for=f"{files[0]}: reading parquet and arrow files")
        if files[0].name == _SAVED:
            data = datasets.load_from_disk(str(files[0].parent))
        else:
            kind, names = _BUILDERS[files[0].suffix.lower()], [escape(str(file.absolute())) for file in files]
            features = None if len(files) == 1 else datasets.Features.from_arrow_schema(_merged_schema(files))
            options: dict[str, Any] = {"data_files": names, "features": features}
            if kind == "parquet":
                options["batch_size"] = 1000  # by default, the rows of the first group, which may be none
            data = datasets.load_dataset(kind, split="train", **options)
        data = data.with_format(None)  # `save_to_disk` keeps a format, which may hide columns
        self._media = [field.name for field in data.features.arrow_schema if _has_files(field.type)]
        self._rows, self._table = data.remove_columns(self._media), data.with_format("arrow")

    def __len__(self) -> int:
        return len(self._table)

    def _row(self, index: int) -> Any:
        row = self._rows[index] if self._rows.column_names else {}
        if not self._media:
            return row
        cells = self._table[index]
        for column in self._media:
            if (files := self._files(cells, column)) is not None:
                row[column] = [f"{_EMBEDDED}{column}/{number}" for number in range(len(files))]
        return row

    def _files(self, cells: Any, column: str) -> Any:
        """Return the files in a column of an arrow row, without reading their bytes; None if the cell is null."""
        cell = cells.column(column)[0]
        if not cell.is_valid:
            return None
        return cell.values if hasattr(cell.type, "value_type") else [cell]

    def _embedded(self, index: int, name: str) -> tuple[str, int] | None:
        if not name.startswith(_EMBEDDED):
            return None
        column, _, number = name.removeprefix(_EMBEDDED).rpartition("/")
        return column, int(number)

    def _content(self, index: int, column: str, number: int) -> tuple[Callable[[], bytes] | None, str]:
        from pyarrow import types

        cell = self._files(self._table[index], column)[number]
        fields = {field.name for field in cell.type} if types.is_struct(cell.type) else set()
        content = cell["bytes"] if "bytes" in fields else cell
        path = cell["path"].as_py() if "path" in fields else None
        return content.as_py if content.is_valid else None, path or ""


class TarRecords(EmbeddedRecords):
    """The samples of WebDataset shards: consecutive members with one name before the first dot are one sample.

    A member `json` is the record; without one, the text of `txt` is a caption. Media members belong to the record: by
    their name, or in order if the record names none or the same number. Members are read from the shards on access.
    """

    def _open(self, files: Sequence[Path]) -> None:
        self._samples: list[tuple[Path, str, dict[str, tuple[int, int]]]] = []  # (offset, bytes) of each extension
        for file in files:
            with tarfile.open(file, "r:") as archive:
                for member in archive:
                    folder, name = os.path.split(member.name)
                    stem, dot, extension = name.partition(".")
                    if not (member.isreg() and stem and dot) or name.startswith("__"):
                        continue
                    key = os.path.join(folder, stem)
                    if not self._samples or self._samples[-1][:2] != (file, key):
                        self._samples.append((file, key, {}))
                    if extension in self._samples[-1][2]:
                        raise ValueError(f"Duplicate field {extension!r} for sample {key!r} in {file}")
                    self._samples[-1][2][extension] = member.offset_data, member.size
        if not any(x in ("json", *_TEXTS) or _media_kind(x) for *_, members in self._samples for x in members):
            raise ValueError("its members are neither json nor txt, images or videos")

    def __len__(self) -> int:
        return len(self._samples)

    def _read(self, index: int, extension: str) -> bytes:
        file, _, members = self._samples[index]
        offset, size = members[extension]
        with file.open("rb") as opened:
            opened.seek(offset)
            return opened.read(size)

    def _row(self, index: int) -> Any:
        members = self._samples[index][2]
        with reading("its member json is not JSON", "each has one record"):
            record = json.loads(self._read(index, "json")) if "json" in members else {}
        if not isinstance(record, dict):
            return record
        for name in _TEXTS:
            if name in members:
                record.setdefault("text", self._read(index, name).decode(errors="replace").strip())
        if "messages" in record:
            return record
        for kind in ("image", "video"):
            media = [name for name in members if _media_kind(name) == kind]
            named = record.get(kind, record.get(f"{kind}s", ()))
            if media and len([named] if isinstance(named, str) else named or ()) in (0, len(media)):
                record = {key: value for key, value in record.items() if key not in (kind, f"{kind}s")}
                record[kind] = media
        if not record:
            raise DataError(f"its members are {', '.join(members)}; expected json, or txt, beside media")
        return record

    def _embedded(self, index: int, name: str) -> tuple[str, int] | None:
        _, key, members = self._samples[index]
        for extension in filter(_media_kind, members):  # by extension, by its name or its path
            member = f"{key}.{extension}"
            if name in (extension, member) or Path(name).name == Path(member).name:
                return extension, 0
        return None

    def _content(self, index: int, column: str, number: int) -> tuple[Callable[[], bytes] | None, str]:
        return partial(self._read, index, column), f"{self._samples[index][1]}.{column}"


def _merged_schema(files: Sequence[Path]) -> Any:
    """Return the columns of all files; rows of files without a column have null.

    A column has its type in the first file if its types cannot be merged; `datasets` casts it.
    """
    import pyarrow as arrow

    schemas, columns = list(map(_schema_of, files)), dict[str, Any]()
    for field in chain(*schemas):
        both = [arrow.schema([columns.get(field.name, field)]), arrow.schema([field])]
        with suppress(arrow.ArrowTypeError):
            columns[field.name] = arrow.unify_schemas(both, promote_options="permissive").field(0)
    return arrow.schema(list(columns.values()), metadata=schemas[0].metadata)


def _schema_of(file: Path) -> Any:
    """Return the schema of a parquet file, or of an arrow file in either of its formats."""
    from pyarrow import ArrowInvalid, ipc, parquet

    if file.suffix.lower() == ".parquet":
        return parquet.read_schema(file)
    with file.open("rb") as opened:
        try:
            return ipc.open_stream(opened).schema
        except ArrowInvalid:
            return ipc.open_file(opened).schema


def _media_kind(extension: str) -> str | None:
    suffix = f".{extension.rpartition('.')[2].lower()}"
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else None


def _has_files(kind: Any) -> bool:
    """Return whether a column has files: bytes, (bytes, path) as the features Image and Video, or lists of them."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    if types.is_struct(kind):
        kind = next((field.type for field in kind if field.name == "bytes"), kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))
