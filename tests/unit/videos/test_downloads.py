"""Layer: one process, a server of this machine. URLs of videos become files of the cache, or one clear error."""

import itertools
import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clips import write_clip
from mllm_seqpar.data import VideoSource
from mllm_seqpar.errors import VideoError
from mllm_seqpar.videos import downloads
from mllm_seqpar.videos.media_files import CACHE_VARIABLE, SIZE_VARIABLE, local_media, media_cache


class Server(BaseHTTPRequestHandler):
    """Serves one video under several names, and counts the requests."""

    def __init__(self, content: bytes, requests: list[str], *args: Any) -> None:
        self._content, self._requests = content, requests
        super().__init__(*args)

    def do_GET(self) -> None:
        self._requests.append(self.path)
        if "none" in self.path:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8" if "page" in self.path else "video/mp4")
        if "unsized" not in self.path:
            self.send_header("Content-Length", str(len(self._content) + 9 * ("short" in self.path)))
        self.end_headers()
        self.wfile.write(self._content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def requests() -> list[str]:
    return []


@pytest.fixture
def url(tmp_path: Path, requests: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    content = write_clip(tmp_path / "a.mp4").read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, content, requests))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_video_of_a_url_is_downloaded_once(tmp_path: Path, url: str, requests: list[str]) -> None:
    (expected,) = VideoSource.open(tmp_path / "a.mp4", num_frames=3).read(0, 3)
    results: list[VideoSource] = []
    threads = [
        threading.Thread(target=lambda: results.append(VideoSource.open(f"{url}/a.mp4?x=1", num_frames=3)))
        for _ in "1234"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and requests == ["/a.mp4?x=1"]
    assert torch.equal(next(results[0].read(0, 3)), expected)
    assert Path(results[0].plan.path).parent == tmp_path / "cache/media" and results[0].plan.path.endswith(".mp4")
    assert media_cache().download(f"{url}/unsized").read_bytes() == (tmp_path / "a.mp4").read_bytes()
    assert len(requests) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("URL/none.mp4", r"/none.mp4: the server answered 404 \(Not Found\); check the URL"),
        ("URL/page", "/page: it is a web page, not a media file; give the URL of the file itself"),
        ("URL/short.mp4", r"/short.mp4: .*cannot be downloaded \(it ended 9 bytes early\)"),
        ("http://127.0.0.1:9/a.mp4", "cannot be downloaded .*; without a network, download it elsewhere"),
        ("s3://bucket/a.mp4", "s3://bucket/a.mp4: s3 URLs cannot be read; give a path, or an http"),
        *[(name, "not a valid URL .*; expected http") for name in ("http://[x", "https://[x")],
        ("file://[x", "not a valid URL .*; expected file"),
        *[
            (name, "not a valid URL .*; expected data:image/png;base64,")
            for name in ("data:", "data:,", "data:;base64,?", "data:;base64,a")
        ],
    ],
)
def test_url_that_cannot_be_read_is_named_and_leaves_nothing(tmp_path: Path, url: str, name: str, message: str) -> None:
    with pytest.raises(VideoError, match=message):
        local_media(name.replace("URL", url))
    assert not [path for path in (tmp_path / "cache").rglob("*.*") if path.suffix != ".lock"]


def test_paths_and_file_urls_are_paths(tmp_path: Path) -> None:
    assert local_media("file:///a%20b.mp4") == "/a b.mp4"
    assert local_media(tmp_path / "a.mp4") == str(tmp_path / "a.mp4")


def test_size_limits_hold_with_and_without_a_stated_size(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (tmp_path / "a.mp4").stat().st_size
    monkeypatch.setenv(SIZE_VARIABLE, str(10.5 * size / 1e9))
    media_cache().download(f"{url}/1.mp4")
    monkeypatch.setenv(SIZE_VARIABLE, str(9 * size / 1e9))
    for name, message in (("2.mp4", "a file of the cache may have"), ("unsized", "would exceed its limit")):
        with pytest.raises(VideoError, match=message):
            media_cache().download(f"{url}/{name}")
    assert len([path for path in (tmp_path / "cache/media").iterdir() if path.suffix != ".lock"]) == 1
    monkeypatch.setenv(SIZE_VARIABLE, "much")
    with pytest.raises(VideoError, match="MLLM_SEQPAR_CACHE_GB='much' is not a number"):
        media_cache().download(f"{url}/3.mp4")


def test_files_that_vanish_while_the_cache_is_counted_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    scandir = os.scandir

    def scan(path: Path) -> list[os.DirEntry[str]]:
        (path / ".1.tmp").touch()
        entries = list(scandir(path))
        (path / ".1.tmp").unlink()
        return entries

    monkeypatch.setattr(os, "scandir", scan)
    assert media_cache().store(b"1", ".png").read_bytes() == b"1"


def test_files_of_other_processes_count_once_the_cache_is_almost_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv(SIZE_VARIABLE, "1e-6")  # 1000 bytes
    other = tmp_path / "media/other"
    for number in range(10):
        media_cache().store(bytes([number]) * 95, "")
    other.write_bytes(bytes(100))
    with pytest.raises(VideoError, match="would exceed its limit"):
        media_cache().store(b"x" * 95, "")
    other.unlink()
    (tmp_path / "media" / media_cache().store(bytes(95), "").name).unlink()
    media_cache().store(b"x" * 95, "")


class Answer:
    """Sends one byte after some seconds each, by the clock of the test."""

    length = None

    def __init__(self, rates: list[tuple[int, float]]) -> None:
        self.now, self._rates = 0.0, rates

    def read1(self, size: int) -> bytes:
        count, seconds = self._rates.pop(0) if self._rates else (0, 0.0)
        self.now += seconds
        return b"x" * count


@pytest.mark.parametrize(
    ("rates", "longest", "message"),
    [
        ([(1, 50.0)] * 100, None, "the host sends 0.02 bytes per second; 10000 are required"),
        ([(10**6, 1.0)] * 100 + [(1, 50.0)] * 3, None, "bytes per second; 10000 are required"),
        ([(10**6, 50.0)] * 100, None, None),
        ([(1, 50.0)], None, None),
        ([(10**6, 50.0)] * 100, 600.0, "the download takes more than 600 s"),
    ],
)
def test_host_that_sends_too_slowly_ends_the_download(
    monkeypatch: pytest.MonkeyPatch, rates: list[tuple[int, float]], longest: float | None, message: str | None
) -> None:
    answer, expected = Answer(list(rates)), sum(count for count, _ in rates)
    monkeypatch.setattr(downloads, "time", SimpleNamespace(monotonic=lambda: answer.now))
    if message is None:
        assert sum(map(len, downloads.blocks(answer, longest))) == expected
    else:
        with pytest.raises(OSError, match=message):
            list(downloads.blocks(answer, longest))


def test_slow_host_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(step=1000)
    monkeypatch.setattr(downloads, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    with pytest.raises(VideoError, match=f"{url}/a.mp4: cannot be downloaded .the host sends .* are required.*; with"):
        media_cache().download(f"{url}/a.mp4")
