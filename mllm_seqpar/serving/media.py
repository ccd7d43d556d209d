"""Files that requests name: uploads, data: URLs, files below a folder, and URLs of hosts that the operator allows.

A request decides nothing about the file system or the network unless the operator has allowed it: paths are resolved
and must be below `media_root`, and http(s) URLs need their host in `allowed_hosts` (`download`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from mllm_seqpar.data.media_files import IMAGE_SUFFIXES

from .download import NotAllowed, open_url
from .engine import MediaFile
from .protocol import ApiError, MediaReference


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


class MediaStore:
    """Resolves the media of requests to files. Threads may share it.

    Args:
        folder: for uploads and downloads; all ranks must see it.
        media_root: the folder below which requests may name paths; None: no paths.
        allowed_hosts: hosts of http(s) URLs; "*" allows all with a public address.
        max_bytes: of one file.
        max_total: bytes of all uploads.
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
        self._lock = threading.Lock()

    def add(self, file: Any, filename: str, purpose: str) -> Upload:
        """Store an upload from a binary file; raise ApiError 413 if it does not fit."""
        name, path = _safe_suffix(filename), self._temporary()
        digest = hashlib.sha256()
        with path.open("wb") as target:
            while block := file.read(1 << 20):
                digest.update(block)
                target.write(block)
        size = path.stat().st_size
        upload_id = f"file-{os.urandom(12).hex()}"
        with self._lock:
            stored = sum(upload.size for upload in self._uploads.values())
            if stored + size > self._max_total:
                path.unlink()
                raise ApiError(
                    413,
                    f"file: {size} bytes, and {stored} of {self._max_total} are in use; delete files first "
                    "(DELETE /v1/files/ID)",
                    param="file",
                )
            final = path.rename(self._folder / f"{upload_id}{name}")
            upload = Upload(
                id=upload_id, path=final, filename=filename, purpose=purpose, size=size, created=int(time.time())
            )
            self._uploads[upload_id] = upload
        return upload

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
    def files(self, media: Sequence[MediaReference], sampling: dict[str, Any]) -> Iterator[tuple[MediaFile, ...]]:
        """Yield the files of a request's media. Files that exist for this request only are removed at the end.

        Args:
            media: of the request.
            sampling: of a video for which the request states neither fps nor num_frames.

        Raises:
            ApiError: a reference that is not allowed, or that cannot be resolved.
        """
        paths: list[Path] = []
        try:
            found = []
            for reference in media:
                kind, path = self._claim(reference)
                paths.append(path)
                found.append(_media_file(kind, path, reference, sampling))
            yield tuple(found)
        finally:
            for path in paths:
                with self._lock:
                    self._used[path] -= 1
                    self._used += Counter()  # drops what is not used
                self._remove_unused(path)

    def _remove_unused(self, path: Path) -> None:
        with self._lock:
            if self._used[path] <= 0 and path in self._removed:
                self._removed.discard(path)
                path.unlink(missing_ok=True)

    def _claim(self, reference: MediaReference) -> tuple[str, Path]:
        """Return the kind and the path of a reference; the file stays until it is released."""
        if reference.file_id is not None:
            with self._lock:
                upload = self._uploads.get(reference.file_id)
                if upload is not None:
                    self._used[upload.path] += 1
            if upload is None:
                raise _refused(reference, f"no uploaded file has the id {reference.file_id}")
            return _kind_of(upload.path), upload.path
        assert reference.url is not None and reference.kind is not None
        scheme = urlsplit(reference.url).scheme.lower()
        if scheme == "data":
            return reference.kind, self._inline(reference)
        if scheme in ("http", "https"):
            return reference.kind, self._download(reference)
        if scheme == "file" or not scheme:
            return reference.kind, self._local(reference)
        raise _refused(reference, f"the scheme {scheme}: is not supported; expected data:, http:, https: or a path")

    def _local(self, reference: MediaReference) -> Path:
        assert reference.url is not None
        parts = urlsplit(reference.url)
        name = unquote(parts.path) if parts.scheme else reference.url
        if self._root is None or parts.netloc not in ("", "localhost") or "\0" in name:
            raise _refused(
                reference, "paths are not allowed; start the server with --media_root DIR, or upload the file"
            )
        path = (self._root / name).resolve()  # also of links, so that they cannot lead out of the folder
        if not path.is_relative_to(self._root):
            raise _refused(reference, "the path is not below the server's --media_root")
        if not path.is_file():
            raise _refused(reference, "no such file below the server's --media_root")
        with self._lock:
            self._used[path] += 1
        return path

    def _inline(self, reference: MediaReference) -> Path:
        assert reference.url is not None
        header, comma, data = reference.url.partition(",")
        try:
            if header.endswith(";base64"):
                content = base64.b64decode(data, validate=True)
            else:
                content = unquote_to_bytes(data)
        except (binascii.Error, ValueError) as error:
            raise _refused(reference, f"the data: URL is not base64 ({error})") from error
        if not comma or not content:
            raise _refused(reference, "the data: URL has no data")
        if len(content) > self.max_bytes:
            raise ApiError(413, f"{reference.param}: {len(content)} bytes; at most {self.max_bytes} are allowed")
        # The name depends on the content, so that the same video in a later request is recognised.
        return self._keep(hashlib.sha256(content).hexdigest(), [content])

    def _download(self, reference: MediaReference) -> Path:
        assert reference.url is not None
        try:
            with open_url(reference.url, self._hosts) as answer:
                version = answer.headers.get("ETag") or os.urandom(8).hex()
                name = hashlib.sha256(f"{reference.url} {version}".encode()).hexdigest()
                return self._keep(name, iter(lambda: answer.read(1 << 20), b""), reference)
        except NotAllowed as error:
            raise _refused(reference, str(error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _refused(reference, f"the URL cannot be read ({error})") from error

    def _keep(self, name: str, blocks: Any, reference: MediaReference | None = None) -> Path:
        """Write a file for one request; an equal file of another request is shared."""
        path, temporary, size = self._folder / f"inline-{name}", self._temporary(), 0
        try:
            with temporary.open("wb") as target:
                for block in blocks:
                    size += len(block)
                    if reference is not None and size > self.max_bytes:
                        raise ApiError(413, f"{reference.param}: more than the allowed {self.max_bytes} bytes")
                    target.write(block)
            os.utime(temporary, (0, 0))  # the time is a part of the version, and the name states the content
            with self._lock:
                temporary.replace(path)
                self._removed.add(path)
                self._used[path] += 1
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def _temporary(self) -> Path:
        handle, name = tempfile.mkstemp(dir=self._folder)
        os.close(handle)
        return Path(name)


def _media_file(kind: str, path: Path, reference: MediaReference, sampling: dict[str, Any]) -> MediaFile:
    if kind == "image":
        if reference.sampling:
            raise _refused(reference, f"{next(iter(reference.sampling))} of an image; only a video takes it")
        return MediaFile.of(kind, str(path))
    given = dict(reference.sampling)
    if not ("fps" in given or "num_frames" in given):
        given = sampling | given
    return MediaFile.of(kind, str(path), **given)


def _kind_of(path: Path) -> str:
    return "image" if path.suffix.lower() in IMAGE_SUFFIXES else "video"


def _safe_suffix(filename: str) -> str:
    suffix = Path(filename).suffix.lower()
    return suffix if suffix[1:].isalnum() and len(suffix) <= 8 else ""


def _refused(reference: MediaReference, reason: str) -> ApiError:
    return ApiError(400, f"{reference.param}: {reason}", param=reference.param)
