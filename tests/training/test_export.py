"""Layer: one process. The final model's dtype, and telling the models apart that runs begin from."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration
from mllm_seqpar.running.digest import model_digest
from mllm_seqpar.training.export import export_dtype, export_model
from tiny import tiny_model


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


def test_a_model_is_known_by_its_weights(tmp_path: Path) -> None:
    model = tiny_model()
    for name in ("one", "same", "other"):
        if name == "other":
            with torch.no_grad():
                model.get_output_embeddings().weight.mul_(1.5)
        model.save_pretrained(tmp_path / name)
    digests = [model_digest(str(tmp_path / name)) for name in ("one", "same", "other")]
    assert digests[0] == digests[1] != digests[2]
