"""The public toolkit for model adapters: all that an adapter imports of `mllm_seqpar`, also those of this package.

An adapter (`Adapter`) replaces forwards through `Patch.set`. The model's forward encodes the frames of this rank
(`frame_range`), states which text rows attend to which frames (`FrameMask`), and creates the state of the pass with
`sharded_call`. Layers then attend through it. ``state.attend(q, [state.text_keys(q, k, v)], scale)`` is the language
model's causal attention, and ``state.attend(q, [state.frame_keys(q, layer, project)], scale)`` the attention to the
frames of all ranks; keys in one list share a softmax. `project` is a `KVProjection` or a `FunctionProjection`.

For a model of transformers, `Family` does all this except the facts of the model. `ChatFamily` is the chat format of
its processor, and `ModelSizes` are the sizes for the planner. `mllm_seqpar.patches.idefics` is an example.

Names are imported on first use: the sizes need no torch, and an adapter of another model needs no transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sizes import *  # noqa: F403
    from .toolkit import *  # noqa: F403
    from .transformers import *  # noqa: F403
else:  # with a `__getattr__` in sight, type checkers would take any name, and take it for Any

    def __getattr__(name: str) -> Any:
        for module in ("sizes", "toolkit", "transformers"):
            found = importlib.import_module(f"{__name__}.{module}")
            if name in found.__all__:
                return getattr(found, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
