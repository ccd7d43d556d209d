"""Files that requests name: uploads, data: URLs, files below a folder, and URLs of hosts that the operator allows.

A request cannot access the file system or the network unless the operator has allowed it: paths are resolved and must
be below `media_root`, and http(s) URLs need their host in `allowed_hosts` (`data.downloads`).

The folder of the uploads is removed with the server, even if the server is killed: while it runs, a server holds a lock
on a file in its folder, and the next server on the same machine removes the folders whose lock it can take. In a shared
directory, folders of other machines are kept, because locks may not work across machines.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.requests import ClientDisconnect

from mllm_seqpar.chats.clip import Clip
from mllm_seqpar.errors import ConfigError, VideoError, write_fault
from mllm_seqpar.videos.downloads import NotAllowed, blocks, data_blocks, open_url
from mllm_seqpar.videos.frame_choice import FrameChoice
from mllm_seqpar.videos.images import is_image_file, jpeg_of
from mllm_seqpar.videos.reader import read_frames
from mllm_seqpar.videos.video import probe

from .protocol import ApiError

LONGEST = 600.0
"""Seconds that a download may take."""

WIDTH = 240
"""The width of a preview, in pixels."""

PREFIX = "mllm-seqpar-"
_LOCK = "server.lock"
_BLOCK = 1 << 20


@contextmanager
def upload_folder(parent: str | None) -> Iterator[Path]:
    """Yield a new folder below `parent` (default: the system's temporary directory), and remove it at the end."""
    for folder in Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _remove_if_dead(folder)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as name:
        # Locked before it has its name, so that no other server finds it without its owner.
        unnamed = Path(name, f"{_LOCK}.new")
        with unnamed.open("w") as lock:
            lock.write(socket.gethostname())
            lock.flush()
            fcntl.flock(lock, fcntl.LOCK_EX)
            unnamed.rename(Path(name, _LOCK))
            yield Path(name)


def _remove_if_dead(folder: Path) -> None:
    with suppress(OSError):  # of another user, or just removed by its owner
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        with Path(folder, _LOCK).open() as lock:
            if lock.read() == socket.gethostname():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Expiry:
    """When an upload is deleted: OpenAI's `expires_after`, with a second anchor."""

    anchor: str  # what the seconds are counted from: "created_at", or "last_active_at", the last request that named it
    seconds: int  # 60 to 30 days

    @classmethod
    def of(cls, form: Mapping[str, Any]) -> Expiry | None:
        """Return the expiry that the fields of a form state, as OpenAI's client does; raise ApiError 400."""
        anchor, seconds = (form.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if anchor is seconds is None:
            return None
        number = int(str(seconds)) if str(seconds).isdecimal() and len(str(seconds)) < 9 else 0
        for name, value, valid, allowed in (
            ("anchor", anchor, anchor in ("created_at", "last_active_at"), "created_at or last_active_at"),
            ("seconds", seconds, 60 <= number <= 2_592_000, "60 to 2592000"),
        ):
            if not valid:
                text = f"expires_after[{name}]: {str(value)[:80]!r} is not allowed; give {allowed}"
                raise ApiError(400, text, param="expires_after")
        return cls(anchor=str(anchor), seconds=number)


@dataclass(kw_only=True)
class Upload:
    """An uploaded file, with the names of OpenAI's file object; times are seconds since 1970."""

    path: Path
    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None
    expiry: Expiry | None = None

    def describe(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        facts = {name: value for name, value in vars(self).items() if name not in ("path", "expiry")}
        return {**facts, "object": "file", "status": "processed"}


class MediaStore:
    """Resolves the media of requests to files. Threads may share it.

    All ranks must have access to the folder. Without `media_root`, requests may name no paths; the host "*" stands for
    all with a public address. `max_bytes` is of one file, and `max_total` of all uploads, and of the data: URLs and
    downloads of the requests that wait or run.
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
        self._lock = threading.RLock()

    @property
    def stored(self) -> int:
        """The bytes that count against `max_total`."""
        with self._lock:
            return self._reserved + sum(upload.bytes for upload in self.uploads())

    def _require_room(self, size: int) -> None:
        """Raise ApiError 413 if `size` further bytes do not fit."""
        if (stored := self.stored) + size > self._max_total:
            raise ApiError(
                413,
                f"{size} bytes do not fit: {stored} of {self._max_total} are in use (--max_stored_mb); delete files "
                "first (DELETE /v1/files/ID), or try again when other requests have ended",
            )

    def add(self, file: Any, filename: str, purpose: str, expiry: Expiry | None = None) -> Upload:
        """Store an upload from a binary file; raise ApiError 413 if it does not fit."""
        suffix, upload_id = Path(filename).suffix.lower(), f"file-{os.urandom(12).hex()}"
        path = self._folder / (upload_id + (suffix if suffix[1:].isalnum() and len(suffix) <= 8 else ""))
        with self._temporary() as temporary:
            with temporary.open("wb") as target:
                shutil.copyfileobj(file, target, _BLOCK)
            now = int(time.time())
            upload = Upload(
                path=path,
                id=upload_id,
                filename=filename,
                purpose=purpose,
                bytes=temporary.stat().st_size,
                created_at=now,
                expires_at=None if expiry is None else now + expiry.seconds,
                expiry=expiry,
            )
            with self._lock:
                self._require_room(upload.bytes)
                temporary.rename(path)
                self._uploads[upload_id] = upload
        return upload

    def uploads(self) -> list[Upload]:
        """Return the uploads, after those that have expired are deleted."""
        with self._lock:
            for upload in [*self._uploads.values()]:
                if upload.expires_at is not None and upload.expires_at <= time.time():
                    self._forget(upload)
            return [*self._uploads.values()]

    def upload(self, file_id: str) -> Upload:
        """Return an upload, which is then in use; raise ApiError 404."""
        with self._lock:
            self.uploads()
            if (upload := self._uploads.get(file_id)) is None:
                raise ApiError(404, f"No such File object: {file_id}", param="id")
            if upload.expiry is not None and upload.expiry.anchor == "last_active_at":
                upload.expires_at = int(time.time()) + upload.expiry.seconds
            return upload

    def delete(self, file_id: str) -> None:
        """Forget an upload. Its file is removed when no request uses it."""
        with self._lock:
            self._forget(self.upload(file_id))

    def _forget(self, upload: Upload) -> None:
        del self._uploads[upload.id]
        self._removed.add(upload.path)
        self._remove_unused(upload.path)

    @contextmanager
    def files(
        self,
        media: Mapping[str, Clip],
        frames: FrameChoice,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[Clip, ...]]:
        """Yield the files of a request's media. Files that exist only for this request are removed at the end.

        Args:
            media: the parts of the request that name them, by their places in it, for messages.
            frames: of a video, as far as its part states nothing else.
            abandoned: a download ends when it returns True.

        Raises:
            ApiError: a file that is not allowed, or that cannot be read.
            ClientDisconnect: `abandoned` returned True.
        """
        with ExitStack() as used:
            clips = []
            for where, part in media.items():
                try:
                    if part.kind == "file":
                        path, name = self._upload(used, part.source)
                    else:
                        path, name = self._named(used, part.source, abandoned)
                    if part.kind != "image_url" and not (part.kind == "file" and is_image_file(str(path))):
                        clips.append(Clip.of_file("video", str(path), part.frames.over(frames), name=name))
                    elif stated := part.frames.given():
                        raise ApiError(400, f"{next(iter(stated))} of an image; only a video takes it")
                    else:
                        clips.append(Clip.of_file("image", str(path), name=name))
                except ApiError as error:
                    raise error.at(where) from error
            yield tuple(clips)

    @contextmanager
    def _using(self, path: Path) -> Iterator[None]:
        """Keep a file of the folder until the end of the block."""
        with self._lock:
            self._used[path] += 1
        try:
            yield
        finally:
            with self._lock:
                self._used[path] -= 1
                self._remove_unused(path)

    def _remove_unused(self, path: Path) -> None:
        if not self._used[path]:
            del self._used[path]
            if path in self._removed:
                self._removed.discard(path)
                path.unlink(missing_ok=True)

    def _upload(self, used: ExitStack, file_id: str) -> tuple[Path, str]:
        with self._lock:
            try:
                upload = self.upload(file_id)
            except ApiError as error:
                raise ApiError(400, f"no uploaded file has the id {file_id}") from error
            used.enter_context(self._using(upload.path))
        return upload.path, upload.filename

    def _named(self, used: ExitStack, url: str, abandoned: Callable[[], bool]) -> tuple[Path, str]:
        """Return the file of a URL or path, which stays until `used` closes, and its name for messages."""
        scheme, colon, _ = url[:20].partition(":")  # a data: URL may be long
        scheme = scheme.lower() if colon and scheme.isalnum() else ""
        if scheme == "data":
            try:  # the name depends on the content, so that a later request with the same video finds it
                return self._keep(used, data_blocks(url)), "the data: URL"
            except ValueError as error:
                raise ApiError(400, f"not a data: URL with a file ({error})") from error
        if scheme in ("http", "https"):
            return self._download(used, url, abandoned), url
        if scheme == "file" or not scheme:
            return self._local(url), url
        raise ApiError(400, f"the scheme {scheme}: is not supported; expected data:, http:, https: or a path")

    def _local(self, url: str) -> Path:
        try:
            parts = urlsplit(url)
            name = unquote(parts.path) if parts.scheme else url
            if self._root is None or parts.netloc not in ("", "localhost") or "\0" in name:
                raise ApiError(400, "paths are not allowed; start the server with --media_root DIR, or upload the file")
            path = (self._root / name).resolve()  # also of links, so that they cannot lead out of the folder
            is_file = path.is_file()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, or not a URL
            raise ApiError(400, "not a valid path") from error
        if not (is_file and path.is_relative_to(self._root)):
            raise ApiError(400, "no such file below the server's --media_root")
        return path

    def _download(self, used: ExitStack, url: str, abandoned: Callable[[], bool]) -> Path:
        try:
            with open_url(url, self._hosts) as answer:
                length = answer.headers.get("Content-Length") or ""
                expected = int(length) if length.isdecimal() else 0
                version = answer.headers.get("ETag") or os.urandom(8).hex()
                name = hashlib.sha256(f"{url} {version}".encode()).hexdigest()

                def content() -> Iterator[bytes]:
                    for block in blocks(answer, LONGEST):
                        if abandoned():
                            raise ClientDisconnect
                        yield block

                return self._keep(used, content(), name=name, expected=expected)
        except NotAllowed as error:
            raise ApiError(400, str(error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiError(400, f"the URL cannot be read ({error})") from error

    def _keep(self, used: ExitStack, blocks: Iterable[bytes], *, name: str = "", expected: int = 0) -> Path:
        """Write a file until the end of `used`, block by block; an equal file of another request is shared.

        Args:
            name: what equal files have in common; default: a digest of the content.
            expected: the size, if it is known; counted before the first block is read.
        """
        reserve, size, digest = used.enter_context(self.room()), 0, hashlib.sha256()
        with self._temporary() as temporary:
            with temporary.open("wb") as target:
                for block in chain([b""], blocks):
                    size += len(block)
                    if max(size, expected) > self.max_bytes:
                        raise ApiError(413, f"more than the allowed {self.max_bytes} bytes (--max_upload_mb)")
                    reserve(max(size, expected))
                    digest.update(block)
                    target.write(block)
            os.utime(temporary, (0, 0))  # the time is a part of the version, and the name states the content
            path = self._folder / f"inline-{name or digest.hexdigest()}"
            with self._lock:
                temporary.replace(path)
                self._removed.add(path)
                used.enter_context(self._using(path))
        return path

    @contextmanager
    def room(self, size: int = 0) -> Iterator[Callable[[int], None]]:
        """Count bytes against `max_total` until the end of the block, and yield a function that sets their number.

        Raises:
            ApiError: 413 if they do not fit; the function too.
        """
        reserved = 0

        def reserve(size: int) -> None:
            nonlocal reserved
            with self._lock:
                self._require_room(size - reserved)
                self._reserved, reserved = self._reserved + size - reserved, size

        reserve(size)
        try:
            yield reserve
        finally:
            with self._lock:
                self._reserved -= reserved

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        """Yield an empty file, which is removed at the end of the block if it still has its name.

        Raises:
            ApiError: 507, if the disk is full.
        """
        name = None
        try:
            handle, name = tempfile.mkstemp(dir=self._folder)
            os.close(handle)
            yield Path(name)
        except OSError as error:
            if (fault := write_fault(error)) is None:
                raise
            text = (
                f"the server cannot store the file ({fault}); its operator can free space or give another --upload_dir"
            )
            raise ApiError(507, text, kind="server_error") from error
        finally:
            if name is not None:
                Path(name).unlink(missing_ok=True)


class Previews:
    """Facts and frames of the uploads in `store`. One frame is decoded at a time, to leave the cores to the model."""

    def __init__(self, store: MediaStore) -> None:
        self._store, self._decoding = store, threading.Lock()
        self._probed = lru_cache(maxsize=16)(probe)

    def describe(self, file_id: str) -> dict[str, Any]:
        """Return whether an upload is a video or an image, and the seconds and frames per second of a video.

        Raises:
            ApiError: 404, or 400 if the file is not a readable video.
        """
        with self._file(file_id) as file:
            if file.kind == "image":
                return {"kind": "image"}
            info = self._probed(file.source)
            return {"kind": "video", "seconds": info.duration, "fps": info.fps}

    def frame(self, file_id: str, seconds: float) -> bytes:
        """Return the frame of a video that is shown at a time, or the last one before it, as a JPEG.

        Raises:
            ApiError: 404, or 400 if the upload has no readable frame at that time.
        """
        with self._file(file_id) as file, self._decoding:
            if file.kind == "image":
                raise ApiError(400, f"{file.name}: an image has no time; give the id of a video", param="seconds")
            info = self._probed(file.source)
            plan = info.plan([info.start + min(max(0, int(seconds / info.time_base)), info.length - 1)])
            return jpeg_of(next(read_frames(plan, threads=1))[0], WIDTH)

    @contextmanager
    def _file(self, file_id: str) -> Iterator[Clip]:
        self._store.upload(file_id)
        with self._store.files({"id": Clip("file", file_id)}, FrameChoice()) as (file,):
            try:
                yield file
            except (VideoError, ConfigError) as error:
                raise ApiError(400, str(error).replace(file.source, file.name), param="id") from error
