"""Layer: one process, real files. A feature store written by some ranks is read by any other number of ranks."""

import json
import os
from pathlib import Path

import pytest
import torch
from clips import write_clip
from safetensors.torch import save_file
from torch import Tensor

from mllm_seqpar.data import plan_frames, probe
from mllm_seqpar.data.features import model_fingerprint, open_features, save_features, source_meta
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.sharding import frame_bounds


def write(folder: Path, embeds: Tensor, world: int, ranks: list[int] | None = None, **meta: object) -> None:
    for rank, (start, stop) in enumerate(frame_bounds(len(embeds), world)):
        if ranks is None or rank in ranks:
            save_features(folder, embeds[start:stop], start=start, total=len(embeds), rank=rank, world=world, meta=meta)


@pytest.mark.parametrize(("world", "dtype"), [(1, torch.float32), (3, torch.bfloat16), (11, torch.float32)])
def test_any_number_of_ranks_reads_the_store(tmp_path: Path, world: int, dtype: torch.dtype) -> None:
    embeds = torch.randn(10, 3, 8).to(dtype)  # the last of 11 ranks has no frames
    write(tmp_path, embeds, world, fps=1.0)
    store = open_features(tmp_path)
    assert (store.total_frames, store.tokens_per_frame, store.hidden, store.dtype) == (10, 3, 8, dtype)
    for readers in (1, 4, 12):
        parts = [store.read(a, b) for a, b in frame_bounds(10, readers)]
        assert torch.equal(torch.cat(parts), embeds)
    assert torch.equal(store.read(2, 9), embeds[2:9]) and store.read(4, 4).shape == (0, 3, 8)
    with pytest.raises(ConfigError, match="frames 3 to 11 asked"):
        store.read(3, 11)


def test_store_without_a_shard_is_refused(tmp_path: Path) -> None:
    embeds = torch.randn(10, 3, 8)
    write(tmp_path, embeds, 3, ranks=[0, 2])
    with pytest.raises(
        DataError, match=r"1 of 3 shards cannot be used: features-00001-of-00003.safetensors \(missing\)"
    ):
        open_features(tmp_path)
    write(tmp_path, embeds, 3, ranks=[1])
    assert torch.equal(open_features(tmp_path).read(0, 10), embeds)
    (tmp_path / "features.json").unlink()
    with pytest.raises(DataError, match="3 shards but no index"):
        open_features(tmp_path)
    with pytest.raises(DataError, match="no features"):
        open_features(tmp_path / "nowhere")


def test_shard_of_another_run_is_refused(tmp_path: Path) -> None:
    write(tmp_path, torch.zeros(10, 3, 8), 2, video="old")
    write(tmp_path, torch.ones(10, 3, 8), 2, ranks=[0], video="new")
    with pytest.raises(DataError, match=r"features-00001-of-00002.safetensors \(from another run\)"):
        open_features(tmp_path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, torch.zeros(10, 3, 8), 2)
    shard = tmp_path / "features-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"00001-of-00002.safetensors \(damaged"):
        open_features(tmp_path)
    (tmp_path / "features.json").write_text(json.dumps({"total_frames": 10}))
    with pytest.raises(DataError, match="not an index of features"):
        open_features(tmp_path)


def test_failed_write_leaves_the_store_unchanged(tmp_path: Path) -> None:
    write(tmp_path, torch.zeros(4, 3, 8), 2)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    assert sorted(p.name for p in before) == [
        "features-00000-of-00002.safetensors",
        "features-00001-of-00002.safetensors",
        "features.json",
    ]
    with pytest.raises(TypeError):  # metadata that JSON cannot represent
        write(tmp_path, torch.ones(4, 3, 8), 2, when=object())
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_frames_of_another_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank 1 of 2 passed embeds \(5, 3, 8\) from frame 0; .* range is \(5, 10\)"):
        save_features(tmp_path, torch.zeros(5, 3, 8), start=0, total=10, rank=1, world=2)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        save_features(tmp_path, torch.zeros(5, 3, 8), start=0, total=10, rank=2, world=2)


def test_features_of_another_video_or_sampling_are_refused(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "a.mp4")
    meta = source_meta(plan_frames(probe(clip), fps=5))
    write(tmp_path / "store", torch.zeros(meta["frames"], 1, 2), 2, **meta)
    store = open_features(tmp_path / "store")
    store.require(**source_meta(plan_frames(probe(clip), fps=5)))
    with pytest.raises(DataError, match="made with frames = 12, now it is 5"):
        store.require(**source_meta(plan_frames(probe(clip), fps=2)))
    os.utime(clip, (1, 1))
    with pytest.raises(DataError, match="made with source_mtime"):
        store.require(**source_meta(plan_frames(probe(clip), fps=5)))


def test_fingerprint_depends_on_vision_weights_and_preprocessing_only(tmp_path: Path) -> None:
    weights = {
        "vision_model.w": torch.randn(3, 4, dtype=torch.bfloat16),
        "vision2text_model.bias": torch.randn(2),
        "language_model.w": torch.randn(5),
    }

    def fingerprint() -> str:
        save_file(weights, tmp_path / "model.safetensors")
        return model_fingerprint(tmp_path)

    first = fingerprint()
    weights["language_model.w"] += 1
    assert fingerprint() == first
    weights["vision_model.w"][0, 0] += 1
    changed = fingerprint()
    assert changed != first
    (tmp_path / "preprocessor_config.json").write_text("{}\n")
    assert fingerprint() != changed
    with pytest.raises(DataError, match="no safetensors weights"):
        model_fingerprint(tmp_path / "nothing")
