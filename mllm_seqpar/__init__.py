"""Exact sequence parallelism for multimodal LLMs: `model = patch_model(model, strategy="lv-xattn")`.

Frames reach the language model by cross-attention, or as tokens of its text (decoder-only models).

Names load on first use, so that importing the package imports neither torch nor transformers. The native models become
known to transformers' Auto classes. A checkout works without installation, given its folder in PYTHONPATH.
"""

from pathlib import Path

from mllm_seqpar._lazy_names import lazy_names
from mllm_seqpar.models.auto_classes import register_on_import as _register_native_models

__version__ = "0.2.0"

__all__ = lazy_names(__name__, __file__)

_folder = Path(__file__).parent
if not (_folder / "patches").exists() and (_folder.parent / "patches" / "sizes.py").exists():
    # In a checkout, the families lie beside the package. An editable install finds the same files.
    __path__.append(str(_folder.parent))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_register_native_models()
