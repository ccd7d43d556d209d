"""Layer: one process. Media that requests may use: uploads, paths, data: URLs and downloads; the folder of uploads."""

import base64
import http.server
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")

from PIL import Image

from launch import PYTHON
from mllm_seqpar.chats.clip import Clip
from mllm_seqpar.data import FrameChoice
from mllm_seqpar.serving.media import MediaStore, upload_folder
from mllm_seqpar.serving.protocol import ApiError
from mllm_seqpar.videos import downloads


def store(folder: Path, **options: Any) -> MediaStore:
    (folder / "store").mkdir(exist_ok=True)
    return MediaStore(folder / "store", **{"max_bytes": 1000, "max_total": 1500} | options)


def parts(url: str, **frames: Any) -> dict[str, Clip]:
    return {"part": Clip("video_url", url, FrameChoice(**frames))}


def resolve(media: MediaStore, url: str, **frames: Any) -> Any:
    with media.files(parts(url, **frames), FrameChoice(fps=1.0, max_frames=8)) as (file,):
        return file, Path(file.source).read_bytes()


def test_paths_stay_below_the_media_root(tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret.mp4"
    (root / "a").mkdir(parents=True)
    (root / "a" / "b c.mp4").write_bytes(b"video")
    secret.write_bytes(b"secret")
    (root / "link.mp4").symlink_to(secret)
    media = store(tmp_path, media_root=str(root))
    for url in ("a/b c.mp4", str(root / "a" / "b c.mp4"), f"file://{root}/a/b%20c.mp4", "a/../a/b c.mp4"):
        assert resolve(media, url)[1] == b"video"
    for url in ("../secret.mp4", str(secret), f"file://{secret}", "link.mp4", "a", "a\0", "file://host/a", "ftp://x/y"):
        with pytest.raises(ApiError, match="media_root|scheme"):
            resolve(media, url)
    with pytest.raises(ApiError, match="start the server with --media_root"):
        resolve(store(tmp_path), "a/b c.mp4")


@pytest.mark.parametrize(
    "url", ["//[x", "file://[x", "a" * 3000, "a/" * 3000, "loop", "file:%00", "http://[x", "https://[::1"]
)
def test_malformed_names_are_refused(tmp_path: Path, url: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for options in ({"media_root": str(tmp_path)}, {}, {"allowed_hosts": ["*"]}):
        with pytest.raises(ApiError) as error:
            resolve(store(tmp_path, **options), url)
        assert error.value.status == 400 and str(tmp_path) not in str(error.value)


def test_limit_of_the_server_holds_for_every_video_of_a_request(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"video")
    media = store(tmp_path, media_root=str(tmp_path))
    for stated, used in (
        ({}, FrameChoice(fps=1, max_frames=8)),
        ({"fps": 5}, FrameChoice(fps=5, max_frames=8)),
        ({"num_frames": 100}, FrameChoice(num_frames=100, max_frames=8)),
        ({"max_frames": 2}, FrameChoice(fps=1, max_frames=2)),
        ({"fps": 5, "max_frames": 100, "start": 1}, FrameChoice(fps=5, max_frames=8, start=1)),
    ):
        assert resolve(media, "a.mp4", **stated)[0].frames == used


def test_inline_files_are_recognised_again_and_removed(tmp_path: Path) -> None:
    media, url = store(tmp_path), "data:video/mp4;base64," + base64.b64encode(b"video").decode()
    (first, content), (second, _) = resolve(media, url, num_frames=3), resolve(media, url, num_frames=3)
    assert content == b"video" and first == second and first.frames == FrameChoice(num_frames=3, max_frames=8)
    for wrong, status in (("data:video/mp4;base64,?", 400), ("data:," + "a" * 1001, 413)):
        with pytest.raises(ApiError) as error:
            resolve(media, wrong)
        assert error.value.status == status
    assert not list((tmp_path / "store").iterdir())


def test_deleted_upload_stays_until_its_request_ends(tmp_path: Path) -> None:
    media = store(tmp_path)
    source = tmp_path / "source"
    Image.new("RGB", (2, 2)).save(source, "BMP")
    source.write_bytes(source.read_bytes().ljust(900))
    with source.open("rb") as file:
        upload = media.add(file, "../../a.mp4", "vision")  # the content decides that it is an image
    with source.open("rb") as file, pytest.raises(ApiError, match="delete files first"):
        media.add(file, "b.mp4", "vision")
    part = {"part": Clip("file", upload.id)}
    with media.files(part, FrameChoice()) as (found,):
        media.delete(upload.id)
        assert found.kind == "image" and Path(found.source).stat().st_size == 900
    assert not list((tmp_path / "store").iterdir())
    with pytest.raises(ApiError, match="no uploaded file"), media.files(part, FrameChoice()):
        pass


def test_media_of_requests_count_against_the_storage(tmp_path: Path, site: str) -> None:
    media = store(tmp_path, max_total=1000, allowed_hosts=["127.0.0.1"])

    def held(url: str) -> Any:
        return media.files(parts(url), FrameChoice())

    with held("data:," + "a" * 600):
        assert media.stored == 600
        for url in ("data:," + "a" * 401, f"http://{site}/401", f"http://{site}/unknown/401"):
            with pytest.raises(ApiError, match="600 of 1000 are in use") as error, held(url):
                pass
            assert error.value.status == 413 and media.stored == 600
        with held(f"http://{site}/397"), held("data:;base64,QUJD"):
            assert media.stored == 1000
    assert media.stored == 0 and not list((tmp_path / "store").iterdir())


def test_download_is_counted_before_its_content_comes(tmp_path: Path, site: str) -> None:
    media = store(tmp_path, max_total=1000, allowed_hosts=["127.0.0.1"])
    large = store(tmp_path, max_bytes=5000, allowed_hosts=["127.0.0.1"], max_total=1000)
    for used, size, message in ((large, 1001, "1001"), (media, 900, "cannot be read")):  # fewer bytes than stated
        with pytest.raises(ApiError, match=message):
            resolve(used, f"http://{site}/stated/{size}")
    assert media.stored == 0 and not list((tmp_path / "store").iterdir())


class Site(http.server.BaseHTTPRequestHandler):
    """Answers /N with N bytes, /unknown/N without their number, /stated/N with the number only; /to/URL redirects."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        kind, _, size = self.path[1:].rpartition("/")
        self.asked.append((self.headers["Host"], self.path))
        redirect = self.path.startswith("/to/")
        self.send_response(302 if redirect else 200)
        if redirect:
            self.send_header("Location", "http://" + self.path.removeprefix("/to/"))
        elif kind != "unknown":
            self.send_header("Content-Length", size)
        self.end_headers()
        self.wfile.write(b"" if redirect or kind == "stated" else b"y" * int(size))

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    Site.asked.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_urls_need_an_allowed_host_or_a_public_address(tmp_path: Path, site: str) -> None:
    allowed = store(tmp_path, allowed_hosts=["127.0.0.1"])
    assert resolve(allowed, f"http://{site}/5")[1] == b"yyyyy"
    assert resolve(allowed, f"http://{site}/to/{site}/3")[1] == b"yyy"
    for media, path, message in (
        (allowed, "1001", "more than the allowed"),
        (allowed, f"to/localhost:{site.partition(':')[2]}/3", "URLs of localhost are not allowed"),
        (store(tmp_path), "5", "are not allowed; upload the file"),
        (store(tmp_path, allowed_hosts=["*"]), "5", "127.0.0.1 has no public address"),
    ):
        with pytest.raises(ApiError, match=message):
            resolve(media, f"http://{site}/{path}")
    assert not list((tmp_path / "store").iterdir())


PUBLIC = ["8.8.8.8", "2606:2800:220:1::1"]
OTHER = """0.0.0.0 10.0.0.1 100.64.0.1 127.0.0.1 169.254.169.254 172.16.0.1 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1
224.0.0.1 240.0.0.1 255.255.255.255 :: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 64:ff9b::7f00:1 64:ff9b::808:808
64:ff9b:1::1 100::1 2001:0:1::1 2001:db8::1 2002:7f00:1::1 3fff::1 5f00::1 fc00::1 fe80::1 fe80::1%eth0 fec0::1
ff0e::1"""


def test_only_addresses_of_the_public_internet_are_public() -> None:
    assert [address for address in [*PUBLIC, *OTHER.split()] if downloads.is_public(address)] == PUBLIC


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses of hosts, for the test to fill in; 127.0.0.1 counts as public, and no other address is reached."""
    known: dict[str, list[str]] = {}
    connect = socket.create_connection

    def resolved(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(f"{host} is unknown")
        return [(0, 0, 0, "", (address, port)) for address in known[host]]

    def connected(address: tuple[str, int], *rest: Any, **options: Any) -> socket.socket:
        assert address[0] in ("127.0.0.1", "127.0.0.9"), "an address that was to be refused"
        return connect(address, *rest, **options)

    monkeypatch.setattr(downloads, "is_public", lambda address: address.startswith("127.0.0."))
    monkeypatch.setattr(downloads, "socket", SimpleNamespace(**vars(socket)))
    monkeypatch.setattr(downloads.socket, "getaddrinfo", resolved)
    monkeypatch.setattr(downloads.socket, "create_connection", connected)
    return known


def test_connection_goes_to_a_checked_address_with_the_name_of_the_host(
    tmp_path: Path, site: str, names: dict[str, list[str]]
) -> None:
    port = site.partition(":")[2]
    # the first address is refused, the second does not answer
    names |= {"a.example": ["10.0.0.1", "127.0.0.9", "127.0.0.1"], "b.example": ["127.0.0.1"], "inner": ["10.0.0.1"]}
    anywhere = store(tmp_path, allowed_hosts=["*"])
    assert resolve(anywhere, f"http://a.example:{port}/to/b.example:{port}/3")[1] == b"yyy"
    assert [host for host, _ in Site.asked] == [f"a.example:{port}", f"b.example:{port}"]
    for url in (f"http://inner:{port}/3", f"http://b.example:{port}/to/inner:{port}/3", f"http://nowhere:{port}/3"):
        with pytest.raises(ApiError, match="(inner|nowhere) has no public address"):
            resolve(anywhere, url)
    named = store(tmp_path, allowed_hosts=["a.example", "c.example"])
    names["c.example"] = ["127.0.0.1"]
    assert resolve(named, f"http://c.example:{port}/2")[1] == b"yy"
    with pytest.raises(ApiError, match="cannot be read"):
        resolve(store(tmp_path, allowed_hosts=["nowhere"]), f"http://nowhere:{port}/3")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate")
def test_certificate_is_checked_for_the_name_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]
) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=a.example -addext subjectAltName=DNS:a.example"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    names |= {"a.example": ["127.0.0.1"], "b.example": ["127.0.0.1"]}
    trusting = ssl.create_default_context(cafile=certificate)
    monkeypatch.setattr(downloads.ssl, "create_default_context", lambda: trusting)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        media = store(tmp_path, allowed_hosts=["*"])
        assert resolve(media, f"https://a.example:{server.server_port}/4")[1] == b"yyyy"
        with pytest.raises(ApiError, match="certificate"):
            resolve(media, f"https://b.example:{server.server_port}/4")
        server.shutdown()


SERVERS = """
import os, sys
from mllm_seqpar.serving.media import upload_folder

os.fork()
with upload_folder(sys.argv[1]) as folder:
    (folder / "video").write_text("x")
    os.write(1, f"{os.getpid()} {folder}\\n".encode())
    sys.stdin.read()
"""


@pytest.mark.slow
def test_leftovers_of_a_killed_server_are_removed_and_a_living_one_keeps_its_files(tmp_path: Path) -> None:
    command = [*PYTHON, "-c", SERVERS, str(tmp_path)]
    living = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert living.stdout is not None
    folders = {int(pid): Path(path) for pid, path in (living.stdout.readline().split() for _ in range(2))}
    kept = folders.pop(living.pid)
    ((pid, left),) = folders.items()
    foreign = tmp_path / "mllm-seqpar-elsewhere"
    foreign.mkdir()
    (foreign / "server.lock").write_text("another machine")
    (tmp_path / "mllm-seqpar-link").symlink_to(kept)
    killed = psutil.Process(pid)
    killed.kill()
    while killed.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert (left / "video").exists()
    with upload_folder(str(tmp_path)) as folder:
        assert not left.exists() and (kept / "video").exists() and foreign.exists()
        assert os.listdir(folder) == ["server.lock"]
    assert not folder.exists()
    living.communicate("")
    assert not kept.exists()
