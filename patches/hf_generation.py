"""`generate` on several ranks: the same tokens everywhere, also when they are sampled."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mllm_seqpar.comm import Communicator
from mllm_seqpar.context import SeqParContext
from mllm_seqpar.patching import Patch


def patch_generate(model: Any, context: SeqParContext, patch: Patch) -> None:
    """Starts every `generate` from rank 0's random state, so that sampling draws the same tokens on all ranks."""
    unpatched = model.generate

    @functools.wraps(unpatched)
    def generate(*args: Any, **kwargs: Any) -> Any:
        share_random_state(context.comm, next(model.parameters()).device)
        return unpatched(*args, **kwargs)

    patch.set(model, "generate", generate)


def share_random_state(comm: Communicator, device: torch.device) -> None:
    """Sets the random state of every rank to that of rank 0: the CPU's, and the device's that the model is on."""
    if comm.size == 1:
        return
    torch.set_rng_state(comm.broadcast(torch.get_rng_state().to(comm.device), "random state").cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(comm.device)
        torch.cuda.set_rng_state(comm.broadcast(state, "random state").cpu(), device)
