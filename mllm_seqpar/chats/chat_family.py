"""The chat format of a model family: the interface between its processor and the programs that train and generate.

A family is found by the class of a model directory's processor (`chat_family`). Its chat format turns
conversations into tokens and decoded frames into the arguments that the model's forward takes, exactly as the family's
own processor does for the same conversation.

Most families have one special token of the text for each image (`ImageTokenFamily`). The text of a conversation is
written and tokenized as a whole, as the families' processors do it. Appending a message only appends text, so an answer
is the text between the conversation that opens it and the conversation that ends with it. The labels are the tokens
whose character offsets lie in such a span.

Shape legend: B samples, L text tokens, N images in the model's flat list (padding images included), n images of
one call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.families import built_in_chats, family_index
from mllm_seqpar.patching.registry import external_adapters
from mllm_seqpar.sharding import FrameShard

from .answer_tokens import Span, target_mask
from .clip import FeatureFrames, FrameSource, ImageListSource

Messages = Sequence[Mapping[str, Any]]
"""Valid messages, as `Chat.to_json` returns them."""

_Source = TypeVar("_Source")

VIDEO_MARK = "<|video|>"
"""The placeholder of the video in a question, in every family. Without it, the video comes first."""


def chat_family(processor: Any) -> ChatFamily:
    """Return the chat format of a processor, of the family that names its class or one of its base classes.

    Raises:
        ConfigError: no family names one of them.
    """
    names = [c.__name__ for c in type(processor).__mro__]
    for name in names:
        for family, chat_format in [*_external_formats(), *built_in_chats(names)]:
            if name in chat_format.processors:
                return chat_format(processor, family)
    raise ConfigError(
        f"no model family has a chat format for a {type(processor).__name__}; expected one of "
        f"{', '.join(known_processors())}. Copy the processor files of the model (processor_config.json or "
        "preprocessor_config.json, and the tokenizer) into its directory, or register a family whose chat format names "
        "this class in `processors` (mllm_seqpar.register_adapter)"
    )


def _external_formats() -> list[tuple[Any, type[ChatFamily]]]:
    """Return (family, chat format) of the families from outside this package that have one."""
    formats = [(family, getattr(family, "chat", None)) for family in external_adapters().values()]
    return [(family, chat_format) for family, chat_format in formats if chat_format is not None]


def known_processors() -> list[str]:
    """Return the class names of the processors that have a chat format."""
    external = [name for _, chat_format in _external_formats() for name in chat_format.processors]
    return external + [entry.processor for entry in family_index().values()]


@dataclass(frozen=True, kw_only=True)
class ChatText:
    """Tokenized conversations and the model's other text arguments.

    Attributes:
        input_ids, attention_mask: (B, L), padded.
        labels: (B, L), the tokens of the answers and their ends, -100 elsewhere; or None.
        slots: (N,) for each image of the model's flat list, its index among all images of the conversations, or -1
            for an image that only pads a sample.
        sizes: (N,) the tokens of each image if they differ; see `ChatFamily.frame_sizes`.
        extras: masks and positions of images, by their argument names in the model's forward.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor | None
    slots: Sequence[int]
    sizes: Sequence[int] | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def beginning(self, stop: int, images: int | None = None) -> ChatText:
        """Return the first `stop` tokens, among them those of the first `images` images; None: of all."""
        length = self.input_ids.shape[1]

        def cut(x: Tensor) -> Tensor:
            return x[:, :stop] if x.dim() > 1 and x.shape[1] == length else x

        extras = {name: cut(x) for name, x in self.extras.items() if name != "media_offset"}
        if images is not None:
            extras = {name: x[:, :, :images] if x.dim() > 2 else x for name, x in extras.items()}
        if (offset := self.extras.get("media_offset")) is not None:
            extras["media_offset"] = torch.where(offset < stop, offset, -1)
        labels = None if self.labels is None else cut(self.labels)
        return replace(
            self, input_ids=cut(self.input_ids), attention_mask=cut(self.attention_mask), labels=labels, extras=extras
        )


class ChatFamily(ABC):
    """The chat format of one model family, for one processor.

    Args:
        processor: the processor of the model directory.
        family: the family's class.

    Attributes:
        processors: class names of the family's processors.
        marks: strings that a message must not contain because the chat format gives them a meaning.
        ids_name: the argument name of the token ids in the model's forward.
        frame_names: the argument names of the tensors that `pixels` returns, in the same order.
        feature_weights: name prefixes of the weights that compute visual features.
        tower: path of the vision tower in the model, and the name of its method that takes images.
        always_sharded: whether the patched forward takes images as one flat list on a single process too, where the
            unpatched forward has a dimension of samples.
        ragged: whether images have different numbers of rows, and are joined by `joined`.
        stores_tower: whether the outputs of the vision tower can be stored (`finetune --features`).
        repeats_media: whether the forward of a model that appends media needs images in each pass, also those of the
            cache.
    """

    processors: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    ids_name = "input_ids"
    frame_names: tuple[str, ...] = ("pixel_values",)
    feature_weights: tuple[str, ...]
    tower: tuple[str, str] = ("model.vision_model", "forward")
    always_sharded = True
    ragged = False
    stores_tower = True
    repeats_media = False

    def __init__(self, processor: Any, family: Any) -> None:
        self.processor, self.family = processor, family

    @property
    def model_class(self) -> str:
        """The name of the class of the family's models."""
        return self.family.model_class

    @property
    def frame_layout(self) -> str:
        """How the programs map images to ranks: as the patched model does (`Family.frame_layout`)."""
        return self.family.frame_layout

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @abstractmethod
    def text(
        self,
        conversations: Sequence[Messages],
        media: Sequence[Sequence[FrameSource]],
        *,
        add_generation_prompt: bool = False,
        labels: bool = False,
        padding_side: str | None = None,
    ) -> ChatText:
        """Tokenize conversations. Nothing is decoded, except one frame where the size of a video is needed.

        Args:
            conversations: validated messages.
            media: for each conversation, the sources of its media parts, in order.
            add_generation_prompt: end each conversation with the beginning of an answer.
            padding_side: "left" or "right"; the tokenizer's default if None.

        Raises:
            DataError: images and placeholders do not match, or the tokenizer lacks a required feature.
        """

    def check(self, model: Any) -> None:
        known = {self.model_class, *(entry.model_class for entry in family_index().values())}
        # The first known class: a family's class may derive from that of another family.
        if next((c.__name__ for c in type(model).__mro__ if c.__name__ in known), None) != self.model_class:
            raise ConfigError(
                f"the model is {type(model).__name__}, and its directory has a {type(self.processor).__name__}, which "
                f"goes with {self.model_class}; copy the processor files of this model into the directory"
            )

    def frame_groups(self, source: FrameSource) -> FrameSource:
        """Return a source of the frame groups that a rank encodes as a whole; by default, each frame is one."""
        return source

    def group_sizes(self, source: FrameSource) -> list[int]:
        """Return the number of frames of the source in each of its frame groups."""
        count, groups = len(source), len(self.frame_groups(source))
        step = -(-count // groups) if groups else 1
        return [min(step, count - first) for first in range(0, count, step)]

    @abstractmethod
    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """Preprocess frames (n, 3, H, W), uint8, n > 0, or what `frame_groups` reads; return (n, ...) for `encode`."""

    def joined(self, parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the results of several calls of `pixels` as the model's arguments, one for each of `frame_names`."""
        return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))

    def unsharded(self, *sources: FrameSource) -> dict[str, Tensor]:
        """Return all frames of the sources as arguments of the unpatched model, for one sample."""
        grouped = map(self.frame_groups, sources)
        parts = [self.pixels(read) for groups in grouped for read in groups.read(0, len(groups))]
        arguments = zip(self.frame_names, self.joined(parts), strict=True)
        return {name: x[None] if self.always_sharded else x for name, x in arguments if len(x)}

    @abstractmethod
    def blank(self) -> tuple[Tensor, ...]:
        """Return the image that pads a sample, in the form of `pixels`, (1, ...) each."""

    def encode(self, model: Any, *frames: Tensor) -> Tensor:
        """Return the visual features (n, tokens, width) of what `pixels` returned, on the model's device.

        By default `Family.encode` computes them, as in a pass with pixels.
        """
        features: Tensor = self.family(model, None).encode(*frames)
        images = frames[0].shape[0]
        return features.reshape(images, features.shape[0] // images * features.shape[1], features.shape[2])

    @abstractmethod
    def feature_arguments(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        """Return the arguments that pass this rank's features to the patched `generate` instead of images."""

    @property
    def tower_weights(self) -> tuple[str, ...]:
        """Name prefixes of the weights of the vision tower."""
        last = self.tower[0].rpartition(".")[2] + "."
        return tuple(prefix for prefix in self.feature_weights if prefix.endswith(last))

    def tower_rows(self, source: FrameSource) -> int:
        """Return the number of rows that the method of `tower` takes and returns for each frame of a source.

        The source is what `frame_groups` returns.
        """
        return 1

    def tower_frames(self, pixels: Tensor) -> int:
        """Return the number of images in the input of the method of `tower`, or of rows if an image has several."""
        return pixels.shape[0]

    def tower_states(self, output: Any) -> Tensor:
        """Return the states (images, ...) in the output of the method of `tower`."""
        return output.last_hidden_state

    def tower_output(self, states: Tensor) -> Any:
        """Return the output of the method of `tower` for these states."""
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=states)

    def arguments(self, text: ChatText) -> dict[str, Tensor]:
        """Return all arguments of forward and `generate` except the images."""
        arguments = {self.ids_name: text.input_ids, "attention_mask": text.attention_mask, **text.extras}
        return arguments if text.labels is None else arguments | {"labels": text.labels}

    def generation(self, model: Any) -> dict[str, Any]:
        """Return arguments of `generate` that the chat format requires, such as the tokens that end an answer."""
        return {}

    def appends_media(self, model: Any) -> bool:
        """Return whether a later turn of a conversation may show further media over its cache.

        This is so if no token attends to images after it, and if the forward distinguishes images of the cache from
        further ones.
        """
        return False

    def arguments_of_media(
        self, arguments: Mapping[str, Tensor], past_length: int, first: int, stop: int
    ) -> Mapping[str, Tensor]:
        """Return the arguments of a pass that brings the media ``first <= m < stop`` of a text to its cache.

        Args:
            arguments: of the whole text up to the end of the pass, and of all media; by default they are returned.
            past_length: the number of tokens in the cache.
        """
        return arguments

    def still_frames(self, image: ImageListSource) -> FrameSource:
        """Return the frames of a still image, given as a source of one frame: one for each tile if the processor cuts
        images into tiles."""
        return image

    def frame_metadata(self, source: FrameSource) -> dict[str, Any]:
        """Return the metadata that a feature store records about its frames, so that prompts and times need no access
        to the video; by default, the times."""
        seconds = [source.seconds(number) for number in range(len(source))]
        return {} if None in seconds else {"frame_seconds": seconds}

    def frame_sizes(self, sources: Sequence[FrameSource]) -> Sequence[int] | None:
        """Return the tokens of each frame of all sources, by which ranks share whole frames; None: by their number.

        A format of a model with cross-attention whose frames differ in size overrides it; the model states the same
        sizes (`ForwardInputs.units_per_frame`).
        """
        return None

    def stored_frames(self, count: int, metadata: Mapping[str, Any]) -> FrameSource:
        """Return a source that stands for the frames of `count` frame groups in a feature store with this metadata."""
        return FeatureFrames(count, times=metadata.get("frame_seconds"))


class ImageTokenFamily(ChatFamily):
    """A chat format with one special token for each image; every sample is padded to the same number of images."""

    min_images = 0
    """The minimum number of images per sample, padding included."""

    @property
    @abstractmethod
    def image_token(self) -> str: ...

    @abstractmethod
    def write(self, messages: Sequence[dict[str, Any]], open_answer: bool) -> str:
        """Return the text of a conversation whose contents are parts of type text or image.

        With `open_answer`, it ends with the beginning of an answer.
        """

    def needs_special_tokens(self, texts: Sequence[str]) -> bool:
        """Return whether the tokenizer must add its own special tokens, such as the one that begins a text."""
        return False

    def masks(self, ids: Tensor, media: Sequence[Sequence[FrameSource]]) -> dict[str, Tensor]:
        """Return the model's masks of images for token ids (B, L)."""
        return {}

    def text(
        self,
        conversations: Sequence[Messages],
        media: Sequence[Sequence[FrameSource]],
        *,
        add_generation_prompt: bool = False,
        labels: bool = False,
        padding_side: str | None = None,
    ) -> ChatText:
        chats = [expand_media(messages, sources) for messages, sources in zip(conversations, media, strict=True)]
        texts = [self.write(messages, add_generation_prompt) for messages in chats]
        spans = [answer_spans(messages, self.write) for messages in chats] if labels else None
        ids, mask, targets = tokenize(
            self.tokenizer,
            texts,
            spans,
            padding_side=padding_side,
            add_special_tokens=self.needs_special_tokens(texts),
        )
        counts, mark = image_counts(media), self.image_token
        token = self.tokenizer.convert_tokens_to_ids(mark)
        written = (ids == token).sum(1).tolist() if token is not None else [0] * len(counts)
        for sample, (tokens, images) in enumerate(zip(written, counts, strict=True)):
            if tokens != images:
                raise DataError(
                    f"sample {sample} has {images} images, but {tokens} tokens {mark} (id {token}) in its text; "
                    f"the tokenizer must have {mark} as one special token, and the chat template must write it for "
                    "each image"
                )
        most, first, slots = max([self.min_images, *counts]), 0, []
        for count in counts:
            slots += [*range(first, first + count), *[-1] * (most - count)]
            first += count
        return ChatText(input_ids=ids, attention_mask=mask, labels=targets, slots=slots, extras=self.masks(ids, media))


def media_parts(messages: Messages) -> list[Mapping[str, Any]]:
    """Return the parts of type video and image, in order."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return [part for content in contents for part in content if part["type"] != "text"]


def media_of(messages: Messages, sources: Sequence[_Source]) -> list[tuple[str, _Source]]:
    """Return the kind and the source of each media part.

    Raises:
        DataError: unless there is one source for each.
    """
    parts = media_parts(messages)
    if len(parts) != len(sources):
        raise DataError(
            f"{len(sources)} videos and images were passed, and the conversation has {len(parts)} media parts; pass "
            "one for each"
        )
    return [(part["type"], source) for part, source in zip(parts, sources, strict=True)]


def expand_media(messages: Messages, media: Sequence[FrameSource]) -> list[dict[str, Any]]:
    """Return the messages with all contents as parts, and one image part for each frame of a media part."""
    sources = iter([source for _, source in media_of(messages, media)])

    def parts(content: Any) -> Iterator[dict[str, Any]]:
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            is_text = part["type"] == "text"
            yield from [{"type": "text", "text": part["text"]}] if is_text else [{"type": "image"}] * len(next(sources))

    return [{"role": message["role"], "content": [*parts(message["content"])]} for message in messages]


def image_counts(media: Sequence[Sequence[FrameSource]]) -> list[int]:
    return [sum(len(source) for source in sources) for sources in media]


def answer_spans(
    messages: Sequence[dict[str, Any]], write: Callable[[Sequence[dict[str, Any]], bool], str]
) -> list[Span]:
    """Return the character ranges of ``write(messages, False)`` that hold the answers and their ends.

    Raises:
        DataError: the chat template changes the text of earlier messages when a message is appended.
    """
    whole, spans = write(messages, False), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened, closed = write(messages[:number], True), write(messages[: number + 1], False)
        if not (closed.startswith(opened) and whole.startswith(closed)):
            raise DataError(
                f"message {number}: the chat template writes earlier messages differently when later ones follow, so "
                "the answers cannot be found in the text; use a template that only appends"
            )
        spans.append((len(opened), len(closed)))
    return spans


def tokenize(
    tokenizer: Any,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]] | None,
    *,
    padding_side: str | None,
    add_special_tokens: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return input_ids, attention_mask and labels, (B, L) each; no labels if `spans` is None.

    Raises:
        DataError: the tokenizer cannot pad several texts, or has no character offsets.
    """
    if len(texts) > 1 and tokenizer.pad_token_id is None:
        raise DataError(
            "the tokenizer has no pad token, so texts of different lengths cannot be batched; set pad_token"
        )
    if spans is not None and not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} has no character offsets, so the tokens of the answers cannot be found; use "
            "the fast tokenizer (tokenizer.json) of this model"
        )
    encoded = tokenizer(
        list(texts),
        padding=len(texts) > 1,
        return_tensors="pt",
        add_special_tokens=add_special_tokens,
        return_token_type_ids=False,
        return_attention_mask=True,
        return_offsets_mapping=spans is not None,
        **({} if padding_side is None else {"padding_side": padding_side}),
    )
    ids, labels = encoded["input_ids"], None
    if spans is not None:
        labels = ids.masked_fill(torch.tensor(target_mask(encoded["offset_mapping"], spans)) == 0, -100)
    return ids, encoded["attention_mask"], labels
