"""The language-modelling loss of sharded text.

Labels are shifted before they are sharded, so no target is lost between two shards. The loss is the sum over the group,
divided by the number of targets of the whole text; a rank without targets needs no special case.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

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
        shift_labels: (B, L), the shifted labels of the whole text, the same on every rank.
        text: the sharding of the tokens.
        num_items_in_batch: the divisor of the sum; None: the number of targets (a mean).
        ignore_index: the label of tokens without a target; None: -100.

    Returns:
        float32 scalar. Its gradient, averaged over the group, is the gradient of the unpatched model's loss.
    """
    if shift_labels.shape != (text.batch, text.length):
        raise ShapeError(
            f"labels are {tuple(shift_labels.shape)}; expected the shape of the text, {(text.batch, text.length)}"
        )
    ignore = IGNORE if ignore_index is None else ignore_index
    local = text.shard(shift_labels, 1, ignore).to(logits.device)
    total = F.cross_entropy(logits.float().flatten(0, 1), local.flatten(), ignore_index=ignore, reduction="sum")
    return mean_over_targets(group_sum(total, text.comm), shift_labels, num_items_in_batch, ignore)


def mean_over_targets(total: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None, ignore: int) -> Tensor:
    """Return a sum of losses divided by `num_items_in_batch`, or by the number of `targets` other than `ignore`."""
    count = (targets != ignore).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)
