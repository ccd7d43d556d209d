"""OpenAI's chat completions: the requests that this server reads, the responses to them, and their errors.

The fields are those of the public API reference (POST /v1/chat/completions), and those that clients of vLLM and of
transformers add. pydantic models describe them with their types and ranges. A field that this server cannot honour is
refused by name; a field that never changes an answer is ignored, and the response says so. A number is not read from a
text, and null stands for a field that is left out.
"""

from __future__ import annotations

import json
import reprlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from mllm_seqpar.chats.chat import Allowed, Chat, MessageError, with_members
from mllm_seqpar.chats.clip import Clip
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.inference.generation import Answer, Sampling
from mllm_seqpar.videos.frame_choice import FrameChoice

IGNORED = {
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store", "prediction"),
    *("service_tier", "parallel_tool_calls", "priority", "request_id", "cache_salt", "include_reasoning"),
}
"""Fields that never change an answer."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "chat_template_kwargs": ({}, {"enable_thinking": False}, {"thinking": False}),
}
"""Fields that are accepted with a value that has no effect."""


class ApiError(Exception):
    """A response with an HTTP status of 400 or more, in OpenAI's format; `headers` are added to it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.kind, self.headers = status, param, code, kind, headers

    def at(self, where: str) -> ApiError:
        """Return the error with the part of the request that it belongs to."""
        text = f"{where}: {self}"
        return ApiError(self.status, text, param=where, code=self.code, kind=self.kind, headers=self.headers)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


_PARTS = Allowed(
    sources={"image_url": ("url",), "video_url": ("url",), "file": ("file_id",)}, files=True, other_keys=False
)
"""The parts of messages besides texts, with the members of their objects; a file is an uploaded video or image."""

MOMENTS = 100
"""The most moments that a request may ask for."""

MOST_VALUES = 200_000
"""The most values of a body, of which each takes memory; commas and colons in its texts count as values."""

_MOST = 2**31 - 1


class _Object(BaseModel):
    """A JSON object; null stands for a field that is left out, and numbers are not read from texts."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return cls.prepare({name: value for name, value in given.items() if value is not None})

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the fields in the form of this class."""
        return given


class _Frames(_Object):
    """Which frames of a video are used (`FrameChoice`)."""

    fps: float | None = None
    num_frames: int | None = Field(default=None, le=_MOST)
    max_frames: int | None = Field(default=None, le=_MOST)
    start: float | None = None
    end: float | None = None

    @model_validator(mode="after")
    def _check_frames(self) -> Self:
        self.frames()  # raises ConfigError, which pydantic reports as a fault
        return self

    def frames(self) -> FrameChoice:
        return FrameChoice(**self.model_dump())


class _SamplingFields(_Object):
    """The sampling options, with the names and the meaning of transformers' `generate`."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=-1, le=_MOST)
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, Any]:
        values = self.model_dump(include={*_SamplingFields.model_fields}, exclude_none=True)
        return values | ({"top_k": 0} if self.top_k == -1 else {})  # vLLM's "all"


class _GenerationConfig(_SamplingFields):
    """What `transformers chat` sends: the fields of a GenerationConfig that are not the default, as JSON."""

    do_sample: bool | None = None
    max_new_tokens: int | None = Field(default=None, gt=0, le=_MOST)
    min_new_tokens: int | None = Field(default=None, ge=0, le=_MOST)
    num_beams: Literal[1] = 1
    use_cache: Literal[True] = True

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, given: Any) -> Any:
        return from_json(given, allow_inf_nan=False) if isinstance(given, str) else given

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in given.items() if name != "transformers_version" and not name.startswith("_")}

    def given(self) -> dict[str, Any]:
        values = self.model_dump(include={"max_new_tokens", "min_new_tokens"}, exclude_none=True) | super().given()
        if self.do_sample is not None:  # the other values are the defaults of transformers
            values = {"temperature": 1.0, "top_k": 50} | values if self.do_sample else values | {"temperature": 0.0}
        return values


class _StreamOptions(_Object):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


class _MediaOptions(_Object):
    video: _Frames = _Frames()


class ChatRequest(_SamplingFields):
    """A valid body of a request. `read_request` removes the fields that have no effect, and names them in `ignored`."""

    model: str = ""
    messages: list[Any] = Field(min_length=1)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=4)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    max_tokens: int | None = Field(default=None, gt=0, le=_MOST)
    max_completion_tokens: int | None = Field(default=None, gt=0, le=_MOST)
    min_tokens: int | None = Field(default=None, ge=0, le=_MOST)
    evidence: int = Field(default=0, ge=0, le=MOMENTS)
    generation_config: _GenerationConfig = _GenerationConfig()
    mm_processor_kwargs: _Frames = _Frames()
    media_io_kwargs: _MediaOptions = _MediaOptions()
    _ignored: Sequence[str] = ()
    _chat: Chat = Chat(())

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        return given | ({"stop": [given["stop"]]} if isinstance(given.get("stop"), str) else {})

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of the fields that have no effect."""
        return tuple(dict.fromkeys(self._ignored))

    def media(self) -> dict[str, Clip]:
        """Return the media of the messages, by their places in the request."""
        return {
            f"messages[{number}].content[{index}]": part
            for number, turn in enumerate(self._chat.turns)
            for index, part in enumerate(turn.parts)
            if isinstance(part, Clip)
        }

    def conversation(self, kinds: Iterable[str]) -> list[dict[str, Any]]:
        """Return the messages for the model, given whether each of `media` is a video or an image."""
        return self._chat.with_media(map(Clip, kinds)).to_json()

    def frames(self) -> FrameChoice:
        """Return which frames of its videos are used, as far as their parts state nothing else."""
        return self.mm_processor_kwargs.frames().over(self.media_io_kwargs.video.frames())

    def sampling(self, defaults: Sampling) -> Sampling:
        """Return the sampling options, with `defaults` for what the request does not state; raise ApiError 400."""
        lengths = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(lengths) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
        own = {"max_new_tokens": next(iter(lengths), None), "min_new_tokens": self.min_tokens}
        values = {name: value for name, value in own.items() if value is not None}
        values = vars(defaults) | self.generation_config.given() | self.given() | values
        values["seed"] = secrets.randbits(62) if self.seed is None else self.seed
        try:
            return Sampling(**values)
        except ConfigError as error:
            text = str(error).replace("max_new_tokens", "max_tokens").replace("min_new_tokens", "min_tokens")
            raise ApiError(400, text, param=text.partition(":")[0]) from error


def parse(body: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ApiError: 400 if it is not JSON in UTF-8, 413 if it has too many values.
    """
    if sum(_count(body, sign) for sign in (b",", b"[", b"{", b":")) > MOST_VALUES:
        raise ApiError(
            413, f"the body has more than {MOST_VALUES} values or commas; upload files, or send less", code="too_large"
        )
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON ({error})") from error


def _count(body: bytes, sign: bytes) -> int:
    """Return how often a sign occurs, or more than `MOST_VALUES`; `find` is faster in a long URL than `count`."""
    position = count = 0
    while count <= MOST_VALUES and (position := body.find(sign, position) + 1):
        count += 1
    return count


def read_request(body: Any) -> ChatRequest:
    """Return the request in a decoded JSON body.

    Raises:
        ApiError: 400, with the name of the field.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    ignored = [name for name in fields if name in IGNORED]
    for name in ignored:
        del fields[name]
    for name in NEUTRAL.keys() & fields.keys():
        if (value := fields.pop(name)) not in NEUTRAL[name]:
            raise ApiError(400, f"{name}: {_short(value)} is not supported by this server; leave it out", param=name)
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise _as_api_error(error) from error
    request._chat = _read_chat(request.messages, ignored)
    request._ignored = ignored
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options: with stream=true only", param="stream_options")
    if request._chat.turns[-1].role != "user":
        raise ApiError(
            400, "messages: the last message is not the user's, so there is nothing to answer", param="messages"
        )
    return request


def _read_chat(messages: list[Any], ignored: list[str]) -> Chat:
    """Return the conversation of a request; add to `ignored` the names of the fields that have no effect."""
    try:
        plain = [_plain_message(number, message, ignored) for number, message in enumerate(messages)]
        chat = Chat.parse(plain, _PARTS)
        for number, turn in enumerate(chat.turns):
            for index, part in enumerate(turn.parts):
                frames = part.frames if isinstance(part, Clip) else FrameChoice()
                for name in ("num_frames", "max_frames"):
                    if (getattr(frames, name) or 0) > _MOST:
                        raise MessageError(f"has a {name} above {_MOST}; give a smaller one", [number, index, name])
    except MessageError as error:
        number, *place = error.place
        where = f"messages[{number}]"
        if place and isinstance(place[0], int):
            where += f".content[{place.pop(0)}]"
        where = ".".join([where, *map(str, place)])
        raise ApiError(400, f"{where}: {error.fault}", param=where) from error
    return chat


def _plain_message(number: int, message: Any, ignored: list[str]) -> Any:
    if not isinstance(message, Mapping):
        return message
    # Clients send back what they received, with fields that are empty.
    known = {name: x for name, x in message.items() if name in ("role", "content") or (x and name != "annotations")}
    if known.get("role") == "developer":
        known["role"] = "system"
    if known.get("role") == "assistant" and known.get("content") is None:
        known["content"] = ""
    content = known.get("content")
    if isinstance(content, str):
        known["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        known["content"] = [_plain_part([number, index], part, ignored) for index, part in enumerate(content)]
    return known


def _plain_part(place: Sequence[int], part: Any, ignored: list[str]) -> Any:
    """Return a part whose members are those of its object too, such as {"url": "x", "fps": 1}."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _PARTS.sources:
        return part
    if not isinstance(part.get(kind), (Mapping, str) if kind != "file" else Mapping):
        raise MessageError(f"has a part whose {kind} is not an object", place)
    try:
        given = with_members(part, kind)
    except DataError as error:
        raise MessageError(str(error), place) from error
    unused = {name: given.pop(name, None) for name in ("uuid", "detail") if name == "uuid" or kind == "image_url"}
    for name, value in [*unused.items(), *((name, given.get(name)) for name in _PARTS.sources[kind] or ())]:
        if value is not None and (not isinstance(value, str) or (value == "" and name not in unused)):
            raise MessageError(f"has a part with the {name} {_short(value)}; expected a text", [*place, name])
    ignored += [name for name, value in unused.items() if value is not None and (name, value) != ("detail", "auto")]
    return given


def _as_api_error(error: ValidationError) -> ApiError:
    """Return the first fault as a sentence: where, what was found, what is allowed."""
    faults = error.errors(include_url=False, include_context=False)
    fault = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    where, previous = "", None
    for item in fault["loc"]:
        if isinstance(item, int):
            where += f"[{item}]"
        elif not (isinstance(previous, int) and where.endswith("]") and ".content[" in where):  # the kind of a part
            where += f".{item}" if where else item
        previous = item
    given, reason = _short(fault["input"]), fault["msg"].removeprefix("Value error, ")
    if fault["type"] in ("model_type", "model_attributes_type"):
        reason = "expected a JSON object"
    if fault["type"] == "extra_forbidden":
        text = f"{where}: unknown field; leave it out"
    elif fault["type"] == "missing":
        text = f"{where}: is missing"
    else:
        text = f"{where}: {given} is not allowed; {reason[:1].lower()}{reason[1:]}"
    top = fault["loc"][0] if fault["loc"] else None
    return ApiError(400, text, param=where if top == "messages" else str(top))


def _short(value: Any) -> str:
    text = json.dumps(value[:100]) if isinstance(value, str) else reprlib.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class Completion:
    """The response to the request `request_id`, as one object or as chunks; all have the same time."""

    def __init__(self, model: str, request_id: str, include_usage: bool = False) -> None:
        self._model, self._include_usage = model, include_usage
        self._id, self._created = f"chatcmpl-{request_id}", int(time.time())

    def whole(self, reply: Answer) -> dict[str, Any]:
        """Return the chat completion object."""
        message = {"role": "assistant", "content": reply.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
        return self._object("chat.completion", [choice]) | {"usage": usage_of(reply)} | _evidence(reply)

    def first(self) -> str:
        """Return the first chunk, which has the role."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def piece(self, text: str) -> str:
        return self._chunk({"content": text})

    def last(self, reply: Answer) -> str:
        """Return the last chunks: the reason of the end, the usage if it was asked for, and [DONE]."""
        text = self._chunk({}, reply.finish_reason, _evidence(reply))
        if self._include_usage:
            text += server_sent(self._object("chat.completion.chunk", []) | {"usage": usage_of(reply)})
        return text + "data: [DONE]\n\n"

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, further: dict[str, Any] | None = None
    ) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return server_sent(self._object("chat.completion.chunk", [choice]) | usage | (further or {}))

    def _object(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        same = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**same, "choices": choices, "system_fingerprint": None}


def server_sent(value: Any) -> str:
    """Return a server-sent event with `value` as JSON."""
    return f"data: {json.dumps(value)}\n\n"


def _evidence(reply: Answer) -> dict[str, Any]:
    """Return the fields that `evidence` of the request asked for: the moments, or why there are none."""
    names = ("start", "end", "share", "first", "last", "peak", "medium")
    if reply.evidence is None:
        return {}
    moments = [{name: getattr(moment, name) for name in names} for moment in reply.evidence.moments]
    return {"evidence": moments} if moments else {"evidence_note": reply.evidence.note}


def usage_of(reply: Answer) -> dict[str, Any]:
    tokens = len(reply.tokens)
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": reply.prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }
