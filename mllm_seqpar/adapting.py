"""The public toolkit for model adapters: all that an adapter imports of `mllm_seqpar`, also those of this package.

An adapter (`Adapter`) replaces forwards through `Patch.set`. The model's forward encodes the frames of this rank
(`frame_range`), states which text rows attend to which frames (`FrameMask`), and creates the state of the pass with
`sharded_call`. Layers then attend through it. ``state.attend(q, [state.text_keys(q, k, v)], scale)`` is the language
model's causal attention, and ``state.attend(q, [state.frame_keys(q, layer, project)], scale)`` the attention to the
frames of all ranks; keys in one list share a softmax. `project` is a `KVProjection` or a `FunctionProjection`.

For a model of transformers, `Family` does all this except the facts of the model. `ChatFamily` is the chat format of
its processor, and `ModelSizes` are the sizes for the planner. `mllm_seqpar.patches.idefics` is an example.

`adapting.pyi` is the table of names. A name is imported on first use: the sizes need no torch, an adapter of another
model needs no transformers, and a family imports chat formats only if it has one.
"""

from ._lazy_names import lazy_names

__all__ = lazy_names(__name__, __file__)
