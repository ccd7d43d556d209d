"""Layer: one process, loopback ranks. Where rows attend to earlier frames only, every rank computes as much as others.

Counted are score entries of cross-attention and bytes, never seconds.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_cases import count_entries
from family_cases import BATCHES, OWL, QWENS
from family_harness import family_module, on_ranks, patched
from mllm_seqpar.attention.attend import attend
from mllm_seqpar.attention.call_spec import accumulation, call_spec_for, problem_of
from mllm_seqpar.attention.keys import GivenKeys
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.comm.agreement import attempt
from mllm_seqpar.errors import AgreementError, ShapeError
from mllm_seqpar.masks import BlockMasks, FrameMask
from mllm_seqpar.masks.frame_mask import frame_masks
from mllm_seqpar.runtime.frames import Frames
from mllm_seqpar.schedules.bytes_sent import Problem, lv_xattn_bytes
from mllm_seqpar.schedules.mesh_shapes import parallel_spec
from mllm_seqpar.sharding import FRAME_LAYOUTS, FrameShard, frame_spans, padded_length, sequence_positions
from tiny_models.mplug_owl3 import Case as Owl

FRAMES, TEXT, RANKS = 4096, 256, 8


def video_masks(layout: str, frames: int = FRAMES, text: int = TEXT, ranks: int = RANKS) -> BlockMasks:
    """The masks of a question about a video, as mPLUG-Owl3's: a placeholder attends to the frames up to it."""
    rows = torch.arange(padded_length(frames + text, ranks, "zigzag"))
    stop = torch.where(rows < frames + text, (rows + 1).clamp(max=frames), 0)[None]
    mask = FrameMask.from_intervals(torch.zeros_like(stop), stop, 1, frames)
    positions = [sequence_positions(len(rows), rank, ranks, "zigzag") for rank in range(ranks)]
    return frame_masks([mask.take(own) for own in positions], frame_spans(frames, ranks, layout))


def over_the_mean(loads: Sequence[int]) -> list[float]:
    return [load * len(loads) / sum(loads) for load in loads]


def planned_entries(masks: BlockMasks) -> list[int]:
    """The score entries of each rank, which computes with the rows of all ranks."""
    ranks, found = range(len(masks.keys)), []
    for j in ranks:
        blocks = [(masks.bounds[i].shape[-1], masks.block(i, j)) for i in ranks]
        found.append(sum(r * masks.keys[j].count if m is None else sum(x.visible for x in m) for r, m in blocks))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_load_is_balanced_for_any_number_of_ranks(ranks: int) -> None:
    for frames, text in ((64 * ranks + 5, 16), (256 * ranks, 0)):
        contiguous, zigzag = (planned_entries(video_masks(layout, frames, text, ranks)) for layout in FRAME_LAYOUTS)
        assert max(over_the_mean(zigzag)) <= 1.05 and max(over_the_mean(contiguous)) > 1.35
        assert sum(zigzag) <= 1.02 * sum(contiguous)


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, str]]:
    """The score entries that blocks compute, by thread, which is a rank, and direction."""
    found: Counter[tuple[int, str]] = Counter()

    def add(count: int, direction: str) -> None:
        found[threading.get_ident(), direction] += count

    count_entries(monkeypatch, add)
    return found


def run_video(
    comm: Communicator, masks: BlockMasks, strategy: str, entries: Counter[tuple[int, str]]
) -> dict[str, Any]:
    """Run attention to frames of one token each, and return the entries and the bytes of this rank."""
    lengths = tuple(keys.count for keys in masks.keys)
    q = torch.randn(1, 2, masks.bounds[0].shape[-1], 2, requires_grad=True)
    k, v = (torch.randn(1, 1, lengths[comm.rank], 2, requires_grad=True) for _ in range(2))
    problem = problem_of(q.shape, k.shape, lengths, q.dtype, "auto")
    spec = call_spec_for(parallel_spec(strategy, None, problem), masks, problem, accumulation("auto", q.dtype))
    comm.bytes.reset()
    ((o, _),) = attend(q, [[GivenKeys(spec, k, v)]], rows="sharded", comm=comm, scale=1.0)
    found: dict[str, Any] = {"forward bytes": dict(comm.bytes.sent)}
    comm.bytes.reset()
    o.sum().backward()
    found |= {"backward bytes": dict(comm.bytes.sent)}
    return found | {name: entries[threading.get_ident(), name] for name in ("forward", "backward")}


def test_every_rank_computes_the_same_for_4096_frames_and_256_tokens(entries: Counter[tuple[int, str]]) -> None:
    masks = video_masks("zigzag")
    found = run_loopback(RANKS, run_video, masks, "lv-xattn", entries)
    for direction in ("forward", "backward"):
        assert max(over_the_mean([one[direction] for one in found])) <= 1.05
    entries.clear()
    before = run_loopback(RANKS, run_video, video_masks("contiguous"), "lv-xattn", entries)
    assert max(over_the_mean([one["forward"] for one in before])) > 1.7
    assert sum(one["forward"] for one in found) <= 1.01 * sum(one["forward"] for one in before)
    rows = masks.bounds[0].shape[-1]
    problem = {"rows": rows, "keys": (FRAMES // RANKS,) * RANKS, "heads": 2, "kv_heads": 1, "dim": 2, "batch": 1}
    sizes: dict[str, Any] = problem | {"key_batch": 1, "element": 4, "accumulated": 4, "direct_element": 4}
    for rank, backward in ((rank, backward) for rank in range(RANKS) for backward in (False, True)):
        sent = found[rank]["backward bytes" if backward else "forward bytes"]
        sent.pop("agreement", None)
        own, visible = Problem(**sizes, rank=rank), masks.visible_row_counts()
        assert sent == lv_xattn_bytes(own, backward=backward, visible_rows=visible)
        assert sum(sent.values()) < sum(lv_xattn_bytes(own, backward=backward).values()), "less than without a mask"


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_strategies_that_move_keys_send_as_many_bytes(strategy: str) -> None:
    none: Counter[tuple[int, str]] = Counter()
    sent = [run_loopback(2, run_video, video_masks(x, 67, 9, 2), strategy, none) for x in FRAME_LAYOUTS]
    for direction in ("forward bytes", "backward bytes"):
        totals = [[sum(rank[direction].values()) for rank in found] for found in sent]
        assert sorted(totals[0]) == sorted(totals[1])


@pytest.mark.parametrize("family", ["mplug_owl3", "mllama"])
def test_a_model_that_gets_all_frames_balances_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Frames] = []
    of_shards = Frames.of_shards.__func__  # type: ignore[attr-defined]

    def recorded(*args: Any) -> Frames:
        made.append(frames := of_shards(*args))
        return frames

    monkeypatch.setattr(Frames, "of_shards", classmethod(recorded))
    case = Owl(frames=(40,), length=60) if family == "mplug_owl3" else BATCHES[family]
    on_ranks(4, family, case, lambda model, inputs, comm: model(**inputs).loss)
    units = family_module("mllama").TILES if family == "mllama" else 1
    total = made[0].source.units
    for frames in made:
        expected = frame_spans(total // units, 4, "zigzag")
        assert list(frames.units) == [tuple((a * units, b * units) for a, b in spans) for spans in expected]
    if family == "mplug_owl3":
        assert max(over_the_mean(planned_entries(made[0].masks))) < 1.15  # 40 frames


def test_ranks_that_pass_frames_in_different_layouts_are_refused() -> None:
    def run(comm: Communicator) -> Exception | None:
        layout = FRAME_LAYOUTS[comm.rank > 0]
        model, inputs = patched("mplug_owl3", replace(OWL, local_frames=True, frame_layout=layout), comm)
        return attempt(lambda: model(**inputs))[1]

    for error in run_loopback(3, run):
        assert isinstance(error, AgreementError)
        assert "layout of the frames: rank 0: contiguous; ranks 1, 2: zigzag" in str(error)


def test_frames_in_no_layout_are_refused() -> None:
    def run(comm: Communicator) -> Exception | None:
        model, inputs = patched("mplug_owl3", replace(OWL, local_frames=True), comm)
        return attempt(lambda: model(**inputs | {"visual_shard": FrameShard(0, 1, 5)}))[1]

    message = 'holds frames 0 to 3 of 5 (frame_range), or 0 to 2 and 4 to 5 (frame_ranges with layout="zigzag"), but'
    assert message in str(run_loopback(2, run)[0])


@pytest.mark.parametrize("family", QWENS)
def test_decoder_only_models_refuse_zigzag_frames(family: str) -> None:
    def run(comm: Communicator) -> Exception | None:
        model, inputs = patched(family, replace(QWENS[family], local_frames=True), comm)
        shard = FrameShard.of(inputs["visual_shard"].total, comm, "zigzag")
        return attempt(lambda: model(**inputs | {"visual_shard": shard}))[1]

    for error in run_loopback(2, run):
        assert isinstance(error, ShapeError) and "of 8 (frame_range), but" in str(error)
