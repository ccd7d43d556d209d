"""OpenFlamingo (package open-flamingo 2.0.1) as a directory that loads and saves like other models.

The package builds its model from a CLIP of open_clip and a language model, and publishes only the weights that it
trained. Here a directory is complete:

    config.json           model_type "open_flamingo"; the configs of the language model and of the CLIP vision tower
    model.safetensors     all weights, under the names of the real class's state_dict, each tensor once
    tokenizer.json ...    the language model's tokenizer, with <image> and <|endofchunk|> (and a pad token) added
    preprocessor_config.json, processor_config.json    CLIP's image processor

`convert` writes such a directory from a language model's directory, a CLIP directory and a published checkpoint.pt.
Importing this package registers it with transformers' Auto classes. Loading a model needs the package open-flamingo;
importing does not.
"""

import os
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor

from .configuration import OpenFlamingoConfig
from .conversion import convert
from .processing import OpenFlamingoProcessor

__all__ = ["OpenFlamingoConfig", "OpenFlamingoLoader", "OpenFlamingoProcessor", "convert", "register"]


class OpenFlamingoLoader:
    """The model class that transformers' Auto classes find; it imports the package open-flamingo only to load."""

    config_class = OpenFlamingoConfig

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], **options: Any) -> Any:
        """Return the `open_flamingo.Flamingo` of a directory; see `modeling.OpenFlamingo.from_pretrained`."""
        from .modeling import OpenFlamingo

        return OpenFlamingo.from_pretrained(path, **options)


def register() -> None:
    """Register `open_flamingo` with transformers' Auto classes. Repeated calls change nothing."""
    AutoConfig.register(OpenFlamingoConfig.model_type, OpenFlamingoConfig, exist_ok=True)
    for auto in (AutoModel, AutoModelForImageTextToText):
        auto.register(OpenFlamingoConfig, OpenFlamingoLoader, exist_ok=True)
    AutoProcessor.register(OpenFlamingoConfig, OpenFlamingoProcessor, exist_ok=True)


register()
