"""Layer: gloo ranks. The scores that a patched model gives TRL's trainers are those of the unpatched model's logits."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patching import patch_of
from mllm_seqpar.training.trl import remove_fused_head, trl_trainer, use_token_scores
from ranks import ranks
from tiny_models.mllama import Case, inputs_of, tiny_model

CASE = Case(frames=((3, 1), (2,)), length=13, padding="right")


def expected_scores(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Compute each score from its definition, (B, L - 1), in float64."""
    logits, targets = logits[:, :-1].double(), labels[:, 1:]
    mask, p = targets != -100, logits.softmax(-1)
    scores = {
        "log_probs": p.gather(-1, targets.clamp(min=0)[..., None])[..., 0].log(),
        "entropy": torch.distributions.Categorical(p).entropy(),
        "log_sum_sq_probs": p.square().sum(-1).log(),
        "mean_logits": logits.mean(-1),
        "is_top1": (p.argmax(-1) == targets),
    }
    return {name: score * mask for name, score in scores.items()} | {"label_mask": mask}


def compare(rank: int, world: int, options: dict[str, Any], shift: bool) -> None:
    """Compare scores and gradients of a loss that weighs the tokens differently."""
    model = tiny_model()
    inputs = inputs_of(CASE, model)
    labels = inputs["labels"]
    if shift:  # the same targets, given as TRL gives them if they are shifted already
        inputs["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    scores = expected_scores(model(**{**inputs, "labels": None, "shift_labels": None}).logits, labels)
    weights = torch.arange(1.0, CASE.length)
    (scores["log_probs"] * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    unpatched_forward = model.forward

    patch_model(model, **options)
    patch = patch_of(model)
    assert patch is not None
    use_token_scores(model, patch, nullcontext)
    found = model(**inputs, fused_lm_head=True)
    for name, score in scores.items():
        value = found[name][:, : CASE.length - 1]
        torch.testing.assert_close(value.double(), score.double(), rtol=1e-4, atol=1e-4, msg=name)
        assert found[name].shape[1] == CASE.length - (not shift)
    assert found.is_top1.dtype == found.label_mask.dtype == torch.bool
    (found.log_probs[:, : CASE.length - 1] * weights).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad)
            gradient = gradients.get(name, torch.zeros_like(parameter))
            torch.testing.assert_close(parameter.grad / world, gradient, rtol=1e-3, atol=1e-4, msg=name)
    assert model(**inputs).loss is not None
    with pytest.raises(ConfigError, match="pass labels or shift_labels"):
        model(**{**inputs, "labels": None, "shift_labels": None}, fused_lm_head=True)
    assert unpatch_model(model).forward == unpatched_forward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options", "shift"),
    [(1, {}, False), (2, {}, False), (3, {"logits": "local"}, True), (2, {"logits": "full"}, False)]
    + [(2, {"self_attention": "local"}, False)],
)
def test_scores_and_gradients_equal_those_of_the_unpatched_logits(
    world: int, options: dict[str, Any], shift: bool
) -> None:
    ranks(world).run(compare, options, shift)


def test_only_forwards_and_trainers_of_trl_are_recognised() -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match="TRL did not replace the forward of MllamaForConditionalGeneration"):
        remove_fused_head(model)
    assert trl_trainer(object) is None
    other = type("GRPOTrainer", (), {"__module__": "trl.trainer.grpo_trainer"})
    with pytest.raises(ConfigError, match="TRL's GRPOTrainer is not supported"):
        trl_trainer(type("Mine", (other,), {}))
