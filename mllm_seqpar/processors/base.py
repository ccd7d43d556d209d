"""The common part of the native processors, which have the interface of transformers' processors.

A processor consists of an image processor, a tokenizer and a chat template. The template is Jinja, as in transformers,
and marks the answers by `{% generation %}`, so labels and masks of answers follow from the rendered text.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin
from transformers.utils import PROCESSOR_NAME
from transformers.utils.chat_template_utils import render_jinja_template

from mllm_seqpar.chats.answer_tokens import Span, target_mask
from mllm_seqpar.chats.chat import Chat, without_nulls
from mllm_seqpar.chats.forms import plain_part
from mllm_seqpar.errors import DataError, ShapeError, require_one_of
from mllm_seqpar.models.auto_classes import LocalCode, write_code

Messages = Sequence[Mapping[str, Any]]

PARTS = ("tokenizer", "image_processor", "chat_template")
"""The arguments of `from_pretrained` that replace a part of a directory."""

_MODALITIES = ("text_kwargs", "images_kwargs", "videos_kwargs", "audio_kwargs")
_MEDIA_KEYS = {"image": ("image", "url", "path", "base64"), "video": ("video", "url", "path")}
TEXT_ARGUMENTS = {
    *("padding", "padding_side", "pad_to_multiple_of", "max_length", "truncation", "return_tensors"),
    *("return_attention_mask", "return_offsets_mapping", "add_special_tokens", "verbose"),
}
"""The arguments of tokenizers that the processors with placeholders for frames take."""

TENSORS = ("pt", "np", None)
"""The values of `return_tensors`: torch, numpy, or lists."""

_SAVED_TEMPLATE = "has_chat_template"
"""Key of processor_config.json. A directory of the hub may have the chat template of its language model in a file of
the same name, which is not that of the processor."""


_RENDERING = threading.Lock()
"""transformers keeps one compiled template per process, and the positions of the answers within it while it renders."""


class NativeProcessor(LocalCode, ProcessorMixin):
    """Base of the native processors; subclasses have the attributes `image_processor` and `tokenizer`.

    Attributes:
        chat_template: Jinja, or several by name; the published format if none is given. A tokenizer without chat
            template gets it too.
    """

    model_type: ClassVar[str]
    """The `model_type` of the model that it belongs to."""
    saved_options: tuple[str, ...] = ()
    """Names of the attributes that processor_config.json states."""
    ids_name = "input_ids"
    """Name of the token ids among the model's inputs."""
    text_kwargs = {"padding": True, "return_tensors": "pt"}
    supported_arguments: ClassVar[Mapping[str, set[str]]] = {}
    """The supported arguments of `__call__` under text_kwargs, images_kwargs and videos_kwargs, including those without
    effect by design."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None) -> None:
        template = self.published_chat_template(tokenizer) if chat_template is None else chat_template
        super().__init__(image_processor, tokenizer, chat_template=template)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = template

    @classmethod
    def published_chat_template(cls, tokenizer: Any) -> str:
        """Return the chat template of the published models, as it is for this tokenizer."""
        raise NotImplementedError

    def check_conversation(self, messages: Messages) -> None:
        """Raise DataError for messages that the published chat template cannot express."""
        Chat.parse(messages)

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]

    @classmethod
    def _of_directory(
        cls,
        path: str | os.PathLike,
        parts: Mapping[str, Any],
        image_processor: Callable[[], Any],
        *,
        options: Mapping[str, Any],
        hub: Mapping[str, Any],
        **of_tokenizer: Any,
    ) -> Self:
        """Return the processor of a directory, with those of `parts` (of `PARTS`) that the caller has passed."""
        template = parts["chat_template"]
        if template is None:
            stated, _ = cls.get_processor_dict(path, **hub)
            template = stated.get("chat_template") if stated.get(_SAVED_TEMPLATE) else None
        tokenizer = parts["tokenizer"] or AutoTokenizer.from_pretrained(path, **of_tokenizer)
        processor = cls(parts["image_processor"] or image_processor(), tokenizer, chat_template=template, **options)
        if parts["tokenizer"] is None:  # a published tokenizer has the chat template of its language model
            tokenizer.chat_template = processor.chat_template
        return processor

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> list[str]:
        """Write tokenizer, image processor, chat template and options to a directory; return the paths of the files."""
        if push_to_hub:
            raise DataError("push_to_hub is True; save to a directory and upload that")
        path = Path(save_directory, PROCESSOR_NAME)
        path.parent.mkdir(parents=True, exist_ok=True)
        own, self.tokenizer.chat_template = self.tokenizer.chat_template, self.chat_template
        try:  # tokenizer and processor share the files of the chat template
            files = [*self.tokenizer.save_pretrained(save_directory, **kwargs)]
        finally:
            self.tokenizer.chat_template = own
        files += self.image_processor.save_pretrained(save_directory)
        options = {"processor_class": type(self).__name__, "auto_map": write_code(save_directory, self.model_type)}
        options |= {name: getattr(self, name) for name in self.saved_options} | {_SAVED_TEMPLATE: True}
        path.write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
        return [str(path), *files]

    def apply_chat_template(
        self,
        conversation: Messages | Sequence[Messages],
        chat_template: str | None = None,
        tools: list[Any] | None = None,
        documents: list[dict[str, str]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        return_assistant_tokens_mask: bool = False,
        tokenize: bool = False,
        return_tensors: str | None = "auto",
        return_dict: bool = True,
        *,
        images: Any = None,
        videos: Any = None,
        return_labels: bool = False,
        processor_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return one conversation or several as text, or, with `tokenize`, as model inputs with their media.

        Args:
            conversation: messages, or a list of conversations. Parts may contain their media, an image, an array, a
                path or a URL: {"type": "image", "image": image}, {"type": "image", "url": "https://..."}.
            chat_template: Jinja, or the name of one of several saved templates, instead of the processor's.
            tools, documents: for chat templates that use them; the published formats do not.
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: leave the last message open, without its end.
            return_assistant_tokens_mask: with `tokenize`, add `assistant_masks`: 1 at the tokens of the answers.
            return_tensors: "pt", which is the default, "np", or None for lists.
            return_dict: False returns the token ids only.
            images, videos: with `tokenize`, used instead of the media in the parts, in the form of `__call__`.
            return_labels: with `tokenize`, add `labels`: the tokens of the answers and their ends, -100 elsewhere.
            processor_kwargs: arguments of `__call__`.
            **kwargs: variables of the chat template, and further arguments of `__call__`.

        Raises:
            DataError: an argument that neither the template nor `__call__` takes, or messages that the format refuses.
        """
        conversations, batched = _conversations(conversation)
        options = dict(processor_kwargs or {})
        names = self._argument_names()
        variables = {name: value for name, value in kwargs.items() if name not in names}
        options |= {name: value for name, value in kwargs.items() if name in names}
        texts, spans = self._render(
            conversations,
            chat_template,
            marked=return_assistant_tokens_mask or return_labels,
            training=return_labels,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        if not tokenize:
            return texts if batched else texts[0]
        if return_tensors != "auto":
            options["return_tensors"] = return_tensors
        if spans is not None:
            options["return_offsets_mapping"] = True
        beginning = self.tokenizer.bos_token
        if beginning and texts[0].startswith(beginning):
            options.setdefault("add_special_tokens", False)
        media = {"images": images, "videos": videos}
        for kind, name in (("image", "images"), ("video", "videos")):
            listed = [media_of(messages, kind) for messages in conversations]
            if media[name] is None and any(listed):
                media[name] = listed
        inputs = self(text=texts, **{name: value for name, value in media.items() if value is not None}, **options)
        if spans is not None:
            masks = target_mask(inputs.pop("offset_mapping"), spans)
            if return_labels:
                inputs["labels"] = _labels(inputs[self.ids_name], masks)
            if return_assistant_tokens_mask:
                inputs["assistant_masks"] = _like(masks, inputs[self.ids_name])
        return inputs if return_dict else inputs[self.ids_name]

    def _render(
        self,
        conversations: Sequence[Messages],
        chat_template: str | None = None,
        *,
        marked: bool = False,
        tools: list[Any] | None = None,
        documents: list[dict[str, str]] | None = None,
        continue_final_message: bool | str = False,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> tuple[list[str], list[list[Span]] | None]:
        """Return the text of each conversation and, if `marked`, the character ranges of its answers."""
        template: str = self.chat_template if chat_template is None else chat_template
        if isinstance(self.chat_template, Mapping):  # several by name
            name = "default" if chat_template is None else chat_template
            if chat_template is None and name not in self.chat_template:
                names = ", ".join(sorted(self.chat_template))
                raise DataError(f"there is no default chat template; pass chat_template, one of {names}")
            template = self.chat_template.get(name, name)
        given = {"tools": tools, "documents": documents, **variables}
        unused = [
            name
            for name, value in given.items()
            if value and name != "training" and not re.search(rf"\b{name}\b", template)
        ]
        if unused:
            raise DataError(
                f"unknown arguments: {', '.join(sorted(unused))}: neither {type(self).__name__} nor its chat template "
                "uses them; leave them out, or pass a chat_template that does"
            )
        if continue_final_message and (add_generation_prompt or marked):
            raise DataError(
                "continue_final_message leaves the last answer open; leave out add_generation_prompt, "
                "return_assistant_tokens_mask and return_labels"
            )
        if marked and not re.search(r"\{%-?\s*generation\b", template):
            raise DataError("the chat template has no {% generation %} block, which marks the answers; add one to it")
        if template == self.published_chat_template(self.tokenizer):
            for messages in conversations:
                self.check_conversation(messages)
        with _RENDERING:
            texts, spans = render_jinja_template(
                conversations=conversations,
                chat_template=template,
                tools=tools,
                documents=documents,
                return_assistant_tokens_mask=marked,
                continue_final_message=continue_final_message,
                add_generation_prompt=add_generation_prompt,
                **(self.tokenizer.special_tokens_map | variables),
            )
        return texts, spans if marked else None

    @classmethod
    def _arguments_of(cls, kind: str) -> set[str]:
        """Return the names of the arguments of a modality that processors of transformers take, and of the own ones."""
        of_transformers = cls.valid_processor_kwargs.__annotations__[kind].__annotations__
        return {*of_transformers, *cls.supported_arguments.get(kind, ())}

    @classmethod
    def _argument_names(cls) -> set[str]:
        """Return the names of the arguments of `__call__`, supported or not."""
        named = set(cls.valid_processor_kwargs.__annotations__) | {"common_kwargs"}
        return named.union(*map(cls._arguments_of, _MODALITIES))

    def _arguments(self, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the arguments of a call by modality; raise DataError for unknown ones, and those without effect."""
        nested = {kind: dict(given.get(kind) or {}) for kind in _MODALITIES}
        allowed = {kind: self.supported_arguments.get(kind, set()) for kind in _MODALITIES}
        flat = {name: value for name, value in given.items() if name not in (*_MODALITIES, "common_kwargs")}
        merged = {kind: dict(getattr(self, kind, {})) for kind in _MODALITIES}
        saved = getattr(self.tokenizer, "init_kwargs", {})
        merged["text_kwargs"] |= {name: saved[name] for name in ("padding", "max_length") if saved.get(name)}
        unknown, refused = set(flat) - self._argument_names(), set()
        for kind, values in nested.items():
            unknown |= set(values) - self._arguments_of(kind)
            refused |= {name for name, value in values.items() if value and name not in allowed[kind]}
            if twice := sorted(set(flat) & set(values)):
                raise DataError(f"{twice[0]} was passed in {kind} and outside of it; pass it once")
            merged[kind] |= dict(given.get("common_kwargs") or {}) | values
            merged[kind] |= {name: value for name, value in flat.items() if name in allowed[kind]}
        if unknown:
            raise DataError(f"unknown arguments: {', '.join(sorted(unknown))}")
        taken = set().union(*allowed.values())
        refused |= {name for name, value in flat.items() if value and name not in taken}
        if refused:
            raise DataError(
                f"{type(self).__name__} does not support the arguments {', '.join(sorted(refused))}; supported are "
                f"{', '.join(sorted(taken))}"
            )
        return merged


def texts_of(text: Any) -> list[str]:
    """Return the texts of a call, which are one text or several; raise DataError without any."""
    texts = [text] if isinstance(text, str) else list(text) if isinstance(text, Iterable) else []
    if not texts or not all(isinstance(each, str) for each in texts):
        raise DataError(f"text is {text!r:.80}; pass a text, or a list of texts, with a mark for each image and video")
    return texts


def media_of(messages: Messages, kind: str) -> list[Any]:
    """Return the media of the parts of type `kind` ("image" or "video") that contain theirs, in order."""
    return [
        part[key]
        for message in messages
        if not isinstance(message.get("content"), str)
        for part in message.get("content") or ()
        if part.get("type") == kind
        for key in [key for key in _MEDIA_KEYS[kind] if part.get(key) is not None][:1]
    ]


def flattened(media: Any, counts: Sequence[int], mark: str, noun: str, nested: bool | None = None) -> list[Any]:
    """Return the media of all texts in one list.

    Args:
        media: one list, or a list for each text; None without media.
        counts: the number of placeholders `mark` in each text.
        nested: whether there is a list for each text; None: if an item is a list.

    Raises:
        DataError: the number of media in a list is not the number of placeholders.
    """
    listed = [] if media is None else list(media)
    if nested is None:
        nested = any(isinstance(sample, (list, tuple)) for sample in listed)
    passed = [len(x) if isinstance(x, (list, tuple)) else "no list" for x in listed] if nested else len(listed)
    if passed != (list(counts) if nested else sum(counts)):
        raise DataError(f"the texts have {list(counts)} {mark}, and {passed} {noun} were passed; pass one for each")
    return [item for sample in listed for item in sample] if nested else listed


def is_video(item: Any) -> bool:
    """Return whether an item of a list is a video, and not a frame of one."""
    return isinstance(item, (str, os.PathLike, Mapping, list, tuple)) or getattr(item, "ndim", 0) == 4


def frame_list(images: Any) -> list[Any]:
    """Return a list of images from one image, an array or tensor of several, or any iterable of images."""
    if isinstance(images, (np.ndarray, Tensor)):
        return list(images) if images.ndim > 3 else [images]
    return [images] if hasattr(images, "convert") or isinstance(images, (str, os.PathLike)) else list(images)


def to_tensor(frame: Any, number: int, *, convert_rgb: bool = True, layout: str | None = None) -> Tensor:
    """Return the image as (3, H, W), uint8 or floating; `number` is its index in error messages."""
    if hasattr(frame, "convert"):  # a PIL image; PIL may not be installed
        frame, layout = np.array(frame.convert("RGB") if convert_rgb else frame), "channels_last"
    if isinstance(frame, np.ndarray):
        frame = torch.from_numpy(np.ascontiguousarray(frame))
    channels = {"channels_first": (0,), "channels_last": (2,), None: (2, 0)}[layout]
    axes = [axis for axis in channels if isinstance(frame, Tensor) and frame.dim() == 3 and frame.shape[axis] == 3]
    if not axes:
        what = tuple(frame.shape) if isinstance(frame, Tensor) else type(frame).__name__
        raise ShapeError(f"frame {number} is {what}; expected an image, (height, width, 3) or (3, height, width)")
    if axes[0] == 2:
        frame = frame.permute(2, 0, 1)
    if frame.dtype != torch.uint8 and not frame.is_floating_point():
        raise ShapeError(f"frame {number} is {frame.dtype}; expected uint8 from 0 to 255, or floating from 0 to 1")
    if frame.is_floating_point() and frame.numel() and not (frame.min() >= 0 and frame.max() <= 1):
        raise ShapeError(
            f"frame {number} is floating-point with values from {frame.min():.3g} to {frame.max():.3g}; expected 0 "
            "to 1, or uint8"
        )
    return frame


def returned(data: dict[str, Any], return_tensors: str | None) -> BatchFeature:
    """Return tensors as torch or numpy arrays, or as lists; raise DataError for another kind of tensors."""
    require_one_of("return_tensors", return_tensors, TENSORS, kind=DataError)
    if return_tensors == "np":
        data = {name: np.asarray(value) for name, value in data.items()}
    elif return_tensors is None:
        data = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in data.items()}
    return BatchFeature(data)


def _conversations(given: Any) -> tuple[list[list[dict[str, Any]]], bool]:
    """Return conversations, messages without nulls and with OpenAI's image_url as images; whether several came."""
    if not isinstance(given, (list, tuple)) or not given:
        raise DataError(f"the conversation is {given!r:.80}; pass a list of messages, or a list of such lists")
    batched = not isinstance(given[0], Mapping)
    conversations = []
    for messages in given if batched else [given]:
        if not isinstance(messages, (list, tuple)) or not all(isinstance(message, Mapping) for message in messages):
            raise DataError(f"a conversation is {messages!r:.80}; expected a list of messages with role and content")
        conversations.append([_message(message) for message in messages])
    return conversations, batched


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    message, content = without_nulls(message), message.get("content")
    if isinstance(content, (list, tuple)):
        is_openai = (isinstance(part, Mapping) and part.get("type") == "image_url" for part in content)
        message["content"] = [plain_part(part) if x else part for part, x in zip(content, is_openai, strict=True)]
    return message


def _like(rows: list[list[int]], ids: Any) -> Any:
    if isinstance(ids, Tensor):
        return torch.tensor(rows)
    return np.array(rows) if isinstance(ids, np.ndarray) else rows


def _labels(ids: Any, masks: list[list[int]]) -> Any:
    rows = [[token if kept else -100 for token, kept in zip(*row, strict=True)] for row in zip(ids, masks, strict=True)]
    return _like([[int(token) for token in row] for row in rows], ids)
