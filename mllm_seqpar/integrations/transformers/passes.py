"""The forward passes of a patched transformers model, the same for all families.

A family says what its model computes (`Family`); here is who computes it: which tokens and frames a rank has, what is
agreed upon before, and how loss and logits come out as the unpatched model's. Passes with a cache: `hf_cached_passes`.

Shape legend: B samples, L text tokens of the pass, s of them on this rank.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.utils import can_return_tuple

from mllm_seqpar.runtime.forward_state import ForwardState

from .cached_passes import cached_pass
from .family import Family
from .frame_encoding import local_features
from .generation import share_random_state
from .inputs import ForwardInputs
from .outputs import sharded_outputs
from .pass_inputs import frames_of, report, require_same_pass, text_of
from .text_masks import text_shards


def forward_of(model: Any, forward: Callable[..., Any]) -> Any:
    """`forward(self, ...)` as the model's method: with `return_dict`, and as it is under torch.compile.

    What is sent when is planned in Python, anew for each mask. Compiling that takes minutes, and again for each batch.
    """
    return types.MethodType(torch.compiler.disable(can_return_tuple(forward)), model)


def run_pass(family: Family, inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: dict[str, Any]) -> Any:
    """One forward pass of a patched model; what its `forward` returns."""
    return (cached_pass if inputs.use_cache else _sharded_pass)(family, inputs, logits_to_keep, kwargs)


def _sharded_pass(family: Family, inputs: ForwardInputs, logits_to_keep: int | Tensor, kwargs: dict[str, Any]) -> Any:
    """Text and frames dealt to the ranks, no cache: training, evaluation, generation without a cache."""
    context = family.context
    require_same_pass(family, inputs, kwargs | {"logits_to_keep": logits_to_keep})
    text, note = text_shards(context, inputs), family.note(inputs)
    features = local_features(family, inputs)
    call = ForwardState(context, text=text, **frames_of(family, inputs, text, features, note))
    report(family, inputs, text.local if call.shards_text else inputs.length)
    if not call.shards_text and family.model.training:  # every rank computes all text: it must drop the same of it
        share_random_state(context.comm, inputs.text.device)
    embeds, positions, mask = text_of(family, inputs, call)
    if not call.shards_text:
        mask = family.text_mask(embeds, mask, positions, None)
    outputs = family.decode(embeds, positions, mask, None, call, **kwargs)
    out = sharded_outputs(
        call,
        inputs,
        outputs.last_hidden_state,
        outputs.hidden_states,
        lm_head=family.lm_head,
        loss_function=family.loss_function,
        loss_arguments=kwargs,
        logits_to_keep=logits_to_keep,
    )
    return family.output(out, features, inputs)
