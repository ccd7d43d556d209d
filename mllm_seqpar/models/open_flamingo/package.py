"""The package open-flamingo, imported when a model is built and not before."""

import sys
import types
from typing import Any

from mllm_seqpar.errors import ConfigError


def open_flamingo() -> tuple[Any, Any, Any]:
    """(class `Flamingo`, class `FlamingoLMMixin`, function `extend_instance`) of the real package.

    Raises:
        ConfigError: it is not installed.
    """
    # The package imports open_clip, for a factory that is not used here, and open_clip imports torchvision, which has
    # no build for some machines. Where that import fails, an empty module stands in for it during this one import.
    missing = _cannot_import_open_clip()
    if missing:
        sys.modules["open_clip"] = types.ModuleType("open_clip")
    try:
        from open_flamingo import Flamingo
        from open_flamingo.src.flamingo_lm import FlamingoLMMixin
        from open_flamingo.src.utils import extend_instance
    except ImportError as error:
        raise ConfigError(
            f"OpenFlamingo needs packages that are missing ({error}): pip install einops einops-exts, and "
            "pip install --no-deps open-flamingo==2.0.1, which pins an old torch"
        ) from error
    finally:
        if missing:
            del sys.modules["open_clip"]
    return Flamingo, FlamingoLMMixin, extend_instance


def _cannot_import_open_clip() -> bool:
    if "open_flamingo" in sys.modules or "open_clip" in sys.modules:
        return False
    try:
        import open_clip  # noqa: F401
    except ImportError:
        return True
    return False
