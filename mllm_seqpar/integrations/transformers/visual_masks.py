"""From a family's table of what each row sees of its own sample's units, to a mask over the units of all samples."""

from __future__ import annotations

import torch
from torch import Tensor

from mllm_seqpar.errors import ShapeError
from mllm_seqpar.masks import FrameMask


def sample_mask(
    visible: Tensor, tokens: int, units: int, rows: Tensor | None = None, first_batch: int | None = None
) -> FrameMask:
    """The mask over the one flat list of all samples' units, sample by sample.

    Args:
        visible: (B, L, U) bool, U units of each sample.
        tokens: keys of a unit.
        units: of all samples and ranks together; with beams, B is a multiple of the samples, and the beams of a sample
            share its units.
        rows: (B,) the row of the frames' own pass that each row continues; None: that pass itself.
        first_batch: rows of the frames' own pass; None: B.

    Raises:
        ShapeError: units that do not fit the table.
    """
    visible = visible.detach().cpu()
    batch, length, own = visible.shape
    start = unit_offsets(first_batch or batch, own, units)
    start = start if rows is None else start[rows]
    count = visible.sum(-1)
    first = visible.int().argmax(-1) if own else count
    after = own - visible.flip(-1).int().argmax(-1) if own else count
    if bool(((after - first == count) | (count == 0)).all()):  # no holes: two numbers per row say it all
        return FrameMask.from_intervals(start[:, None] + first, start[:, None] + first + count, tokens, units)
    table = torch.zeros(batch, length, units, dtype=torch.bool)
    for sample in range(batch):
        table[sample, :, int(start[sample]) : int(start[sample]) + own] = visible[sample]
    return FrameMask.from_dense(table, tokens)


def unit_offsets(batch: int, own: int, units: int) -> Tensor:
    """(B,) the number of each row's sample's first unit, when samples have `own` units and beams share theirs."""
    samples = units // own if own else batch
    if own and (units % own or samples == 0 or batch % samples):
        raise ShapeError(
            f"{units} frames (or tiles) were passed for {batch} samples of the text, whose mask speaks of {own} each; "
            f"expected {batch * own}, or with beams those of the samples once"
        )
    return torch.arange(batch) // max(1, batch // samples) * own
