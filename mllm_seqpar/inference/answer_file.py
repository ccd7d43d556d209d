"""The answer file of a data set: one JSON object a line, from which a run that stopped is resumed.

Group 0 appends each answer to the file itself, and every other group of ranks appends to its own part next to it, so
that all answers survive a crash. When a run starts, it collects the answers of all parts, and drops a last line that
was not written completely. When it ends, it writes all answers in the order of the questions. A second file records
what the answers depend on, so that a run with another model or other options is refused. It is locked during the run,
so that a second run with the same output is refused too.
"""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from mllm_seqpar.cli.outputs import stream_descriptor
from mllm_seqpar.data.store_files import require_made_with
from mllm_seqpar.errors import ConfigError, DataError

Line = dict[str, Any]
"""An answer: "index" is the number of its question; "error" says why there is no answer."""


class AnswerFile:
    """The answers of one run, and the files that they are in.

    Args:
        path: the file; directories are created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._settings = self.path.with_name(self.path.name + ".settings.json")
        self._file: TextIO | None = None
        self._locked: TextIO | None = None

    def resume(self, settings: Mapping[str, Any]) -> dict[int, Line]:
        """Return the answers of an earlier run with the same settings, and collect them in the file. Call this on one
        process only.

        Lines with an error are dropped: their questions are asked again.

        Raises:
            ConfigError: the file has answers that were made with other settings, another run is writing to it, it is
                not a regular file, or it cannot be written.
            DataError: a line of the file is not an answer.
        """
        if stream_descriptor(self.path) is not None or (self.path.exists() and not self.path.is_file()):
            raise ConfigError(
                f"--output {self.path}: not a regular file, so a run could not be resumed from it; give a regular file"
            )
        with _writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self._locked = self._settings.open("a+", encoding="utf-8")
            self._lock(file)
            done = self._collect()
            if done or (self.path.exists() and self.path.stat().st_size):
                self._require_same(file, settings)
            else:
                file.truncate(0)
                file.write(json.dumps(dict(settings), indent=1) + "\n")
                file.flush()
            answered = {index: line for index, line in done.items() if "error" not in line}
            self._write_all(answered.values())
        return answered

    def open(self, group: int) -> Path:
        """Open this group's part for appending, and return its path."""
        path = self._part(group)
        with _writing(path):
            self._file = path.open("a", encoding="utf-8")
        return path

    def require_parts(self, groups: int) -> None:
        """Raise ConfigError unless this process finds the parts that all groups of ranks have opened."""
        missing = [path for path in map(self._part, range(groups)) if not path.exists()]
        if missing:
            raise ConfigError(
                f"--output: {missing[0]}, which another node has created, is not visible here; give a path on a file "
                "system that all nodes share"
            )

    def write(self, line: Line) -> None:
        """Append an answer to this group's part in one write; raise ConfigError if that fails."""
        assert self._file is not None  # `open` precedes
        with _writing(self.path):
            self._file.write(_encoded(line))
            self._file.flush()

    def close_part(self) -> None:
        """Close this group's part, if it is open; raise ConfigError if it could not be written."""
        file, self._file = self._file, None
        if file is not None:
            with _writing(self.path):
                file.close()

    def close(self) -> None:
        """Close the part and release the lock, at the end of a run, even if it failed."""
        with suppress(ConfigError):
            self.close_part()
        if self._locked is not None:
            self._locked.close()

    def finish(self) -> list[Line]:
        """Write the answers of all parts in the order of the questions, delete the parts, and return the answers.

        Call this on one process only, after `close_part` on all.
        """
        with _writing(self.path):
            lines = [line for _, line in sorted(self._collect().items())]
            self._write_all(lines)
        return lines

    def _part(self, group: int) -> Path:
        return self.path.with_name(f"{self.path.name}.part-{group}") if group else self.path

    def _parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.part-*"))

    def _collect(self) -> dict[int, Line]:
        """Return the lines of the file and all parts by the number of their question; an answer replaces an error."""
        found: dict[int, Line] = {}
        for path in (self.path, *self._parts()):
            for line in _read(path):
                if line["index"] not in found or "error" in found[line["index"]]:
                    found[line["index"]] = line
        return found

    def _write_all(self, lines: Iterable[Line]) -> None:
        temporary = self.path.with_name(self.path.name + ".new")
        temporary.write_text("".join(map(_encoded, lines)), encoding="utf-8")
        os.replace(temporary, self.path)
        for part in self._parts():
            part.unlink()

    def _lock(self, file: TextIO) -> None:
        """Lock a file until it is closed, if the file system supports it; raise ConfigError if another process holds
        the lock."""
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise ConfigError(
                f"{self.path}: another run is writing its answers there; wait until it ends, or give another --output"
            ) from error
        except OSError:  # a file system without locks
            pass

    def _require_same(self, file: TextIO, settings: Mapping[str, Any]) -> None:
        files = ", ".join(str(path) for path in (self.path, *self._parts()) if path.exists())
        remedy = f"give another --output, or delete {files} to begin again"
        file.seek(0)
        try:
            earlier = dict(json.loads(file.read()))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.path}: it is not empty, and {self._settings.name}, which says what its answers were made with, "
                f"cannot be read; {remedy}"
            ) from error
        require_made_with(f"{self.path}: its answers", earlier, settings, remedy, ConfigError)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise ConfigError if a file cannot be written within this context."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path}: cannot be written ({error.strerror}); answers that it has are kept; make it "
            "writable and start again, or give another --output"
        ) from error


def _encoded(line: Line) -> str:
    return json.dumps(line, ensure_ascii=False) + "\n"


def _read(path: Path) -> list[Line]:
    """Return the lines of a file, without a last line that was not written completely."""
    rows = path.read_bytes().split(b"\n") if path.exists() else [b""]
    lines: list[Line] = []
    for number, row in enumerate(rows[:-1], 1):  # what follows the last line break is incomplete, or empty
        try:
            line = json.loads(row)
            if not isinstance(line, dict) or not isinstance(line.get("index"), int):
                raise ValueError('expected an object with "index"')
        except ValueError as error:
            if number == len(rows) - 1:  # a machine that stops may leave its last block unwritten
                break
            raise DataError(f"{path}:{number}: not an answer ({error}); give another --output") from error
        lines.append(line)
    return lines
