"""Layer: one process. A checkpoint that lacks weights is not filled with random ones."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.running.loading import load_model
from tiny import tiny_model


def changed(folder: Path, change: str) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    if change == "lacks":
        weights = {name: x for name, x in weights.items() if not name.startswith("vision2text_model")}
    elif change == "shapes":
        weights["vision2text_model.bias"] = torch.zeros(3)
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "lacks",
            r"the checkpoint lacks 2 of the model's weights \(vision2text_model.bias, vision2text_model.weight\)",
        ),
        ("shapes", "--model .*ignore_mismatched_sizes"),
    ],
)
def test_incomplete_checkpoints(tmp_path: Path, change: str, message: str) -> None:
    tiny_model().save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).training is False
    changed(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        load_model(str(tmp_path))
