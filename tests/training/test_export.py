"""Layer: one process and gloo ranks. The final model's dtype, and telling the models apart that runs begin from."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mllm_seqpar.comm import as_communicator
from mllm_seqpar.models.digest import model_digest
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration
from mllm_seqpar.patches.mplug_owl3.testing import tiny_model
from mllm_seqpar.training.export import export_dtype, export_model, on_rank_0
from ranks import ranks


@pytest.mark.parametrize(
    ("source", "choice", "saved"),
    [
        (torch.bfloat16, "source", torch.bfloat16),
        (torch.float32, "source", torch.float32),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "float16", torch.float16),
    ],
)
def test_saved_in_the_dtype_asked_for(tmp_path: Path, source: torch.dtype, choice: str, saved: torch.dtype) -> None:
    tiny_model().to(source).save_pretrained(tmp_path / "source")
    trained = MPlugOwl3ForConditionalGeneration.from_pretrained(tmp_path / "source", dtype=torch.float32)
    export_model(trained, None, tmp_path / "model", export_dtype(choice, str(tmp_path / "source")))
    assert {x.dtype for x in load_file(tmp_path / "model" / "model.safetensors").values()} == {saved}
    loaded = MPlugOwl3ForConditionalGeneration.from_pretrained(tmp_path / "model", dtype="auto")
    assert loaded.dtype is saved and trained.dtype is torch.float32


def slow_write(rank: int, world: int, folder: str) -> bool:
    group = dist.new_group(timeout=timedelta(seconds=1))

    def write() -> None:
        time.sleep(2.5)
        (Path(folder) / f"by-{rank}").touch()

    on_rank_0(as_communicator(group), write, news=0.2)
    return (Path(folder) / "by-0").exists()


def test_writing_may_take_longer_than_the_ranks_time_limit(tmp_path: Path) -> None:
    assert ranks(2).run(slow_write, str(tmp_path)) == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["by-0"]


def test_a_model_is_known_by_its_weights(tmp_path: Path) -> None:
    model = tiny_model()
    for name in ("one", "same", "other"):
        if name == "other":
            with torch.no_grad():
                model.get_output_embeddings().weight.mul_(1.5)
        model.save_pretrained(tmp_path / name)
    digests = [model_digest(str(tmp_path / name)) for name in ("one", "same", "other")]
    assert digests[0] == digests[1] != digests[2]
