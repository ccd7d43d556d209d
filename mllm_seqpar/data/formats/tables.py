"""Hugging Face datasets on disk: parquet files, and arrow files as `save_to_disk` writes them; read with pyarrow.

Text columns are read when the table is opened. Columns with the bytes of pictures and videos are not: a record names
such a file by its column, and its bytes are written to the cache of media (`downloads`) on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mllm_seqpar.data.downloads import store_bytes
from mllm_seqpar.errors import ConfigError, DataError, VideoError

from .records import Records, sampled_digest

_EMBEDDED = "column:"


def require_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading parquet and arrow files needs pyarrow, which is not installed: "
            "pip install 'mllm-seqpar[data]'"
        ) from error
    return pyarrow


class TableRecords(Records):
    """The rows of parquet or arrow files of one split, in order."""

    def __init__(self, path: Path, files: Sequence[Path], folders: Sequence[Path] = ()) -> None:
        self._arrow = require_pyarrow(path)
        folder = files[0].parent
        self.path, self.folders = path, tuple(folders) or (folder, folder.parent)
        self._parts = [_Part(self._arrow, file) for file in files]
        self._starts = [0]
        for part in self._parts:
            self._starts.append(self._starts[-1] + part.rows)
        self.digest = sampled_digest(files)

    def __len__(self) -> int:
        return self._starts[-1]

    def place(self, index: int) -> str:
        part, row = self._find(index)
        return f"{part.file}:{row + 1}"

    def line(self, index: int) -> int:
        return self._find(index)[1] + 1

    def record(self, index: int) -> Any:
        part, row = self._find(index)
        record = {name: value for name, value in part.text(row).items() if value is not None}
        for column in part.media:
            count = part.media_count(row, column)
            names = [f"{_EMBEDDED}{column}/{number}" for number in range(count or 0)]
            record |= {column: names} if count else {}
        return record

    def locate(self, index: int, name: str) -> str:
        """Return the file of the cache with a picture or video of the row; other names as elsewhere."""
        if not is_embedded(name):
            return super().locate(index, name)
        part, row = self._find(index)
        column, _, number = name.removeprefix(_EMBEDDED).rpartition("/")
        content, path = part.media_cell(row, column)[int(number)]
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

    def _find(self, index: int) -> tuple[_Part, int]:
        number = next(i for i, stop in enumerate(self._starts[1:]) if index < stop)
        return self._parts[number], index - self._starts[number]


class _Part:
    """One parquet or arrow file: its text columns in memory, and its media columns on disk."""

    def __init__(self, pyarrow: Any, file: Path) -> None:
        self.file, self._arrow = file, pyarrow
        try:
            self._parquet = pyarrow.parquet.ParquetFile(file) if file.suffix == ".parquet" else None
            self._mapped = None if self._parquet else self._map(file)
            schema = self._parquet.schema_arrow if self._parquet else self._mapped.schema
            self.media = [field.name for field in schema if self._is_media(field.type)]
            names = [field.name for field in schema if field.name not in self.media]
            self._text = self._parquet.read(columns=names) if self._parquet else self._mapped.select(names)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{file}: not a readable parquet or arrow file ({error})") from error
        self._lengths: dict[str, list[int]] = {}
        self.rows = self._parquet.metadata.num_rows if self._parquet else self._mapped.num_rows
        self._group = lru_cache(maxsize=2)(self._read_group)

    def _map(self, file: Path) -> Any:
        """Return an arrow file as a table in mapped memory; datasets writes streams, others write files."""
        source = self._arrow.memory_map(str(file))
        try:
            return self._arrow.ipc.open_stream(source).read_all()
        except self._arrow.ArrowInvalid:
            return self._arrow.ipc.open_file(source).read_all()

    def text(self, row: int) -> dict[str, Any]:
        rows = self._text.slice(row, 1).to_pylist()
        return rows[0] if rows else {}

    def media_count(self, row: int, column: str) -> int:
        """Return the number of files in a cell without reading their bytes, where the file format permits it."""
        if self._parquet is None:
            cell = self._mapped.column(column)[row]
            return 0 if not cell.is_valid else len(cell) if self._is_list(cell.type) else 1
        return self._counts(column)[row]

    def _counts(self, column: str) -> list[int]:
        if column not in self._lengths:
            counts: list[int] = []
            for group in range(self._parquet.num_row_groups):
                cells = self._parquet.read_row_group(group, columns=self._light_leaf(column)).column(0)
                is_list = self._is_list(cells.type)
                counts += [0 if not cell.is_valid else len(cell) if is_list else 1 for cell in cells]
            self._lengths[column] = counts
        return self._lengths[column]

    def _light_leaf(self, column: str) -> list[str]:
        """Return the leaf of a parquet column to count files by: its path if it has one, else its bytes."""
        paths = [self._parquet.schema.column(i).path for i in range(len(self._parquet.schema))]
        leaves = [path for path in paths if path == column or path.startswith(column + ".")]
        return [next((leaf for leaf in leaves if leaf.endswith(".path")), leaves[0])]

    def media_cell(self, row: int, column: str) -> list[tuple[bytes | None, str | None]]:
        """Return (bytes, path) of each file in a cell."""
        if self._parquet is None:
            value = self._mapped.column(column)[row].as_py()
        else:
            group, first = self._group_of(row)
            value = self._group(group, column)[row - first].as_py()
        cells = value if isinstance(value, list) else [value]
        return [(cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None) for cell in cells]

    def _group_of(self, row: int) -> tuple[int, int]:
        first = 0
        for group in range(self._parquet.num_row_groups):
            rows = self._parquet.metadata.row_group(group).num_rows
            if row < first + rows:
                return group, first
            first += rows
        raise IndexError(row)

    def _read_group(self, group: int, column: str) -> Any:
        return self._parquet.read_row_group(group, columns=[column]).column(0)

    def _is_list(self, kind: Any) -> bool:
        types = self._arrow.types
        return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)

    def _is_media(self, kind: Any) -> bool:
        """Return whether a column has files: bytes, (bytes, path) as the features Image and Video, or lists of them."""
        types = self._arrow.types
        if self._is_list(kind):
            return self._is_media(kind.value_type)
        if types.is_struct(kind):
            return any(field.name == "bytes" and self._is_media(field.type) for field in kind)
        return types.is_binary(kind) or types.is_large_binary(kind)


def is_embedded(name: str) -> bool:
    """Return whether a name stands for a file inside a table."""
    return name.startswith(_EMBEDDED)
