"""The common part of the native processors: an image processor and a tokenizer, saved together with options."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers.processing_utils import ProcessorMixin
from transformers.utils import PROCESSOR_NAME

from mllm_seqpar.errors import DataError

from .auto_classes import LocalCode, write_code

_IGNORED = {"return_tensors", "return_dict", "padding", "add_special_tokens"}


class NativeProcessor(LocalCode, ProcessorMixin):
    """Base of the native processors; subclasses have the attributes `image_processor` and `tokenizer`."""

    model_type: ClassVar[str]
    """The `model_type` of the model that it belongs to."""
    saved_options: tuple[str, ...] = ()
    """Names of the attributes that processor_config.json states."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> list[str]:
        """Write tokenizer, image processor and options to a model directory; return the paths of the files."""
        if push_to_hub:
            raise DataError("push_to_hub is True; save to a directory and upload that")
        path = Path(save_directory, PROCESSOR_NAME)
        path.parent.mkdir(parents=True, exist_ok=True)
        files = [*self.tokenizer.save_pretrained(save_directory, **kwargs)]
        files += self.image_processor.save_pretrained(save_directory)
        options = {"processor_class": type(self).__name__, "auto_map": write_code(save_directory, self.model_type)}
        options |= {name: getattr(self, name) for name in self.saved_options}
        path.write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
        return [*files, os.path.join(save_directory, PROCESSOR_NAME)]

    @staticmethod
    def check_arguments(arguments: Mapping[str, Any]) -> None:
        """Raise DataError for unknown arguments; ignore arguments with which transformers requests padded tensors."""
        unknown = sorted(set(arguments) - _IGNORED)
        if unknown:
            raise DataError(f"unknown arguments: {', '.join(unknown)}")
