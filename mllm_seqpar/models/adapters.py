"""PEFT: arguments that its adapters take for each sample or each token of a batch.

PEFT passes them to every adapted layer by a hook, for the batch that the caller passes. Layers of a patched model also
compute with other batches: K and V and the vision tower with frames of any sample, and all layers of the text with
this rank's tokens. They would take the adapter of another sample, or fail on the number of samples.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from torch import nn

from mllm_seqpar.errors import ConfigError

_OF_SAMPLES = {"adapter_names": "the adapter of each sample", "task_ids": "the task of each sample"}
_OF_TOKENS = {"alora_offsets": "the tokens with aLoRA's adapter", "scalings": "X-LoRA's weights of each token"}


def refuse_arguments_of_samples(model: nn.Module, frame_modules: Iterable[nn.Module | None], ranks: int = 1) -> bool:
    """Raise ConfigError if adapters take an argument of samples or tokens, and their layer computes with others.

    Return whether there are any adapters.

    PEFT's hooks are removed before: PEFT itself removes them only after calls that succeed.

    Args:
        model: the model, while it is called.
        frame_modules: the modules within it, or beside it, that compute with frames; None for one that it lacks.
        ranks: the number of ranks that share the tokens of the text.
    """
    of_frames = [module for module in frame_modules if module is not None]
    message = _reason(model, of_frames, ranks)
    if message is not None:
        for root in (model, *of_frames):
            for module in root.modules():
                for key, _ in list(_hooks(module)):
                    module._forward_pre_hooks.pop(key)
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
        raise ConfigError(message)
    return any(_is_adapted(module) for root in (model, *of_frames) for module in root.modules())


def _reason(model: nn.Module, frame_modules: Iterable[nn.Module], ranks: int) -> str | None:
    for name, module in ((name, part) for root in frame_modules for part in root.modules() for _, name in _hooks(part)):
        return (
            f"{name}: PEFT passes {_OF_SAMPLES.get(name) or _OF_TOKENS[name]} to {type(module).__name__} layers that "
            "compute with frames, in batches of frames and not of samples. Leave it out and call set_adapter for the "
            "samples of one adapter at a time, or use adapters without these layers, which are those of the vision "
            "tower, the projector and the attention to frames"
        )
    if ranks > 1:
        for name in (name for part in model.modules() for _, name in _hooks(part) if name in _OF_TOKENS):
            return (
                f"{name}: PEFT passes {_OF_TOKENS[name]} of the whole text, but each of {ranks} ranks computes with a "
                'shard of it; run the model on one process (group="self"), or leave these adapters out'
            )
    return None


def _is_adapted(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.")


def _hooks(module: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield the key and the argument of each hook by which PEFT adds such an argument to calls of an adapted layer."""
    if module._forward_pre_hooks and _is_adapted(module):
        for key, hook in module._forward_pre_hooks.items():
            closure = getattr(getattr(hook, "__code__", None), "co_freevars", ())
            for name in hook.keywords if isinstance(hook, functools.partial) else closure:
                if name in _OF_SAMPLES or name in _OF_TOKENS:
                    yield key, name
