"""The processor: text with `<image>` placeholders and pictures to the arguments of `Flamingo.forward`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, Self

import torch
from transformers import AutoTokenizer
from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin
from transformers.utils import PROCESSOR_NAME

from mllm_seqpar.errors import DataError

IMAGE, END_OF_CHUNK = "<image>", "<|endofchunk|>"


class OpenFlamingoProcessor(ProcessorMixin):
    """The language model's tokenizer and CLIP's image processor, used as in the published training.

    Attributes:
        image_processor: CLIP's.
        tokenizer: has the tokens `<image>` and `<|endofchunk|>`.
    """

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        vocabulary = tokenizer.get_vocab()
        missing = [mark for mark in (IMAGE, END_OF_CHUNK) if mark not in vocabulary]
        if missing:
            raise DataError(f"the tokenizer has no token {', '.join(missing)}; add it as a special token")
        super().__init__(image_processor, tokenizer)

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """Load the tokenizer and the image processor of a directory."""
        # AutoImageProcessor requires torchvision in transformers 5.17.
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path)
        return cls(CLIPImageProcessorPil.from_pretrained(pretrained_model_name_or_path), tokenizer)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> list[str]:
        """Write tokenizer and image processor to a model directory; return the paths of the files."""
        if push_to_hub:
            raise DataError("push_to_hub is True; save to a directory and upload that")
        os.makedirs(save_directory, exist_ok=True)
        written = [
            *self.tokenizer.save_pretrained(save_directory),
            *self.image_processor.save_pretrained(save_directory),
        ]
        written.append(os.path.join(save_directory, PROCESSOR_NAME))
        with open(written[-1], "w", encoding="utf-8") as stream:
            json.dump({"processor_class": type(self).__name__}, stream, indent=2)
            stream.write("\n")
        return written

    def __call__(
        self,
        images: Sequence[Sequence[Any]] | None = None,
        text: str | Sequence[str] | None = None,
        padding_side: str | None = None,
        **unknown: Any,
    ) -> BatchFeature:
        """Return texts and their pictures as model inputs.

        Args:
            images: the pictures of each text; samples are padded with zeros to equally many pictures.
            text: one text or several, with `<image>` for each picture.
            padding_side: the tokenizer's default if None.

        Returns:
            `lang_x` and `attention_mask` (B, L), `vision_x` (B, media, 1, 3, H, W).

        Raises:
            DataError: the numbers of pictures and placeholders differ, or an argument is unknown.
        """
        # transformers' callers pass these; the result is always padded tensors.
        left_over = set(unknown) - {"return_tensors", "return_dict", "padding", "add_special_tokens"}
        if left_over:
            raise DataError(f"unknown arguments: {', '.join(sorted(left_over))}")
        if text is None:
            raise DataError(f"text is None; pass text with {IMAGE} for each picture")
        texts = [text] if isinstance(text, str) else list(text)
        pictures = [list(sample) for sample in images or [[] for _ in texts]]
        counts = [sample.count(IMAGE) for sample in texts]
        passed = [len(sample) for sample in pictures]
        if counts != passed:
            raise DataError(f"the texts have {counts} {IMAGE}, and {passed} pictures were passed; pass one for each")
        side = {} if padding_side is None else {"padding_side": padding_side}
        tokens = self.tokenizer(texts, padding=len(texts) > 1, return_tensors="pt", **side)
        crop = self.image_processor.crop_size
        vision = torch.zeros(len(texts), max([1, *counts]), 1, 3, int(crop["height"]), int(crop["width"]))
        for sample, images_of_sample in enumerate(pictures):
            if images_of_sample:
                pixels = self.image_processor(images_of_sample, return_tensors="pt")["pixel_values"]
                vision[sample, : len(pixels), 0] = pixels
        return BatchFeature(
            {"lang_x": tokens["input_ids"], "attention_mask": tokens["attention_mask"], "vision_x": vision}
        )

    @property
    def model_input_names(self) -> list[str]:
        return ["lang_x", "attention_mask", "vision_x"]
