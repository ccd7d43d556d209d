"""Layer: one process. Options of chat and serve, and what is refused before a model is loaded."""

import importlib.util
import socket
from pathlib import Path

import pytest

from mllm_seqpar.cli.options import parse_options
from mllm_seqpar.data import FrameChoice
from mllm_seqpar.errors import ConfigError, VideoError
from mllm_seqpar.inference import Sampling
from mllm_seqpar.serving.chat import ChatOptions, chat
from mllm_seqpar.serving.server import ServeOptions, _bound_socket, serve

MODEL = ["--model", "none"]


def options(*argv: str) -> ServeOptions:
    return parse_options(ServeOptions, [*MODEL, *argv], prog="serve", description="")


def test_names_may_have_underscores_or_hyphens() -> None:
    both = options("--max_new_tokens=7", "--media-root", ".", "--allow_urls", "a_b.example", "--allow-urls", "*")
    assert (both.max_new_tokens, both.media_root, both.allow_urls) == (7, ".", ("a_b.example", "*"))
    assert both.sampling() == Sampling(max_new_tokens=7) and both.frame_choice() == FrameChoice()
    assert options("--num_frames", "4").frame_choice() == FrameChoice(num_frames=4)
    sampled = [*MODEL, "--seed", "3", "--temperature", "1"]
    assert parse_options(ChatOptions, sampled, prog="chat", description="").seed == 3


@pytest.mark.parametrize(
    ("argv", "fault"),
    [
        (["--num_processes", "0"], "--num_processes: 0"),
        (["--fps", "1", "--num_frames", "2"], "give one of them"),
        (["--temperature", "inf"], "temperature"),
        (["--port", "70000"], "--port: 70000"),
        (["--media_root", "nowhere"], "nowhere: no such directory"),
        (["--max_upload_mb", "0"], "--max_upload_mb: 0.0"),
        (["--allow_urls", "https://a.example/v/"], "--allow_urls https://a.example/v/: .*; give a.example$"),
        (["--allow_urls", "a.example:80"], "give a.example$"),
        (["--allow_urls", "[::1]:80"], "give ::1$"),
        (["--allow_urls", "*.example"], r'or "\*" for all public hosts$'),
        (["--allow_urls", "[1"], r'or "\*" for all public hosts$'),
        (["--allowed_origins", "example.org"], "--allowed_origins example.org: expected a scheme"),
        (["--allowed_origins", "https://example.org/"], "without a path"),
        (["--kernel", "none"], "--kernel: 'none' is not allowed"),
    ],
)
def test_invalid_options_are_refused(argv: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        options(*argv)


def test_chat_refuses_options_of_sampling_without_sampling() -> None:
    for argv in (["--seed", "5"], ["--top_p", "0.5"], ["--temperature", "0", "--seed", "5"]):
        with pytest.raises(ConfigError, match="no effect: without --temperature above 0 no token is sampled"):
            parse_options(ChatOptions, [*MODEL, *argv], prog="chat", description="")
    assert options("--top_p", "0.5").top_p == 0.5  # a default for the requests of a server, which may sample


@pytest.mark.parametrize(
    ("model", "name"), [("runs/first/model", "first"), ("runs/first", "first"), ("/model", "model"), ("a/b", "b")]
)
def test_fine_tuned_model_has_the_name_of_its_run(model: str, name: str) -> None:
    assert parse_options(ServeOptions, ["--model", model], prog="serve", description="").name == name
    given = ["--model", model, "--served_model_name", "mine"]
    assert parse_options(ServeOptions, given, prog="serve", description="").name == "mine"


def test_chat_refuses_a_launcher_and_a_file_that_is_no_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(VideoError, match="not a readable video"):
        chat([*MODEL, "--video", str(tmp_path / "text.mp4")])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="start it as mllm-seqpar chat --num_processes N"):
        chat(MODEL)


@pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="fastapi is not installed (extra serve)")
def test_address_that_cannot_be_used_is_reported_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another port"):
            serve([*MODEL, "--port", str(taken.getsockname()[1])])
    with pytest.raises(ConfigError, match="give an address of this machine as --host"):
        serve([*MODEL, "--host", "192.0.2.1"])  # an address of no machine (RFC 5737)


def test_connections_to_machines_that_vanish_are_closed() -> None:
    with _bound_socket(options("--port", "0")) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_KEEPIDLE"):
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


@pytest.mark.skipif(importlib.util.find_spec("fastapi") is not None, reason="fastapi is installed")
def test_missing_packages_are_named() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'mllm-seqpar\[serve\]'"):
        serve(MODEL)
