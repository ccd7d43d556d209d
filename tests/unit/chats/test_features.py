"""Layer: one process, real files. A feature store written by some ranks is read by any other number of ranks."""

import itertools
import os
from collections.abc import Container, Sequence
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
from mllm_seqpar.sharding import FRAME_LAYOUTS, FrameSizes, take_spans


def write(
    folder: Path,
    embeds: Tensor,
    world: int,
    *,
    ranks: Container[int] = range(99),
    layout: str = "contiguous",
    sizes: Sequence[int] | None = None,
    **meta: object,
) -> None:
    frames = FrameSizes(len(embeds) if sizes is None else len(sizes), sizes)
    for rank, spans in enumerate(frames.spans(world, layout)):
        if rank in ranks:
            place: dict[str, Any] = {"start": spans[0][0] if spans else 0, "total": frames.total, "layout": layout}
            own = take_spans(embeds, frames.units(spans))
            save_features(folder, own, **place, rank=rank, world=world, sizes=sizes, meta=meta)


@pytest.mark.parametrize("sizes", [None, [5, 1, 2, 9, 1]], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    ("world", "layout", "dtype"),
    [
        (1, "contiguous", torch.float32),
        (3, "contiguous", torch.bfloat16),
        (11, "contiguous", torch.float32),  # the last rank has no frames
        *((world, "zigzag", torch.float32) for world in (1, 3, 8, 11)),
    ],
)
def test_any_number_of_ranks_reads_and_maps_the_store(
    tmp_path: Path, world: int, layout: str, dtype: torch.dtype, sizes: list[int] | None
) -> None:
    embeds = (torch.randn(10, 3, 8) if sizes is None else torch.randn(sum(sizes), 1, 8)).to(dtype)
    write(tmp_path, embeds, world, layout=layout, sizes=sizes, fps=1.0)
    store = open_features(tmp_path)
    frames = FrameSizes(10 if sizes is None else 5, sizes)
    assert (store.total_frames, store.sizes) == (frames.total, frames)
    assert (store.tokens_per_frame, store.hidden, store.dtype) == (embeds.shape[1], 8, dtype)
    of_ranks = {key: frames.spans(*key) for key in itertools.product((1, 3, 4, 8, 11, 12), FRAME_LAYOUTS)}
    for key, by_rank in of_ranks.items():
        assert store.can_map(by_rank) or key != (world, layout)
    for spans in [*itertools.chain(*of_ranks.values()), ((3, 5), (0, 1)), ((2, 2),)]:
        expected = take_spans(embeds, frames.units(spans))
        assert torch.equal(store.read(*spans), expected) and torch.equal(store.map(*spans), expected)
    assert not store.can_map([((0, 1), (3, 4))])
    with pytest.raises(ConfigError, match=f"frames 3 to {frames.total + 1} asked"):
        store.read((3, frames.total + 1))


def test_unusable_store_is_refused(tmp_path: Path) -> None:
    one = torch.zeros(10, 3, 8)
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
    write(tmp_path, one + 1, 2, ranks=[0], video="new")
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
    with pytest.raises(ConfigError, match="this rank has 0 to"):
        save_features(tmp_path, torch.zeros(1, 1, 4), start=0, total=5, rank=0, world=3, sizes=[5, 1, 2, 9, 1])


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
