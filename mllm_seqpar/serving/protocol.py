"""OpenAI's chat completions: requests that are read, and responses and errors that are written.

The fields are those of the public API reference (POST /v1/chat/completions, the chat completion object, the chat
completion chunk object). A field that this server cannot honour is refused by name; only fields that never change an
answer are ignored.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.inference.conversation import Reply
from mllm_seqpar.inference.generation import Sampling

IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store"}
"""Fields that never change an answer."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
"""Fields that are accepted with a value that asks for nothing."""

MOMENTS = 100
"""The most moments that a request may ask for."""

_READ = {"model", "messages", "stream", "stream_options", "temperature", "top_p", "stop", "seed"}
_READ |= {"max_tokens", "max_completion_tokens", "evidence"}
_MEDIA = {"image_url": "image", "video_url": "video", "file": None}
_SAMPLING = {"fps": (int, float), "num_frames": (int,), "max_frames": (int,)}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ApiError(Exception):
    """A response with an HTTP status of 400 or more, in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.kind = status, param, code, kind

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class MediaReference:
    """A media part as the request names it: by URL or by the id of an uploaded file.

    Attributes:
        kind: "video", "image", or None for that of the uploaded file.
        url: data:, http(s):, file: or a path.
        file_id: of an uploaded file.
        sampling: fps, num_frames, max_frames of a video, as far as they are given.
        param: the part of the request, for messages.
    """

    kind: str | None
    url: str | None = None
    file_id: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    param: str


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A valid request; `messages` have parts of type text and {"type": "media"}, in the order of `media`."""

    model: str
    messages: list[dict[str, Any]]
    media: tuple[MediaReference, ...]
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    evidence: int = 0


def read_request(body: Any, defaults: Sampling) -> ChatRequest:
    """Return the request in a decoded JSON body; `defaults` has what it does not state.

    Raises:
        ApiError: 400, with the name of the field.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object")
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, value in given.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise ApiError(400, f"{name}: {_short(value)} is not supported by this server; leave it out", param=name)
        if name not in _READ and name not in NEUTRAL:
            raise ApiError(400, f"{name}: this server does not know this field; leave it out", param=name)
    stream, usage = given.get("stream", False), given.get("stream_options", {})
    if not isinstance(stream, bool):
        raise ApiError(400, f"stream: {_short(stream)} is not true or false", param="stream")
    if not isinstance(usage, dict) or (usage and not stream):
        raise ApiError(400, "stream_options: an object, with stream=true only", param="stream_options")
    messages, media = _read_messages(given.get("messages"))
    return ChatRequest(
        model=str(given.get("model", "")),
        messages=messages,
        media=tuple(media),
        sampling=_read_sampling(given, defaults),
        stop=_read_stop(given.get("stop", ())),
        stream=stream,
        include_usage=bool(usage.get("include_usage")),
        evidence=_read_evidence(given.get("evidence", 0)),
    )


def _read_evidence(given: Any) -> int:
    """Return the number of moments that the request asks for; the field is this server's own."""
    if type(given) is not int or not 0 <= given <= MOMENTS:
        raise ApiError(
            400, f"evidence: {_short(given)}; expected a number of moments from 0 to {MOMENTS}", param="evidence"
        )
    return given


def _read_sampling(given: Mapping[str, Any], defaults: Sampling) -> Sampling:
    lengths = {given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(lengths) > 1:
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    values = {"max_new_tokens": next(iter(lengths), defaults.max_new_tokens)}
    values |= {name: given.get(name, getattr(defaults, name)) for name in ("temperature", "top_p")}
    values["seed"] = given.get("seed", secrets.randbits(62))
    for name, kinds in {
        "max_new_tokens": (int,),
        "seed": (int,),
        "temperature": (int, float),
        "top_p": (int, float),
    }.items():
        shown = "max_tokens" if name == "max_new_tokens" else name
        if type(values[name]) not in kinds or not math.isfinite(values[name]):
            raise ApiError(400, f"{shown}: {_short(values[name])} is not a number of the right kind", param=shown)
    if not 0 <= values["seed"] < 2**63:
        raise ApiError(400, f"seed: {values['seed']} is not allowed; give 0 or more, below 2**63", param="seed")
    if values["temperature"] > 2:
        raise ApiError(400, f"temperature: {values['temperature']} is not allowed; give 0 to 2", param="temperature")
    try:
        return Sampling(**values)
    except ConfigError as error:
        name = str(error).partition(":")[0].replace("max_new_tokens", "max_tokens")
        raise ApiError(400, str(error).replace("max_new_tokens", "max_tokens"), param=name) from error


def _read_stop(given: Any) -> tuple[str, ...]:
    stop = (given,) if isinstance(given, str) else given
    if not isinstance(stop, (list, tuple)) or len(stop) > 4 or not all(isinstance(x, str) and x for x in stop):
        raise ApiError(400, "stop: expected a text, or up to 4 texts that are not empty", param="stop")
    return tuple(stop)


def _read_messages(given: Any) -> tuple[list[dict[str, Any]], list[MediaReference]]:
    if not isinstance(given, list) or not given:
        raise ApiError(400, "messages: expected a list with at least one message", param="messages")
    messages, media = [], []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise ApiError(400, f"{where}.role: {_short(role)}; expected one of {', '.join(_ROLES)}", param=where)
        if unknown := [name for name, x in message.items() if x and name not in ("role", "content", "annotations")]:
            raise ApiError(400, f"{where}.{unknown[0]}: not supported by this server; leave it out", param=where)
        content = message.get("content")
        if content is None and role == "assistant":
            content = ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list) or not parts:
            raise ApiError(400, f"{where}.content: expected a text or a list of parts", param=where)
        read = [_read_part(part, role, f"{where}.content[{index}]") for index, part in enumerate(parts)]
        media += [part for part in read if isinstance(part, MediaReference)]
        contents = [{"type": "media"} if isinstance(part, MediaReference) else part for part in read]
        messages.append({"role": _ROLES[role], "content": contents})
    if messages[-1]["role"] != "user":
        raise ApiError(
            400, "messages: the last message is not the user's, so there is nothing to answer", param="messages"
        )
    return messages, media


def _read_part(part: Any, role: str, where: str) -> MediaReference | dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in _MEDIA:
        known = ", ".join(("text", *_MEDIA))
        raise ApiError(400, f"{where}: {_short(kind)} is not a part of this server; expected {known}", param=where)
    if role != "user":
        raise ApiError(400, f"{where}: only a message of the user shows media", param=where)
    value = part.get(kind)
    value = {"url": value} if isinstance(value, str) and kind != "file" else value
    names = {"file_id", *_SAMPLING} if kind == "file" else {"url", *_SAMPLING}
    if not isinstance(value, dict):
        raise ApiError(400, f"{where}.{kind}: expected an object", param=where)
    given = {name: x for name, x in value.items() if x is not None and name != "detail"}
    if unknown := sorted(set(given) - names):
        raise ApiError(400, f"{where}.{kind}.{unknown[0]}: not supported; expected {sorted(names)}", param=where)
    target = given.pop("file_id" if kind == "file" else "url", None)
    if not isinstance(target, str) or not target:
        raise ApiError(400, f"{where}.{kind}: has no {'file_id' if kind == 'file' else 'url'}", param=where)
    for name, number in given.items():
        if type(number) not in _SAMPLING[name] or not (math.isfinite(number) and number > 0):
            raise ApiError(400, f"{where}.{kind}.{name}: {_short(number)} is not a number above 0", param=where)
    if "fps" in given and "num_frames" in given:
        raise ApiError(400, f"{where}.{kind}: both fps and num_frames; give one of them", param=where)
    if kind == "image_url" and given:
        raise ApiError(400, f"{where}.{kind}.{next(iter(given))}: only a video takes it", param=where)
    names_file = {"file_id": target} if kind == "file" else {"url": target}
    return MediaReference(kind=_MEDIA[kind], **names_file, sampling=given, param=where)


class Completion:
    """The response to one request, as one object or as chunks; all have the same id and time."""

    def __init__(self, model: str, include_usage: bool = False) -> None:
        self._model, self._include_usage = model, include_usage
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())

    def whole(self, reply: Reply) -> dict[str, Any]:
        """Return the chat completion object."""
        message = {"role": "assistant", "content": reply.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
        return self._object("chat.completion", [choice]) | {"usage": usage_of(reply)} | _evidence(reply)

    def first(self) -> str:
        """Return the first chunk, which has the role."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def piece(self, text: str) -> str:
        return self._chunk({"content": text})

    def last(self, reply: Reply) -> str:
        """Return the last chunks: the reason of the end, the usage if it was asked for, and [DONE]."""
        text = self._chunk({}, reply.finish_reason, _evidence(reply))
        if self._include_usage:
            text += event(self._object("chat.completion.chunk", []) | {"usage": usage_of(reply)})
        return text + "data: [DONE]\n\n"

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, further: dict[str, Any] | None = None
    ) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return event(self._object("chat.completion.chunk", [choice]) | usage | (further or {}))

    def _object(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        same = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**same, "choices": choices, "system_fingerprint": None}


def event(value: Any) -> str:
    """Return a server-sent event with `value` as JSON."""
    return f"data: {json.dumps(value)}\n\n"


def _evidence(reply: Reply) -> dict[str, Any]:
    """Return the fields that `evidence` of the request asked for: the moments, or why there are none."""
    names = ("start", "end", "share", "first", "last", "medium")
    moments = [{name: getattr(moment, name) for name in names} for moment in reply.evidence]
    note = {"evidence_note": reply.evidence_note} if reply.evidence_note else {}
    return ({"evidence": moments} if moments else {}) | note


def usage_of(reply: Reply) -> dict[str, Any]:
    tokens = len(reply.tokens)
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": reply.prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
