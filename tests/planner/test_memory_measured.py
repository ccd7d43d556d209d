"""Layer: one process. The planner's formula for activations against what autograd saves of a real, patched model."""

from __future__ import annotations

import pytest
import torch

from mllm_seqpar import patch_model
from mllm_seqpar.planner import Way
from mllm_seqpar.planner.hf_config import _mplug_owl3
from mllm_seqpar.planner.memory import memory
from mllm_seqpar.planner.run import Run
from tiny import tiny_frames, tiny_model, tiny_text

WIDTHS = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2}


def kept(model: torch.nn.Module, length: int, frames: int, dtype: torch.dtype) -> int:
    """Bytes of the storages that a forward pass saves for backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes, alive = {}, []

    def save(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(x.detach())  # or its place would be given away, and counted once for two
        return x.detach()

    ids = tiny_text(frames, length=length)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        model(input_ids=ids, pixel_values=tiny_frames(frames).to(dtype), labels=ids)
    return sum(sizes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_a_real_model(dtype: torch.dtype) -> None:
    """By the difference between two lengths of text: what a token costs. Logits are counted apart (test_plan)."""
    model = tiny_model(num_hidden_layers=6, hyper_layers=[1, 4], vocab_size=256, **WIDTHS).to(dtype)
    model.vision_model.requires_grad_(False)
    sizes = _mplug_owl3(model.config.to_dict(), "tiny")
    model = patch_model(model, strategy="lv-xattn").train()
    found = kept(model, 512, 4, dtype) - kept(model, 256, 4, dtype)

    def planned(text: int) -> int:
        run = Run(model=sizes, frames=4, text=text, gpus=1, element=dtype.itemsize)
        return memory(run, Way("lv-xattn", (1, 1)))["activations"] - text * 256 * (dtype.itemsize + 8)

    logits = 256 * 256 * 4  # in float32, of 256 tokens and words
    assert planned(512) - planned(256) == pytest.approx(found - logits, rel=0.04)
