"""The public toolkit for model adapters.

An adapter (`Adapter`) replaces forwards through `Patch.set`. The model's forward encodes the frames of this rank
(`frame_range`), states which text rows attend to which frames (`FrameMask`), and creates the state of the pass with
`sharded_call`. Layers then attend through it. ``state.attend(q, [state.text_keys(q, k, v)], scale)`` is the language
model's causal attention, and ``state.attend(q, [state.frame_keys(q, layer, project)], scale)`` the attention to the
frames of all ranks; keys in one list share a softmax. `project` is a `KVProjection` or a `FunctionProjection`.

This package is all that an adapter imports of `mllm_seqpar`, those of the package's own families included:

    adapting                 the pass, its frames and text, K and V, changes of a model, errors; torch only
    adapting.transformers    models of transformers: caches, generation, padded batches (`Family`)
    adapting.chat            the chat format of a family's processor (`ChatFamily`)
    adapting.sizes           the sizes of a model for the planner (`ModelSizes`)

`mllm_seqpar.patches.idefics` is an example of a family.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .toolkit import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # On first use: the sizes of a family are read where torch is not imported.
    return getattr(importlib.import_module("mllm_seqpar.adapting.toolkit"), name)
