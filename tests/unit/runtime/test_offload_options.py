"""Layer: one process. Options of `visual_offload`, mapped features, and memory that does not grow with the video."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memory_meters import peak_memory
from mllm_seqpar import patch_model
from mllm_seqpar.chats.store import open_features, save_features
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.runtime import visual_features
from mllm_seqpar.sharding import frame_bounds
from model_copies import tiny_model

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


def make_model(offload: str | None) -> Any:
    model = tiny_model(vision={"image_size": 56})
    model.vision_model = model.vision2text_model = None  # the features are given
    return patch_model(model.train(), group="self", visual_offload=offload)


def step(model: Any, features: Tensor) -> tuple[int, list[Tensor]]:
    """Run a training step in which every token attends to all frames; return its peak memory in bytes, and the loss
    and all gradients."""
    ids = torch.arange(3, 3 + 32)[None]
    offsets = torch.tensor([0, features.shape[0]]).expand(1, 32, 2)
    model.zero_grad()
    with peak_memory(torch.device("cpu")) as peak:
        loss = model(input_ids=ids, image_embeds=features, media_offset=offsets, labels=ids).loss
        loss.backward()
    return peak.bytes, [loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a mapped file are not counted: the kernel drops them when it needs memory."""
    monkeypatch.setattr(visual_features, "CHUNK_BYTES", 2**18)
    offloaded, plain = make_model("cpu"), make_model(None)
    peaks = {}
    for frames in (1000, 8000):
        features = torch.randn(frames, 8, 64)
        save_features(tmp_path / str(frames), features, start=0, total=frames, rank=0, world=1)
        mapped = open_features(tmp_path / str(frames)).map((0, frames))
        peak, results = step(offloaded, mapped)
        _, expected = step(offloaded, features)
        assert all(map(torch.equal, results, expected))
        peaks[frames] = peak, step(plain, mapped)[0], mapped.nbytes
    offload, whole, more = (peaks[8000][i] - peaks[1000][i] for i in range(3))
    assert offload < more / 4 and whole > more, peaks
