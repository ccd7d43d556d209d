"""Layer: one process. Facts and frames of uploads, for the page."""

import io
import json
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")
pytest.importorskip("openai", reason="openai is not installed (extra test)")
pytest.importorskip("av", reason="PyAV is not installed (extra video)")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (extra video)")


def get(service: SimpleNamespace, path: str, key: str = "secret") -> tuple[int, bytes]:
    """Return status and body."""
    request = urllib.request.Request(f"{service.base}/v1/files/{path}", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def preview(service: SimpleNamespace, file: str) -> Any:
    return json.loads(get(service, f"{file}/preview")[1])


def upload(service: SimpleNamespace, name: str, content: bytes) -> str:
    return service.client.files.create(file=(name, content), purpose="user_data").id


def test_frames_are_those_of_the_time(service: SimpleNamespace, clip: Path) -> None:
    file = upload(service, "clip.mp4", clip.read_bytes())
    assert preview(service, file) == {"kind": "video", "seconds": 4.0, "fps": 1.0}
    for seconds, brightness in (("0", 0), ("1.9", 60), ("2", 120), ("3", 180), ("1e9", 180), ("-1", 0), ("nan", 0)):
        _, picture = get(service, f"{file}/frame?seconds={seconds}")
        red, green, blue = Image.open(io.BytesIO(picture)).convert("RGB").getpixel((8, 8))
        assert max(abs(x - brightness) for x in (red, green, blue)) < 12, seconds


def test_image_has_no_frames(service: SimpleNamespace) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "PNG")
    file = upload(service, "a.png", buffer.getvalue())
    assert preview(service, file) == {"kind": "image"}
    assert get(service, f"{file}/frame")[0] == 400


def test_refused_previews_name_the_upload_and_no_path(service: SimpleNamespace, clip: Path) -> None:
    damaged = upload(service, "cut.mp4", clip.read_bytes()[:300])
    for path in ("preview", "frame?seconds=1"):
        status, body = get(service, f"{damaged}/{path}")
        message = json.loads(body)["error"]["message"]
        assert status == 400 and message.startswith("cut.mp4: ") and "/" not in message
    whole = upload(service, "clip.mp4", clip.read_bytes())
    assert get(service, f"{whole}/frame?seconds=x")[0] == 400
    assert get(service, "file-none/preview")[0] == get(service, "file-none/frame")[0] == 404
    assert get(service, f"{whole}/frame", key="wrong")[0] == 401
