"""Exact sequence parallelism for multimodal LLMs: `model = patch_model(model, strategy="lv-xattn")`.

Frames reach the language model by cross-attention, or as tokens of its text (decoder-only models).

Names load on first use, so that importing the package imports neither torch nor transformers. The native models become
known to transformers' Auto classes.
"""

from mllm_seqpar._lazy_names import lazy_names
from mllm_seqpar.models.auto_classes import register_on_import as _register_native_models

__version__ = "0.2.0"

__all__ = lazy_names(__name__, __file__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_register_native_models()
