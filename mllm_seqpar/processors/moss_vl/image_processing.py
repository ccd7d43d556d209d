"""The image processor of MOSS-VL as transformers' interface has it: images to patches and their grids."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_base import ImageProcessingMixin

from mllm_seqpar.models.auto_classes import SavedWithCode, auto_map
from mllm_seqpar.models.moss_vl.configuration import MossVLConfig
from mllm_seqpar.processors.base import returned
from mllm_seqpar.processors.mplug_owl3.image_processing import frame_list, to_tensor

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
        chosen, stills = self.options.with_options(options), []
        for number, image in enumerate(frame_list(images)):
            stills.append(to_tensor(self.fetch_images(image) if isinstance(image, str) else image, number))
        sizes = chosen.sizes([(int(x.shape[1]), int(x.shape[2])) for x in stills])
        parts = [resized_patches(x[None], size, chosen)[0] for x, size in zip(stills, sizes, strict=True)]
        data: Mapping[str, Any] = {
            "pixel_values": torch.cat(parts),
            "image_grid_thw": torch.tensor([[1, *chosen.grid(size)] for size in sizes]),
        }
        return returned(dict(data), return_tensors)
