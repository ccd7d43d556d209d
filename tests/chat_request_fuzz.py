"""Random bodies of chat completion requests for a live server, each followed by a good request."""

from __future__ import annotations

import base64
import copy
import json
import random
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from launch import HANG

NUMBERS = [0, 1, 2, -1, 3, 5, 0.0, 0.5, 1.0, 1.5, -0.5, 2.0, 1e-9, 1e-300, 5e-324, 1e30, 1e308]
NUMBERS += [2**31, 2**63, 10**30, -(2**70)]
TEXTS = ["", "x", "1", "2", "auto", "none", "\n", "\0", "\N{SNOWMAN}", "\ud800", "a" * 3000, "{", "[]"]
TEXTS += ["<|im_end|>", "<|image|>", "<image>"]
USUAL = [0, 1, 2, 0.1, 0.5, 0.9, 1.0, 1.2, 5]
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
OTHER = """
seed stop max_completion_tokens min_tokens n stream stream_options evidence logprobs presence_penalty frequency_penalty
tools tool_choice response_format logit_bias user metadata generation_config model foo chat_template_kwargs
mm_processor_kwargs media_io_kwargs best_of priority ignore_eos modalities
""".split()
INNER = [
    "fps",
    "num_frames",
    "max_frames",
    "type",
    "text",
    "url",
    "video",
    "include_usage",
    "do_sample",
    "x",
    *SAMPLING,
]
URLS = ["clip.mp4", "none.mp4", "../x", "data:,x", "data:;base64,QUJD", "http://127.0.0.1:1/", "file:///etc/passwd"]
URLS += ["\ud800", "C:x", "http://[", "//[x", "file://[x", "a" * 3000, "clip.mp4/x"]
URLS += ["subfile,,start,0,end,9,,:/etc/passwd"]
LENGTH = 4


class Bodies:
    """Random bodies; about half of them are valid but for one or two values."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._random = random.Random(seed)
        image = base64.b64encode(next(folder.glob("*.mp4")).read_bytes()).decode()
        self._urls = [*URLS, "data:video/mp4;base64," + image]

    def value(self, depth: int = 0) -> Any:
        """Return any JSON value."""
        draw = self._random
        kinds = ["number", "text", "flag", "none"] + (["list", "object"] if depth < 4 else [])
        kind = draw.choice(kinds)
        if kind == "number":
            return draw.choice([*NUMBERS, draw.uniform(-3, 3), draw.randint(-3, 300)])
        if kind == "text":
            return draw.choice(TEXTS)
        if kind == "list":
            return [self.value(depth + 1) for _ in range(draw.randint(0, 4))]
        if kind == "object":
            return {draw.choice(INNER): self.value(depth + 1) for _ in range(draw.randint(0, 4))}
        return draw.choice([True, False]) if kind == "flag" else None

    def number(self) -> Any:
        return self._random.choice([*USUAL * 5, *NUMBERS, self._random.uniform(0, 2)])

    def part(self) -> Any:
        draw = self._random
        kind = draw.choice(["text", "text", "video_url", "video_url", "image_url", "file", "input_audio"])
        url, file_id = draw.choice(["clip.mp4", *self._urls]), draw.choice(TEXTS)
        inner: Any = {"url": url} if kind.endswith("url") else {"file_id": file_id}
        part = {"type": kind, kind: draw.choice(TEXTS) if kind == "text" else inner}
        for place in (part, inner):
            if draw.random() < 0.3:
                place[draw.choice(["fps", "num_frames", "max_frames", "detail", "uuid", "x"])] = self.number()
        return part if draw.random() < 0.9 else self.value()

    def message(self) -> Any:
        draw = self._random
        content = draw.choice([draw.choice(TEXTS), [self.part() for _ in range(draw.randint(0, 3))], self.value()])
        roles = ["user", "user", "system", "assistant", "developer", "tool"]
        message = {"role": draw.choice(roles), "content": content}
        if draw.random() < 0.1:
            message[draw.choice(["name", "tool_calls", "refusal", "x"])] = self.value()
        return message if draw.random() < 0.95 else self.value()

    def origin(self) -> str | None:
        """Return the header Origin, which most requests do not have."""
        return self._random.choice([*[None] * 30, "http://[", "null"])

    def body(self) -> Any:
        draw = self._random
        body: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": LENGTH}
        if draw.random() < 0.5:
            body["messages"] = [self.message() for _ in range(draw.randint(0, 3))] + [{"role": "user", "content": "?"}]
        for _ in range(draw.randint(0, 3)):
            body[draw.choice(SAMPLING)] = self.number()
        if draw.random() < 0.5:
            body[draw.choice([*OTHER, *SAMPLING, "messages"])] = self.value()
        return body if draw.random() < 0.98 else self.value()


def status(url: str, body: bytes, origin: str | None = None) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"} | ({} if origin is None else {"Origin": origin})
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=HANG) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def fuzz(url: str, folder: Path, seed: int, count: int) -> Counter[int]:
    """Send random bodies, a good request after each; return how often each status was the answer.

    Args:
        url: of the server, which has the folder as its --media_root.
        folder: with a file clip.mp4.
    """
    bodies, statuses = Bodies(folder, seed), Counter[int]()
    good = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}).encode()
    for number in range(count):
        body = bodies.body()
        code, answer = status(url, json.dumps(body).encode(), bodies.origin())
        statuses[code] += 1
        assert code < 500, (number, code, answer, copy.deepcopy(body))
        assert status(url, good)[0] == 200, (number, body)
    return statuses
