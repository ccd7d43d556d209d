"""Layer: pure Python, and torch to shard. Plans of frames that have different numbers of visual tokens."""

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from mllm_seqpar.cli import planner
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import ParallelSpec, read_cluster
from mllm_seqpar.planner.memory import peak_memory
from mllm_seqpar.planner.model_sizes import read_model
from mllm_seqpar.planner.plan import make_plan, max_frames
from mllm_seqpar.planner.workload import Workload
from mllm_seqpar.sharding import FrameSizes, span_length

MOSS, QWEN, OWL = (read_model(name) for name in ("moss_vl_11b", "qwen3_vl_8b", "mplug-owl3-7b"))
H200 = read_cluster("h200-141g-8xN")
LV = ParallelSpec("lv-xattn", (4, 1))
TOKENS = [221] * 24 + [921] * 9 + [101] * 31


def moss(tokens: Any = TOKENS, **options: Any) -> Workload:
    return Workload(model=MOSS, frames=64, text=512, gpus=4, frame_tokens=tokens, **options)


@pytest.mark.parametrize(("model", "count"), [(MOSS, 921), (MOSS, MOSS.vision.keys), (QWEN, 300), (OWL, 729)])
def test_equal_frames_are_planned_as_a_model_of_that_size(model: Any, count: int) -> None:
    vary = model if count == model.vision.keys else model.with_frame_tokens(count)
    expected = Workload(model=vary, frames=8, text=64, gpus=2)
    frames = expected.encoded_frames
    for tokens in (count, [count] * frames, torch.full((frames,), count)):
        found = Workload(model=model, frames=8, text=64, gpus=2, frame_tokens=tokens)
        assert found == expected and found.frame_tokens is None


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 7])
def test_frames_are_balanced_as_the_model_shards_them(gpus: int) -> None:
    work = replace(moss(torch.tensor(TOKENS), batch=2), gpus=gpus)
    sizes = FrameSizes(64, TOKENS)
    held = [sizes.count(spans) for spans in sizes.spans(gpus, "zigzag")]
    assert work.local_keys == 2 * max(held) and work.visual_tokens == sum(TOKENS)
    assert set(work.problem("cross-attention").keys) == {max(held)}
    assert work.features_bytes == 2 * max(held) * MOSS.cross.visual_dim * work.element
    mean = work.visual_tokens / gpus
    assert mean <= max(held) < 1.3 * mean
    patches = MOSS.vision.tokens // (MOSS.vision.keys - MOSS.vision.separators)
    counts = [span_length(spans) for spans in sizes.spans(gpus, "zigzag")]
    patched = [count - frames * MOSS.vision.separators for count, frames in zip(held, counts, strict=True)]
    assert work.sum_over_frames(int) == 2 * patches * max(patched) and work.local_frames == 2 * max(counts)
    assert work.sum_over_frames(int, 1) == patches * (921 - MOSS.vision.separators)


def test_one_large_frame_determines_the_peak() -> None:
    """A rank holds whole frames, so it is that of the rank with the frame, however many ranks share the others."""
    work = moss([50] * 63 + [20_000])
    assert work.local_keys == 20_000
    even = replace(work, frame_tokens=None)
    assert even.visual_tokens == pytest.approx(work.visual_tokens, rel=0.01) and even.local_keys < 6_000
    more, less = (peak_memory(x, LV)["features"] for x in (work, even))
    assert more / less == pytest.approx(work.local_keys / even.local_keys)
    slow, fast = (make_plan(x, H200, ["lv-xattn"]).best for x in (work, even))
    assert slow.parts["cross-attention"].seconds > 2 * fast.parts["cross-attention"].seconds
    assert max_frames(work, H200, LV) == max_frames(even, H200, LV)


def test_search_for_enough_gpus_ends_with_more_ranks_than_frames() -> None:
    """Nothing fits, so the 4 frames are sharded over up to 65,536 ranks."""
    few = Workload(model=MOSS, frames=4, text=512, gpus=4, frame_tokens=(50, 60, 70, 80))
    plan = make_plan(few, replace(H200, memory_bytes=1e9), ["lv-xattn"])
    assert plan.min_gpus is None and not plan.best.fits


def test_visible_entries_are_those_of_the_placeholders() -> None:
    """Every placeholder sees half of its own frame here, as in the mean over the rows of equal frames."""
    work, keys = moss(), sum(TOKENS)
    seen = [(before + after) / 2 / keys for before, after in pairwise(accumulate(TOKENS, initial=0))]
    assert work.visible("cross-attention") == pytest.approx((sum(seen) + 512 - 64) / 512)
    late = moss(sorted(TOKENS)).visible("cross-attention")
    assert late < replace(work, frame_tokens=None).visible("cross-attention") < moss(sorted(TOKENS)[::-1]).visible("")


def test_tokens_of_all_frames_are_rows_of_a_decoder_only_model() -> None:
    work = Workload(model=QWEN, frames=8, text=100, gpus=2, frame_tokens=(10, 20, 30, 40))
    assert work.rows == (100 + 100) // 2 and make_plan(work, H200).best.fits


def test_wrong_sizes_are_refused() -> None:
    for tokens, message in (
        ([221] * 63, "frame_tokens: 63 numbers for 64 frames; give one for each frame"),
        ([221] * 63 + [1], "frame_tokens: 1 is not above the 1 separators of a frame"),
    ):
        with pytest.raises(ConfigError, match=message):
            moss(tokens)
    with pytest.raises(ConfigError, match="a frame of mplug-owl3-7b always has 729 visual tokens"):
        Workload(model=OWL, frames=2, text=64, gpus=1, frame_tokens=(729, 100))


def test_command_takes_numbers_of_frames_with_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    args = "--model moss_vl_11b --cluster h200-141g-8xN --frames 100 --text 512 --gpus 4 --frame_tokens".split()
    assert planner.plan([*args, "80:640x360,20:1920x1080"]) == 0
    sizes = [MOSS.tokens_of_image(*size) for size in ((360, 640), (1080, 1920))]
    mean = (80 * sizes[0] + 20 * sizes[1]) / 100
    printed = " ".join(capsys.readouterr().out.split())
    assert f"100 frames of {sizes[0]} to {sizes[1]} (mean {mean:.4g}) tokens" in printed
    for given, message in (
        ("80:640x360,21:99", "80:640x360,21:99: these are 101 frames, and --frames is 100"),
        ("80:640x360,99", "80:640x360,99: '99' is not a number of frames with their size or tokens"),
        ("100:", "--frame_tokens 100:: '100:' is not a number of frames"),
    ):
        with pytest.raises(ConfigError, match=message):
            planner.plan([*args, given])
