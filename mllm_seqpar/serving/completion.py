"""OpenAI's chat completion object and chat completion chunks, which are the responses to a request."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from mllm_seqpar.inference.generation import Answer


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
