"""The processor: text with `<image>` placeholders and pictures to the arguments of `Flamingo.forward`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Self

import torch
from transformers import AutoTokenizer
from transformers.feature_extraction_utils import BatchFeature

from mllm_seqpar.errors import DataError
from mllm_seqpar.models.processor import NativeProcessor

from .configuration import OpenFlamingoConfig

IMAGE, END_OF_CHUNK = "<image>", "<|endofchunk|>"


class OpenFlamingoProcessor(NativeProcessor):
    """The language model's tokenizer and CLIP's image processor, used as in the published training."""

    model_type = OpenFlamingoConfig.model_type

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        vocabulary = tokenizer.get_vocab()
        missing = [mark for mark in (IMAGE, END_OF_CHUNK) if mark not in vocabulary]
        if missing:
            raise DataError(f"the tokenizer has no token {', '.join(missing)}; add it as a special token")
        super().__init__(image_processor, tokenizer)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """Load the tokenizer and the image processor of a directory."""
        # AutoImageProcessor requires torchvision in transformers 5.17.
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path)
        return cls(CLIPImageProcessorPil.from_pretrained(pretrained_model_name_or_path), tokenizer)

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        padding_side: str | None = None,
        **unknown: Any,
    ) -> BatchFeature:
        """Return texts and their pictures as model inputs.

        Args:
            images: the pictures of each text, a list of lists; or one list of all pictures, in the order of the
                `<image>` in the texts; or one picture. Samples are padded with zeros to equally many pictures.
            text: one text or several, with `<image>` for each picture.

        Returns:
            `lang_x` and `attention_mask` (B, L), `vision_x` (B, media, 1, 3, H, W).

        Raises:
            DataError: the numbers of pictures and placeholders differ, or an argument is unknown.
        """
        self.check_arguments(unknown)
        if text is None:
            raise DataError(f"text is None; pass text with {IMAGE} for each picture")
        texts = [text] if isinstance(text, str) else list(text)
        counts = [sample.count(IMAGE) for sample in texts]
        pictures = _pictures_of_texts(images, counts)
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
        values = (tokens["input_ids"], tokens["attention_mask"], vision)
        return BatchFeature(dict(zip(self.model_input_names, values, strict=True)))

    @property
    def model_input_names(self) -> list[str]:
        return ["lang_x", "attention_mask", "vision_x"]


def _pictures_of_texts(images: Any, counts: Sequence[int]) -> list[list[Any]]:
    """Return the pictures of each text; one list of all pictures is divided by the numbers of placeholders."""
    if images is None or (isinstance(images, (list, tuple)) and not images):
        return [[] for _ in counts]
    if not isinstance(images, (list, tuple)):
        images = list(images) if getattr(images, "ndim", 3) > 3 else [images]
    nested = [isinstance(item, (list, tuple)) for item in images]
    if all(nested):
        return [list(sample) for sample in images]
    if any(nested):
        raise DataError("images has both pictures and lists of pictures; pass one list of pictures for each text")
    if len(images) != sum(counts):
        raise DataError(
            f"the texts have {list(counts)} {IMAGE}, and one list of {len(images)} pictures was passed; pass one for "
            "each"
        )
    remaining = iter(images)
    return [[next(remaining) for _ in range(count)] for count in counts]
