from pathlib import Path

import pytest

from mllm_seqpar.data.needle import make_needle_videos
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.patches.mplug_owl3.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models `gated`, `fused` and `other` with processors; `clip.mp4` and `twin.mp4`, 100 frames, 25 a second."""
    folder = tmp_path_factory.mktemp("inference")
    for name, gate, seed in (("gated", "per_head", 0), ("fused", None, 0), ("other", "per_head", 1)):
        tiny_model(gate, seed).save_pretrained(folder / name)
        MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=28), tiny_tokenizer()).save_pretrained(folder / name)
    clip, twin = make_needle_videos(folder, 2, frames=(100, 100), rate=25)
    Path(clip.path).rename(folder / "clip.mp4")
    Path(twin.path).rename(folder / "twin.mp4")
    return folder
