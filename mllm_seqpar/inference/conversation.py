"""A conversation about videos and images whose earlier turns stay in the KV cache.

An answer always equals the answer to a single prompt with all messages. The cache only saves work: it keeps the tokens
that it shares with the beginning of the prompt, the others are cropped, and the rest of the prompt is prefilled. After
an ordinary turn, this rest is the new question and what the chat format puts around it. If the tokens of an answer
differ from those that were generated, they and all later tokens are computed again.

A later turn may show further media (`Conversation.followed_by`). Each rank encodes some of their frames, so that the
frames of all turns are balanced, and the pass of their text appends their K and V to those of the cache.

All answers of this package are given here: `answer` is a conversation of one question about a video that is encoded
already, and multiple choice compares the log-likelihoods of letters after a prompt.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, StoppingCriteriaList

from mllm_seqpar._compat import cache_name, cache_of
from mllm_seqpar.chats.chat import ANY_MEDIA, Chat
from mllm_seqpar.chats.chat_family import VIDEO_MARK, ChatText, chat_family
from mllm_seqpar.chats.clip import FeatureFrames, FrameSource
from mllm_seqpar.errors import ConfigError, LengthError
from mllm_seqpar.models.loading import context_length
from mllm_seqpar.patching import patch_of
from mllm_seqpar.sharding import FrameShard, FrameSizes

from .encoding import Encoded, Progress, encode, encoder_of
from .evidence import evidence_of, record_attention
from .generation import (
    Answer,
    FiniteLogits,
    GeneratedText,
    OnText,
    PrefillInterrupted,
    Sampling,
    interruptible_prefill,
    require_finite,
)

PREFILL_CHUNK = 4096
"""The most tokens of a continued prompt that are computed at once."""


@dataclass(frozen=True)
class Score:
    """The likelihood of a continuation of a prompt."""

    log_likelihood: float  # the sum of the log-probabilities of the tokens, in nats
    is_greedy: bool  # whether each token is the most likely one


@dataclass
class _LaterMedia:
    """Media of a later turn, from medium number `first` of the conversation on, and their features.

    `first_token` is the length of the cache before the pass that brought their frames. After `_keep_prefix`, it is set
    exactly if the cache holds these frames.
    """

    first: int
    sources: tuple[FrameSource, ...]
    encoded: Encoded | None = None
    first_token: int | None = None


class Conversation:
    """Answers messages about videos and images, on every rank of the model's group.

    Args:
        model: patched by `patch_model`.
        processor: the model's.
        sources: the frames of the media parts of the messages, in their order; default: those of `encoded`.
        batch: frames that a rank reads and encodes at once.
        on_host: keep the features in host memory, for a model with `visual_offload="cpu"`.
        encoded: a video from `encode` or `load_video`. It is not changed, and can be used for further
            conversations.

    Attributes:
        encoded: the features of the media, without those of later turns; None if they are not encoded yet.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        sources: Sequence[FrameSource] = (),
        *,
        batch: int = 8,
        on_host: bool = False,
        encoded: Encoded | None = None,
    ) -> None:
        if encoded is not None and not sources:
            sources = [encoded.source or FeatureFrames(encoded.frames)]
        self.sources = tuple(sources)
        self._model: Any = model
        self._processor, self._chat_format = processor, chat_family(processor)
        patch = patch_of(model)
        if patch is None:
            raise ConfigError("Conversation: the model is not patched; call patch_model(model) first")
        self._comm = patch.context.comm
        self._batch, self._on_host = batch, on_host
        self.encoded = encoded
        self._later: list[_LaterMedia] = []
        self._passed = WeakKeyDictionary[Encoded, dict[str, Any]]()
        self._cache: Any = None
        self._cached_ids: list[int] = []

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._model.parameters()).dtype

    @property
    def tokenizer(self) -> Any:
        return self._processor.tokenizer

    @property
    def frames(self) -> int:
        """The number of frames of all videos and images."""
        return sum(len(source) for source in self.sources)

    @property
    def can_follow(self) -> bool:
        """Whether a later turn may show further media over the cache of this conversation."""
        return bool(self.sources) and self._chat_format.appends_media(self._model)

    def followed_by(self, sources: Sequence[FrameSource]) -> Conversation:
        """Return a conversation about these media and further ones, in the order of the messages' media parts.

        It continues the cache of this one, which must not be used any more.

        Raises:
            ConfigError: the model's family cannot append media to a cache.
        """
        if not self.can_follow:
            raise ConfigError(
                f"{type(self._chat_format).__name__}: further media cannot follow those of a conversation of this "
                "model, or it has none; begin a new conversation with all media"
            )
        longer, later = copy.copy(self), _LaterMedia(len(self.sources), tuple(sources))
        longer.sources += later.sources
        longer._later = [*map(copy.copy, self._later), later]
        return longer

    def prompt(self, messages: Sequence[Mapping[str, Any]], max_new_tokens: int = 0) -> ChatText:
        """Return the tokens of the messages, with the beginning of an answer.

        Frames are not encoded, and ranks do not communicate.

        Args:
            messages: {"role": ..., "content": ...}; a content is a text, or parts of type text, video or image.
            max_new_tokens: maximum length of the answer.

        Raises:
            DataError: a message is malformed, a text contains a mark of the chat format, or the media are not those of
                the conversation.
            LengthError: the prompt and its answer are longer than the model's context.
        """
        chat = Chat.parse(messages, replace(ANY_MEDIA, marks=self._chat_format.marks))
        text = self._chat_format.text([chat.to_json()], [self.sources], add_generation_prompt=True)
        length, longest = text.input_ids.shape[1], context_length(getattr(self._model, "config", None))
        if longest is not None and length + max_new_tokens > longest:
            raise LengthError(
                f"the context of this model is {longest} tokens, and the prompt has {length} ({self.frames} of them "
                f"stand for frames), with up to {max_new_tokens} of the answer; use fewer frames, ask for a shorter "
                "answer, or begin a new conversation"
            )
        return text

    def question(self, question: str, max_new_tokens: int = 0) -> ChatText:
        """Return the tokens of a question without earlier messages, as `prompt` does.

        Args:
            question: the user's text. The media precede it, unless the text contains "<|video|>" where each belongs.
            max_new_tokens: maximum length of the answer.
        """
        return self.prompt(question_about(len(self.sources), question), max_new_tokens)

    def encode(self, progress: Progress | None = None, interrupted: Callable[[], bool] | None = None) -> None:
        """Read and encode this rank's frames, unless that has been done. `answer` calls this.

        Args:
            progress: as in `encode`.
            interrupted: the encoding ends on all ranks when it returns True on this one.

        Raises:
            VideoError: if this rank's frames cannot be read; Interrupted if `interrupted` returned True; AgreementError
                if another rank raised one of them.
        """
        if not self.sources:
            return
        options: dict[str, Any] = {"group": self._comm, "batch": self._batch, "on_host": self._on_host}
        options |= {"progress": progress, "interrupted": interrupted}
        if self.encoded is None:
            self.encoded = encode(self._model, self._processor, self._first_sources, **options)
        for number, later in enumerate(self._later):
            if later.encoded is None:
                before = [self.encoded, *(earlier.encoded for earlier in self._later[:number])]
                own = sum(FrameSizes(x.frames, x.sizes).count(x.shard.spans) for x in before if x is not None)
                held = [units for (units,) in self._comm.gather_ints([own])]  # frames, or their tokens, of each rank
                later.encoded = encode(self._model, self._processor, later.sources, held=held, **options)

    @property
    def _first_sources(self) -> tuple[FrameSource, ...]:
        return self.sources[: self._later[0].first] if self._later else self.sources

    def answer(
        self,
        text: ChatText,
        sampling: Sampling,
        *,
        stop: Sequence[str] = (),
        on_text: OnText | None = None,
        interrupted: Callable[[], bool] | None = None,
        evidence: int = 0,
    ) -> Answer:
        """Generate the answer to a prompt. Every rank of the model's group calls this with the same prompt.

        Args:
            text: from `prompt`.
            sampling: how to choose the tokens.
            stop: the answer ends before the first of these strings.
            on_text: called with each piece of the answer.
            interrupted: given on all ranks, or on none; the answer ends on all ranks when it returns True on rank 0,
                before the next token, or before the next attention module of the prompt's pass.
            evidence: the number of moments to return that the answer attends to most.

        Raises:
            NonFiniteLogitsError: on all ranks, if logits or attention are NaN or infinite.
        """
        self.encode()
        length = text.input_ids.shape[1]
        kept = self._keep_prefix(text)
        tokenizer = self._processor.tokenizer
        written = GeneratedText(tokenizer, self._comm, on_text, stop, interrupted)
        options = {**self._chat_format.generation(self._model), **sampling.generate_arguments()}
        criteria = StoppingCriteriaList([written] if stop or interrupted is not None else [])
        try:
            new = self._prefill_in_chunks(text, kept, written)
            torch.manual_seed(sampling.seed)
            with record_attention(self._model) if evidence and self.sources else nullcontext() as recorded:
                with interruptible_prefill(self._model, written):
                    output = self._generate(text, new=new, streamer=written, stopping_criteria=criteria, **options)
                attention = None if recorded is None else recorded.result()
        except PrefillInterrupted:
            return Answer(
                text="",
                tokens=[],
                prompt_tokens=length,
                prefill_seconds=0.0,
                decode_seconds=0.0,
                finish_reason="interrupted",
            )
        tokens, seen = output.sequences[0, length:].tolist(), None
        if attention is not None:
            finite = all(bool(x.isfinite().all()) for x in (attention.frames, attention.text))
            require_finite(finite, "attention weights", self._dtype, self._comm)
            sizes = [size for source in self.sources for size in self._chat_format.group_sizes(source)]
            seen = evidence_of(attention.split(sizes), tokens, tokenizer, self.sources, evidence)
        ends = options.get("eos_token_id")
        last = {ends} if isinstance(ends, int) else {*(ends or ()), *tokenizer.all_special_ids}
        full = len(tokens) >= sampling.max_new_tokens and tokens[-1] not in last and not written.stopped
        return Answer(
            text=written.text,
            tokens=tokens,
            prompt_tokens=length,
            prefill_seconds=written.prefill_seconds,
            decode_seconds=written.decode_seconds,
            finish_reason="interrupted" if written.is_interrupted else "length" if full else "stop",
            cached_tokens=kept,
            evidence=seen,
        )

    def ask(self, question: str, sampling: Sampling | None = None, **options: Any) -> Answer:
        """Answer a question without earlier messages. Every rank of the group calls this with the same question.

        Args:
            question: as in `question`.
            sampling: the most likely tokens by default.
            **options: those of `answer`.
        """
        sampling = sampling or Sampling()
        return self.answer(self.question(question, sampling.max_new_tokens), sampling, **options)

    def log_likelihoods(self, text: ChatText, continuations: Sequence[Sequence[int]]) -> list[Score]:
        """Return the score of each continuation of a prompt. Every rank of the group calls this with the same tokens.

        The prompt is computed once. A continuation of several tokens costs one step for each token but the last.

        Args:
            text: from `prompt`.
            continuations: token ids; none is empty.

        Raises:
            NonFiniteLogitsError: on all ranks, if logits or a log-likelihood are NaN or infinite.
        """
        # The log-probabilities (vocabulary,), float64, of the token after each beginning of a continuation
        following: dict[tuple[int, ...], Tensor] = {}
        self.encode()
        scores = []
        for tokens in continuations:
            beginnings = [tuple(tokens[:number]) for number in range(len(tokens))]
            if beginnings[-1] not in following:
                new = self._prefill_in_chunks(text, self._keep_prefix(text))
                sampling = Sampling(max_new_tokens=len(tokens))
                options = {**self._chat_format.generation(self._model), **sampling.generate_arguments()}

                def forced(_: int, ids: Tensor, tokens: Sequence[int] = tokens) -> list[int]:
                    return [tokens[len(ids) - text.input_ids.shape[1]]]

                options |= {"output_logits": True, "prefix_allowed_tokens_fn": forced}
                logits = self._generate(text, new=new, **options).logits
                rows = [row[0].double().log_softmax(-1).cpu() for row in logits]
                following |= dict(zip(beginnings, rows, strict=True))
            steps = [(following[beginning], token) for beginning, token in zip(beginnings, tokens, strict=True)]
            total = sum(float(row[token]) for row, token in steps)
            scores.append(Score(total, all(int(row.argmax()) == token for row, token in steps)))
        finite = all(math.isfinite(score.log_likelihood) for score in scores)
        require_finite(finite, "log-likelihoods", self._dtype, self._comm)
        return scores

    def _generate(self, text: ChatText, *, new: _LaterMedia | None = None, **options: Any) -> Any:
        """Generate after the tokens of `text` that the cache does not have, and keep the cache of the result.

        `new` are the later media whose placeholders are among these tokens.

        Raises:
            NonFiniteLogitsError: on all ranks, if logits are not finite.
        """
        device = next(self._model.parameters()).device
        past = 0 if self._cache is None else int(self._cache.get_seq_length())
        given: Mapping[str, Tensor] = self._chat_format.arguments(text)
        if self._later and (new is not None or not past):
            media = (0, len(self._first_sources)) if new is None else (new.first, new.first + len(new.sources))
            given = self._chat_format.arguments_of_media(given, past, *media)
        arguments = {name: value.to(device) for name, value in given.items()}
        arguments |= self._feature_arguments(text, device, new)
        if self._cache is not None:
            options[cache_name()] = self._cache
        self._cache = None  # a pass that fails may leave the cache with only some of its layers filled
        ends = options.get("eos_token_id", self._model.generation_config.eos_token_id)
        finite = FiniteLogits(next(iter(ends), 0) if isinstance(ends, (list, tuple)) else ends or 0)
        options["logits_processor"] = LogitsProcessorList([finite])
        output = self._model.generate(**arguments, use_cache=True, return_dict_in_generate=True, **options)
        finite.require(self._dtype, self._comm)
        self._cache = cache = cache_of(output)
        if new is not None:
            new.first_token = past
        self._cached_ids = output.sequences[0, : cache.get_seq_length()].tolist()
        return output

    def _prefill_in_chunks(self, text: ChatText, kept: int, written: GeneratedText | None = None) -> _LaterMedia | None:
        """Compute all but the end of a prompt; return the later media whose placeholders are in that end, or None.

        A continuation of the cache is computed `PREFILL_CHUNK` tokens at a time, because attention to a cache needs a
        mask with a row for each new token and a column for each token so far. The placeholders of the media of one turn
        are in one pass, with none of another turn.

        The cache has the first `kept` tokens of the prompt. If these are 0, the first pass brings the media of the
        first turn, and ends before those of the next one.

        Raises:
            PrefillInterrupted: on all ranks, if `interrupted` ended the answer.
        """
        options = {**self._chat_format.generation(self._model), **Sampling(max_new_tokens=1).generate_arguments()}
        length, places = text.input_ids.shape[1], self._places(text)
        waiting = [place for place in places if place[2].first_token is None]
        while True:
            stop, new = min(kept + PREFILL_CHUNK, length) if kept else length, None
            if waiting and waiting[0][0] < stop:
                low, high, later = waiting[0]
                if kept:
                    new, stop = later, min([max(stop, high), *(next_low for next_low, _, _ in waiting[1:2])])
                else:
                    stop = low
            if stop == length:
                return new
            images = sum(place < stop for place in self._placeholders(text)) if places else None
            with nullcontext() if written is None else interruptible_prefill(self._model, written):
                self._generate(text.beginning(stop, images), new=new, **options)
            waiting, kept = waiting[new is not None :], stop

    def _placeholders(self, text: ChatText) -> list[int]:
        """Return the positions of the placeholders of images."""
        offsets, mark = text.extras.get("media_offset"), getattr(self._chat_format, "image_token", None)
        if (kinds := text.extras.get("mm_token_type_ids")) is not None:
            offsets = kinds[0].nonzero()
        elif offsets is None and mark is not None:
            offsets = (text.input_ids[0] == self._processor.tokenizer.convert_tokens_to_ids(mark)).nonzero()
        return [] if offsets is None else [place for place in offsets.flatten().tolist() if place >= 0]

    def _places(self, text: ChatText) -> list[tuple[int, int, _LaterMedia]]:
        """Return where the placeholders of later media begin and end, with these media; one is that of one frame."""
        ranges, places = [], self._placeholders(text) if self._later else []
        done = sum(map(len, self._first_sources))
        for later in self._later:
            own = places[done : done + sum(map(len, later.sources))]
            ranges.append((own[0], own[-1] + 1, later))
            done += len(own)
        return ranges

    def _feature_arguments(self, text: ChatText, device: torch.device, new: _LaterMedia | None) -> dict[str, Any]:
        """Return the arguments that pass this rank's features, those of `new` or of the last media in the cache; those
        of a blank image if the chat format needs one."""
        later = [new] if new is not None else [x for x in self._later if x.first_token is not None]
        if later:
            encoded = later[-1].encoded if new is not None or self._chat_format.repeats_media else None
            return {} if encoded is None else self._features_of(encoded)
        if self.encoded is None and not len(text.slots):
            return {}
        if self.encoded is None:
            weight = next(self._model.parameters())
            blank = (x.to(device, weight.dtype if x.is_floating_point() else None) for x in self._chat_format.blank())
            with torch.no_grad():
                features = encoder_of(self._model, self._chat_format)(*blank)
            shard = FrameShard.of(1, self._comm, self._chat_format.frame_layout)
            self.encoded = Encoded(features[: len(shard)], shard)
        return self._features_of(self.encoded)

    def _features_of(self, encoded: Encoded) -> dict[str, Any]:
        """Return the arguments that pass features: the same objects in each pass, by which a model may know them."""
        if encoded not in self._passed:
            arguments = self._chat_format.feature_arguments(self._model, encoded.features, encoded.shard)
            self._passed[encoded] = arguments
        return self._passed[encoded]

    def _keep_prefix(self, text: ChatText) -> int:
        """Crop the cache to the tokens that the prompt begins with, but not to all of it; return their number.

        A prompt whose media are in another place is prefilled from the start, and so is a text of which little is
        cached: often that is only the beginning of the chat format, of another user's text.
        """
        if self._cache is None:
            for later in self._later:
                later.first_token = None
            return 0
        ids = text.input_ids[0].tolist()
        limit = min(len(self._cached_ids), len(ids) - 1)
        kept = next((i for i in range(limit) if self._cached_ids[i] != ids[i]), limit)
        # To continue, attention needs a mask of all pairs, which takes several times longer than the causal order.
        short = not self.sources and kept < len(ids) // 8
        for _, stop, later in self._places(text):
            if later.first_token is not None and kept < stop:
                kept = min(kept, later.first_token)
        places = self._placeholders(text)[: sum(map(len, self._first_sources)) if self._later else None]
        if kept == 0 or short or kept <= max(places, default=-1):
            self._cache, kept = None, 0
        elif remove := len(self._cached_ids) - kept:
            self._cache.crop(-remove)
            self._cached_ids = self._cached_ids[:kept]
        for later in self._later:
            if later.first_token is not None and kept <= later.first_token:
                later.first_token = None
        return kept


def question_about(videos: int, question: str) -> list[dict[str, Any]]:
    """Return the messages of a question about this many videos; see `Conversation.question`."""
    if VIDEO_MARK not in question:
        question = VIDEO_MARK * videos + question
    first, *others = question.split(VIDEO_MARK)
    parts = [{"type": "text", "text": first}]
    for piece in others:
        parts += [{"type": "video"}, {"type": "text", "text": piece}]
    return [{"role": "user", "content": [part for part in parts if part.get("text", True)]}]


def answer(
    model: nn.Module,
    processor: Any,
    question: str,
    video: Encoded,
    sampling: Sampling | None = None,
    *,
    source: FrameSource | None = None,
    **options: Any,
) -> Answer:
    """Answer a question about a video. Every rank of the model's group calls this with the same question.

    Args:
        model: patched by `patch_model`, over the group that encoded the video.
        processor: the model's; its chat format writes the prompt.
        question: the user's text. The video precedes it, unless the text contains "<|video|>" where the video belongs.
        video: from `encode` or `load_video`; it is not changed and can be used for further questions.
        sampling: the most likely tokens by default.
        source: the frames, whose times evidence has; default: those of `video`.
        **options: those of `Conversation.answer`.

    Raises:
        AgreementError: if the ranks have different questions.
    """
    sources = () if source is None else (source,)
    return Conversation(model, processor, sources, encoded=video).ask(question, sampling, **options)
