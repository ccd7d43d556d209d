"""`patch_model`, `unpatch_model` and the registry of family adapters."""

from .changes import Patch
from .patch import patch_model, patch_of, unpatch_model
from .registry import Adapter, register_adapter

__all__ = ["Adapter", "Patch", "patch_model", "patch_of", "register_adapter", "unpatch_model"]
