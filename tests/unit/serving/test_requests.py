"""Layer: pure Python. Requests to the server: fields that are honoured, ignored, or refused by name."""

from typing import Any

import pytest

pytest.importorskip("pydantic", reason="pydantic is not installed (extra serve)")

from transformers import GenerationConfig

from mllm_seqpar.data import FrameChoice
from mllm_seqpar.inference import Sampling
from mllm_seqpar.serving.protocol import ApiError, ChatRequest, read_request

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
    assert {type(asked.generate_arguments()[name]) for name in ("temperature", "top_p", "min_p")} == {float}
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
        assert read(messages=messages).media[0].frames == FrameChoice(fps=1.0)
    both = read(messages=video({"url": "x", "fps": 1}, max_frames=8)).media[0]
    assert both.frames == FrameChoice(fps=1, max_frames=8)
    assert read(messages=video({"url": "x", "start": 0, "end": 2.5})).media[0].frames == FrameChoice(start=0, end=2.5)
    with pytest.raises(ApiError, match="end: 2 is not after the start of the clip, 3"):
        read(messages=video({"url": "x", "start": 3, "end": 2}))
    for fields in ({"mm_processor_kwargs": {"fps": 1}}, {"media_io_kwargs": {"video": {"fps": 1, "num_frames": None}}}):
        assert read(messages=video("x"), **fields).frames == FrameChoice(fps=1.0)


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
        ({"role": "user", "content": [{"type": "file", "file": {"file_id": "x", "fps": 1, "num_frames": 2}}]}, "but"),
        ({"role": "user", "content": [{"type": "file", "file": {"file_data": "x"}}]}, "file_data"),
        ({"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}, "pixels": 3}]}, "content[0].pixels"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x", "fps": 1}]}, "content[0].fps"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "fps": 1}]}, "content[0].fps"),
        ({"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x", "fps": 1}, "fps": 2}]}, "twice"),
        ({"role": "user", "content": [{"type": "video_url", "video_url": "x", "fps": 1, "num_frames": 2}]}, "give one"),
        ({"role": "user", "content": [3]}, "messages[0].content[0]: 3"),
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(message: Any, fault: str) -> None:
    assert fault in str(refused(messages=[message]))
