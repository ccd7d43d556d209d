"""Layer: one process. The exported model's dtype, export beyond a time limit, and the digest of a model's weights."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.models.loading import model_digest
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration
from mllm_seqpar.patches.mplug_owl3.testing import tiny_model
from mllm_seqpar.training.export import export_dtype, export_model, run_on_rank_0


@pytest.mark.parametrize(("choice", "saved"), [("source", torch.bfloat16), ("float32", torch.float32)])
def test_weights_are_saved_in_the_requested_dtype(tmp_path: Path, choice: str, saved: torch.dtype) -> None:
    tiny_model().bfloat16().save_pretrained(tmp_path / "source")
    trained = MPlugOwl3ForConditionalGeneration.from_pretrained(tmp_path / "source", dtype=torch.float32)
    export_model(trained, None, tmp_path / "model", export_dtype(choice, str(tmp_path / "source")))
    assert {x.dtype for x in load_file(tmp_path / "model" / "model.safetensors").values()} == {saved}
    loaded = MPlugOwl3ForConditionalGeneration.from_pretrained(tmp_path / "model", dtype="auto")
    assert loaded.dtype is saved and trained.dtype is torch.float32


def test_ranks_communicate_while_rank_0_works() -> None:
    """A collective that lasts as long as the work would reach its time limit."""
    polls, worked = threading.Semaphore(0), []

    class Counted:
        """Counts the collectives of rank 1; rank 0's work ends only after three of them."""

        def __init__(self, comm: Communicator) -> None:
            self.rank, self._comm = comm.rank, comm

        def gather_ints(self, values: list[int]) -> list[list[int]]:
            if self.rank == 1:
                polls.release()
            return self._comm.gather_ints(values)

    def work() -> None:
        assert all(polls.acquire(timeout=60) for _ in range(3))
        worked.append(True)

    run_loopback(2, lambda comm: run_on_rank_0(Counted(comm), work, poll_seconds=0.01))  # type: ignore[arg-type]
    assert worked == [True]


def test_model_digest_depends_on_the_weights(tmp_path: Path) -> None:
    model, digests = tiny_model(), []
    for name, factor in (("one", 1.0), ("same", 1.0), ("other", 1.5)):
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(factor)
        model.save_pretrained(tmp_path / name)
        digests.append(model_digest(str(tmp_path / name)))
    assert digests[0] == digests[1] != digests[2]
