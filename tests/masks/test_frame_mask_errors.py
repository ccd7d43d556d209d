"""Layer: pure Python. What a FrameMask refuses."""

from __future__ import annotations

import pytest
import torch

from mllm_seqpar.errors import MaskError
from mllm_seqpar.masks import FrameMask

ROWS = torch.zeros(1, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    "first,stop,tokens,frames,message",
    [
        (ROWS, ROWS[:, :3], 2, 5, r"first is \(1, 4\)"),
        (ROWS[0], ROWS[0], 2, 5, r"integers of shape \(batch, query rows\)"),
        (ROWS.float(), ROWS.float(), 2, 5, "torch.float32"),
        (ROWS, ROWS + 6, 2, 5, "a row sees frames 0 to 5, but there are 5 frames"),
        (ROWS - 1, ROWS + 1, 2, 5, "a row sees frames -1 to 0"),
        (ROWS, ROWS, 0, 5, "tokens_per_frame=0"),
        (ROWS, ROWS, 2, -1, "frames=-1"),
    ],
)
def test_intervals_that_do_not_fit(first, stop, tokens, frames, message) -> None:
    with pytest.raises(MaskError, match=message):
        FrameMask.from_intervals(first, stop, tokens, frames)


@pytest.mark.parametrize("visible", [torch.ones(1, 4, 5), torch.ones(4, 5, dtype=torch.bool)])
def test_tables_that_do_not_fit(visible) -> None:
    with pytest.raises(MaskError, match="must be bool of shape"):
        FrameMask.from_dense(visible, 2)


def test_rows_that_see_nothing_may_hold_any_numbers() -> None:
    """mPLUG-Owl3 marks samples without images with a stop of -1000000."""
    mask = FrameMask.from_intervals(ROWS + 100, ROWS - 1_000_000, 2, 5)
    assert not mask.any_frame_visible().any() and mask.tiles(0, 5) == ()
