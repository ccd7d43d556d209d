import os
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor

from .configuration import OpenFlamingoConfig
from .processing import OpenFlamingoProcessor


class OpenFlamingoLoader:
    """What transformers' Auto classes find for an OpenFlamingo directory; the package is imported when it loads."""

    config_class = OpenFlamingoConfig

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], **options: Any) -> Any:
        """The model in a directory, an `open_flamingo.Flamingo`; see `modeling.OpenFlamingo.from_pretrained`."""
        from .modeling import OpenFlamingo

        return OpenFlamingo.from_pretrained(path, **options)


def register() -> None:
    """Makes `open_flamingo` known to transformers' Auto classes. Doing it again changes nothing."""
    AutoConfig.register(OpenFlamingoConfig.model_type, OpenFlamingoConfig, exist_ok=True)
    for auto in (AutoModel, AutoModelForImageTextToText):
        auto.register(OpenFlamingoConfig, OpenFlamingoLoader, exist_ok=True)
    AutoProcessor.register(OpenFlamingoConfig, OpenFlamingoProcessor, exist_ok=True)
