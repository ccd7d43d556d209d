"""Layer: one process. Options of `visual_offload`, mapped features, and memory that does not grow with the video."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.data.feature_store import open_features, save_features
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.sharding import frame_bounds

ROOT = Path(__file__).resolve().parents[3]
LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory's figures of Linux")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"visual_offload": "disk"}, "visual_offload: 'disk' is unknown; choose \"cpu\", or None"),
        ({"visual_offload": "cpu", "strategy": "ring"}, "strategy='ring' other ranks would need the chunks too; use"),
        ({"visual_offload": "cpu", "strategy": "auto"}, 'use strategy="lv-xattn"'),
        ({"visual_offload": "cpu", "recompute_visual": False}, "leave one of the two options out"),
    ],
)
def test_options_that_offload_excludes_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SeqParConfig(**options)
    assert SeqParConfig(visual_offload="cpu").visual_offload == "cpu"


def is_in_file(address: int, folder: Path) -> bool:
    """Return whether an address of this process is mapped from a file of the folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(x, 16) for x in line.split()[0].split("-"))
        if start <= address < stop:
            return str(folder) in line
    return False


@LINUX
def test_features_of_one_file_are_mapped_and_of_several_read(tmp_path: Path) -> None:
    embeds = torch.randn(10, 3, 8)
    for rank, (start, stop) in enumerate(frame_bounds(10, 2)):
        save_features(tmp_path, embeds[start:stop], start=start, total=10, rank=rank, world=2)
    store = open_features(tmp_path)
    for start, stop, mapped in ((0, 4, 1), (5, 10, 1), (6, 9, 1), (4, 6, 0), (0, 10, 0), (3, 3, 0)):
        found = store.map((start, stop))
        assert torch.equal(found, embeds[start:stop])
        assert is_in_file(found.data_ptr(), tmp_path) == mapped
    with pytest.raises(ConfigError, match="frames 8 to 11 asked"):
        store.map((8, 11))


@pytest.mark.slow
@LINUX
def test_memory_does_not_grow_with_the_video() -> None:
    program = [sys.executable, str(ROOT / "tests" / "offload_memory.py"), "1000", "8000"]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True)
    short, long = json.loads(done.stdout.splitlines()[-1])
    more = long["size"] - short["size"]
    assert more > 13 << 20
    assert long["offload"] - short["offload"] < more / 4, (short, long)
    assert long["no offload"] - short["no offload"] > more, (short, long)
