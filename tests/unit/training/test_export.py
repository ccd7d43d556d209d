"""Layer: one process. The result of a run: its directory, its model card, its upload; the digest of weights."""

import functools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file

from mllm_seqpar.chats.chat_family import chat_family
from mllm_seqpar.chats.store import TowerStore
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.models.digests import model_digest
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration, MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.training import export
from mllm_seqpar.training.arguments import make_options, read_options
from mllm_seqpar.training.export import create_repository, export_dtype, export_model, model_card, run_on_rank_0
from mllm_seqpar.training.stored_tower import TowerReplay, TowerRows
from model_copies import tiny_model
from tiny_models.mplug_owl3 import IMAGE_SIZE, tiny_tokenizer


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


def test_stored_tower_keeps_a_method_that_was_set_on_its_instance(tmp_path: Path) -> None:
    """As the autocast wrapper of accelerate, or `register_fsdp_forward_method` of torch."""
    processor = MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=IMAGE_SIZE), tiny_tokenizer())
    model = tiny_model().requires_grad_(False)
    stored = TowerReplay(TowerStore(tmp_path, {}), chat_family(processor), model)
    tower = model.vision_model
    for wrapper in (None, lambda pixels: type(tower).penultimate(tower, pixels)):
        if wrapper is not None:
            tower.penultimate = wrapper
        with stored.running(TowerRows((), None)):
            assert vars(tower)["penultimate"] is not wrapper
        assert vars(tower).get("penultimate") is wrapper


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unreachable = functools.partial(HfApi, endpoint="http://127.0.0.1:9")
    monkeypatch.setattr(export, "HfApi", unreachable)
    args: Any = SimpleNamespace(
        hub_model_id=None, output_dir=str(tmp_path / "run"), hub_private_repo=None, hub_token="x"
    )
    with pytest.raises(
        ConfigError, match="--push_to_hub: the repository run cannot be created .*leave --push_to_hub out"
    ):
        create_repository(args)


@pytest.mark.parametrize(("model", "base"), [("user/name", "user/name"), ("user/name@a1b2", "user/name"), (".", None)])
def test_base_model_of_the_card_is_an_id_on_the_hub_or_left_out(model: str, base: str | None) -> None:
    given = ["--model", model, "--data", "d", "--output_dir", "o", "--use_cpu"]
    card = model_card(make_options(read_options(given)), [{"loss": 0.5}], samples=3, steps=2)
    assert (ModelCard(card).data.base_model, ModelCard(card).data.library_name) == (base, "transformers")
    assert "- last training loss: 0.5" in card and "(3 samples) for 2 steps" in card
