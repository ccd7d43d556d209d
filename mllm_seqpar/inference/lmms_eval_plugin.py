"""The entry point by which lmms-eval finds the model class; see `lmms_eval_model`."""

from __future__ import annotations

from typing import Any

NAME = "mllm_seqpar"


def manifest() -> Any:
    """Return lmms-eval's description of the model: a class for tasks that generate, and one for all tasks."""
    from lmms_eval.models.registry_v2 import ModelManifest

    module = "mllm_seqpar.inference.lmms_eval_model"
    return ModelManifest(
        model_id=NAME, simple_class_path=f"{module}.SimpleSeqParModel", chat_class_path=f"{module}.ChatSeqParModel"
    )
