"""WebDataset tar shards: consecutive members with one name before the first dot are one sample.

A shard is read in place, by an index of its members from one pass over the headers. Samples can therefore be accessed
in any order, every rank reads only the bytes that it needs, and a video is decoded inside the shard.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mllm_seqpar.data.media_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES, file_slice, open_media
from mllm_seqpar.errors import DataError

from .records import Records, sampled_digest

_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # the key ends at the first dot of the file's own name
_TEXTS = ("txt", "text", "caption")


@dataclass
class _Sample:
    """A sample's shard and key, and the bytes (start, stop) of its members by extension."""

    shard: Path
    key: str
    members: dict[str, tuple[int, int]]

    def slice(self, extension: str) -> str:
        return file_slice(self.shard.absolute(), *self.members[extension])

    def read(self, extension: str) -> bytes:
        with open_media(self.slice(extension)) as file:
            return file.read()

    def of_kind(self, suffixes: frozenset[str]) -> list[str]:
        return [name for name in self.members if f".{name.rpartition('.')[2].lower()}" in suffixes]


class TarRecords(Records):
    """The samples of one or several shards, in order.

    A member `json` is the record; without one, the text of `txt` is a caption. Media members belong to the record: by
    their name, or in order if the record names none or the same number.
    """

    def __init__(self, path: Path, shards: Sequence[Path]) -> None:
        self.path, self.folders = path, (shards[0].parent,)
        self._samples = [sample for shard in shards for sample in _index(shard)]
        self.digest = sampled_digest(shards)

    def __len__(self) -> int:
        return len(self._samples)

    def place(self, index: int) -> str:
        sample = self._samples[index]
        return f"{sample.shard}:{sample.key}"

    def record(self, index: int) -> Any:
        sample = self._samples[index]
        record: Any = {}
        if "json" in sample.members:
            try:
                record = json.loads(sample.read("json"))
            except ValueError as error:
                raise DataError(f"its member json is not JSON ({error})") from error
            if not isinstance(record, dict):
                return record
        for name in _TEXTS:
            if name in sample.members:
                record.setdefault("text", sample.read(name).decode(errors="replace").strip())
        if "messages" in record:
            return record
        for kind, suffixes in (("image", IMAGE_SUFFIXES), ("video", VIDEO_SUFFIXES)):
            members = sample.of_kind(suffixes)
            named = record.get(kind, record.get(f"{kind}s", ()))
            if members and len([named] if isinstance(named, str) else named or ()) in (0, len(members)):
                record = {key: value for key, value in record.items() if key not in (kind, f"{kind}s")}
                record[kind] = members
        if not record:
            found = ", ".join(sample.members)
            raise DataError(f"its members are {found}; expected json, or txt, beside images or a video")
        return record

    def locate(self, index: int, name: str) -> str:
        """Return the bytes of a member, named by its extension, its name or its path; other names as elsewhere."""
        sample = self._samples[index]
        for extension in sample.members:
            member = f"{sample.key}.{extension}"
            if name in (extension, member) or Path(name).name == Path(member).name:
                return sample.slice(extension)
        return super().locate(index, name)


def _index(shard: Path) -> list[_Sample]:
    samples: list[_Sample] = []
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                found = _NAME.match(member.name)
                if not member.isreg() or not found or Path(member.name).name.startswith("__"):
                    continue
                key, extension = found.groups()
                if not samples or samples[-1].key != key:
                    samples.append(_Sample(shard, key, {}))
                elif extension in samples[-1].members:
                    raise DataError(f"{shard}: two members {member.name}; a sample has each extension once")
                samples[-1].members[extension] = (member.offset_data, member.offset_data + member.size)
    except (tarfile.TarError, OSError) as error:
        raise DataError(
            f"{shard}: not a complete uncompressed tar file ({error}); was the download complete?"
        ) from error
    size = shard.stat().st_size
    if samples and max(stop for _, stop in samples[-1].members.values()) > size:
        raise DataError(f"{shard}: it ends in the middle of {samples[-1].key}; was the download complete?")
    return samples
