"""Layer: pure Python. Requests to the server: fields that are honoured, ignored, or refused by name."""

import json
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="pydantic is not installed (extra serve)")

from transformers import GenerationConfig

from mllm_seqpar.data import FrameChoice
from mllm_seqpar.inference import Sampling
from mllm_seqpar.serving.protocol import ApiError, ChatRequest, parse, read_request

HELLO = [{"role": "user", "content": "Hello"}]
DEFAULTS = Sampling(max_new_tokens=9)


def read(**fields: Any) -> ChatRequest:
    return read_request({"messages": HELLO} | fields)


def shown(*parts: Any, **fields: Any) -> dict[str, Any]:
    """Return the fields of a request with media, or with other fields of its message."""
    return {"messages": [{"role": "user", "content": [*parts], **fields}]}


def video(url: Any = "x", **beside: Any) -> dict[str, Any]:
    return shown({"type": "video_url", "video_url": url, **beside})


def image(**fields: Any) -> dict[str, Any]:
    return shown({"type": "image_url", "image_url": "x", **fields})


def file(**fields: Any) -> dict[str, Any]:
    return shown({"type": "file", "file": {"file_id": "x", **fields}})


def generation(**changes: Any) -> dict[str, Any]:
    config = GenerationConfig()
    config.update(**changes)
    return {"generation_config": config.to_json_string()}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"max_new_tokens": 9}),
        ({"max_completion_tokens": 3, "top_p": 0.5, "n": 1, "tools": []}, {"max_new_tokens": 3, "top_p": 0.5}),
        ({"max_tokens": None, "top_p": 0.9}, {"max_new_tokens": 9, "top_p": 0.9}),
        ({"temperature": 1, "top_k": -1}, {"max_new_tokens": 9, "temperature": 1.0, "top_k": 0}),
        (
            generation(do_sample=True, max_new_tokens=256),
            {"max_new_tokens": 256, "temperature": 1.0, "top_k": 50},  # the defaults of transformers
        ),
        (
            generation(do_sample=True, temperature=0.3, top_p=0.5, top_k=3, max_new_tokens=256) | {"max_tokens": 4},
            {"max_new_tokens": 4, "temperature": 0.3, "top_p": 0.5, "top_k": 3},
        ),
        ({"generation_config": '{"do_sample": false, "temperature": 0.7}'}, {"max_new_tokens": 9, "temperature": 0.0}),
    ],
)
def test_request_has_its_own_sampling_and_else_the_defaults(fields: Any, expected: dict[str, Any]) -> None:
    assert read(seed=1, **fields).sampling(DEFAULTS) == Sampling(seed=1, **expected)


def test_numbers_and_sampling_options_are_those_of_generate() -> None:
    asked = read(temperature=2, top_p=1, top_k=5, min_p=0, repetition_penalty=2, min_tokens=3)
    found = asked.sampling(DEFAULTS).generate_arguments()
    assert found == {
        **{"max_new_tokens": 9, "min_new_tokens": 3, "num_beams": 1, "do_sample": True, "temperature": 2.0},
        **{"top_p": 1.0, "top_k": 5, "min_p": 0.0, "repetition_penalty": 2.0},
    }
    assert {type(found[name]) for name in ("temperature", "top_p", "min_p")} == {float}
    greedy = read(seed=1).sampling(DEFAULTS).generate_arguments()
    assert greedy["do_sample"] is False and "repetition_penalty" not in greedy
    sampled = read(temperature=1)
    assert sampled.sampling(DEFAULTS).seed != sampled.sampling(DEFAULTS).seed


def test_further_fields_and_what_is_ignored() -> None:
    asked = read(stop="\n")
    assert (asked.stop, asked.stream, asked.include_usage, asked.ignored) == (["\n"], False, False, ())
    assert read(stream=True, stream_options={"include_usage": True}).include_usage
    part = {"type": "image_url", "image_url": {"url": "x", "detail": "low"}, "uuid": "1"}
    unused = {"user": "me", "priority": 3, "metadata": None, "top_logprobs": 0, "chat_template_kwargs": {}}
    assert read(**shown(part), **unused).ignored == ("user", "priority", "uuid", "detail")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (video({"url": "x", "fps": 1}), {"fps": 1}),
        (video({"url": "x"}, fps=1), {"fps": 1}),
        (video("x", fps=1.0), {"fps": 1}),
        (video({"url": "x", "fps": 1, "end": None}, max_frames=8), {"fps": 1, "max_frames": 8}),
        (video({"url": "x", "start": 0, "end": 2.5}), {"start": 0, "end": 2.5}),
        (file(num_frames=3), {"num_frames": 3}),
    ],
)
def test_frames_of_a_video_are_stated_in_its_part_or_in_its_object(part: Any, expected: Any) -> None:
    (found,) = read(**part).media().values()
    assert found.frames == FrameChoice(**expected)


@pytest.mark.parametrize(
    "fields", [{"mm_processor_kwargs": {"fps": 1}}, {"media_io_kwargs": {"video": {"fps": 1, "num_frames": None}}}]
)
def test_frames_of_all_videos_of_a_request(fields: Any) -> None:
    assert read(**video(), **fields).frames() == FrameChoice(fps=1.0)


REFUSED: list[tuple[str, list[Any]]] = [
    ("n", [2]),
    ("logprobs", [True]),
    ("tools", [[{"type": "function"}]]),
    ("response_format", [{"type": "json_object"}]),
    ("frequency_penalty", [0.5]),
    ("reasoning_effort", ["low"]),
    ("temprature", [0.1]),
    ("temperature", [2.5, True, float("nan"), 1e-9, "1"]),
    ("top_p", [0]),
    ("top_k", [-2, 1.5]),
    ("min_p", [1.1]),
    ("repetition_penalty", [0, 1e9]),
    ("max_tokens", [0, 1.5, 10**30]),
    ("min_tokens", [10]),
    ("seed", [-1]),
    ("stop", ["", list("abcde")]),
    ("stream", [1]),
    ("stream_options", [{"include_usage": True}]),
    ("messages", [[]]),
    ("ignore_eos", [True]),
    ("chat_template_kwargs", [{"enable_thinking": True}]),
    ("mm_processor_kwargs", [{"do_resize": False}]),
    ("media_io_kwargs", [{"audio": {}}]),
    ("generation_config", ["{", "[" * 5000, {"num_beams": 4}]),
    ("evidence", ["5", -1, True, 101]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED for value in values])
def test_fields_that_cannot_be_honoured_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as error:
        read(**{field: value}).sampling(DEFAULTS)
    assert error.value.status == 400
    assert str(error.value.param).startswith(field) and field in str(error.value)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        # What every reader of messages refuses (tests/unit/chats/test_chat.py), here with the place in the request
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
        (shown({"type": "input_audio"}), "input_audio"),
        (shown({"type": "text", "text": "x", "fps": 1}), "content[0].fps"),
        (shown(3), "messages[0].content[0]: holds 3"),
        (image(image_url={"url": "x", "fps": 1}), "content[0].fps"),
        # What this server refuses
        ({"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "the last message is not the user's"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "tool_calls"),
        (shown({"type": "video_url", "url": "x"}), "messages[0].content[0]: "),
        (video({"url": "x", "fps": 1}, fps=2), "twice"),
        (video(num_frames=2**31), "messages[0].content[0].num_frames: "),
        (video(fps=10**400), "messages[0].content[0].fps: "),
        (video(""), "messages[0].content[0].url: "),
        (image(detail=3), "messages[0].content[0].detail: "),
        (shown({"type": "file", "file": {"file_data": "x"}}), "file_data"),
        (shown({"type": "file", "file": "x"}), "file is not an object"),
    ],
)
def test_malformed_messages_are_refused(fields: Any, fault: str) -> None:
    with pytest.raises(ApiError) as error:
        read(**fields)
    assert error.value.status == 400 and fault in str(error.value)


def test_body_has_the_value_of_the_standard_parser() -> None:
    value = [
        {"a": ["data:video/mp4;base64," + "QUJD" * 30_000, 'she said "data:\\', {"b": "\N{SNOWMAN}"}], "c": None},
        1.5,
    ]
    for ascii_only in (True, False):
        assert parse(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("body", "status"),
    [
        *[(b"", 400), (b"{", 400), (b"NaN", 400), (b"[1e999, Infinity]", 400), (b"\xff", 400), (b'"\\ud800"', 400)],
        *[(b"[" * 100_000 + b"]" * 90_000, 400), (b"1" * 5000, 400), (b"[" + b"0," * 300_000 + b"0]", 413)],
    ],
)
def test_body_that_is_refused(body: bytes, status: int) -> None:
    with pytest.raises(ApiError) as error:
        parse(body)
    assert error.value.status == status
