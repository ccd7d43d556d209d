"""Files that requests name: uploads, data: URLs, files below a folder, and URLs of hosts that the operator allows.

A request cannot access the file system or the network unless the operator has allowed it: paths are resolved and must
be below `media_root`, and http(s) URLs need their host in `allowed_hosts` (`data.downloads`).
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mllm_seqpar.data.downloads import NotAllowed, blocks, data_blocks, open_url
from mllm_seqpar.data.frame_choice import FrameChoice
from mllm_seqpar.data.images import is_image_file
from mllm_seqpar.inference.engine import MediaFile

from .protocol import ApiError, MediaReference

LONGEST = 600.0
"""Seconds that a download may take."""

_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Upload:
    """An uploaded file."""

    id: str
    path: Path
    filename: str
    purpose: str
    size: int
    created: int

    def describe(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        same = {"id": self.id, "object": "file", "bytes": self.size, "created_at": self.created}
        return {**same, "filename": self.filename, "purpose": self.purpose, "status": "processed"}


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """A file that a request uses, what its client calls it, and the bytes that are counted for it."""

    path: Path
    name: str
    reserved: int = 0


class MediaStore:
    """Resolves the media of requests to files. Threads may share it.

    Args:
        folder: for uploads and downloads; all ranks must have access to it.
        media_root: the folder below which requests may name paths; None: no paths.
        allowed_hosts: hosts of http(s) URLs; "*" allows all with a public address.
        max_bytes: of one file.
        max_total: bytes of all uploads, and of the data: URLs and downloads of the requests that wait or run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        media_root: str | None = None,
        allowed_hosts: Sequence[str] = (),
        max_bytes: int,
        max_total: int,
    ) -> None:
        self._folder, self._root = folder, None if media_root is None else Path(media_root).resolve()
        self._hosts, self.max_bytes, self._max_total = {host.lower() for host in allowed_hosts}, max_bytes, max_total
        self._uploads: dict[str, Upload] = {}
        self._used: Counter[Path] = Counter()
        self._removed: set[Path] = set()
        self._reserved = 0
        self._lock = threading.Lock()

    @property
    def stored(self) -> int:
        """The bytes that count against `max_total`."""
        with self._lock:
            return self._stored()

    def require_room(self, size: int) -> None:
        """Raise ApiError 413 if `size` further bytes do not fit."""
        with self._lock:
            self._require_room(size, "file")

    def add(self, file: Any, filename: str, purpose: str) -> Upload:
        """Store an upload from a binary file; raise ApiError 413 if it does not fit."""
        path = self._temporary()
        with path.open("wb") as target:
            shutil.copyfileobj(file, target, _BLOCK)
        size, upload_id = path.stat().st_size, f"file-{os.urandom(12).hex()}"
        upload = Upload(
            id=upload_id,
            path=self._folder / f"{upload_id}{_safe_suffix(filename)}",
            filename=filename,
            purpose=purpose,
            size=size,
            created=int(time.time()),
        )
        try:
            with self._lock:
                self._require_room(size, "file")
                path.rename(upload.path)
                self._uploads[upload_id] = upload
        finally:
            path.unlink(missing_ok=True)
        return upload

    def _stored(self) -> int:
        return self._reserved + sum(upload.size for upload in self._uploads.values())

    def _require_room(self, size: int, param: str) -> None:
        if (stored := self._stored()) + size > self._max_total:
            raise ApiError(
                413,
                f"{param}: {size} bytes, and {stored} of {self._max_total} are in use (--max_stored_mb); delete files "
                "first (DELETE /v1/files/ID), or try again when other requests have ended",
                param=param,
            )

    def uploads(self) -> list[Upload]:
        with self._lock:
            return [*self._uploads.values()]

    def upload(self, file_id: str) -> Upload:
        """Return an upload; raise ApiError 404."""
        with self._lock:
            found = self._uploads.get(file_id)
        if found is None:
            raise ApiError(404, f"No such File object: {file_id}", param="id")
        return found

    def delete(self, file_id: str) -> None:
        """Forget an upload. Its file is removed when no request uses it."""
        upload = self.upload(file_id)
        with self._lock:
            del self._uploads[file_id]
            self._removed.add(upload.path)
        self._remove_unused(upload.path)

    @contextmanager
    def files(self, media: Sequence[MediaReference], frames: FrameChoice) -> Iterator[tuple[MediaFile, ...]]:
        """Yield the files of a request's media. Files that exist only for this request are removed at the end.

        Args:
            media: of the request.
            frames: of a video, as far as its reference states nothing else.

        Raises:
            ApiError: a reference that is not allowed, or that cannot be resolved.
        """
        claims: list[_Claim] = []
        try:
            found = []
            for reference in media:
                claim = self._claim(reference)
                claims.append(claim)
                found.append(_media_file(claim, reference, frames))
            yield tuple(found)
        finally:
            for claim in claims:
                with self._lock:
                    self._reserved -= claim.reserved
                    self._used[claim.path] -= 1
                    self._used += Counter()  # drops unused files
                self._remove_unused(claim.path)

    def _remove_unused(self, path: Path) -> None:
        with self._lock:
            if self._used[path] <= 0 and path in self._removed:
                self._removed.discard(path)
                path.unlink(missing_ok=True)

    def _claim(self, reference: MediaReference) -> _Claim:
        """Return the file of a reference; it stays until it is released."""
        if reference.file_id is not None:
            with self._lock:
                upload = self._uploads.get(reference.file_id)
                if upload is not None:
                    self._used[upload.path] += 1
            if upload is None:
                raise _refused(reference, f"no uploaded file has the id {reference.file_id}")
            return _Claim(path=upload.path, name=upload.filename)
        assert reference.url is not None
        scheme, colon, _ = reference.url[:20].partition(":")  # a data: URL may be long
        scheme = scheme.lower() if colon and scheme.isalnum() else ""
        if scheme == "data":
            return self._inline(reference)
        if scheme in ("http", "https"):
            return self._download(reference)
        if scheme == "file" or not scheme:
            return self._local(reference)
        raise _refused(reference, f"the scheme {scheme}: is not supported; expected data:, http:, https: or a path")

    def _local(self, reference: MediaReference) -> _Claim:
        assert reference.url is not None
        try:
            parts = urlsplit(reference.url)
            name = unquote(parts.path) if parts.scheme else reference.url
            if self._root is None or parts.netloc not in ("", "localhost") or "\0" in name:
                raise _refused(
                    reference, "paths are not allowed; start the server with --media_root DIR, or upload the file"
                )
            path = (self._root / name).resolve()  # also of links, so that they cannot lead out of the folder
            is_file = path.is_file()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, or not a URL
            raise _refused(reference, "not a valid path") from error
        if not path.is_relative_to(self._root):
            raise _refused(reference, "the path is not below the server's --media_root")
        if not is_file:
            raise _refused(reference, "no such file below the server's --media_root")
        with self._lock:
            self._used[path] += 1
        return _Claim(path=path, name=reference.url)

    def _inline(self, reference: MediaReference) -> _Claim:
        assert reference.url is not None
        # The name depends on the content, so that a later request with the same video finds it.
        try:
            return self._keep(data_blocks(reference.url), reference, "the data: URL")
        except ValueError as error:
            raise _refused(reference, f"not a data: URL with a file ({error})") from error

    def _download(self, reference: MediaReference) -> _Claim:
        assert reference.url is not None
        try:
            with open_url(reference.url, self._hosts) as answer:
                length = answer.headers.get("Content-Length") or ""
                expected = int(length) if length.isdecimal() else 0
                if expected > self.max_bytes:
                    raise self._too_long(reference)
                version = answer.headers.get("ETag") or os.urandom(8).hex()
                name = hashlib.sha256(f"{reference.url} {version}".encode()).hexdigest()
                return self._keep(blocks(answer, LONGEST), reference, reference.url, name=name, expected=expected)
        except NotAllowed as error:
            raise _refused(reference, str(error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _refused(reference, f"the URL cannot be read ({error})") from error

    def _keep(
        self, blocks: Iterable[bytes], reference: MediaReference, shown: str, *, name: str = "", expected: int = 0
    ) -> _Claim:
        """Write a file for one request; an equal file of another request is shared.

        Args:
            blocks: the content; written and counted one after another.
            shown: the name of the file in messages.
            name: what equal files have in common; default: a digest of the content.
            expected: the size, if it is known; counted before the first block is read.
        """
        temporary, size, reserved, digest = self._temporary(), 0, 0, hashlib.sha256()
        try:
            with temporary.open("wb") as target:
                for block in chain([b""], blocks):
                    size += len(block)
                    if size > self.max_bytes:
                        raise self._too_long(reference)
                    with self._lock:
                        more = max(size, expected) - reserved
                        self._require_room(more, reference.param)
                        self._reserved, reserved = self._reserved + more, reserved + more
                    digest.update(block)
                    target.write(block)
            os.utime(temporary, (0, 0))  # the time is a part of the version, and the name states the content
            path = self._folder / f"inline-{name or digest.hexdigest()}"
            with self._lock:
                temporary.replace(path)
                self._removed.add(path)
                self._used[path] += 1
        except BaseException:
            with self._lock:
                self._reserved -= reserved
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return _Claim(path=path, name=shown, reserved=reserved)

    def _too_long(self, reference: MediaReference) -> ApiError:
        return ApiError(
            413,
            f"{reference.param}: more than the allowed {self.max_bytes} bytes (--max_upload_mb)",
            param=reference.param,
        )

    def _temporary(self) -> Path:
        handle, name = tempfile.mkstemp(dir=self._folder)
        os.close(handle)
        return Path(name)


def _media_file(claim: _Claim, reference: MediaReference, frames: FrameChoice) -> MediaFile:
    kind = reference.kind or ("image" if is_image_file(str(claim.path)) else "video")
    if kind == "video":
        return MediaFile.of(kind, str(claim.path), reference.frames.over(frames), name=claim.name)
    if given := reference.frames.given():
        raise _refused(reference, f"{next(iter(given))} of an image; only a video takes it")
    return MediaFile.of(kind, str(claim.path), name=claim.name)


def _safe_suffix(filename: str) -> str:
    suffix = Path(filename).suffix.lower()
    return suffix if suffix[1:].isalnum() and len(suffix) <= 8 else ""


def _refused(reference: MediaReference, reason: str) -> ApiError:
    return ApiError(400, f"{reference.param}: {reason}", param=reference.param)
