"""OpenAI's chat completions: the requests that this server reads, and their errors.

The fields are those of the public API reference (POST /v1/chat/completions), and those that clients of vLLM and of
transformers add. A field that this server cannot honour is refused by name; a field that never changes an answer is
ignored, and the response says so.
"""

from __future__ import annotations

import json
import reprlib
import secrets
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.inference.generation import Sampling

from .schema import Body, MediaReference, TextPart

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
class ChatRequest:
    """A valid request.

    Attributes:
        messages: with parts of type text and {"type": "media"}, in the order of `media`.
        frames: the sampling of videos whose part states none.
        ignored: the names of the fields that have no effect.
    """

    model: str
    messages: list[dict[str, Any]]
    media: tuple[MediaReference, ...]
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    evidence: int = 0
    frames: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def read_request(body: Any, defaults: Sampling) -> ChatRequest:
    """Return the request in a decoded JSON body; `defaults` has what it does not state.

    Raises:
        ApiError: 400, with the name of the field.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object")
    ignored = [name for name in body if name in IGNORED and body[name] is not None]
    fields = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name in NEUTRAL.keys() & fields.keys():
        if (value := fields.pop(name)) not in NEUTRAL[name]:
            raise ApiError(400, f"{name}: {_short(value)} is not supported by this server; leave it out", param=name)
    try:
        asked = Body.model_validate(fields)
    except ValidationError as error:
        raise _as_api_error(error) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options: with stream=true only", param="stream_options")
    if asked.messages[-1].role != "user":
        raise ApiError(
            400, "messages: the last message is not the user's, so there is nothing to answer", param="messages"
        )
    messages, media = [], []
    for number, message in enumerate(asked.messages):
        parts: list[dict[str, Any]] = []
        for index, part in enumerate(message.content):
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text})
            else:
                parts.append({"type": "media"})
                media.append(part.reference(f"messages[{number}].content[{index}]"))
                ignored += part.ignored()
        messages.append({"role": message.role.replace("developer", "system"), "content": parts})
    return ChatRequest(
        model=asked.model,
        messages=messages,
        media=tuple(media),
        sampling=_sampling(asked, defaults),
        stop=tuple(asked.stop),
        stream=asked.stream,
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        evidence=asked.evidence,
        frames=asked.media_io_kwargs.video.given() | asked.mm_processor_kwargs.given(),
        ignored=tuple(dict.fromkeys(ignored)),
    )


def _sampling(asked: Body, defaults: Sampling) -> Sampling:
    lengths = {asked.max_tokens, asked.max_completion_tokens} - {None}
    if len(lengths) > 1:
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    own = {"max_new_tokens": next(iter(lengths), None), "min_new_tokens": asked.min_tokens}
    values = {name: value for name, value in own.items() if value is not None}
    values = vars(defaults) | asked.generation_config.given() | asked.given() | values
    values["seed"] = secrets.randbits(62) if asked.seed is None else asked.seed
    try:
        return Sampling(**values)
    except ConfigError as error:
        text = str(error).replace("max_new_tokens", "max_tokens").replace("min_new_tokens", "min_tokens")
        raise ApiError(400, text, param=text.partition(":")[0]) from error


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
