"""Layer: gloo ranks. patch_model says once, where Python shows it by default, how the model is parallel."""

import logging

import pytest

from mllm_seqpar import patch_model
from ranks import ranks
from tiny_models.mplug_owl3 import tiny_model


def shown_lines(rank: int, world: int) -> list[str]:
    """Patch a model and return what a handler of the default level shows on this rank."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mllm_seqpar")
    logger.addHandler(handler)
    try:
        patch_model(tiny_model(), "ring", group="self" if world == 1 else None)
    finally:
        logger.removeHandler(handler)
    return lines


@pytest.mark.slow
def test_rank_0_of_several_reports_one_line_and_one_rank_reports_nothing() -> None:
    first, second = ranks(2).run(shown_lines)
    assert first == [
        "[rank 0] MPlugOwl3ForConditionalGeneration is sequence-parallel over 2 ranks: cross-attention by ring, "
        "self-attention by ring (zigzag text)"
    ]
    assert second == []
    assert ranks(1).run(shown_lines) == [[]]
