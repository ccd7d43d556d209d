"""`generate` on several ranks: the same tokens everywhere, also when they are sampled."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import require_same_text
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patching import Patch
from mllm_seqpar.runtime.context import SeqParContext


def patch_generate(model: Any, context: SeqParContext, patch: Patch, frames: tuple[str, ...] = ()) -> None:
    """Compares the ranks' generation settings, and starts every `generate` from rank 0's random state.

    A rank that stopped after fewer tokens than the others would leave them waiting; one that drew other random numbers
    would go on with another text.

    Args:
        model: what has `generate`.
        context: of the patched model.
        patch: takes the changes.
        frames: arguments that hold frames, and stay as they are when samples are repeated for beams: a sample's beams
            share its frames, which the model's mask must then know of (`visual_masks.sample_mask` does).
    """
    unpatched = model.generate

    @functools.wraps(unpatched)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if context.comm.size > 1:
            given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
            require_same_text(context.comm, "generate", lambda: _settings(given or model.generation_config, kwargs))
            share_random_state(context.comm, next(model.parameters()).device)
        return unpatched(*args, **kwargs)

    patch.set(model, "generate", generate)
    # With a static cache transformers would compile the forward pass, transfers between ranks and all.
    patch.set(model, "_valid_auto_compile_criteria", lambda *args, **kwargs: False)
    if hasattr(model, "set_attn_implementation"):
        patch.set(model, "set_attn_implementation", _refuse_other_attention)
    if frames:
        patch.set(model, "_expand_inputs_for_generation", _keeping(model._expand_inputs_for_generation, frames))


def _refuse_other_attention(*args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        "set_attn_implementation: this model is patched, and its attention is the patch's; choose before patching, or "
        "unpatch_model(model) first (block kernels: patch_model(..., kernel=...))"
    )


def _keeping(unpatched: Any, frames: tuple[str, ...]) -> Any:
    @functools.wraps(unpatched)
    def expand(*args: Any, **kwargs: Any) -> Any:
        held = {name: kwargs.pop(name) for name in frames if kwargs.get(name) is not None}
        ids, expanded = unpatched(*args, **kwargs)
        return ids, expanded | held

    return expand


def _settings(config: Any, kwargs: dict[str, Any]) -> str:
    """What decides how many tokens are generated and how, as text. The forward pass compares the inputs."""
    settings = {**config.to_dict(), **kwargs, "streamer": None}  # one rank's streamer changes nothing
    if settings.get("max_time") is not None:
        raise ConfigError(
            f"max_time={settings['max_time']}: the ranks' clocks would end generation at different tokens; use "
            "max_new_tokens"
        )
    texts = {name: _as_text(value) for name, value in sorted(settings.items())}
    return ", ".join(f"{name}={text}" for name, text in texts.items() if text)


def _as_text(value: Any) -> str:
    """Return a setting as the ranks compare it: objects by type; nothing for tensors, which the forward compares."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_as_text, value))}]"
    if value is None or isinstance(value, Tensor):
        return ""
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__


def share_random_state(comm: Communicator, device: torch.device) -> None:
    """Sets the random state of every rank to that of rank 0: the CPU's, and the device's that the model is on."""
    if comm.size == 1:
        return
    torch.set_rng_state(comm.broadcast(torch.get_rng_state().to(comm.device), "random state").cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(comm.device)
        torch.cuda.set_rng_state(comm.broadcast(state, "random state").cpu(), device)
