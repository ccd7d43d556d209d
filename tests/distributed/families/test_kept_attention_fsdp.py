"""Layer: gloo ranks. FSDP2 with accelerate's `fsdp_activation_checkpointing` computes attention once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from family_cases import BATCHES
from family_harness import inputs_of, model_of
from mllm_seqpar import patch_model
from mllm_seqpar.attention import attend
from ranks import ranks

LAYERS = ["MllamaSelfAttentionDecoderLayer", "MllamaCrossAttentionDecoderLayer"]


def step(recompute: bool) -> tuple[float, dict[str, torch.Tensor], int]:
    """Return the loss, the gradients and the number of distributed forward passes of a step in bfloat16."""
    case, calls = BATCHES["mllama"], []
    model = model_of("mllama", case).train()
    inputs = inputs_of("mllama", case, model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        activation_checkpointing=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=LAYERS,
    )
    plugin.set_auto_wrap_policy(model)
    model = fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)
    layers = model.model.language_model.layers
    assert all("CheckpointWrapper" in type(layer).__name__ for layer in layers)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    patch_model(model, recompute_attention=recompute)
    forward = attend.distributed_forward

    def counted(*args: Any) -> Any:
        calls.append(1)
        return forward(*args)

    attend.distributed_forward = counted
    try:
        loss = model(**inputs).loss
        loss.backward()
    finally:
        attend.distributed_forward = forward
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.item(), {name: x.to_local() if isinstance(x, DTensor) else x for name, x in grads.items()}, len(calls)


def both(rank: int, world: int) -> int:
    (loss, grads, once), (expected_loss, expected, twice) = step(False), step(True)
    assert loss == expected_loss and twice == 2 * once > 0
    assert grads.keys() == expected.keys() and all(torch.equal(grads[name], x) for name, x in expected.items())
    return once


@pytest.mark.slow
def test_accelerate_activation_checkpointing_computes_attention_once() -> None:
    layers = model_of("mllama", BATCHES["mllama"]).config.text_config.num_hidden_layers
    assert ranks(2).run(both) == [layers] * 2
