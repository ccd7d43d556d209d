"""The image processor of MOSS-VL as transformers' interface has it: images to patches and their grids."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_base import ImageProcessingMixin

from mllm_seqpar.errors import DataError
from mllm_seqpar.models.auto_classes import SavedWithCode, auto_map
from mllm_seqpar.models.moss_vl.configuration import MossVLConfig
from mllm_seqpar.processors.base import frame_list, returned, to_tensor

from .media import ImagePixelOptions, resized_patches


class MossVLImageProcessor(SavedWithCode, ImageProcessingMixin):
    """Resize images, each to its part of the pixels of the call, and cut them into patches.

    Attributes:
        options: see `ImagePixelOptions`, whose fields are the arguments.
    """

    model_type = MossVLConfig.model_type
    model_input_names = ["pixel_values", "image_grid_thw"]

    def __init__(self, **kwargs: Any) -> None:
        self.options = ImagePixelOptions.of(kwargs)
        super().__init__(auto_map=auto_map(self.model_type))

    def to_dict(self) -> dict[str, Any]:
        """Return the options as saved."""
        names = {"image_processor_type": type(self).__name__, "processor_class": "MossVLProcessor"}
        return {**asdict(self.options), **names, "auto_map": self.auto_map}

    def __call__(self, images: Any, return_tensors: str | None = "pt", **options: Any) -> BatchFeature:
        """Return `pixel_values` (patches, values) and `image_grid_thw` (images, 3) of images, arrays, paths or URLs."""
        chosen = self.options.with_options(options)
        patches, grids = zip(*self.encoded(frame_list(images), chosen), strict=True)
        data: dict[str, Any] = {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
        return returned(data, return_tensors)

    def encoded(self, images: Sequence[Any], options: ImagePixelOptions) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the patches (n, values) of each image of a call, and its grid: 1, height and width in patches.

        Raises:
            DataError: an image that is not uint8, or too long for its width.
        """
        fetched = (self.fetch_images(os.fspath(x)) if isinstance(x, (str, os.PathLike)) else x for x in images)
        stills = [to_tensor(x, number) for number, x in enumerate(fetched)]
        sizes = options.sizes([(int(x.shape[1]), int(x.shape[2])) for x in stills])
        for still, size in zip(stills, sizes, strict=True):
            if still.dtype != torch.uint8:
                raise DataError(f"an image is {still.dtype}; pass levels from 0 to 255 as uint8")
            yield resized_patches(still[None], size, options)[0], [1, *options.grid(size)]
