"""The forward pass of a patched transformers model, the same for all families.

`Family` describes the model. This module first compares the inputs of the ranks, decides which tokens and frames each
rank computes, and returns loss and logits as the unpatched model does. Passes with a cache are in `cached_passes`.

Shape legend: B samples, L text tokens of the pass, s of them on this rank.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers.utils import can_return_tuple

from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.fsdp_units import call_within
from mllm_seqpar.sharding import tensor_of

from .cached_passes import cached_pass
from .data_parallel import with_accumulated_gradients
from .family import Family, require_same_pass
from .frames import frame_arguments, local_features, log_shard_sizes
from .generation import share_random_state
from .inputs import ForwardInputs
from .outputs import uncached_outputs
from .text import rows_of_pass, text_shards


def as_forward(model: Any, forward: Callable[..., Any], doc: str = "") -> Any:
    """Return `forward(self, ...)` as a method of `model` that takes `return_dict` and `HostFrames`, never compiled.

    Schedules are planned in Python for each mask. Compiling that would take minutes for every new mask. The docstring
    is that of the unpatched forward with `doc` appended.
    """
    forward.__doc__ = (model.forward.__doc__ or "") + doc

    @functools.wraps(forward)
    def with_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *map(tensor_of, args), **{name: tensor_of(x) for name, x in kwargs.items()})

    return types.MethodType(torch.compiler.disable(can_return_tuple(with_tensors)), model)


def run_pass(family: Family, inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: Mapping[str, Any]) -> Any:
    """Run one forward pass of a patched model, and return what the model's `forward` returns."""
    family.context.require_same_world()
    run = cached_pass if inputs.use_cache else _uncached_pass
    units = [module for module in family.bypassed_modules if isinstance(module, FSDPModule)]
    return call_within(units, functools.partial(run, family, inputs, logits_to_keep, kwargs))


def _uncached_pass(
    family: Family, inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: Mapping[str, Any]
) -> Any:
    """Run a pass with text and frames sharded: training, evaluation, generation without a cache."""
    context = family.context
    same_random_state = require_same_pass(family, inputs, logits_to_keep, kwargs)
    text, placement = text_shards(context, inputs), family.placement(inputs)
    features = local_features(family, inputs)
    state = ForwardState(context, text=text, **frame_arguments(family, inputs, text, features, placement))
    log_shard_sizes(family, inputs, text.local if state.shards_text else inputs.length)
    # Without sharding, every rank computes all text, with the same dropout masks.
    if not (state.shards_text or same_random_state) and family.model.training:
        share_random_state(context.comm, inputs.text.device)
    embeds, positions, mask = rows_of_pass(family, inputs, state)
    if features is None:
        embeds = with_accumulated_gradients(embeds, family.model)
    if state.takes_mask:
        mask = family.text_mask(embeds, mask, positions, None)
    decoded = family.run_decoder(embeds, positions, mask, None, state, **kwargs)
    out = uncached_outputs(family, inputs, state, decoded, logits_to_keep, kwargs)
    return family.model_output(out, features, inputs)
