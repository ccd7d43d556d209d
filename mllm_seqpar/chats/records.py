"""Data sets by path: their records in a fixed order, the place of each, and the media that it names.

JSONL, JSON and CSV are read here, so that an error names FILE:LINE. Parquet, arrow, directories of `save_to_disk` and
WebDataset shards are read by `datasets`. It copies them into its own cache when they are opened first; a lock of the
cache makes the other processes of the machine wait. Images and videos inside a table are written to the media cache
(`media_files`) on first use, because decoders read files.
"""

from __future__ import annotations

import codecs
import csv
import importlib
import io
import json
import os
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from glob import escape, glob, has_magic
from itertools import chain
from pathlib import Path
from typing import Any

from mllm_seqpar._compat import optional_import
from mllm_seqpar.digests import digest_of, file_digest
from mllm_seqpar.errors import PASSED, DataError, VideoError, first_line
from mllm_seqpar.models.hub import local_directory
from mllm_seqpar.videos.files import reading_index
from mllm_seqpar.videos.media_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES, is_remote, local_media, media_cache

VIDEO_ID = "video-id:"
"""The prefix of the name of a video if only the stem of its file is known."""

KNOWN = (
    "JSONL, a JSON list, CSV, parquet, arrow (a directory of save_to_disk), tar shards (WebDataset), a folder with "
    "metadata.jsonl, or the id of a data set on the Hub"
)
_VIDEO_FOLDERS = ("", "data", "videos", "video")
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
_SUFFIXES = (".jsonl", ".json", ".csv", *_BUILDERS)
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
    elif kind in _BUILDERS or kind == _SAVED:
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


def _files_of(folder: Path) -> list[Path]:
    """Return the files of the only data set, and of its only split, in a directory."""
    if not folder.is_dir():
        raise DataError(f"{folder}: cannot be read (no such file or directory); expected {KNOWN}")
    if (folder / "dataset_dict.json").is_file():
        with reading_index(folder / "dataset_dict.json", "splits", "was the download complete?"):
            splits = [folder / name for name in json.loads((folder / "dataset_dict.json").read_text())["splits"]]
        return _files_of(_only(folder, "splits", splits))
    for mark in _MARKS:
        if (folder / mark).is_file():
            return [folder / mark]
    inside = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and not _is_hidden(path, folder))
    texts = [path for path in inside if path.suffix not in _BUILDERS]
    # Folders inside may have texts that describe one medium each, and CSV beside other texts may have results.
    marked = [path for path in texts if path.name in _MARKS]
    texts = [path for path in texts if path.parent == folder] or marked or texts
    texts = [path for path in texts if path.suffix != ".csv"] or texts
    for files in (*([path for path in inside if path.suffix == suffix] for suffix in _BUILDERS), texts):
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
    if path.suffix in _BUILDERS:  # texts with other numbers may be versions of one another
        split = _NUMBER.sub("", split)
    return f"{split}*{path.suffix}"


def _is_hidden(path: Path, folder: Path) -> bool:
    """Return whether a file of a directory is not data: a hidden one, or one that describes a data set of the Hub."""
    return path.name.startswith("dataset_info") or any(x.startswith(".") for x in path.relative_to(folder).parts)


def _only(folder: Path, what: str, found: Sequence[Any]) -> Any:
    if len(found) > 1:
        listed = ", ".join(map(str, found[:6]))
        raise DataError(f"{folder}: it has several {what}; give one of them: {listed}")
    return found[0]


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
        try:
            row = self._row(index)
        except PASSED:
            raise
        except Exception as error:
            raise DataError(f"cannot be read ({first_line(error)}); check that the download is complete") from error
        return {name: value for name, value in row.items() if value is not None} if isinstance(row, dict) else row

    def place(self, index: int) -> str:
        """Return the place of a record, for messages: FILE:LINE of JSONL, its number otherwise, each from 1."""
        return f"{self.path}, record {index + 1}"

    def locate(self, index: int, name: str) -> str:
        """Return the path of a file that record `index` names; downloads a URL.

        Raises:
            VideoError: there is no such file.
        """
        if name.startswith(VIDEO_ID):
            return self._video_of(index, name.removeprefix(VIDEO_ID))
        local = local_media(name)
        if local != name:
            return local
        folders = self._folders(index)
        for folder in folders:
            if os.path.isfile(folder / name):  # Path.is_file raises for a name that is too long
                return str(folder / name)
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

    def _video_of(self, index: int, stem: str) -> str:
        for folder in self._folders(index):
            for inner in _VIDEO_FOLDERS:
                for suffix in sorted(VIDEO_SUFFIXES):
                    path = folder / inner / (stem + suffix)
                    if path.is_file():
                        return str(path)
        where = ", ".join(str(folder) for folder in self._folders(index))
        raise VideoError(f"no file {stem}.mp4 (or another video format) in {where}, or data, videos, video there")


class JsonRecords(Records):
    """The records of JSONL files, whose places have their lines, of JSON files that hold one list each, or of CSV."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.path, self.folders = files[0], ()
        contents = [self._content(file) for file in files]
        self.digest = "\n".join(map(digest_of, contents))
        self._rows = [
            (file, number, row)
            for file, content in zip(files, contents, strict=True)
            for number, row in self._numbered(file, content)
        ]

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
        try:
            return json.loads(row) if isinstance(row, bytes) else row
        except (ValueError, RecursionError) as error:
            raise DataError(f"not JSON ({error}); each line holds one record") from error

    def _content(self, file: Path) -> bytes:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}); expected {KNOWN}") from error
        if content.startswith(b"\x1f\x8b"):
            raise DataError(
                f"{file}: is compressed by gzip; decompress it, e.g. gunzip < {file.name} > OUT{file.suffix}"
            )
        return content

    def _numbered(self, file: Path, content: bytes) -> Iterator[tuple[int, Any]]:
        """Yield (number, record) from 1; the records of JSONL are lines that are parsed on access."""
        if file.suffix.lower() == ".csv":
            try:
                for number, cells in enumerate(csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline="")), 1):
                    yield number, {name: cell or None for name, cell in cells.items()}
            except UnicodeDecodeError as error:
                raise DataError(f"{file}: not CSV in UTF-8 ({error}); save it in UTF-8") from error
            except csv.Error as error:  # such as a cell of more than 131,072 characters
                raise DataError(f"{file}: not readable as CSV ({error}); save it as JSONL or parquet") from error
            return
        start = content.removeprefix(codecs.BOM_UTF8).lstrip()
        if start[:1] == b"[":
            try:
                yield from enumerate(json.loads(start), 1)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}: not JSON ({error}); expected one list of records") from error
            return
        yield from ((number, row) for number, row in enumerate(content.splitlines(), 1) if row.strip())


class TableRecords(Records):
    """The rows of parquet or arrow files of one split, in order.

    Of each image and video, a record has a name for the bytes in its column. `locate` returns their file in the cache.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.path, folder = files[0], files[0].parent
        common = Path(os.path.commonpath([file.parent for file in files]))  # the file of a row is not known
        self.folders = common, common.parent
        datasets = optional_import(
            "datasets", extra="data", needed_for=f"{files[0]}: reading parquet, arrow and tar files"
        )
        if saved := files[0].name == _SAVED:
            files = sorted(path for path in folder.iterdir() if path.is_file())
        try:
            data = datasets.load_from_disk(str(folder)) if saved else self._load(datasets, files)
            data = data.with_format(None)  # `save_to_disk` keeps a format, which may hide columns
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
                f"{files[0]}{others}: cannot be read by `datasets` ({why}); check that the download is complete, and "
                "that a column has the same type in all files"
            ) from error
        self._media = self._media_columns(data.features)
        self._rows, self._table = data.remove_columns(self._media), data.with_format("arrow")

    def _load(self, datasets: Any, files: Sequence[Path]) -> Any:
        kind, names = _BUILDERS[files[0].suffix.lower()], [escape(str(file.absolute())) for file in files]
        options: dict[str, Any] = {"data_files": names, "features": self._features(datasets, files)}
        if kind == "parquet":
            options["batch_size"] = 1000  # by default, the rows of the first group, which may be none
        return datasets.load_dataset(kind, split="train", **options)

    def _features(self, datasets: Any, files: Sequence[Path]) -> Any:
        """Return the columns of all files; rows of files without a column have null. None: those of the first file.

        `datasets` casts a column to its type in the first file if its types cannot be merged.
        """
        if len(files) == 1:
            return None
        import pyarrow as arrow

        schemas, columns = list(map(_schema_of, files)), dict[str, Any]()
        for field in chain(*schemas):
            both = [arrow.schema([columns.get(field.name, field)]), arrow.schema([field])]
            with suppress(arrow.ArrowTypeError):
                columns[field.name] = arrow.unify_schemas(both, promote_options="permissive").field(0)
        merged = arrow.schema(list(columns.values()), metadata=schemas[0].metadata)
        return datasets.Features.from_arrow_schema(merged)

    def _media_columns(self, features: Any) -> list[str]:
        return [field.name for field in features.arrow_schema if _has_files(field.type)]

    def __len__(self) -> int:
        return len(self._table)

    def _row(self, index: int) -> Any:
        row = self._rows[index] if self._rows.column_names else {}
        names = {
            column: [f"{_EMBEDDED}{column}/{number}" for number in range(len(files))]
            for column, files in self._cells(index).items()
        }
        return row | names

    def _cells(self, index: int) -> dict[str, Sequence[Any]]:
        """Return the files in each column of a row, without reading their bytes."""
        row = self._table[index]
        cells = {column: row.column(column)[0] for column in self._media}
        return {
            column: cell.values if hasattr(cell.type, "value_type") else [cell]
            for column, cell in cells.items()
            if cell.is_valid
        }

    def _embedded(self, index: int, name: str) -> tuple[str, int] | None:
        """Return the column of a file of the row, and its number there; None for other files."""
        if not name.startswith(_EMBEDDED):
            return None
        column, _, number = name.removeprefix(_EMBEDDED).rpartition("/")
        return column, int(number)

    def locate(self, index: int, name: str) -> str:
        """Return the file of the cache with an image or video of the row; other names as elsewhere."""
        try:
            found = self._embedded(index, name)
            path = None if found is None else self._written(index, *found)
        except PASSED:
            raise
        except Exception as error:
            raise VideoError(f"{name}: cannot be read from the table ({first_line(error)})") from error
        return path or super().locate(index, name)

    def _written(self, index: int, column: str, number: int) -> str:
        """Return the file of the cache with a file of a row; it is written if it is not there."""
        from pyarrow import types

        cell = self._cells(index)[column][number]
        fields = {field.name for field in cell.type} if types.is_struct(cell.type) else set()
        content = cell["bytes"] if "bytes" in fields else cell
        path = cell["path"].as_py() if "path" in fields else None
        if content.is_valid:
            key = digest_of(f"{self._version} {index} {column} {number}")
            name = key + Path(path or "").suffix
            return str(media_cache().file(name, "a file inside a table", lambda: iter([content.as_py()])))
        if not path:
            raise VideoError(f"column {column} has neither bytes nor a path in this row")
        return super().locate(index, path)

    def identify(self, index: int, name: str) -> str | tuple[int, str]:
        return super().identify(index, name) if self._embedded(index, name) is None else (index, name)


class TarRecords(TableRecords):
    """The samples of WebDataset shards: consecutive members with one name before the first dot are one sample.

    A member `json` is the record; without one, the text of `txt` is a caption. Media members belong to the record: by
    their name, or in order if the record names none or the same number.
    """

    def _load(self, datasets: Any, files: Sequence[Path]) -> Any:
        module = importlib.import_module("datasets.packaged_modules.webdataset.webdataset")
        # `datasets` would decode all members, also those that are not read, and fail without naming the sample.
        builder = type("UndecodedMembers", (module.WebDataset,), {"DECODERS": {}})
        names = [escape(str(file.absolute())) for file in files]
        found = builder(data_files=names, features=self._features(datasets, files))
        found.download_and_prepare()
        return found.as_dataset("train")

    def _features(self, datasets: Any, files: Sequence[Path]) -> Any:
        # Without types, `datasets` infers them from five samples and silently leaves out what only later samples have.
        types: dict[str, Any] = {"__key__": datasets.Value("string"), "__url__": datasets.Value("string")}
        for file in files:
            with tarfile.open(file, "r:") as archive:
                for member in archive:
                    extension = Path(member.name).name.partition(".")[2]
                    kind = _media_kind(extension)
                    if kind is not None:
                        types[extension] = datasets.Image() if kind == "image" else datasets.Video()
                    elif extension in ("json", *_TEXTS):
                        types[extension] = datasets.Value("binary")
        if len(types) == 2:
            raise ValueError("its members are neither json nor txt, images or videos")
        return datasets.Features(types)

    def _media_columns(self, features: Any) -> list[str]:
        return [name for name in features if _media_kind(name) is not None]

    def _row(self, index: int) -> Any:
        row = self._rows[index]
        try:
            record = {} if row.get("json") is None else json.loads(row["json"])
        except (ValueError, RecursionError) as error:
            raise DataError(f"its member json is not JSON ({error})") from error
        if not isinstance(record, dict):
            return record
        for name in _TEXTS:
            if (text := row.get(name)) is not None:
                record.setdefault("text", text.decode(errors="replace").strip())
        if "messages" in record:
            return record
        cells = self._cells(index)
        for kind in ("image", "video"):
            members = [name for name in cells if _media_kind(name) == kind]
            named = record.get(kind, record.get(f"{kind}s", ()))
            if members and len([named] if isinstance(named, str) else named or ()) in (0, len(members)):
                record = {key: value for key, value in record.items() if key not in (kind, f"{kind}s")}
                record[kind] = members
        if not record:
            raise DataError(f"its members are {', '.join(cells) or 'unknown'}; expected json, or txt, beside media")
        return record

    def _embedded(self, index: int, name: str) -> tuple[str, int] | None:
        """Return the column of a member, named by its extension, its name or its path; None for other files."""
        key = self._rows[index]["__key__"]
        for extension in self._cells(index):
            member = f"{key}.{extension}"
            if name in (extension, member) or Path(name).name == Path(member).name:
                return extension, 0
        return None


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
