"""Layer: one process, loopback ranks. Checkpointed layers of every family compute attention and K and V once.

`recompute_attention=True` is the reference: both must give the same bits.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointError

from family_cases import BATCHES, FUSED
from family_harness import family_module, inputs_of, model_of, slow_unless
from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.attention import attend
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.runtime.visual_features import RecomputedKeys
from outcomes import Outcome, run_case
from tiny_models.mplug_owl3 import LORA_TARGETS


def by_transformers(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def by_wrappers(model: Any, **options: Any) -> None:
    """Wrap the layers as OpenFlamingo's training script and accelerate do."""
    language_model = model.lang_encoder
    units = {*language_model.gated_cross_attn_layers, *language_model.old_decoder_blocks}
    wrap = functools.partial(checkpoint_wrapper, **options)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=units.__contains__)


@dataclass(frozen=True)
class Step:
    outcome: Outcome
    sent: dict[str, int]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of distributed forward passes, and of projections of K and V of frames, on all ranks."""
    ran: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            ran[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(attend, "distributed_forward", counted("attention", attend.distributed_forward))
    monkeypatch.setattr(RecomputedKeys, "keys_values", counted("K and V", RecomputedKeys.keys_values))
    return ran


def train(comm: Communicator, model: Any, inputs: dict[str, Any], **options: Any) -> Step:
    patch_model(model, group=comm, **options)
    comm.bytes.reset()
    outcome = run_case(model, inputs, model(**inputs))
    return Step(outcome, dict(comm.bytes.sent))


def assert_same_bits(found: list[Step], expected: list[Step]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.outcome.loss == b.outcome.loss
        for name, grad in b.outcome.grads.items():
            assert grad is None or torch.equal(a.outcome.grads[name], grad), name
        assert any(grad is not None and grad.any() for grad in b.outcome.grads.values())


CASES = [
    ("mplug_owl3", by_transformers, {}),
    ("idefics", by_transformers, {}),
    ("mllama", by_transformers, {}),
    ("moss_vl", by_transformers, {}),
    ("video_mllama", by_transformers, {}),
    ("open_flamingo", by_wrappers, {}),
    ("mplug_owl3", by_transformers, {"self_attention": "ulysses"}),  # one softmax over sources of two kinds
    ("mllama", by_transformers, {"strategy": "ulysses", "self_attention": "ulysses"}),
    ("idefics", by_transformers, {"strategy": "replicate", "self_attention": "local"}),
    ("qwen2_5_vl", by_transformers, {}),
    ("qwen3_vl", by_transformers, {"self_attention": "ulysses"}),
]


@pytest.mark.parametrize(("family", "enable", "options"), slow_unless(lambda row: row in (CASES[1], CASES[3]), CASES))
def test_step_computes_attention_once(
    family: str, enable: Callable[[Any], None], options: dict[str, Any], calls: Counter[str]
) -> None:
    family_module(family)
    case = BATCHES[family]
    found: dict[str, list[Step]] = {}
    ran: dict[str, Counter[str]] = {}
    for how in ("no checkpointing", "kept", "recomputed"):
        models = [model_of(family, case).train() for _ in range(2)]
        for model in models if how != "no checkpointing" else ():
            enable(model)
        inputs = inputs_of(family, case, model_of(family, case))
        step = functools.partial(train, inputs=inputs, recompute_attention=how == "recomputed", **options)
        found[how] = run_loopback(2, lambda comm, step=step, models=models: step(comm, models[comm.rank]))
        ran[how] = calls.copy()
        calls.clear()
    assert_same_bits(found["kept"], found["recomputed"])
    assert ran["kept"] == ran["no checkpointing"]
    assert ran["recomputed"]["attention"] == 2 * ran["kept"]["attention"] > 0
    assert 2 * ran["recomputed"]["K and V"] == 3 * ran["kept"]["K and V"]
    sent_again = ("q", "k", "v") if "ulysses" in options.values() else ("gather",)  # the text of "local" is gathered
    for plain, kept, recomputed in zip(*found.values(), strict=True):
        assert all(kept.sent[label] == size for label, size in plain.sent.items() if label not in sent_again)
        if options.get("strategy") != "replicate":
            assert sum(kept.sent.values()) < sum(recomputed.sent.values())


def test_dropout_and_lora_draw_the_same_numbers(calls: Counter[str]) -> None:
    """LoRA's dropout in the projection of K and V, and in others, is replayed whether attention runs again or not."""
    case = BATCHES["mplug_owl3"].with_model(**FUSED)
    steps = []
    for recompute in (False, True):
        lora = LoraConfig(r=4, target_modules=LORA_TARGETS, init_lora_weights=False, lora_dropout=0.3)
        model = model_of("mplug_owl3", case)
        by_transformers(model)
        torch.manual_seed(5)
        model = get_peft_model(model, lora).train()
        inputs = inputs_of("mplug_owl3", case, model)
        torch.manual_seed(6)
        steps += run_loopback(1, functools.partial(train, recompute_attention=recompute), model, inputs)
    assert_same_bits(steps[:1], steps[1:])
    assert calls["attention"] % 3 == 0  # 1 + 2


def test_unpatching_before_backward_fails_as_without_kept_results() -> None:
    for recompute in (False, True):
        model = model_of("mllama", BATCHES["mllama"]).train()
        by_transformers(model)
        inputs = inputs_of("mllama", BATCHES["mllama"], model)
        loss = patch_model(model, recompute_attention=recompute)(**inputs).loss
        unpatch_model(model)
        with pytest.raises(CheckpointError, match="have different metadata"):
            loss.backward()
