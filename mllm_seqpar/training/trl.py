"""TRL's `SFTTrainer` and `DPOTrainer` with sequence-parallel models.

Both replace the model's forward at the end of their `__init__`: with `fused_lm_head=True`, it runs the inner model,
bypassing the patched forward, and returns log-probabilities of tokens instead of logits. `use_token_scores` replaces
this forward with one that returns the same from the patched model: each rank scores the tokens of its own text shard,
and the scores (B, L) are gathered, not the logits. Verified with TRL 1.16.

Shape legend: B samples, L text tokens, s of them on this rank, T of them with a target, V vocabulary.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.patching.changes import Patch
from mllm_seqpar.runtime.loss import IGNORE, shifted
from mllm_seqpar.runtime.text import TextShards

SUPPORTED = ("SFTTrainer", "DPOTrainer")


def trl_trainer(trainer: type) -> str | None:
    """Return the name of the TRL trainer that `trainer` derives from, or None.

    Raises:
        ConfigError: the trainer is not in `SUPPORTED`; other TRL trainers use the model in ways that nothing here
            verifies.
    """
    names = [c.__name__ for c in trainer.__mro__ if c.__module__.partition(".")[0] == "trl"]
    if not names:
        return None
    if names[0] not in SUPPORTED:
        raise ConfigError(
            f"{trainer.__name__}: TRL's {names[0]} is not supported with sequence-parallel models; supported are "
            f"{' and '.join(SUPPORTED)}, transformers' Trainer, and subclasses of these"
        )
    return names[0]


def refuse_collator(collator: Any, processor: Any) -> None:
    """Raise ConfigError for collators of TRL whose batches are wrong for the families of this package.

    TRL joins prompts with images and completions after their tokenization. Masks of images then end with the prompt,
    and positions of images are wrong after TRL has moved the prompts to the left.
    """
    name = type(collator).__name__
    if type(collator).__module__.partition(".")[0] != "trl" or "Vision" not in name:
        return
    joins = name != "DataCollatorForVisionLanguageModeling" or getattr(collator, "completion_only_loss", False)
    lacks = getattr(processor, "chat_template", None) is None or getattr(processor, "ids_name", None) == "lang_x"
    if joins or lacks:
        reason = "joins prompts with images and completions after their tokenization"
        if not joins:
            reason = f"needs a processor with a chat template and input_ids, unlike {type(processor).__name__}"
        raise ConfigError(
            f"SeqParMixin: TRL's {name} {reason}; pass data_collator=SeqParDataCollator(processor), from mllm_seqpar"
        )


def remove_fused_head(model: nn.Module) -> None:
    """Undo the replacement of a model's forward by TRL and, of a reference model, by `Accelerator.prepare_model`.

    Raises:
        ConfigError: the forward is not one that TRL made.
    """
    forward = vars(model).get("forward")
    while forward is not None and not _is_of_trl(forward):
        forward = getattr(forward, "__wrapped__", None)
    if forward is None:
        raise ConfigError(
            f"TRL did not replace the forward of {type(model).__name__}, as TRL 1.16 does; install trl>=1.16,<2, or "
            "report its version to the authors of mllm_seqpar"
        )
    object.__delattr__(model, "forward")


def _is_of_trl(forward: Any) -> bool:
    """Return whether a function, or the function of a method, is defined in a module of TRL."""
    function = getattr(forward, "__func__", forward)
    module = getattr(function, "__globals__", {}).get("__name__", "")
    return str(module).partition(".")[0] == "trl"


@dataclass
class TokenScores(ModelOutput):
    """What TRL's fused head returns, (B, L - 1) each, or (B, L) with `shift_labels`; 0 at tokens without a target.

    Attributes:
        log_probs: the log-probability of each target, float32; only it has a gradient.
        entropy: of the distribution of the next token.
        log_sum_sq_probs: the logarithm of the sum of its squared probabilities.
        mean_logits: the mean of its logits over the vocabulary.
        is_top1: whether the target is the most likely token; bool.
        label_mask: whether there is a target; bool.
        loss: the mean of -log_probs over the targets.
        aux_loss: None; of mixtures of experts.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


def use_token_scores(model: Any, patch: Patch, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
    """Make `model(..., fused_lm_head=True)` return `TokenScores`; other calls of the patched model do not change.

    Args:
        model: the module that `patch` changed; `unpatch_model` undoes this change too.
        patch: its patch.
        autocast: returns the context that the forward runs in.
    """
    patched = model.forward

    @functools.wraps(patched)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        with autocast():
            if not fused_lm_head:
                return patched(*args, **kwargs)
            kwargs = {name: x for name, x in kwargs.items() if name not in ("num_items_in_batch", "logits_to_keep")}
            logits = patched(*args, **kwargs).logits
        return _token_scores(logits, kwargs.get("labels"), kwargs.get("shift_labels"), patch)

    patch.set(model, "forward", types.MethodType(forward, model))


def _token_scores(logits: Tensor, labels: Tensor | None, shift_labels: Tensor | None, patch: Patch) -> TokenScores:
    """Return the scores of the whole text on every rank, given the logits that the patched forward returns."""
    if labels is None and shift_labels is None:
        raise ConfigError("fused_lm_head=True needs labels, whose tokens are scored; pass labels or shift_labels")
    whole = shifted(labels) if shift_labels is None else shift_labels  # type: ignore[arg-type]
    context = patch.context
    text = TextShards(whole.shape[0], whole.shape[1], context.comm, context.config.text_layout)
    sharded = context.comm.size > 1 and context.config.shards_text and context.config.logits != "full"
    targets = (text.shard(whole, 1, IGNORE) if sharded else whole).to(logits.device)
    scores = list(_scores(logits, targets))
    if sharded:
        with torch.no_grad():
            others = text.unshard(torch.stack(scores[1:], -1), 1)
        scores = [text.unshard(scores[0], 1), *others.unbind(-1)]
    if shift_labels is None:  # the last token has no target
        whole, scores = whole[:, :-1], [x[:, :-1] for x in scores]
    log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1 = scores
    mask = (whole != IGNORE).to(logits.device)
    return TokenScores(
        loss=-log_probs.sum() / mask.sum().clamp(min=1),
        log_probs=log_probs,
        entropy=entropy,
        log_sum_sq_probs=log_sum_sq_probs,
        mean_logits=mean_logits,
        is_top1=is_top1.bool(),
        label_mask=mask,
    )


def _scores(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return float32 scores in the order of `TokenScores`, from logits (B, s, V) and targets (B, s)."""
    mask = targets != IGNORE
    rows, labels = logits[mask].float(), targets[mask]  # (T, V) and (T,)
    log_p = rows.log_softmax(-1)
    scores = [log_p.gather(-1, labels[:, None])[:, 0]]
    with torch.no_grad():
        scores.append(-(log_p.exp() * log_p).sum(-1))
        scores.append((2 * log_p).logsumexp(-1))
        scores.append(rows.mean(-1))
        scores.append((rows.argmax(-1) == labels).float())
    # masked_scatter keeps a shard without targets connected to the model, so that all ranks run the same backward.
    return tuple(x.new_zeros(mask.shape).masked_scatter(mask, x) for x in scores)
