"""A conversation about videos and images whose earlier turns stay in the KV cache.

An answer is always the answer to one prompt with all messages. The cache only saves work: its tokens that the prompt
begins with are kept, the others are cropped, and the rest of the prompt is prefilled. After an ordinary turn these are
the new question and what the chat format puts around it. If the text of an answer is tokenized differently than it was
generated, the tokens from there on are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StoppingCriteria, StoppingCriteriaList

from mllm_seqpar.comm import Communicator
from mllm_seqpar.data.chat_family import ChatText, chat_family
from mllm_seqpar.data.chat_format import media_parts
from mllm_seqpar.data.sources import FrameSource
from mllm_seqpar.errors import ConfigError, DataError, SeqParError
from mllm_seqpar.patching import patch_of
from mllm_seqpar.sharding import FrameShard, frame_range

from .encoding import EncodedVideo, encode_video, encoder_of
from .evidence import evidence_of
from .frame_attention import FrameAttention, record_attention
from .generation import Answer, AnswerStreamer, Sampling, longest_text

OnText = Callable[[str], object]


class LengthError(DataError):
    """A prompt that is, with its answer, longer than the model's context."""


class Interrupted(SeqParError):
    """Raised where the user ended the encoding of the frames."""


@dataclass(frozen=True, kw_only=True)
class Reply(Answer):
    """The answer to the last message of a conversation.

    Attributes:
        finish_reason: "stop" at the model's end token or a stop string, "length" at `max_new_tokens`, or "interrupted".
        cached_tokens: the tokens of the prompt that were in the cache.
    """

    finish_reason: str
    cached_tokens: int


@dataclass(frozen=True)
class JoinedSource:
    """The frames of several sources, one source after another; `interrupted` is called before each batch."""

    sources: tuple[FrameSource, ...]
    interrupted: Callable[[], bool] | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources)

    def sizes(self) -> list[tuple[int, int]]:
        """Return (height, width) of each frame."""
        return [size for source in self.sources for size in source.sizes()]  # type: ignore[attr-defined]

    def read(self, start: int, stop: int, *, size: tuple[int, int] | None = None, batch: int = 16) -> Iterator[Tensor]:
        """Yield frames start <= i < stop; a batch has frames of one source."""
        first = 0
        for source in self.sources:
            low, high = max(start - first, 0), min(stop - first, len(source))
            if low < high:
                for frames in source.read(low, high, size=size, batch=batch):
                    if self.interrupted is not None and self.interrupted():
                        raise Interrupted("interrupted while the frames were encoded")
                    yield frames
            first += len(source)


class Conversation:
    """Answers messages about fixed videos and images, on every rank of the model's group.

    Args:
        model: patched by `patch_model`.
        processor: the model's.
        sources: the frames of the media parts of the messages, in their order.
        batch: frames that a rank reads and encodes at once.
    """

    def __init__(
        self, model: nn.Module, processor: Any, sources: Sequence[FrameSource] = (), *, batch: int = 8
    ) -> None:
        patch = patch_of(model)
        if patch is None:
            raise ConfigError("Conversation: the model is not patched; call patch_model(model) first")
        self.sources = tuple(sources)
        self._model: Any = model
        self._processor, self._family = processor, chat_family(processor)
        self._comm: Communicator = patch.context.comm
        self._batch = batch
        self._encoded: EncodedVideo | None = None
        self._cache: Any = None
        self._cached_ids: list[int] = []

    @property
    def frames(self) -> int:
        """The number of frames of all videos and images."""
        return sum(len(source) for source in self.sources)

    def prompt(self, messages: Sequence[Mapping[str, Any]], max_new_tokens: int = 0) -> ChatText:
        """Return the tokens of the messages, with the beginning of an answer.

        Frames are not encoded, and ranks do not communicate.

        Args:
            messages: {"role": ..., "content": ...}; a content is a text, or parts of type text, video or image.
            max_new_tokens: maximum length of the answer.

        Raises:
            DataError: a text contains a mark of the chat format, or the media are not those of the conversation.
            LengthError: the prompt and its answer are longer than the model's context.
        """
        for message in messages:
            content = message["content"]
            texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            if found := [mark for mark in self._family.marks if any(mark in text for text in texts)]:
                raise DataError(
                    f"a message contains {found[0]}, which is a mark of this model's chat format; remove it"
                )
        if (parts := len(media_parts(messages))) != len(self.sources):
            raise DataError(f"the messages have {parts} media parts, and the conversation {len(self.sources)} media")
        text = self._family.text([messages], [self.sources], add_generation_prompt=True)
        length, longest = text.input_ids.shape[1], longest_text(self._model)
        if longest is not None and length + max_new_tokens > longest:
            raise LengthError(
                f"the context of this model is {longest} tokens, and the prompt has {length} ({self.frames} of them "
                f"stand for frames), with up to {max_new_tokens} of the answer; take fewer frames, ask for a shorter "
                "answer, or begin a new conversation"
            )
        return text

    def encode(
        self,
        progress: Callable[[int, int], object] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> None:
        """Read and encode the frames, each rank its own, unless that has been done. `answer` does it too.

        Args:
            progress: called with (frames that all ranks have encoded so far, all frames).
            interrupted: the encoding ends on all ranks when it returns True on this one.

        Raises:
            VideoError: if this rank's frames cannot be read; Interrupted if `interrupted` returned True; AgreementError
                if another rank raised one of them.
        """
        if self._encoded is not None or not self.sources:
            return
        joined, total = JoinedSource(self.sources, interrupted), self.frames
        report = None if progress is None else lambda done: progress(done, total)
        options: dict[str, Any] = {"group": self._comm, "batch": self._batch, "progress": report}
        encoded = encode_video(self._model, self._processor, joined, **options)
        self._encoded = EncodedVideo(encoded.features, encoded.shard)

    def answer(
        self,
        text: ChatText,
        sampling: Sampling,
        *,
        stop: Sequence[str] = (),
        on_text: OnText | None = None,
        interrupted: Callable[[], bool] | None = None,
        evidence: int = 0,
    ) -> Reply:
        """Generate the answer to a prompt. Every rank of the model's group calls this with the same prompt.

        Args:
            text: from `prompt`.
            sampling: as for `answer`.
            stop: the answer ends before the first of these strings.
            on_text: called with each piece of the answer.
            interrupted: called for each token on rank 0; the answer ends on all ranks when it returns True.
            evidence: the number of moments to return that the answer attends to most.
        """
        self.encode()
        tokenizer, length = self._processor.tokenizer, text.input_ids.shape[1]
        kept = self._keep_prefix(text)
        watch = _StopWatch(self._comm, stop, on_text, interrupted)
        streamer = AnswerStreamer(tokenizer, watch.put)
        device = next(self._model.parameters()).device
        arguments = {name: value.to(device) for name, value in self._family.arguments(text).items()}
        arguments |= self._feature_arguments(text, device)
        options = {**self._family.generation(self._model), **sampling.generate_arguments()}
        if self._cache is not None:
            options["past_key_values"] = self._cache
        cache, self._cache = self._cache, None  # a pass that fails may leave the cache with a part of its layers filled
        torch.manual_seed(sampling.seed)
        with record_attention(self._model) if evidence and self.sources else nullcontext() as recorded:
            output = self._model.generate(
                **arguments,
                use_cache=True,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([watch]),
                return_dict_in_generate=True,
                **options,
            )
            attention = None if recorded is None else recorded.result()
        self._cache = cache = output.past_key_values
        self._cached_ids = output.sequences[0, : cache.get_seq_length()].tolist()
        tokens = output.sequences[0, length:].tolist()
        return Reply(
            text=watch.finish(),
            tokens=tokens,
            prompt_tokens=length,
            prefill_seconds=streamer.prefill_seconds,
            decode_seconds=streamer.decode_seconds,
            finish_reason=self._finish_reason(watch, tokens, sampling, options),
            cached_tokens=kept,
            **({} if attention is None else self._evidence(attention, tokens, evidence)),
        )

    def _evidence(self, attention: FrameAttention, tokens: list[int], count: int) -> dict[str, Any]:
        found = evidence_of(attention, tokens, self._processor.tokenizer, self.sources, count)
        return {"evidence": found.moments, "evidence_note": found.note}

    def _feature_arguments(self, text: ChatText, device: torch.device) -> dict[str, Any]:
        """Return the arguments that pass this rank's features; those of a blank picture if the family needs one."""
        if self._encoded is None and not len(text.slots):
            return {}
        if self._encoded is None:
            weight = next(self._model.parameters())
            blank = (x.to(device, weight.dtype if x.is_floating_point() else None) for x in self._family.blank())
            with torch.no_grad():
                features = encoder_of(self._model, self._family)(*blank)
            local = frame_range(1, self._comm)
            shard = FrameShard(local.start, local.stop, 1)
            self._encoded = EncodedVideo(features[local.start : local.stop], shard)
        return self._family.feature_arguments(self._model, self._encoded.features, self._encoded.shard)

    def _keep_prefix(self, text: ChatText) -> int:
        """Crop the cache to the tokens that the prompt begins with, but not to all of it; return their number.

        A prompt whose media are elsewhere is prefilled from the start.
        """
        if self._cache is None:
            return 0
        ids = text.input_ids[0].tolist()
        limit = min(len(self._cached_ids), len(ids) - 1)
        kept = next((i for i in range(limit) if self._cached_ids[i] != ids[i]), limit)
        if kept == 0 or kept < self._media_end(text):
            self._cache, kept = None, 0
        elif remove := len(self._cached_ids) - kept:
            self._cache.crop(-remove)
        return kept

    def _media_end(self, text: ChatText) -> int:
        """Return the number of tokens up to the last placeholder of a picture."""
        offsets, mark = text.extras.get("media_offset"), getattr(self._family, "image_token", None)
        if offsets is None and mark is not None:
            offsets = (text.input_ids[0] == self._processor.tokenizer.convert_tokens_to_ids(mark)).nonzero()
        return int(offsets.max()) + 1 if offsets is not None and offsets.numel() else 0

    def _finish_reason(self, watch: _StopWatch, tokens: list[int], sampling: Sampling, options: dict[str, Any]) -> str:
        if watch.interrupted:
            return "interrupted"
        ends = options.get("eos_token_id")
        ended = {ends} if isinstance(ends, int) else {*(ends or ()), *self._processor.tokenizer.all_special_ids}
        long = len(tokens) >= sampling.max_new_tokens and tokens[-1] not in ended
        return "length" if long and not watch.stopped else "stop"


class _StopWatch(StoppingCriteria):
    """Ends an answer at a stop string, or when rank 0 is interrupted; passes on the text that is certain to remain.

    Text that may be the beginning of a stop string is held back. All ranks follow rank 0, by one small broadcast for
    each token.
    """

    def __init__(
        self,
        comm: Communicator,
        stop: Sequence[str],
        on_text: OnText | None,
        interrupted: Callable[[], bool] | None,
    ) -> None:
        self._comm, self._stop, self._on_text, self._interrupted = comm, tuple(stop), on_text, interrupted
        self._text, self._passed = "", 0
        self.stopped = self.interrupted = False

    def put(self, piece: str) -> None:
        """Receive the next piece of the answer."""
        if self.stopped:
            return
        self._text += piece
        first = min((self._text.find(mark) for mark in self._stop if mark in self._text), default=None)
        if first is not None:
            self.stopped, self._text = True, self._text[:first]
        self._pass(len(self._text) - (0 if self.stopped else self._held_back()))

    def finish(self) -> str:
        """Pass on the text that was held back, and return the whole answer."""
        self._pass(len(self._text))
        return self._text

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self._comm.rank == 0 and self._interrupted is not None and self._interrupted():
            self.interrupted = True
        flags = torch.tensor([self.stopped, self.interrupted], device=self._comm.device)
        stopped, interrupted = self._comm.broadcast(flags, "stop").tolist()
        self.stopped, self.interrupted = bool(stopped), bool(interrupted)
        done = self.stopped or self.interrupted
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)

    def _held_back(self) -> int:
        """Return the length of the longest end of the text that a stop string begins with."""
        ends = (size for mark in self._stop for size in range(1, len(mark)) if self._text.endswith(mark[:size]))
        return max(ends, default=0)

    def _pass(self, stop: int) -> None:
        if self._on_text is not None and stop > self._passed:
            self._on_text(self._text[self._passed : stop])
        self._passed = max(self._passed, stop)
