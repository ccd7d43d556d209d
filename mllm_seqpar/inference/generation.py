"""How an answer is generated: sampling options, streamed text, and what ends or forces its tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import ConfigError, NonFiniteLogitsError
from mllm_seqpar.patching import patch_of

from .evidence import Evidence

OnText = Callable[[str], object]

LEAST_TEMPERATURE = 1e-6


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
            ("temperature", self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < inf, "0, or 1e-6 or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("seed", 0 <= self.seed < 2**63, "0 or more, below 2**63"),
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
    """The answer to the last message of a prompt, equal on all ranks except for the times.

    Attributes:
        text: without special tokens, up to a stop string.
        tokens: the generated token ids, including the end token.
        prompt_tokens: length of the prompt.
        prefill_seconds: time to the first token.
        decode_seconds: time from the first token to the last.
        finish_reason: "stop" at the model's end token or a stop string, "length" at `max_new_tokens`, or "interrupted".
        cached_tokens: the tokens of the prompt that were in the KV cache.
        evidence: the moments that the answer attends to most, if they were asked for.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    finish_reason: str = "stop"
    cached_tokens: int = 0
    evidence: Evidence | None = None


class GeneratedText(BaseStreamer, StoppingCriteria):
    """The text of an answer during its generation: as a streamer it receives tokens, as a criterion it may end them.

    Tokens are decoded as they arrive. The text of a token can depend on the tokens before it, for example whether a
    space precedes it. The new tokens are therefore decoded together with the previous piece, whose text is then
    removed. A piece whose last character is incomplete is held back, because byte-level tokens may end inside a
    character. Text that may be the beginning of a stop string is held back as well.

    The arguments are those of `Conversation.answer`. A patched model ends the answer on all ranks when rank 0 does.
    """

    def __init__(
        self,
        tokenizer: Any,
        comm: Communicator,
        on_text: OnText | None = None,
        stop: Sequence[str] = (),
        interrupted: Callable[[], bool] | None = None,
    ) -> None:
        self._tokenizer, self._comm, self._on_text = tokenizer, comm, on_text
        self._stop, self._interrupted = tuple(stop), interrupted
        self.text = ""  # up to a stop string; complete after `end`
        self.stopped = self.is_interrupted = False  # whether a stop string, or `interrupted`, ended the answer
        self._tokens: list[int] = []  # the tokens of the previous piece, then those not decoded yet
        self._decoded = 0  # the number of tokens of the previous piece
        self._passed = 0  # the number of characters that `on_text` has received
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
            self._decode(complete_only=True)
            # The longest end of the text that a stop string begins with is held back.
            marks = () if self.stopped else self._stop
            ends = (size for mark in marks for size in range(1, len(mark)) if self.text.endswith(mark[:size]))
            self._pass_on(len(self.text) - max(ends, default=0))

    def end(self) -> None:
        """Pass on the text that was held back. All ranks call this."""
        self._decode(complete_only=False)
        if self._interrupted is not None:
            self.is_interrupted = bool(self._comm.gather_ints([self.is_interrupted])[0][0])
        self._pass_on(len(self.text))

    @property
    def can_be_interrupted(self) -> bool:
        return self._interrupted is not None

    def require_wanted(self) -> None:
        """Raise PrefillInterrupted on all ranks if `interrupted` returns True on rank 0. All ranks call this."""
        wanted = self._comm.rank > 0 or self._interrupted is None or not self._interrupted()
        self.is_interrupted = not self._comm.gather_ints([wanted])[0][0]
        if self.is_interrupted:
            raise PrefillInterrupted

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self._comm.rank == 0 and self._interrupted is not None and self._interrupted():
            self.is_interrupted = True
        done = self.stopped or self.is_interrupted
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)

    def _decode(self, complete_only: bool) -> None:
        """Add the text of the tokens that are not decoded yet, up to the first stop string."""
        previous, text = (
            self._tokenizer.decode(tokens, skip_special_tokens=True)
            for tokens in (self._tokens[: self._decoded], self._tokens)
        )
        if len(text) <= len(previous) or (complete_only and text.endswith("\N{REPLACEMENT CHARACTER}")):
            return
        self._tokens = self._tokens[self._decoded :]
        self._decoded = len(self._tokens)
        if not self.stopped:
            self.text += text[len(previous) :]
            places = [place for mark in self._stop if (place := self.text.find(mark)) >= 0]
            if places:
                self.stopped, self.text = True, self.text[: min(places)]

    def _pass_on(self, stop: int) -> None:
        if self._on_text is not None and stop > self._passed:
            self._on_text(self.text[self._passed : stop])
        self._passed = max(self._passed, stop)


class PrefillInterrupted(Exception):
    """`interrupted` has ended an answer before its first token."""


_RUN_AHEAD = 4
"""Attention modules that the host may be ahead of a GPU in a prefill: enough that the GPU never waits for the host."""


@contextmanager
def interruptible_prefill(model: nn.Module, written: GeneratedText) -> Iterator[None]:
    """Let `interrupted`, if given, end the first pass of the model inside the block, before any module that attends.

    All ranks agree before each of these modules, in host memory, and raise PrefillInterrupted before the same one. The
    host would otherwise launch a whole pass on a GPU long before the GPU has computed it. It therefore waits until the
    GPU has reached an earlier module, which leaves the GPU with work.
    """
    if not written.can_be_interrupted:
        yield
        return
    device, handles, reached = next(model.parameters()).device, list[Any](), deque[torch.cuda.Event]()

    def poll(*_: Any) -> None:
        if device.type == "cuda":
            reached.append(torch.cuda.Event())
            reached[-1].record(torch.cuda.current_stream(device))
            if len(reached) > _RUN_AHEAD:
                reached.popleft().synchronize()
        written.require_wanted()

    def remove(*_: Any) -> None:
        while handles:
            handles.pop().remove()

    patch = patch_of(model)
    handles += [module.register_forward_pre_hook(poll) for module in (patch.sites if patch is not None else ())]
    handles.append(model.register_forward_hook(remove))
    try:
        yield
    finally:
        remove()


class FiniteLogits(LogitsProcessor):
    """Ends an answer at the first logits that are not finite, without waiting for the device.

    The only possible next token is then `end_token`, or token 0 if no token ends an answer: sampling from NaN would
    fail, on a GPU for the whole process.
    Logits of minus infinity are allowed unless all of them are, because other processors exclude tokens by them.
    """

    def __init__(self, end_token: int) -> None:
        self._end_token = end_token
        self._failed: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # Divided by a temperature, they must be finite too.
        failed = ~(scores.logsumexp(-1, keepdim=True) / LEAST_TEMPERATURE).isfinite()
        self._failed = failed if self._failed is None else self._failed | failed
        end = torch.full_like(scores, -torch.inf)
        end[:, self._end_token] = 0.0
        return torch.where(failed, end, scores)

    def require(self, dtype: torch.dtype, comm: Communicator) -> None:
        """Raise NonFiniteLogitsError on all ranks if some logits were not finite on any. Call this after the answer."""
        require_finite(self._failed is None or not bool(self._failed.any()), "logits", dtype, comm)


def require_finite(finite: bool, what: str, dtype: torch.dtype, comm: Communicator) -> None:
    """Raise NonFiniteLogitsError on all ranks unless `finite` is True on all. Every rank of the group calls this.

    The message says that `what` the model computed in `dtype` is not finite.
    """
    if comm.size > 1:
        finite = all(row[0] for row in comm.gather_ints([finite]))
    if not finite:
        name = str(dtype).removeprefix("torch.")
        if torch.finfo(dtype).max < torch.finfo(torch.bfloat16).max:
            why = f"probably because they exceed the range of {name}; use --dtype bfloat16 or float32"
        else:
            why = f"and {name} has the range of float32, so its weights are probably damaged; copy them again"
        raise NonFiniteLogitsError(f"the {what} of the model are not finite (NaN or infinite), {why}")
