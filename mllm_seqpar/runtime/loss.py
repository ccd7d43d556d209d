"""The language-modelling loss of sharded text.

Labels are shifted before they are sharded, so no target is lost between two shards. The loss is the sum over the group,
divided by the number of targets of the whole text; a rank without targets needs no special case.
"""

from __future__ import annotations

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
    text: TextShards,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int | None = None,
) -> Tensor:
    """Return the unpatched model's loss, the same number on every rank.

    Args:
        logits: (B, s, V), of this rank's tokens.
        shift_labels: (B, L), the shifted labels of the whole text, the same on every rank. On the CPU, they are
            checked, and the host does not wait for the device.
        text: the sharding of the tokens.
        num_items_in_batch: the divisor of the sum; None: the number of targets (a mean).
        ignore_index: the label of tokens without a target; None: -100.

    Returns:
        float32 scalar. Its gradient, averaged over the group, is the gradient of the unpatched model's loss.

    Raises:
        ShapeError: on all ranks, if the labels do not have the shape of the text, or are no tokens.
    """
    if shift_labels.shape != (text.batch, text.length):
        raise ShapeError(
            f"labels are {tuple(shift_labels.shape)}; expected the shape of the text, {(text.batch, text.length)}"
        )
    ignore = IGNORE if ignore_index is None else ignore_index
    if shift_labels.device.type == "cpu":
        require_tokens(shift_labels, logits.shape[-1], ignore)
    local = copy_to_device(text.shard(shift_labels, 1, ignore), logits.device)
    total = F.cross_entropy(logits.float().flatten(0, 1), local.flatten(), ignore_index=ignore, reduction="sum")
    return mean_over_targets(group_sum(total, text.comm), shift_labels, num_items_in_batch, ignore)


def mean_over_targets(total: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None, ignore: int) -> Tensor:
    """Return a sum of losses divided by `num_items_in_batch`, or by the number of `targets` other than `ignore`."""
    count = (targets != ignore).sum() if num_items_in_batch is None else num_items_in_batch
    # A number on the CPU divides a tensor on any device, and the host does not wait for a copy of it.
    moves = isinstance(count, Tensor) and (count.dim() > 0 or count.device.type != "cpu")
    return total / (count.to(total.device) if isinstance(count, Tensor) and moves else count)


def require_tokens(targets: Tensor, vocabulary: int, ignore: int) -> None:
    """Raise ShapeError unless the targets, on the CPU, are `ignore` or tokens, ``0 <= target < vocabulary``.

    All ranks have all targets, so all raise. The cross-entropy of the rank that has the token would raise on it alone.
    """
    wrong = targets[(targets != ignore) & ((targets < 0) | (targets >= vocabulary))]
    if wrong.numel():
        raise ShapeError(
            f"labels: {int(wrong[0])} is not a token of this model, whose tokens are 0 to {vocabulary - 1}; pass "
            f"{ignore} for tokens without a target"
        )
