"""Layer: one process. Ranks that pass different inputs, or compute differently, all raise an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from family_harness import on_ranks
from mllm_seqpar import patch_model
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.errors import AgreementError, SeqParError
from mllm_seqpar.patches.mplug_owl3.testing import Case as Owl
from mllm_seqpar.patches.mplug_owl3.testing import tiny_frames, tiny_model, tiny_text
from mllm_seqpar.runtime.visual_features import fingerprint_of

ELSEWHERE = r"rank 1 of the group failed while checking its arguments"
OWL = Owl(frames=(3,), length=12)
Inputs = dict[str, Any]


def test_frames_are_compared_by_values_and_not_by_memory_layout() -> None:
    frames = torch.randn(7, 33, 50, 3).permute(0, 3, 1, 2)
    assert fingerprint_of(frames) == fingerprint_of(frames.contiguous()) != fingerprint_of(frames + 1)


def differing_pass(model: Any, what: str) -> Any:
    """Run a pass that differs from the other rank's in this way."""
    ids, frames = tiny_text(2), tiny_frames(2)
    more: Inputs = {}
    match what:
        case "training mode":
            model.train()
        case "gradient checkpointing":
            model.gradient_checkpointing_enable()
        case "checksum of which parameters train":
            model.requires_grad_(False)
        case "num_items_in_batch":
            more = {"num_items_in_batch": 3}
        case "checksum of further arguments":
            more = {"output_hidden_states": True}
        case "checksum of the inputs' dtypes":
            frames = frames.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
        return model(ids, frames, labels=ids, **more)


@pytest.mark.parametrize(
    "what",
    [
        "training mode",
        "gradient checkpointing",
        "checksum of which parameters train",
        "num_items_in_batch",
        "checksum of further arguments",
        "checksum of the inputs' dtypes",
        "autocast",
    ],
)
def test_ranks_that_compute_differently_are_refused(what: str) -> None:
    """Their losses would differ, or one would wait for a transfer that the other does not send."""

    def run(model: Any, _: Inputs, comm: Any) -> None:
        with pytest.raises(AgreementError) as caught:
            differing_pass(model, what if comm.rank == 1 else "")
        assert what in str(caught.value)

    on_ranks(2, "mplug_owl3", OWL, run)


def test_stopping_criteria_on_one_rank_are_refused() -> None:
    def run(model: Any, _: Inputs, comm: Any) -> None:
        more = {"stopping_criteria": [lambda *_: True]} if comm.rank == 1 else {}
        with pytest.raises(AgreementError, match="stopping_criteria"):
            model.generate(
                tiny_text(2), pixel_values=tiny_frames(2), max_new_tokens=2, pad_token_id=0, streamer=None, **more
            )

    on_ranks(2, "mplug_owl3", OWL, run)


DISAGREE = "the ranks of the group disagree"


@pytest.mark.parametrize(
    ("options", "overrides", "own", "others"),
    [
        ({"text_layout": "striped"}, {}, *["disagree.*rank 0: .*zigzag.*rank 1: .*striped"] * 2),
        ({"text_lay_out": "striped"}, {}, "unknown option text_lay_out", ELSEWHERE),
        ({}, {"intermediate_size": 112}, DISAGREE, DISAGREE),
        ({}, {"frozen": True}, DISAGREE, DISAGREE),
        ({}, None, "no adapter knows", ELSEWHERE),
    ],
    ids=["other options", "unknown option", "other model", "frozen", "no model"],
)
def test_ranks_that_patch_differently_are_refused(
    options: Inputs, overrides: Inputs | None, own: str, others: str
) -> None:
    def model_of_rank(rank: int) -> Any:
        if rank == 0 or not overrides:
            return torch.nn.Linear(2, 2) if rank == 1 and overrides is None else tiny_model()
        model = tiny_model(**{name: x for name, x in overrides.items() if name != "frozen"})
        return model.requires_grad_("frozen" not in overrides)

    models = [model_of_rank(rank) for rank in range(2)]

    def run(comm: Any) -> None:
        with pytest.raises(SeqParError, match=f"(?s){own if comm.rank == 1 else others}"):
            patch_model(models[comm.rank], group=comm, **(options if comm.rank == 1 else {}))

    run_loopback(2, run)
