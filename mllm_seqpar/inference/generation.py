"""Generation of an answer to a question about an encoded video: prompt, sampling, and streamed text."""

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
from .moments import Moment

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options of an answer.

    Attributes:
        max_new_tokens: maximum length of the answer.
        temperature: 0 always takes the most likely token; above 0, tokens are sampled.
        top_p: sample from the most likely tokens whose probabilities sum to this value.
        seed: set before each question.
        top_k: sample from this many of the most likely tokens; 0 for all.
        min_p: sample from the tokens that are at least this fraction as likely as the most likely one; None for the
            value of the model's own generation config.
        repetition_penalty: divides the scores of tokens that the prompt or the answer has; None as for `min_p`.
        min_new_tokens: the answer does not end before it has this many tokens.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        # Scores that are divided by almost nothing overflow, and the probabilities then become NaN.
        penalty = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        for name, valid, allowed in (
            ("max_new_tokens", self.max_new_tokens > 0, "1 or more"),
            ("temperature", self.temperature == 0 or self.temperature >= 1e-6, "0, or 1e-6 or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", 0.01 <= penalty <= 100, "0.01 to 100"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "0 to max_new_tokens"),
        ):
            if not valid:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is not allowed; give {allowed}")

    def generate_arguments(self) -> dict[str, Any]:
        """Return the arguments of `generate`; None overrides a value of the model's own generation config."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "num_beams": 1}
        if self.repetition_penalty is not None:
            options["repetition_penalty"] = float(self.repetition_penalty)  # transformers rejects integers
        if self.min_new_tokens:
            options["min_new_tokens"] = self.min_new_tokens
        if self.temperature == 0:
            return options | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if self.min_p is not None:
            options["min_p"] = float(self.min_p)
        options |= {"temperature": float(self.temperature), "top_p": float(self.top_p)}
        return options | {"do_sample": True, "top_k": self.top_k}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one question, equal on all ranks except for the times.

    Attributes:
        text: without special tokens.
        tokens: the generated token ids, including the end token.
        prompt_tokens: length of the prompt.
        prefill_seconds: time to the first token.
        decode_seconds: time from the first token to the last.
        evidence: the moments that it attends to most, if they were asked for (`evidence.answer_with_evidence`).
        evidence_note: why there are no moments although they were asked for.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    evidence: tuple[Moment, ...] = ()
    evidence_note: str = ""


def answer(
    model: nn.Module,
    processor: Any,
    question: str,
    video: EncodedVideo,
    sampling: Sampling | None = None,
    *,
    on_text: Callable[[str], object] | None = None,
) -> Answer:
    """Answer a question about a video. Every rank of the model's group calls this with the same question.

    Args:
        model: patched by `patch_model`, over the group that encoded the video.
        processor: the model's; its family writes the prompt.
        question: the user's text. The video precedes it, unless the text contains "<|video|>" where the video belongs.
        video: from `encode_video` or `load_video`; it is not changed and can be used for further questions.
        sampling: the most likely tokens by default.
        on_text: called with each piece of text as it is generated.

    Raises:
        AgreementError: if the ranks have different questions.
    """
    sampling = sampling or Sampling()
    family = chat_family(processor)
    text = _make_prompt(family, question, video)
    device = next(model.parameters()).device
    prompt = {name: value.to(device) for name, value in family.arguments(text).items()}
    length = text.input_ids.shape[1]
    _warn_if_long(model, length + sampling.max_new_tokens)
    streamer = AnswerStreamer(processor.tokenizer, on_text)
    torch.manual_seed(sampling.seed)
    features = family.feature_arguments(model, video.features, video.shard)
    options = {**family.generation(model), **sampling.generate_arguments()}
    output = model.generate(**prompt, **features, use_cache=True, streamer=streamer, **options)  # type: ignore[operator]
    tokens = output[0, length:].tolist()
    content = processor.tokenizer.decode(tokens, skip_special_tokens=True)
    seconds: dict[str, Any] = {"prefill_seconds": streamer.prefill_seconds, "decode_seconds": streamer.decode_seconds}
    return Answer(text=content, tokens=tokens, prompt_tokens=length, **seconds)


def _make_prompt(family: ChatFamily, question: str, video: EncodedVideo) -> ChatText:
    if VIDEO_MARK not in question:
        question = VIDEO_MARK + question
    content: list[dict[str, str]] = []
    for piece in question.split(VIDEO_MARK):
        content += [*([{"type": "text", "text": piece}] if piece else ()), {"type": "video"}]
    source = StoredFrames(video.frames, None) if video.source is None else video.source
    return family.text([[{"role": "user", "content": content[:-1]}]], [[source]], add_generation_prompt=True)


def longest_text(model: Any) -> int | None:
    """Return the context length of the model in tokens; None if its config does not state it."""
    config = getattr(model, "config", None)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None and config is not None:
        longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return longest


def _warn_if_long(model: Any, length: int) -> None:
    longest = longest_text(model)
    if longest is not None and length > longest:
        text = "prompt and answer may take %d tokens, including one per frame; the context length of the model is %d"
        _log.warning(f"{text}: use fewer frames", length, longest)


class AnswerStreamer(BaseStreamer):
    """Passes generated text to `on_text` piece by piece, and measures the time.

    The text of a token can depend on the tokens before it, for example whether a space precedes it. The new tokens are
    therefore decoded together with the previous piece, whose text is then removed. A piece whose last character is
    incomplete is held back, because byte-level tokens may end inside a character.
    """

    def __init__(self, tokenizer: Any, on_text: Callable[[str], object] | None) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._tokens: list[int] = []  # the tokens of the previous piece, then those not written yet
        self._written = 0  # the number of tokens of the previous piece
        self._times = [time.perf_counter()]

    @property
    def prefill_seconds(self) -> float:
        return self._times[1] - self._times[0] if len(self._times) > 1 else 0.0

    @property
    def decode_seconds(self) -> float:
        return self._times[-1] - self._times[1] if len(self._times) > 1 else 0.0

    def put(self, value: Tensor) -> None:
        """Receive the prompt (two dimensions), then one token per call."""
        if value.dim() == 1:
            self._times.append(time.perf_counter())
            self._tokens += value.tolist()
            self._write(complete_only=True)

    def end(self) -> None:
        """Write the text that was held back."""
        self._write(complete_only=False)

    def _write(self, complete_only: bool) -> None:
        if self._on_text is None:
            return
        previous, text = (
            self._tokenizer.decode(tokens, skip_special_tokens=True)
            for tokens in (self._tokens[: self._written], self._tokens)
        )
        if len(text) <= len(previous) or (complete_only and text.endswith("\N{REPLACEMENT CHARACTER}")):
            return
        self._on_text(text[len(previous) :])
        self._tokens = self._tokens[self._written :]
        self._written = len(self._tokens)
