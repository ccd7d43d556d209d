"""Layer: one process. Micro-batches of a chat file, its digest, refused samples; export, and the digest of weights.

Also that a vision tower whose outputs are stored keeps what others have set on it.
"""

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mllm_seqpar.comm import Communicator, as_communicator, run_loopback
from mllm_seqpar.data import ChatDataset
from mllm_seqpar.data.chat_family import chat_family
from mllm_seqpar.data.feature_store import TowerStore
from mllm_seqpar.data.needle import make_needle_videos
from mllm_seqpar.errors import DataError
from mllm_seqpar.models.loading import model_digest
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration, MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.training.batches import BatchReader, LoadedBatch
from mllm_seqpar.training.export import export_dtype, export_model, run_on_rank_0
from mllm_seqpar.training.stored_tower import StoredTower, TowerRows
from tiny_models.mplug_owl3 import IMAGE_SIZE, IMAGE_TOKEN, tiny_model, tiny_tokenizer

TEXT = {"messages": [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "hello"}]}


@pytest.fixture
def chat_file(tmp_path: Path) -> Path:
    videos = make_needle_videos(tmp_path / "videos", 3, frames=(2, 5))
    rows = [*(video.sample(tmp_path) for video in videos), TEXT]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "chat.jsonl"


def opened(path: Path, **options: int) -> ChatDataset:
    processor = MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=IMAGE_SIZE), tiny_tokenizer())
    return ChatDataset(path, processor, **options)


def read(dataset: ChatDataset, *samples: int) -> LoadedBatch:
    return BatchReader(dataset, "self", as_communicator("self")).read(samples)


def test_batch_has_all_arguments_of_forward(chat_file: Path) -> None:
    batch = read(opened(chat_file), 0, 3)
    inputs = batch.arguments
    assert inputs["pixel_values"].shape == (batch.chat.frames, 3, IMAGE_SIZE, IMAGE_SIZE)
    assert "visual_shard" not in inputs
    assert int((inputs["input_ids"] == IMAGE_TOKEN).sum()) == batch.chat.frames
    assert batch.chat.targets == int((inputs["labels"][:, 1:] != -100).sum()) > 0
    assert tiny_model()(**inputs).loss.isfinite()


def test_digest_covers_text_and_media(chat_file: Path) -> None:
    def digest() -> str:
        return opened(chat_file).content_digest()

    first = digest()
    assert digest() == first
    videos = sorted((chat_file.parent / "videos").iterdir())
    with videos[1].open("ab") as video:
        video.write(b"more")
    second = digest()
    chat_file.write_text(chat_file.read_text().replace("hello.", "hullo."))
    assert len({first, second, digest()}) == 3


def test_unusable_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        opened(tmp_path / "none.jsonl")
    (tmp_path / "chat.jsonl").write_text(json.dumps(TEXT) + "\n")
    with pytest.raises(DataError, match="max_length = 5"):
        read(opened(tmp_path / "chat.jsonl", max_length=5), 0)


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
    stored = StoredTower(TowerStore(tmp_path, {}), chat_family(processor), model)
    tower = model.vision_model
    for wrapper in (None, lambda pixels: type(tower).penultimate(tower, pixels)):
        if wrapper is not None:
            tower.penultimate = wrapper
        with stored.running(TowerRows((), None)):
            assert vars(tower)["penultimate"] is not wrapper
        assert vars(tower).get("penultimate") is wrapper
