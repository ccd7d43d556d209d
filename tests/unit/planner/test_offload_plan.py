"""Layer: pure Python. Plans with features in host memory: memory of the device, time of the copies, what is refused."""

from dataclasses import replace

import pytest

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import ParallelSpec, read_cluster
from mllm_seqpar.planner.memory import CHUNK_BYTES, peak_memory
from mllm_seqpar.planner.model_sizes import read_model
from mllm_seqpar.planner.plan import make_plan
from mllm_seqpar.planner.records import find_file
from mllm_seqpar.planner.report import patch_options
from mllm_seqpar.planner.step_cost import HOST_LINK
from mllm_seqpar.planner.workload import Workload
from mllm_seqpar.runtime import visual_features

A30 = read_cluster(find_file("cluster", "a30-24g-8x1"))
ASK = Workload(
    model=read_model(find_file("model", "mplug-owl3-7b")), frames=4096, text=8192, gpus=8, trained="none", parameter=2
)
LV = ParallelSpec("lv-xattn", (8, 1))


@pytest.mark.parametrize("trained", ["none", "language"])
def test_memory_with_offload_does_not_grow_with_the_video(trained: str) -> None:
    def total(frames: int, offload: str | None) -> int:
        return sum(peak_memory(replace(ASK, frames=frames, trained=trained, visual_offload=offload), LV).values())

    assert total(4096, "cpu") == total(65536, "cpu") < total(4096, None)
    assert total(65536, None) - total(4096, None) > replace(ASK, frames=65536 - 4096).features_bytes
    assert CHUNK_BYTES == visual_features.CHUNK_BYTES


def test_longest_video_on_cards_of_24_gb() -> None:
    plain, offloaded = (make_plan(replace(ASK, visual_offload=option), A30, ("lv-xattn",)) for option in (None, "cpu"))
    assert 4096 < plain.best.max_frames < 32768
    assert offloaded.best.max_frames > 8 * plain.best.max_frames  # only their placeholders in the text take memory
    assert patch_options(offloaded) == {"strategy": "lv-xattn", "visual_offload": "cpu"}


def test_copies_bound_the_time_if_text_is_short() -> None:
    short, long = (
        make_plan(replace(ASK, text=text, visual_offload="cpu"), A30).best.parts["cross-attention"].forward.seconds
        for text in (16, 65536)
    )
    copies = 4 * ASK.features_bytes / HOST_LINK  # of the four layers
    assert short == pytest.approx(copies, rel=0.2) and long > 2 * copies


def test_other_strategies_and_stored_keys_are_left_out() -> None:
    plan = make_plan(replace(ASK, visual_offload="cpu"), A30)
    assert [row.spec.strategy for row in plan.rows] == ["lv-xattn"]
    assert plan.illegal["ring"] == "features in host memory need lv-xattn"
    with pytest.raises(ConfigError, match="visual_offload is 'disk'; expected one of None, cpu"):
        replace(ASK, visual_offload="disk")
    with pytest.raises(ConfigError, match="projects K and V again"):
        replace(ASK, visual_offload="cpu", recompute=False)
