"""The language-modelling loss of a text whose tokens are dealt to ranks.

Labels are shifted before they are sharded, so no token is lost at a border; the sum is taken over the group and divided
by the number of targets of the whole text, so a rank without targets is nothing special.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mllm_seqpar.comm.autograd import group_sum
from mllm_seqpar.errors import ShapeError

from .text_shards import TextShards

IGNORE = -100


def shifted(labels: Tensor, ignore_index: int | None = None) -> Tensor:
    """(B, L) labels -> (B, L): each token's target is the label of the next; the last has none."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE if ignore_index is None else ignore_index)


def sharded_causal_lm_loss(
    logits: Tensor,
    shift_labels: Tensor,
    text: TextShards,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int | None = None,
) -> Tensor:
    """The unpatched model's loss, the same number on every rank.

    Args:
        logits: (B, s, V), of this rank's tokens.
        shift_labels: (B, L), shifted, of all tokens, the same on every rank.
        text: how tokens were dealt.
        num_items_in_batch: what to divide the sum by; None: the number of targets here (their mean).
        ignore_index: the label that is no target; None: -100.

    Returns:
        float32 scalar. Its gradient, averaged over the group, is that of the unpatched loss.
    """
    if shift_labels.shape != (text.batch, text.length):
        raise ShapeError(
            f"labels are {tuple(shift_labels.shape)}; expected those of the text, {(text.batch, text.length)}"
        )
    ignore = IGNORE if ignore_index is None else ignore_index
    local = text.shard(shift_labels, 1, ignore).to(logits.device)
    total = F.cross_entropy(logits.float().flatten(0, 1), local.flatten(), ignore_index=ignore, reduction="sum")
    count: Tensor | int = (shift_labels != ignore).sum() if num_items_in_batch is None else num_items_in_batch
    if isinstance(count, Tensor):
        count = count.to(total.device)
    return group_sum(total, text.comm) / count
