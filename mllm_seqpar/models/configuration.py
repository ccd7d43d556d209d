"""The common part of the native models' configurations."""

import os
from typing import Any, ClassVar

from .auto_classes import LocalCode, write_code


class NativeConfig(LocalCode):
    """Base of the native configurations, before a configuration class of transformers."""

    model_type: ClassVar[str]

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json, and what `trust_remote_code=True` loads the directory with (`auto_classes.write_code`)."""
        self.auto_map = write_code(save_directory, self.model_type)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)  # type: ignore[misc]
