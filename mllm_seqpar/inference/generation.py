"""Asking about an encoded video: the prompt, generation over sharded features, and the text as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

from mllm_seqpar._logging import get_logger
from mllm_seqpar.data.chat_family import VIDEO_MARK, ChatFamily, ChatText, StoredFrames, chat_family
from mllm_seqpar.errors import ConfigError

from .encoding import EncodedVideo

_VIDEO = {"type": "video"}
_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: at most.
        temperature: 0 takes the most likely token each time; above, tokens are drawn.
        top_p: draw among the most likely tokens that have this much probability together.
        seed: of the draws; every question begins with it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            "max_new_tokens": (self.max_new_tokens > 0, "1 or more"),
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "more than 0 and at most 1"),
        }
        for name, (good, allowed) in rules.items():
            if not good:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is not allowed; give {allowed}")

    def for_generate(self) -> dict[str, Any]:
        """Arguments of `generate`; None takes back what a model's own generation config says."""
        draws = self.temperature > 0
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": draws,
            "temperature": self.temperature if draws else None,
            "top_p": self.top_p if draws else None,
            "top_k": 0 if draws else None,
            "num_beams": 1,
        }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model said, the same on every rank.

    Attributes:
        text: without special tokens.
        tokens: the generated token ids, the end's included.
        prompt_tokens: length of the prompt.
        prefill_seconds: until the first token.
        decode_seconds: for the others.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float


def answer(
    model: nn.Module,
    processor: Any,
    question: str,
    video: EncodedVideo,
    sampling: Sampling | None = None,
    *,
    on_text: Callable[[str], object] | None = None,
) -> Answer:
    """Answers a question about a video. Every rank of the model's group calls it with the same question.

    Args:
        model: patched by `patch_model`, over the group that encoded the video.
        processor: of that model; its family writes the prompt.
        question: the user's words; the video goes before them, unless they say themselves where, by "<|video|>".
        video: from `encode_video`, or read from a store. Nothing of it is changed: ask as often as you like.
        sampling: the most likely tokens by default.
        on_text: called with each piece of text as it is generated.

    Raises:
        AgreementError: the ranks ask different things.
    """
    sampling = sampling or Sampling()
    family = chat_family(processor)
    text = prompt_of(family, question, video)
    prompt = {name: value.to(video.features.device) for name, value in family.arguments(text).items()}
    length = text.input_ids.shape[1]
    _warn_if_long(model, length + sampling.max_new_tokens)
    streamer = TextPieces(processor.tokenizer, on_text)
    torch.manual_seed(sampling.seed)
    output = model.generate(  # type: ignore[operator]
        **prompt,
        **family.feature_arguments(model, video.features, video.shard),
        use_cache=True,
        streamer=streamer,
        **family.generation(model),
        **sampling.for_generate(),
    )
    tokens = output[0, length:].tolist()
    return Answer(
        text=processor.tokenizer.decode(tokens, skip_special_tokens=True),
        tokens=tokens,
        prompt_tokens=length,
        prefill_seconds=streamer.prefill_seconds,
        decode_seconds=streamer.decode_seconds,
    )


def prompt_of(family: ChatFamily, question: str, video: EncodedVideo) -> ChatText:
    """The prompt of a question about a video."""
    parts = [part for piece in question.split(VIDEO_MARK) for part in ({"type": "text", "text": piece}, _VIDEO)][:-1]
    if len(parts) == 1:
        parts = [_VIDEO, *parts]
    source = StoredFrames(video.frames, None) if video.source is None else video.source
    messages = [{"role": "user", "content": [part for part in parts if part.get("text") != ""]}]
    return family.text([messages], [[source]], add_generation_prompt=True)


def _warn_if_long(model: Any, length: int) -> None:
    config = getattr(model, "config", None)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None and config is not None:
        longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and length > longest:
        _log.warning(
            "prompt and answer may take %d tokens, one per frame among them; the model was made for %d: take fewer "
            "frames",
            length,
            longest,
        )


class TextPieces(BaseStreamer):
    """Turns tokens into text as they come, and keeps the time.

    Decoding a token needs those before it (whether a space precedes it, say), but not many: tokens are decoded together
    with the piece before, once with and once without. A piece is held back while its last character is incomplete:
    byte-level tokens may end inside one.
    """

    def __init__(self, tokenizer: Any, on_text: Callable[[str], object] | None) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._tokens: list[int] = []  # of the piece written last, and of what is not written yet
        self._written = 0  # how many of them are the former
        self._times = [time.perf_counter()]

    @property
    def prefill_seconds(self) -> float:
        """From the start to the first token."""
        return self._times[1] - self._times[0] if len(self._times) > 1 else 0.0

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self._times[-1] - self._times[1] if len(self._times) > 1 else 0.0

    def put(self, value: Tensor) -> None:
        """Takes the prompt first, then one token at a time."""
        if value.dim() > 1:
            return
        self._times.append(time.perf_counter())
        self._tokens += value.tolist()
        self._write(complete_only=True)

    def end(self) -> None:
        """Writes what is held back."""
        self._write(complete_only=False)

    def _write(self, complete_only: bool) -> None:
        if self._on_text is None:
            return
        before, text = self._decode(self._tokens[: self._written]), self._decode(self._tokens)
        if len(text) <= len(before) or (complete_only and text.endswith("\N{REPLACEMENT CHARACTER}")):
            return
        self._on_text(text[len(before) :])
        self._tokens = self._tokens[self._written :]
        self._written = len(self._tokens)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
