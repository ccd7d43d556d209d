"""The processor: text with `<image>` placeholders and images to the arguments of `Flamingo.forward`."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ImagesKwargs, TextKwargs

from mllm_seqpar.chats.chat import Allowed, Chat
from mllm_seqpar.errors import DataError
from mllm_seqpar.models.open_flamingo.configuration import END_OF_CHUNK, IMAGE, OpenFlamingoConfig
from mllm_seqpar.processors.base import PARTS, NativeProcessor, flattened, frame_list, returned, texts_of

_REFUSED = {"text_pair", "text_target", "text_pair_target", "is_split_into_words", "return_overflowing_tokens"}
_REFUSED |= {"return_mm_token_type_ids", "return_text_replacement_offsets", "sanitize_control_tokens"}

CHAT_TEMPLATE = """\
{%- set chat = namespace(opening='', asked=false) -%}
{%- for message in messages -%}
{%- if message.content is string -%}{%- set parts = [{'type': 'text', 'text': message.content}] -%}
{%- else -%}{%- set parts = message.content -%}{%- endif -%}
{%- if message.role == 'assistant' -%}
{{ chat.opening }}{%- set chat.opening = '' -%}
{%- generation -%}
{%- for part in parts -%}{{ '<image>' if part.type == 'image' else part.text }}{%- endfor -%}
{{ '<|endofchunk|>' }}
{%- endgeneration -%}
{%- else -%}
{%- set chat.asked = false -%}
{%- for part in parts -%}
{%- if part.type == 'image' -%}{{ '<image>' }}
{%- else -%}
{{ ('Question:' if message.role == 'user' and not chat.asked else '') + part.text }}{%- set chat.asked = true -%}
{%- endif -%}
{%- endfor -%}
{%- if message.role == 'user' -%}{%- set chat.opening = ' Short answer:' if chat.asked else 'Output:' -%}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ chat.opening }}{%- endif -%}
"""
"""The form of the published evaluations:

    <image>Question:What is it? Short answer:A cat.<|endofchunk|>Question:Where? Short answer:At home.<|endofchunk|>
    <image>Output:A cat at home.<|endofchunk|>

A user message with only images asks for a caption. A system message is plain text before the rest."""


class OpenFlamingoProcessor(NativeProcessor):
    """The language model's tokenizer and CLIP's image processor, used as in the published training.

    Attributes:
        chat_template: Jinja; the form of the published evaluations by default.
    """

    model_type = OpenFlamingoConfig.model_type
    ids_name = "lang_x"
    supported_arguments = {
        "text_kwargs": set(TextKwargs.__annotations__) - _REFUSED,
        "images_kwargs": set(ImagesKwargs.__annotations__),
        "videos_kwargs": {"return_tensors", "do_sample_frames", "num_frames", "fps"},  # there are no videos to sample
    }
    image_token = IMAGE

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None) -> None:
        vocabulary = tokenizer.get_vocab()
        missing = [mark for mark in (IMAGE, END_OF_CHUNK) if mark not in vocabulary]
        if missing:
            raise DataError(f"the tokenizer has no token {', '.join(missing)}; add it as a special token")
        super().__init__(image_processor, tokenizer, chat_template)

    @classmethod
    def published_chat_template(cls, tokenizer: Any) -> str:
        return CHAT_TEMPLATE

    def check_conversation(self, messages: Sequence[Mapping[str, Any]]) -> None:
        Chat.parse(messages, Allowed(sources={"image": None}))  # a video is shown as images of its frames

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """Load the tokenizer, the image processor and the chat template of a directory.

        Args:
            **kwargs: `chat_template`, `tokenizer` and `image_processor` replace those of the directory; options of the
                image processor, such as `do_normalize`, replace saved ones; further arguments are passed to the
                tokenizer.
        """
        # AutoImageProcessor requires torchvision in transformers 5.17.
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        path, parts = pretrained_model_name_or_path, {name: kwargs.pop(name, None) for name in PARTS}
        names = set(ImagesKwargs.__annotations__) & set(kwargs)
        images = partial(CLIPImageProcessorPil.from_pretrained, path, **{name: kwargs.pop(name) for name in names})
        return cls._of_directory(path, parts, images, options={}, hub={}, **kwargs)

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Return texts and their images as model inputs.

        Args:
            images: the images of each text, a list of lists; or one list of all images, in the order of the
                `<image>` in the texts; or one image. An image may be a path or a URL. Samples are padded with zeros to
                the same number of images.
            text: one text or several, with `<image>` for each image.
            **kwargs: arguments of the tokenizer, such as `padding` (True by default), `padding_side`, `max_length`,
                `truncation` and `return_tensors` ("pt" by default), and of the image processor. `text_kwargs` and
                `images_kwargs` may contain them.

        Returns:
            `lang_x` and `attention_mask` (B, L), `vision_x` (B, media, 1, 3, H, W).

        Raises:
            DataError: the numbers of images and placeholders differ, or an argument is unknown.
        """
        texts, arguments = texts_of(text), self._arguments(kwargs)
        counts = [sample.count(IMAGE) for sample in texts]
        listed = None if images is None else frame_list(self._fetched(images))
        remaining = iter(flattened(listed, counts, IMAGE, "images"))
        by_text = [[next(remaining) for _ in range(count)] for count in counts]
        tokens = self._tokens(texts, counts, arguments["text_kwargs"])
        vision = self._vision(by_text, arguments["images_kwargs"])
        data = {"lang_x": tokens["input_ids"], "attention_mask": tokens["attention_mask"], "vision_x": vision}
        data |= {"offset_mapping": tokens["offset_mapping"]} if "offset_mapping" in tokens else {}
        return returned(data, arguments["text_kwargs"].get("return_tensors"))

    def _fetched(self, images: Any) -> Any:
        """Return the same lists of images, with paths and URLs replaced by their images."""
        if isinstance(images, (list, tuple)):
            return [self._fetched(item) for item in images]
        is_file = isinstance(images, (str, os.PathLike))
        return self.image_processor.fetch_images(os.fspath(images)) if is_file else images

    def _tokens(self, texts: list[str], counts: Sequence[int], arguments: Mapping[str, Any]) -> Any:
        options = {**arguments, "return_attention_mask": True}
        if options.get("return_tensors") is not None:
            options["return_tensors"] = "pt"
        tokens = self.tokenizer(texts, **options)
        image = self.tokenizer.convert_tokens_to_ids(IMAGE)
        kept = [[int(token) for token in row].count(image) for row in tokens["input_ids"]]
        if kept != list(counts):
            raise DataError(
                f"the texts have {list(counts)} {IMAGE}, and after truncation {kept} are left; raise max_length, or "
                "pass truncation=False"
            )
        return tokens

    def _vision(self, images: Sequence[Sequence[Any]], arguments: Mapping[str, Any]) -> torch.Tensor:
        """Return (B, media, 1, 3, H, W)."""
        options = {**arguments, "return_tensors": "pt"}
        pixels = [self.image_processor(list(x), **options)["pixel_values"] if x else None for x in images]
        crop = self.image_processor.crop_size
        sizes = [tuple(x.shape[1:]) for x in pixels if x is not None] or [(3, int(crop["height"]), int(crop["width"]))]
        vision = torch.zeros(len(images), max([1, *map(len, images)]), 1, *sizes[0])
        for sample, x in enumerate(pixels):
            if x is not None:
                vision[sample, : len(x), 0] = x
        return vision

    @property
    def model_input_names(self) -> list[str]:
        return ["lang_x", "attention_mask", "vision_x"]
