"""Layer: one process, real files. A feature store written by some ranks is read by any other number of ranks."""

import itertools
import os
from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from clips import write_clip
from mllm_seqpar.chats.store import TowerStore, open_features, save_features
from mllm_seqpar.data import plan_frames, probe, source_meta
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.digests import model_fingerprint
from mllm_seqpar.sharding import FRAME_LAYOUTS, FrameSizes, frame_bounds, frame_spans, take_spans


def write(
    folder: Path,
    embeds: Tensor,
    world: int,
    ranks: Container[int] = range(99),
    layout: str = "contiguous",
    **meta: object,
) -> None:
    for rank, spans in enumerate(frame_spans(len(embeds), world, layout)):
        if rank in ranks:
            place: dict[str, Any] = {"start": spans[0][0] if spans else 0, "total": len(embeds), "layout": layout}
            save_features(folder, take_spans(embeds, spans), **place, rank=rank, world=world, meta=meta)


@pytest.mark.parametrize(("world", "dtype"), [(1, torch.float32), (3, torch.bfloat16), (11, torch.float32)])
def test_any_number_of_ranks_reads_the_store(tmp_path: Path, world: int, dtype: torch.dtype) -> None:
    embeds = torch.randn(10, 3, 8).to(dtype)  # the last of 11 ranks has no frames
    write(tmp_path, embeds, world, fps=1.0)
    store = open_features(tmp_path)
    assert (store.total_frames, store.tokens_per_frame, store.hidden, store.dtype) == (10, 3, 8, dtype)
    for readers in (1, 4, 12):
        parts = [store.read(span) for span in frame_bounds(10, readers)]
        assert torch.equal(torch.cat(parts), embeds)
    assert torch.equal(store.read((2, 9)), embeds[2:9]) and store.read((4, 4)).shape == (0, 3, 8)
    with pytest.raises(ConfigError, match="frames 3 to 11 asked"):
        store.read((3, 11))


@pytest.mark.parametrize("world", [1, 3, 8, 11])
def test_store_of_zigzag_shards_is_mapped_by_as_many_ranks_and_read_by_others(tmp_path: Path, world: int) -> None:
    embeds = torch.randn(10, 3, 8)
    write(tmp_path, embeds, world, layout="zigzag")
    store = open_features(tmp_path)
    assert torch.equal(store.read((0, 10)), embeds) and torch.equal(store.read((7, 9), (1, 3)), embeds[[7, 8, 1, 2]])
    for readers, layout in itertools.product((1, 3, 8, 11), FRAME_LAYOUTS):
        by_rank = frame_spans(10, readers, layout)
        for frames in by_rank:
            expected = take_spans(embeds, frames)
            assert torch.equal(store.read(*frames), expected) and torch.equal(store.map(*frames), expected)
        assert store.can_map(by_rank) or (readers, layout) != (world, "zigzag")
    assert not store.can_map([((0, 1), (3, 4))])


def test_unusable_store_is_refused(tmp_path: Path) -> None:
    one, two = torch.zeros(10, 3, 8), torch.ones(10, 3, 8)
    name = "features-0000{}-of-0000{}.safetensors".format

    def refused(message: str, folder: Path = tmp_path) -> None:
        with pytest.raises(DataError, match=message):
            open_features(folder)

    write(tmp_path, one, 3, ranks=[0, 2])
    refused(rf"1 of 3 shards cannot be used: {name(1, 3)} \(missing\)")
    write(tmp_path, one, 3, ranks=[1])
    assert torch.equal(open_features(tmp_path).read((0, 10)), one)
    (tmp_path / "features.json").unlink()
    refused("3 shards but no index")
    refused("no features", tmp_path / "nowhere")
    write(tmp_path, one, 2, video="old")
    write(tmp_path, two, 2, ranks=[0], video="new")
    refused(rf"{name(1, 2)} \(from another run\)")


def test_failed_write_leaves_the_store_unchanged(tmp_path: Path) -> None:
    write(tmp_path, torch.zeros(4, 3, 8), 2)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    shards = [f"features-0000{rank}-of-00002.safetensors" for rank in range(2)]
    assert sorted(p.name for p in before) == [*shards, "features.json"]
    with pytest.raises(TypeError):  # metadata that JSON cannot represent
        write(tmp_path, torch.ones(4, 3, 8), 2, when=object())
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_frames_of_another_rank_are_refused(tmp_path: Path) -> None:
    message = r"rank 1 of 2 passed embeds \(5, 3, 8\) from frame 0; .* this rank has 5 to 10"
    with pytest.raises(ConfigError, match=message):
        save_features(tmp_path, torch.zeros(5, 3, 8), start=0, total=10, rank=1, world=2)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        save_features(tmp_path, torch.zeros(5, 3, 8), start=0, total=10, rank=2, world=2)


def test_features_of_another_video_or_sampling_are_refused(tmp_path: Path) -> None:
    plan = partial(plan_frames, probe(write_clip(tmp_path / "a.mp4")))
    meta = source_meta(plan(fps=5))
    write(tmp_path / "store", torch.zeros(meta["frames"], 1, 2), 2, **meta)
    store = open_features(tmp_path / "store")
    store.require(**meta)
    with pytest.raises(DataError, match="made with frames = 12, and now it is 5"):
        store.require(**source_meta(plan(fps=2)))
    os.utime(tmp_path / "a.mp4", (1, 1))
    with pytest.raises(DataError, match="made with source_mtime"):
        store.require(**source_meta(plan(fps=5)))


def test_fingerprint_depends_on_vision_weights_and_preprocessing_only(tmp_path: Path) -> None:
    weights = {name: torch.randn(3, 4) for name in ("vision_model.w", "vision2text_model.bias", "language_model.w")}
    weights["vision_model.w"] = weights["vision_model.w"].bfloat16()

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


def test_features_of_a_tower_that_version_0_2_stored_are_read(tmp_path: Path) -> None:
    store, states = TowerStore(tmp_path, {}), torch.arange(6.0).reshape(3, 2)
    store.create((2,), torch.float32, [0, 1])
    store.write("key", 0, states)
    (path,) = tmp_path.rglob("*.safetensors")
    with safe_open(path, "pt") as file:
        identity = file.metadata()
    save_file({"states": states}, path, metadata=identity)
    assert torch.equal(store.read("key", 1, 3), states[1:])


@pytest.mark.parametrize(("world", "layout"), [(1, "contiguous"), (3, "contiguous"), (2, "zigzag"), (7, "zigzag")])
def test_store_of_frames_of_unequal_size(tmp_path: Path, world: int, layout: str) -> None:
    sizes = torch.tensor([5, 1, 2, 9, 1])
    embeds, frames = torch.randn(18, 1, 4), FrameSizes(5, sizes)
    for rank, spans in enumerate(frames.spans(world, layout)):
        place: dict[str, Any] = {"start": spans[0][0] if spans else 0, "total": 5, "layout": layout, "sizes": sizes}
        save_features(tmp_path, take_spans(embeds, frames.units(spans)), **place, rank=rank, world=world)
    store = open_features(tmp_path)
    assert store.sizes == frames and store.total_frames == 5
    for spans in (((0, 5),), ((1, 3),), ((3, 5), (0, 1)), ((2, 2),)):
        expected = take_spans(embeds, frames.units(spans))
        assert torch.equal(store.read(*spans), expected) and torch.equal(store.map(*spans), expected)
    assert store.can_map(frames.spans(world, layout))
    with pytest.raises(ConfigError, match="this rank has 0 to"):
        save_features(tmp_path, embeds[:1], start=0, total=5, rank=0, world=world, sizes=sizes)
