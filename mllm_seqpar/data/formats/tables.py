"""Hugging Face datasets on disk: parquet files, and arrow files as `save_to_disk` writes them; read with pyarrow.

Text columns are read when the table is opened. Columns with the bytes of images and videos are not: a record names
such a file by its column, and its bytes are written to the media cache (`downloads`) on first use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from mllm_seqpar._compat import optional_import
from mllm_seqpar.data.downloads import store_bytes
from mllm_seqpar.errors import DataError, VideoError

from .records import Records, sampled_digest

_EMBEDDED = "column:"


def require_pyarrow(path: Path) -> Any:
    for module in ("pyarrow.parquet", "pyarrow"):
        found = optional_import(module, extra="data", needed_for=f"{path}: reading parquet and arrow files")
    return found


class TableRecords(Records):
    """The rows of parquet or arrow files of one split, in order."""

    def __init__(self, path: Path, files: Sequence[Path], folders: Sequence[Path] = ()) -> None:
        pyarrow = require_pyarrow(path)
        folder = files[0].parent
        self.path, self.folders = path, tuple(folders) or (folder, folder.parent)
        self._parts = [_open_part(pyarrow, file) for file in files]
        self._starts = list(accumulate((part.rows for part in self._parts), initial=0))
        self.digest = sampled_digest(files)

    def __len__(self) -> int:
        return self._starts[-1]

    def place(self, index: int) -> str:
        part, row = self._find(index)
        return f"{part.file}:{row + 1}"

    def record(self, index: int) -> Any:
        part, row = self._find(index)
        record = {name: value for name, value in part.text(row).items() if value is not None}
        for column in part.media:
            count = part.media_count(row, column)
            if count:
                record[column] = [f"{_EMBEDDED}{column}/{number}" for number in range(count)]
        return record

    def locate(self, index: int, name: str) -> str:
        """Return the file of the cache with an image or video of the row; other names as elsewhere."""
        if not is_embedded(name):
            return super().locate(index, name)
        part, row = self._find(index)
        column, _, number = name.removeprefix(_EMBEDDED).rpartition("/")
        cell = part.media_cell(row, column)
        file = cell[int(number)] if isinstance(cell, list) else cell
        content, path = (file.get("bytes"), file.get("path")) if isinstance(file, dict) else (file, None)
        if content is None:
            if not path:
                raise VideoError(f"column {column} has neither bytes nor a path in this row")
            return super().locate(index, path)
        return str(store_bytes(content, Path(path or "").suffix))

    def identify(self, index: int, name: str) -> object:
        return (index, name) if is_embedded(name) else super().identify(index, name)

    def check(self, index: int, name: str) -> None:
        if not is_embedded(name):
            super().check(index, name)

    def _find(self, index: int) -> tuple[_ArrowPart | _ParquetPart, int]:
        number = bisect_right(self._starts, index) - 1
        return self._parts[number], index - self._starts[number]


class _ArrowPart:
    """One arrow file in mapped memory. `datasets` writes streams; other programs write files with an index."""

    def __init__(self, pyarrow: Any, file: Path) -> None:
        self.file = file
        source = pyarrow.memory_map(str(file))
        try:
            self._table = pyarrow.ipc.open_stream(source).read_all()
        except pyarrow.ArrowInvalid:
            self._table = pyarrow.ipc.open_file(source).read_all()
        self.rows, self.media = self._table.num_rows, _media_columns(pyarrow, self._table.schema)
        self._text = self._table.drop_columns(self.media)

    def text(self, row: int) -> dict[str, Any]:
        """Return the columns of a row that hold no files."""
        return self._text.slice(row, 1).to_pylist()[0]

    def media_count(self, row: int, column: str) -> int:
        """Return the number of files in a cell, without reading their bytes."""
        return _count(self._table.column(column)[row])

    def media_cell(self, row: int, column: str) -> Any:
        return self._table.column(column)[row].as_py()


class _ParquetPart:
    """One parquet file: its text in memory, and its files on disk, in groups of rows."""

    def __init__(self, pyarrow: Any, file: Path) -> None:
        self.file = file
        self._parquet = pyarrow.parquet.ParquetFile(file)
        schema = self._parquet.schema_arrow
        self.rows, self.media = self._parquet.metadata.num_rows, _media_columns(pyarrow, schema)
        self._text = self._parquet.read(columns=[name for name in schema.names if name not in self.media])
        self._groups = range(self._parquet.num_row_groups)
        sizes = (self._parquet.metadata.row_group(group).num_rows for group in self._groups)
        self._starts = list(accumulate(sizes, initial=0))
        self._counts = lru_cache(maxsize=None)(self._read_counts)
        self._group = lru_cache(maxsize=2)(self._read_group)

    def text(self, row: int) -> dict[str, Any]:
        """Return the columns of a row that hold no files."""
        return self._text.slice(row, 1).to_pylist()[0] if self._text.num_columns else {}

    def media_count(self, row: int, column: str) -> int:
        """Return the number of files in a cell, without reading their bytes if they have paths."""
        return self._counts(column)[row]

    def media_cell(self, row: int, column: str) -> Any:
        group = bisect_right(self._starts, row) - 1
        return self._group(group, column)[row - self._starts[group]].as_py()

    def _read_group(self, group: int, column: str) -> Any:
        return self._parquet.read_row_group(group, columns=[column]).column(0)

    def _read_counts(self, column: str) -> list[int]:
        leaves = [self._parquet.schema.column(i).path for i in range(len(self._parquet.schema))]
        leaves = [leaf for leaf in leaves if leaf == column or leaf.startswith(f"{column}.")]
        light = next((leaf for leaf in leaves if leaf.endswith(".path")), leaves[0])
        return [_count(cell) for group in self._groups for cell in self._read_group(group, light)]


def _open_part(pyarrow: Any, file: Path) -> _ArrowPart | _ParquetPart:
    with file.open("rb") as content:
        is_parquet = content.read(4) == b"PAR1"
    try:
        return (_ParquetPart if is_parquet else _ArrowPart)(pyarrow, file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: not a readable parquet or arrow file ({error}); was the download complete?"
        ) from error


def _media_columns(pyarrow: Any, schema: Any) -> list[str]:
    """Return the columns with files: bytes, (bytes, path) as the features Image and Video, or lists of them."""
    types = pyarrow.types

    def has_files(kind: Any) -> bool:
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            return has_files(kind.value_type)
        if types.is_struct(kind):
            return any(field.name == "bytes" and has_files(field.type) for field in kind)
        return types.is_binary(kind) or types.is_large_binary(kind)

    return [field.name for field in schema if has_files(field.type)]


def _count(cell: Any) -> int:
    return 0 if not cell.is_valid else len(cell) if hasattr(cell.type, "value_type") else 1


def is_embedded(name: str) -> bool:
    """Return whether a name stands for a file inside a table."""
    return name.startswith(_EMBEDDED)
