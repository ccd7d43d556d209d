"""`generate` on several ranks: every rank generates the same tokens, also with sampling."""

from __future__ import annotations

import functools
import inspect
import zlib
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.stopping_criteria import ConfidenceCriteria

from mllm_seqpar._compat import cache_argument, takes_cache
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patching import Patch
from mllm_seqpar.sharding import tensor_of


def patch_generate(
    model: Any, patch: Patch, visual_arguments: tuple[str, ...] = (), repeats_frames: bool = False
) -> None:
    """Compare the ranks' generation settings at each `generate`, and start it from the random state of rank 0.

    If a rank stopped after fewer tokens, the others would hang; if a rank drew different random numbers, it would
    continue with another text. Generation also ends when it ends on rank 0. `visual_arguments` and `repeats_frames` are
    attributes of `Family`.
    """
    unpatched, comm = model.generate, patch.context.comm

    @takes_cache
    @functools.wraps(unpatched)
    def generate(*args: Any, cache: Any = None, **kwargs: Any) -> Any:
        # As `forward` does; the batches of `SeqParTrainer` have `HostFrames`.
        kwargs = {name: tensor_of(x) for name, x in kwargs.items()}
        kwargs |= {} if cache is None else cache_argument(cache)
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or model.generation_config
        records = patch.context.records
        if comm.size > 1:
            recorded = ", attention over frames is recorded" if records else ""

            def settings() -> dict[str, str]:
                """Return what determines the generated tokens; the streamer may differ between ranks."""
                values = {**config.to_dict(), **kwargs, "streamer": None}
                texts = {name: _describe_value(x) for name, x in sorted(values.items())}
                return {"settings": ", ".join(f"{name}={text}" for name, text in texts.items() if text) + recorded}

            agree(comm, "generate", settings, dict)
        for record in records:
            _refuse_unrecorded(config, kwargs)
            record.begin_answer()
        if comm.size > 1:
            device = next(model.parameters()).device
            share_random_state(comm, comm.device if device.type == "cpu" else device)  # FSDP2 may offload parameters
        return unpatched(*args, **kwargs)

    patch.set(model, "generate", generate)
    if comm.size > 1:
        unpatched_criteria = model._get_stopping_criteria

        def stopping_criteria(*args: Any, **kwargs: Any) -> StoppingCriteriaList:
            criteria = unpatched_criteria(*args, **kwargs)
            return StoppingCriteriaList([x if isinstance(x, _BY_TOKENS) else _OfRank0(x, comm) for x in criteria])

        patch.set(model, "_get_stopping_criteria", stopping_criteria)
    # With a static cache transformers would compile the forward pass, including transfers between ranks.
    patch.set(model, "_valid_auto_compile_criteria", lambda *args, **kwargs: False)
    if hasattr(model, "set_attn_implementation"):
        patch.set(model, "set_attn_implementation", _refuse_other_attention)
    if visual_arguments:
        _patch_visual_arguments(model, patch, visual_arguments, repeats_frames)


_BY_TOKENS = (ConfidenceCriteria, EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)
"""Stopping criteria that decide by the tokens and scores, which all ranks have, and by nothing else."""


class _OfRank0(StoppingCriteria):
    """Ends a generation on all ranks when a stopping criterion ends it on rank 0.

    Clocks differ between ranks, and so may what a criterion of the caller looks at, such as a cancelled request.
    """

    def __init__(self, criterion: StoppingCriteria, comm: Communicator) -> None:
        self._criterion, self._comm = criterion, comm

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        ended = torch.as_tensor(self._criterion(input_ids, scores, **kwargs), device=input_ids.device)
        return self._comm.broadcast(ended.expand(input_ids.shape[:1]).to(torch.uint8), "end of generation").bool()


def _patch_visual_arguments(model: Any, patch: Patch, names: tuple[str, ...], repeats_frames: bool) -> None:
    """Replace the methods of `generate` that would repeat the arguments `names`, and pass them with every token."""
    takes_samples = "visual_samples" in inspect.signature(model.forward).parameters

    def prepare_inputs(unpatched: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = unpatched(*args, **kwargs)
        if kwargs.get("use_cache") and not kwargs.get("is_first_iteration"):
            inputs |= dict.fromkeys(names)
        return inputs

    def expand_inputs(
        unpatched: Any, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **kwargs: Any
    ) -> tuple[Tensor | None, dict[str, Any]]:
        visual = {name: kwargs.pop(name) for name in names if name in kwargs}
        prompt = input_ids if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        if takes_samples and expand_size > 1 and prompt is not None and kwargs.get("visual_samples") is None:
            kwargs["visual_samples"] = prompt.shape[0]
        ids, others = unpatched(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **kwargs
        )
        return ids, others | visual

    def initialize_ids(unpatched: Any, inputs: Any, bos_token_id: Any, model_kwargs: dict[str, Any]) -> Any:
        """Hide frames where transformers takes the batch size from the first tensor, if there are no token ids."""
        return unpatched(inputs, bos_token_id, {name: x for name, x in model_kwargs.items() if name not in names})

    replacements: dict[str, Any] = {
        "_expand_inputs_for_generation": expand_inputs,
        "_maybe_initialize_input_ids_for_generation": initialize_ids,
    }
    if not repeats_frames:
        replacements["prepare_inputs_for_generation"] = prepare_inputs
    for name, replacement in replacements.items():
        unpatched = getattr(model, name)
        patch.set(model, name, functools.wraps(unpatched)(functools.partial(replacement, unpatched)))


_UNRECORDED = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "assistant_model": None,
    "prompt_lookup_num_tokens": None,
    "prefill_chunk_size": None,
}
"""Settings with which a pass computes rows other than that of the next token, and their neutral values."""


def _refuse_unrecorded(config: Any, kwargs: dict[str, Any]) -> None:
    """Raise ConfigError for settings with which the attention of an answer cannot be recorded."""
    for name, neutral in _UNRECORDED.items():
        value = kwargs.get(name, getattr(config, name, None))
        if value not in (None, neutral):
            raise ConfigError(
                f"{name}={_describe_value(value)}: the attention over frames is recorded while one token after another "
                f"is generated; leave {name} out"
            )
    if kwargs.get("use_cache", getattr(config, "use_cache", True)) is False:
        raise ConfigError("use_cache=False: the attention over frames is recorded with a cache; leave use_cache out")


def _refuse_other_attention(*args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        "set_attn_implementation: this model is patched, and the patch computes its attention; choose before "
        "patching, or "
        "unpatch_model(model) first (block kernels: patch_model(..., kernel=...))"
    )


def _describe_value(value: Any) -> str:
    """Return a setting as text, objects by their type. Tensors give an empty text, because the forward pass compares
    them."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_describe_value, value))}]"
    if value is None or isinstance(value, Tensor):
        return ""
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__


def share_random_state(comm: Communicator, device: torch.device) -> None:
    """Set the random state of every rank, of the CPU and of `device`, to that of rank 0, unless all are the same.

    Both states are kept on the host. Comparing them does not wait for the device.
    """
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    rows = comm.gather_ints([zlib.crc32(state.numpy().data) for state in states])
    if all(row == rows[0] for row in rows):
        return
    cpu, *cuda = [comm.broadcast(state.to(comm.device), "random state").cpu() for state in states]
    torch.set_rng_state(cpu)
    for state in cuda:
        torch.cuda.set_rng_state(state, device)
