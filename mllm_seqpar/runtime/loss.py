"""The loss of causal language models whose text is sharded.

Labels are shifted before they are sharded, so no target is lost between two shards. The loss is the sum over the group,
divided by the number of targets of the whole text; a rank without targets needs no special case.

Shape legend: B samples, L tokens of the caller, s of them on this rank, C channels, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar._transfers import copy_to_device
from mllm_seqpar.comm.autograd import group_sum
from mllm_seqpar.errors import ShapeError

from .text import TextShards

IGNORE = -100


def shifted(labels: Tensor, ignore_index: int | None = None) -> Tensor:
    """Return labels (B, L) shifted to the tokens that predict them; the last token has no target."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE if ignore_index is None else ignore_index)


def sharded_causal_lm_loss(
    logits: Tensor,
    shift_labels: Tensor,
    text: TextShards | None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int | None = None,
    target_weights: Callable[[Tensor], Tensor | None] | None = None,
) -> Tensor:
    """Return the unpatched model's loss, the same number on every rank.

    Args:
        logits: (B, s, V), of this rank's tokens.
        shift_labels: (B, L), the shifted labels of the whole text, the same on every rank. On the CPU, they are
            checked, and the host does not wait for the device.
        text: the sharding of the tokens; None: `logits` are of the whole text.
        num_items_in_batch: the divisor of the sum; None: the number of targets (a mean).
        ignore_index: the label of tokens without a target; None: -100.
        target_weights: returns the weights of the losses of targets; None, or None returned: all are 1.

    Returns:
        float32 scalar, or float64 of float64 logits. Its gradient, averaged over the group, is the gradient of the
        unpatched model's loss.

    Raises:
        ShapeError: on all ranks, if the labels do not have the shape of the text, or are no tokens.
    """
    if text is not None and shift_labels.shape != (text.batch, text.length):
        raise ShapeError(
            f"labels are {tuple(shift_labels.shape)}; expected the shape of the text, {(text.batch, text.length)}"
        )
    ignore = IGNORE if ignore_index is None else ignore_index
    local = copy_to_device(shift_labels if text is None else text.shard(shift_labels, 1, ignore), logits.device)
    return _loss_over_group(logits, local, shift_labels, text, num_items_in_batch, ignore, target_weights)


def loss_of_targets(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    text: TextShards | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int | None = None,
    target_weights: Callable[[Tensor], Tensor | None] | None = None,
) -> Tensor:
    """Return the loss of `sharded_causal_lm_loss` from hidden states; the head computes only rows that have a target.

    A rank without targets calls the head too, for no row, so that FSDP2 and DDP stay in step.

    Args:
        hidden: (B, s, C), of the rows that `text` shards, or of all rows if it is None.
        head: hidden states (1, rows, C) -> logits (1, rows, V).
        targets: (B, L), the shifted labels of the whole text, on the CPU.
    """
    ignore = IGNORE if ignore_index is None else ignore_index
    local = (targets if text is None else text.shard(targets, 1, ignore)).flatten()
    rows = (local != ignore).nonzero().flatten()
    rows, labels = copy_to_device(torch.stack([rows, local[rows].long()]), hidden.device)
    logits = head(hidden.flatten(0, 1).index_select(0, rows)[None])[0]
    return _loss_over_group(logits, labels, targets, text, num_items_in_batch, ignore, target_weights)


def _loss_over_group(
    logits: Tensor,
    local: Tensor,
    targets: Tensor,
    text: TextShards | None,
    num_items_in_batch: Tensor | int | None,
    ignore: int,
    target_weights: Callable[[Tensor], Tensor | None] | None,
) -> Tensor:
    """Return the loss of logits (..., V) and their labels `local` (...); `targets` (B, L) are those of all ranks."""
    if targets.device.type == "cpu":
        require_tokens(targets, logits.shape[-1], ignore)
    total = summed_cross_entropy(logits, local, ignore, target_weights(local) if target_weights else None)
    total = total if text is None else group_sum(total, text.comm)
    return mean_over_targets(total, targets, num_items_in_batch, ignore)


def summed_cross_entropy(
    logits: Tensor, targets: Tensor, ignore: int = IGNORE, weights: Tensor | None = None
) -> Tensor:
    """Return the sum of the cross-entropy of logits (..., V) and targets (...), in float32, or float64 for float64.

    The terms are computed in float32 for every dtype, as transformers does. With `weights` (...), each is multiplied by
    the weight of its target.
    """
    logits, targets, dtype = logits.float().flatten(0, -2), targets.flatten(), logits.dtype
    if dtype is not torch.float64 and weights is None:
        return F.cross_entropy(logits, targets, ignore_index=ignore, reduction="sum")
    terms = F.cross_entropy(logits, targets, ignore_index=ignore, reduction="none")
    terms = terms if weights is None else terms * weights.flatten().to(terms)
    return (terms.to(dtype) if dtype is torch.float64 else terms).sum()


def mean_over_targets(total: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None, ignore: int) -> Tensor:
    """Return a sum of losses divided by `num_items_in_batch`, or by the number of `targets` other than `ignore`."""
    count = (targets != ignore).sum() if num_items_in_batch is None else num_items_in_batch
    # A number on the CPU divides a tensor on any device, and the host does not wait for a copy of it.
    moves = isinstance(count, Tensor) and (count.dim() > 0 or count.device.type != "cpu")
    return total / (count.to(total.device) if isinstance(count, Tensor) and moves else count)


def require_tokens(targets: Tensor, vocabulary: int, ignore: int | None) -> None:
    """Raise ShapeError unless the targets, on the CPU, are `ignore` (None: -100) or tokens, ``0 <= target <
    vocabulary``.

    All ranks have all targets, so all raise. The cross-entropy of the rank that has the token would raise on it alone.
    """
    ignore = IGNORE if ignore is None else ignore
    wrong = targets[(targets != ignore) & ((targets < 0) | (targets >= vocabulary))]
    if wrong.numel():
        raise ShapeError(
            f"labels: {int(wrong[0])} is not a token of this model, whose tokens are 0 to {vocabulary - 1}; pass "
            f"{ignore} for tokens without a target"
        )
