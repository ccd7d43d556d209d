"""Layer: pure Python. Requests to the server: fields that are refused by name, and media that may be used."""

import base64
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import GenerationConfig

from mllm_seqpar.inference import Sampling
from mllm_seqpar.serving.media import MediaStore
from mllm_seqpar.serving.protocol import ApiError, ChatRequest, read_request
from mllm_seqpar.serving.schema import MediaReference

HELLO = [{"role": "user", "content": "Hello"}]


def read(**fields: Any) -> ChatRequest:
    return read_request({"messages": HELLO} | fields, Sampling(max_new_tokens=9))


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        read(**fields)
    assert error.value.status == 400
    return error.value


def test_request_has_defaults_and_its_own_values() -> None:
    assert read(seed=1).sampling == Sampling(max_new_tokens=9, seed=1)
    asked = read(max_completion_tokens=3, temperature=0.5, top_p=0.9, seed=7, stop="\n", n=1, tools=[], user="me")
    assert asked.sampling == Sampling(max_new_tokens=3, temperature=0.5, top_p=0.9, seed=7)
    assert (asked.stop, asked.stream, asked.include_usage) == (("\n",), False, False)
    assert read(stream=True, stream_options={"include_usage": True}).include_usage
    assert read(temperature=1).sampling.seed != read(temperature=1).sampling.seed


def test_numbers_and_sampling_options_are_those_of_generate() -> None:
    asked = read(temperature=2, top_p=1, top_k=5, min_p=0, repetition_penalty=2, min_tokens=3, seed=1).sampling
    assert asked.generate_arguments() == {
        **{"max_new_tokens": 9, "min_new_tokens": 3, "num_beams": 1, "do_sample": True, "temperature": 2.0},
        **{"top_p": 1.0, "top_k": 5, "min_p": 0.0, "repetition_penalty": 2.0},
    }
    assert {type(value) for name, value in asked.generate_arguments().items() if "min_p" == name[:5]} == {float}
    assert read(temperature=1, top_k=-1).sampling.top_k == 0
    greedy = read(seed=1).sampling.generate_arguments()
    assert greedy["do_sample"] is False and "repetition_penalty" not in greedy


def test_generation_config_of_transformers_chat_has_its_defaults() -> None:
    config = GenerationConfig()
    config.update(do_sample=True, max_new_tokens=256)
    asked = read(generation_config=config.to_json_string(), seed=1)
    expected = Sampling(max_new_tokens=256, temperature=1.0, top_k=50, seed=1)
    assert asked.sampling == expected
    config.update(temperature=0.3, top_p=0.5, top_k=3)
    asked = read(generation_config=config.to_json_string(), max_tokens=4, seed=1)
    assert asked.sampling == Sampling(max_new_tokens=4, temperature=0.3, top_p=0.5, top_k=3, seed=1)
    assert read(generation_config='{"do_sample": false, "temperature": 0.7}', seed=1).sampling.temperature == 0


def test_fields_without_effect_are_ignored_and_named() -> None:
    image = {"type": "image_url", "image_url": {"url": "x", "detail": "low"}, "uuid": "1"}
    asked = read(
        messages=[{"role": "user", "content": [image]}],
        **{"user": "me", "priority": 3, "metadata": None, "top_logprobs": 0, "chat_template_kwargs": {}},
    )
    assert asked.ignored == ("user", "priority", "uuid", "detail")


def test_sampling_of_a_video_is_read_in_every_place() -> None:
    def video(url: Any, **beside: Any) -> list[Any]:
        return [{"role": "user", "content": [{"type": "video_url", "video_url": url, **beside}]}]

    for messages in (video({"url": "x", "fps": 1}), video({"url": "x"}, fps=1), video("x", fps=1.0)):
        assert read(messages=messages).media[0].sampling == {"fps": 1.0}
    assert read(messages=video({"url": "x", "fps": 1}, max_frames=8)).media[0].sampling == {"fps": 1, "max_frames": 8}
    for fields in ({"mm_processor_kwargs": {"fps": 1}}, {"media_io_kwargs": {"video": {"fps": 1, "num_frames": None}}}):
        assert read(messages=video("x"), **fields).frames == {"fps": 1.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            ("n", 2),
            ("logprobs", True),
            ("tools", [{"type": "function"}]),
            ("response_format", {"type": "json_object"}),
        ],
        *[("frequency_penalty", 0.5), ("reasoning_effort", "low"), ("temprature", 0.1), ("temperature", 2.5)],
        *[("temperature", True), ("temperature", float("nan")), ("top_p", 0), ("max_tokens", 0), ("max_tokens", 1.5)],
        *[
            ("seed", -1),
            ("stop", ""),
            ("stop", list("abcde")),
            ("stream", 1),
            ("stream_options", {"include_usage": True}),
        ],
        ("messages", []),
        *[("top_k", -2), ("top_k", 1.5), ("min_p", 1.1), ("repetition_penalty", 0), ("repetition_penalty", 1e9)],
        *[
            ("temperature", 1e-9),
            ("temperature", "1"),
            ("min_tokens", 10),
            ("max_tokens", 10**30),
            ("ignore_eos", True),
        ],
        *[("chat_template_kwargs", {"enable_thinking": True}), ("mm_processor_kwargs", {"do_resize": False})],
        *[("generation_config", "{"), ("generation_config", {"num_beams": 4}), ("media_io_kwargs", {"audio": {}})],
        *[("evidence", "5"), ("evidence", -1), ("evidence", True), ("evidence", 101)],
    ],
)
def test_fields_that_cannot_be_honoured_are_refused_by_name(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert str(error.param).startswith(field) and field in str(error)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"role": "tool", "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "assistant", "content": "x"}, "the last message is not the user's"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, "tool_calls"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input_audio"),
        ({"role": "system", "content": [{"type": "file", "file": {"file_id": "x"}}]}, "only a message of the user"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "fps": 1}}]}, "fps"),
        ({"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x", "fps": 0}}]}, "fps"),
        ({"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x", "speed": 2}}]}, "speed"),
        ({"role": "user", "content": [{"type": "file", "file": {"file_id": "x", "fps": 1, "num_frames": 2}}]}, "both"),
        ({"role": "user", "content": [{"type": "file", "file": {"file_data": "x"}}]}, "file_data"),
        ({"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}, "pixels": 3}]}, "content[0].pixels"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x", "fps": 1}]}, "content[0].fps"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "fps": 1}]}, "content[0].fps"),
        ({"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x", "fps": 1}, "fps": 2}]}, "twice"),
        ({"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x", "fps": 1}, "num_frames": 2}]}, "both"),
        ({"role": "user", "content": [3]}, "messages[0].content[0]: 3"),
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(message: Any, fault: str) -> None:
    assert fault in str(refused(messages=[message]))


def store(folder: Path, **options: Any) -> MediaStore:
    (folder / "store").mkdir(exist_ok=True)
    return MediaStore(folder / "store", **{"max_bytes": 1000, "max_total": 1500} | options)


def resolve(media: MediaStore, url: str, **sampling: Any) -> Any:
    reference = MediaReference(kind="video", url=url, sampling=sampling, param="part")
    with media.files([reference], {"fps": 1.0}) as (file,):
        return file, Path(file.path).read_bytes()


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


def test_inline_files_are_recognised_again_and_removed(tmp_path: Path) -> None:
    media, url = store(tmp_path), "data:video/mp4;base64," + base64.b64encode(b"video").decode()
    (first, content), (second, _) = resolve(media, url, num_frames=3), resolve(media, url, num_frames=3)
    assert content == b"video" and first == second and (first.fps, first.num_frames) == (None, 3)
    assert not list((tmp_path / "store").iterdir())
    for wrong, status in (("data:video/mp4;base64,?", 400), ("data:,", 400), ("data:," + "a" * 1001, 413)):
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
        upload = media.add(file, "../../a.mp4", "vision")  # the content decides that it is a picture
    with source.open("rb") as file, pytest.raises(ApiError, match="delete files first"):
        media.add(file, "b.mp4", "vision")
    reference = MediaReference(kind=None, file_id=upload.id, param="part")
    with media.files([reference], {}) as (found,):
        media.delete(upload.id)
        assert found.kind == "image" and Path(found.path).stat().st_size == 900
    assert not list((tmp_path / "store").iterdir())
    with pytest.raises(ApiError, match="no uploaded file"), media.files([reference], {}):
        pass


class Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        redirect = self.path.startswith("/to/")
        self.send_response(302 if redirect else 200)
        if redirect:
            self.send_header("Location", "http://" + self.path.removeprefix("/to/"))
        self.end_headers()
        self.wfile.write(b"" if redirect else b"y" * int(self.path[1:]))

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_urls_need_an_allowed_host_or_a_public_address(tmp_path: Path, site: str) -> None:
    allowed = store(tmp_path, allowed_hosts=["127.0.0.1"])
    assert resolve(allowed, f"http://{site}/5")[1] == b"yyyyy"
    assert resolve(allowed, f"http://{site}/to/{site}/3")[1] == b"yyy"
    with pytest.raises(ApiError, match="more than the allowed"):
        resolve(allowed, f"http://{site}/1001")
    with pytest.raises(ApiError, match="URLs of localhost are not allowed"):
        resolve(allowed, f"http://{site}/to/localhost:{site.partition(':')[2]}/3")
    with pytest.raises(ApiError, match="are not allowed; upload the file"):
        resolve(store(tmp_path), f"http://{site}/5")
    with pytest.raises(ApiError, match="127.0.0.1 has no public address"):
        resolve(store(tmp_path, allowed_hosts=["*"]), f"http://{site}/5")
    assert not list((tmp_path / "store").iterdir())
