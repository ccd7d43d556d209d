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
from itertools import accumulate
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
from mllm_seqpar.models.cache import cache_state_of
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


@dataclass(eq=False)
class _Media:
    """The media that the first turn shows, or a later one, and their features."""

    sources: tuple[FrameSource, ...]
    encoded: Encoded | None = None

    @property
    def frames(self) -> int:
        return sum(map(len, self.sources))


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
        self._media = [_Media(tuple(sources), encoded)]  # of the first turn, and of each later one that shows some
        self._model: Any = model
        self._processor, self._chat_format = processor, chat_family(processor)
        patch = patch_of(model)
        if patch is None:
            raise ConfigError("Conversation: the model is not patched; call patch_model(model) first")
        self._comm = patch.context.comm
        self._batch, self._on_host = batch, on_host
        self._passed = WeakKeyDictionary[Encoded, dict[str, Any]]()
        self._cache: Any = None
        self._cached_ids: list[int] = []
        # For the media of each later turn that the cache has, its length before the pass that brought their frames
        self._appended_at: list[int] = []

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._model.parameters()).dtype

    @property
    def tokenizer(self) -> Any:
        return self._processor.tokenizer

    @property
    def sources(self) -> tuple[FrameSource, ...]:
        """The frames of all videos and images."""
        return tuple(source for media in self._media for source in media.sources)

    @property
    def encoded(self) -> Encoded | None:
        """The features of the media, without those of later turns; None if they are not encoded yet."""
        return self._media[0].encoded

    @encoded.setter
    def encoded(self, encoded: Encoded) -> None:
        self._media[0].encoded = encoded

    @property
    def frames(self) -> int:
        """The number of frames of all videos and images."""
        return sum(media.frames for media in self._media)

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
        longer = copy.copy(self)
        longer._media, longer._appended_at = [*self._media, _Media(tuple(sources))], [*self._appended_at]
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
        if VIDEO_MARK not in question:
            question = VIDEO_MARK * len(self.sources) + question
        first, *others = question.split(VIDEO_MARK)
        parts = [{"type": "text", "text": first}]
        for text in others:
            parts += [{"type": "video"}, {"type": "text", "text": text}]
        content = [part for part in parts if part.get("text", True)]  # without empty texts
        return self.prompt([{"role": "user", "content": content}], max_new_tokens)

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
        for number, media in enumerate(self._media):
            if media.encoded is not None:
                continue
            if number:  # the rank's units, which are frames or their tokens, of the media before
                before = [earlier.encoded for earlier in self._media[:number] if earlier.encoded is not None]
                own = sum(FrameSizes(x.frames, x.sizes).count(x.shard.spans) for x in before)
                options["held"] = [units for (units,) in self._comm.gather_ints([own])]
            media.encoded = encode(self._model, self._processor, media.sources, **options)

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
        length, kept = text.input_ids.shape[1], self._keep_prefix(text)
        tokenizer = self._processor.tokenizer
        written = GeneratedText(tokenizer, self._comm, on_text, stop, interrupted)
        options = {**self._chat_format.generation(self._model), **sampling.generate_arguments()}
        criteria = StoppingCriteriaList([written] if stop or interrupted is not None else [])
        try:
            self._prefill_in_chunks(text, kept, written)
            torch.manual_seed(sampling.seed)
            with record_attention(self._model) if evidence and self.sources else nullcontext() as recorded:
                with interruptible_prefill(self._model, written):
                    output = self._generate(text, streamer=written, stopping_criteria=criteria, **options)
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
                self._prefill_in_chunks(text, self._keep_prefix(text))
                sampling = Sampling(max_new_tokens=len(tokens))
                options = {**self._chat_format.generation(self._model), **sampling.generate_arguments()}

                def forced(_: int, ids: Tensor, tokens: Sequence[int] = tokens) -> list[int]:
                    return [tokens[len(ids) - text.input_ids.shape[1]]]

                # An end token inside a continuation does not end it.
                options |= {"output_logits": True, "prefix_allowed_tokens_fn": forced, "eos_token_id": None}
                logits = self._generate(text, **options).logits
                rows = [row[0].double().log_softmax(-1).cpu() for row in logits]
                following |= dict(zip(beginnings, rows, strict=True))
            steps = [(following[beginning], token) for beginning, token in zip(beginnings, tokens, strict=True)]
            total = sum(float(row[token]) for row, token in steps)
            scores.append(Score(total, all(int(row.argmax()) == token for row, token in steps)))
        finite = all(math.isfinite(score.log_likelihood) for score in scores)
        require_finite(finite, "log-likelihoods", self._dtype, self._comm)
        return scores

    def _generate(self, text: ChatText, **options: Any) -> Any:
        """Generate after the tokens of `text` that the cache does not have, and keep the cache of the result.

        If the placeholders of media of a later turn are among these tokens, the pass brings these media.

        Raises:
            NonFiniteLogitsError: on all ranks, if logits are not finite.
        """
        device = next(self._model.parameters()).device
        past = 0 if self._cache is None else int(self._cache.get_seq_length())
        given: Mapping[str, Tensor] = self._chat_format.arguments(text)
        appends, held = len(self._media) > 1, len(self._appended_at)
        later = self._places(text)[1 + held :] if appends else []
        brings = bool(later) and later[0][1] > 0  # the placeholders of the next turn's media are here
        turn = held + brings
        if appends and (brings or not past):
            first = sum(len(media.sources) for media in self._media[:turn])
            given = self._chat_format.arguments_of_media(given, past, first, first + len(self._media[turn].sources))
        arguments = {name: value.to(device) for name, value in given.items()}
        # The features of a later turn are passed once, unless the family repeats them.
        if turn == 0 or brings or self._chat_format.repeats_media:
            arguments |= self._feature_arguments(text, self._media[turn], device)
        if self._cache is not None:
            options[cache_name()] = self._cache
        self._cache = None  # a pass that fails may leave the cache with only some of its layers filled
        ends = options.get("eos_token_id", self._model.generation_config.eos_token_id)
        finite = FiniteLogits(next(iter(ends), 0) if isinstance(ends, (list, tuple)) else ends or 0)
        options["logits_processor"] = LogitsProcessorList([finite])
        output = self._model.generate(**arguments, use_cache=True, return_dict_in_generate=True, **options)
        finite.require(self._dtype, self._comm)
        self._cache = cache = cache_of(output)
        if brings:
            self._appended_at.append(past)
        self._cached_ids = output.sequences[0, : cache.get_seq_length()].tolist()
        return output

    def _prefill_in_chunks(self, text: ChatText, kept: int, written: GeneratedText | None = None) -> None:
        """Compute all but the end of a prompt, whose first `kept` tokens the cache has.

        A continuation of the cache is computed `PREFILL_CHUNK` tokens at a time, because attention to a cache needs a
        mask with a row for each new token and a column for each token so far. The placeholders of the media of one turn
        are in one pass, with none of another turn. Without a cache, the first pass brings the media of the first turn.

        Raises:
            PrefillInterrupted: on all ranks, if `interrupted` ended the answer.
        """
        options = {**self._chat_format.generation(self._model), **Sampling(max_new_tokens=1).generate_arguments()}
        length, appends = text.input_ids.shape[1], len(self._media) > 1
        waiting = self._places(text)[1 + len(self._appended_at) :] if appends else []
        while True:
            stop = min(kept + PREFILL_CHUNK, length) if kept else length
            if waiting and waiting[0][0] < stop:
                low, high = waiting[0]
                if kept:
                    waiting = waiting[1:]
                    stop = min([max(stop, high), *(next_low for next_low, _ in waiting[:1])])
                else:
                    stop = low
            if stop == length:
                return
            images = sum(place < stop for place in self._placeholders(text)) if appends else None
            with nullcontext() if written is None else interruptible_prefill(self._model, written):
                self._generate(text.beginning(stop, images), **options)
            kept = stop

    def _placeholders(self, text: ChatText) -> list[int]:
        """Return the positions of the placeholders of images."""
        offsets, mark = text.extras.get("media_offset"), getattr(self._chat_format, "image_token", None)
        if (kinds := text.extras.get("mm_token_type_ids")) is not None:
            offsets = kinds[0].nonzero()
        elif offsets is None and mark is not None:
            offsets = (text.input_ids[0] == self._processor.tokenizer.convert_tokens_to_ids(mark)).nonzero()
        return [] if offsets is None else [place for place in offsets.flatten().tolist() if place >= 0]

    def _places(self, text: ChatText) -> list[tuple[int, int]]:
        """Return where the placeholders of the media of each turn begin and end; (0, 0) without any.

        If there are later turns, a placeholder is that of one frame.
        """
        places = self._placeholders(text)
        ends = list(accumulate(media.frames for media in self._media))[:-1]
        turns = [places[first:stop] for first, stop in zip([0, *ends], [*ends, None], strict=True)]
        return [(own[0], own[-1] + 1) if own else (0, 0) for own in turns]

    def _feature_arguments(self, text: ChatText, media: _Media, device: torch.device) -> dict[str, Any]:
        """Return the arguments that pass this rank's features: the same objects in each pass, by which a model may know
        them. Without media, those of a blank image if the chat format needs one."""
        if media.encoded is None and not len(text.slots):
            return {}
        if media.encoded is None:
            weight = next(self._model.parameters())
            blank = (x.to(device, weight.dtype if x.is_floating_point() else None) for x in self._chat_format.blank())
            with torch.no_grad():
                features = encoder_of(self._model, self._chat_format)(*blank)
            shard = FrameShard.of(1, self._comm, self._chat_format.frame_layout)
            media.encoded = Encoded(features[: len(shard)], shard)
        encoded = media.encoded
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
            self._appended_at = []
            return 0
        ids = text.input_ids[0].tolist()
        limit = min(len(self._cached_ids), len(ids) - 1)
        kept = next((i for i in range(limit) if self._cached_ids[i] != ids[i]), limit)
        # To continue, attention needs a mask of all pairs, which takes several times longer than the causal order.
        short = not self.sources and kept < len(ids) // 8
        (_, first_stop), *later = self._places(text)
        for (_, stop), before in zip(later, self._appended_at, strict=False):
            if kept < stop:  # the frames of a turn are kept together
                kept = min(kept, before)
        if short or kept < max(1, first_stop):
            self._cache, kept = None, 0
        elif remove := len(self._cached_ids) - kept:
            self._cache.crop(-remove)
            if (state := cache_state_of(self._cache)) is not None:
                state.crop_to(kept)  # a pass would do so too late if it passes the frames of the first turn again
            self._cached_ids = self._cached_ids[:kept]
        self._appended_at = [before for before in self._appended_at if before < kept]
        return kept


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
