from pathlib import Path

import numpy as np
import pytest
from family_chats import CHATS, write_chats
from PIL import Image
from tiny_directories import MAKERS

from mllm_seqpar.data.needle import make_needle_videos


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`clip.mp4`, pictures of several sizes, `train.jsonl` and a tiny model directory of each family."""
    root = tmp_path_factory.mktemp("families")
    Path(make_needle_videos(root, 1, frames=(20, 20), rate=10)[0].path).rename(root / "clip.mp4")
    rng = np.random.default_rng(0)
    for number, (height, width) in enumerate(((40, 40), (24, 90), (80, 30))):
        Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(root / f"{number}.png")
    write_chats(root / "train.jsonl", [*CHATS.values()])
    for name, make in MAKERS.items():
        make(root / name)
    return root
