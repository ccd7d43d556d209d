"""`generate` on several ranks: every rank generates the same tokens, also with sampling."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patching import Patch


def patch_generate(model: Any, patch: Patch, frame_arguments: tuple[str, ...] = ()) -> None:
    """Compare the ranks' generation settings at each `generate`, and start it from the random state of rank 0.

    If a rank stopped after fewer tokens, the others would hang; if a rank drew different random numbers, it would
    continue with another text.

    Arguments that hold frames (`frame_arguments`) are not repeated for beams: the beams of a sample share its frames,
    and the model's mask takes that into account (as `frames.mask_over_samples` does).
    """
    unpatched, comm = model.generate, patch.context.comm

    @functools.wraps(unpatched)
    def generate(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or model.generation_config
        records = patch.context.records
        if comm.size > 1:
            recorded = ", attention over frames is recorded" if records else ""
            agree(comm, "generate", lambda: {"settings": _describe_settings(config, kwargs) + recorded}, dict)
        for record in records:
            _refuse_unrecorded(config, kwargs)
            record.begin_answer()
        if comm.size > 1:
            device = next(model.parameters()).device
            share_random_state(comm, comm.device if device.type == "cpu" else device)  # FSDP2 may offload parameters
        return unpatched(*args, **kwargs)

    patch.set(model, "generate", generate)
    # With a static cache transformers would compile the forward pass, including transfers between ranks.
    patch.set(model, "_valid_auto_compile_criteria", lambda *args, **kwargs: False)
    if hasattr(model, "set_attn_implementation"):
        patch.set(model, "set_attn_implementation", _refuse_other_attention)
    if frame_arguments:
        expand = _without_expanding(model._expand_inputs_for_generation, frame_arguments)
        patch.set(model, "_expand_inputs_for_generation", expand)


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


def _without_expanding(unpatched: Any, frame_arguments: tuple[str, ...]) -> Any:
    @functools.wraps(unpatched)
    def expand(*args: Any, **kwargs: Any) -> Any:
        frames = {name: kwargs.pop(name) for name in frame_arguments if kwargs.get(name) is not None}
        ids, expanded = unpatched(*args, **kwargs)
        return ids, expanded | frames

    return expand


def _describe_settings(config: Any, kwargs: dict[str, Any]) -> str:
    """Return as text the settings that determine the generated tokens. The forward pass compares the inputs."""
    settings = {**config.to_dict(), **kwargs, "streamer": None}  # the streamer may differ between ranks
    if settings.get("max_time") is not None:
        raise ConfigError(
            f"max_time={settings['max_time']}: the ranks' clocks would end generation at different tokens; use "
            "max_new_tokens"
        )
    texts = ((name, _describe_value(value)) for name, value in sorted(settings.items()))
    return ", ".join(f"{name}={text}" for name, text in texts if text)


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
