"""Layer: gloo ranks. Loss, logits, hidden states and every gradient of the patched model are the unpatched one's."""

from typing import Any

import pytest
import torch
from patched import GATES, PATIENCE, Case, check, patched_rank, reference

from ranks import ranks

SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}

EVERYWHERE = {
    "one sample": Case(),
    "two samples": Case(frames=(4, 1)),
    "a sample without frames": Case(frames=(0, 3), length=10),
    "one frame": Case(frames=(1,), length=9),
    "text shorter than the group": Case(frames=(1,), length=3),
    "text only": Case(frames=(0, 0), length=11),
    "left padding": Case(frames=(2, 3, 1), padding="left"),
}
"""For 1 to 4 ranks."""

ONCE = {
    "two tokens, no frames": Case(frames=(0,), length=2, labels="every row"),  # a row of one key has no gradient of q
    "right padding": Case(frames=(2, 3), padding="right"),
    "packed sequences": Case(frames=(3,), length=13, packed=(5, 8)),
    "positions that look packed, with a cache": Case(
        frames=(3, 1), arguments={"position_ids": torch.cat([torch.arange(5), torch.arange(8)])[None]}
    ),
    "sliding window": Case(frames=(3, 2), model=SLIDING),
    "sliding window and packed": Case(frames=(3,), packed=(7, 6), model=SLIDING),
    "few targets, all on one rank": Case(frames=(2, 1), labels="few"),
    "labels shifted by the caller": Case(frames=(2, 1), labels="shifted"),
    "items counted by the caller": Case(frames=(2, 1), arguments={"num_items_in_batch": 37}),
    "another label is no target": Case(frames=(2, 1), labels="every row", arguments={"ignore_index": 7}),
    "offsets given": Case(frames=(2, 0, 1), offsets=True, model={"image_token_id": None}),
    "gradients of pixels": Case(frames=(2, 1), wants_grad=("pixel_values",)),
    "gradients of features": Case(frames=(2, 1), features=True, wants_grad=("image_embeds",)),
    "gradients of embeddings": Case(frames=(2, 1), embeds=True, wants_grad=("inputs_embeds", "pixel_values")),
    "own frames only": Case(frames=(2, 1), local_frames=True),
    "own features only": Case(frames=(2, 3), local_frames=True, features=True),
    "ring": Case(frames=(3, 2)).with_options(strategy="ring"),
    "ring, nothing recomputed": Case(frames=(3, 2)).with_options(strategy="ring", recompute_visual=False),
    "nothing recomputed, contiguous": Case(frames=(1, 1)).with_options(
        recompute_visual=False, text_layout="contiguous"
    ),
    "striped": Case(frames=(3, 2), padding="left").with_options(text_layout="striped", strategy="ring"),
    "striped sliding window": Case(frames=(3,), model=SLIDING).with_options(text_layout="striped"),
    "local text": Case(frames=(3, 2), padding="left").with_options(self_attention="local"),
    "local text, packed": Case(frames=(3,), packed=(5, 8)).with_options(self_attention="local"),
    "local text, sliding window": Case(frames=(3,), model=SLIDING).with_options(self_attention="local"),
    "local text only": Case(frames=(0,)).with_options(self_attention="local"),
    "local text, ring": Case(frames=(1,)).with_options(self_attention="local", strategy="ring", recompute_visual=False),
    "mesh": Case(frames=(3, 2)).with_options(strategy="mesh", self_attention="mesh"),
    "mesh for frames": Case(frames=(3, 2)).with_options(strategy="mesh", recompute_visual=False),
    "no overlap": Case().with_options(overlap=False, accumulate_dtype=None),
    "full logits in training": Case(frames=(2, 1)).with_options(logits="full"),
    "no labels": Case(frames=(2, 1), labels=None),
}
"""Each with one number of ranks, 2 to 4 in turn; a case fails for its own reason, not for that number."""

ON_FOUR: dict[str, dict[str, Any]] = {
    "mesh": {"strategy": "mesh", "self_attention": "mesh", "tile": (2, 2)},
    "ulysses": {"strategy": "ulysses", "self_attention": "ulysses"},
    "hybrid": {"strategy": "ulysses", "self_attention": "ulysses", "tile": (2, 1), "text_layout": "striped"},
    "text by heads": {"self_attention": "ulysses", "text_layout": "contiguous"},
    "frames by heads": {"strategy": "ulysses", "recompute_visual": False},
    "frames by heads, text by mesh": {"strategy": "ulysses", "self_attention": "mesh", "tile": (2, 2)},
    "replicate": {"strategy": "replicate"},
    "replicate beside heads": {"strategy": "replicate", "self_attention": "ulysses", "recompute_visual": False},
    "auto": {"strategy": "auto"},
}
"""Fused hyper layers have one softmax over text and frames that go different ways."""


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("case", EVERYWHERE)
@pytest.mark.parametrize("gate", GATES)
def test_equals_unpatched(world: int, case: str, gate: str | None) -> None:
    what = EVERYWHERE[case]
    check(ranks(world).run(patched_rank, gate, what, timeout=PATIENCE), reference(gate, what), what)


@pytest.mark.parametrize(
    ("world", "case"), sorted((2 + index % 3, case) for index, case in enumerate(ONCE)), ids=lambda value: str(value)
)
@pytest.mark.parametrize("gate", GATES)
def test_equals_unpatched_in(world: int, case: str, gate: str | None) -> None:
    what = ONCE[case]
    outcomes, expected = ranks(world).run(patched_rank, gate, what, timeout=PATIENCE), reference(gate, what)
    if "full" in case or "no labels" in case or "local text" in case:
        assert all(outcome.logits.shape == expected.logits.shape for outcome in outcomes)
    check(outcomes, expected, what)


@pytest.mark.parametrize("way", ON_FOUR)
@pytest.mark.parametrize("gate", GATES)
def test_equals_unpatched_by(way: str, gate: str | None) -> None:
    what = Case(frames=(4, 1), padding="left").with_options(**ON_FOUR[way])
    check(ranks(4).run(patched_rank, gate, what, timeout=PATIENCE), reference(gate, what), what)


def test_equals_unpatched_with_a_vector_gate() -> None:
    what = Case(frames=(2, 0, 3), padding="left", offsets=True)
    check(ranks(3).run(patched_rank, "vector", what, timeout=PATIENCE), reference("vector", what), what)
