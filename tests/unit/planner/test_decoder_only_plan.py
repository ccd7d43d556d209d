"""Layer: pure Python. Plans for Qwen2.5-VL and Qwen3-VL: sizes, times and memory."""

from dataclasses import replace
from typing import Any

import pytest
from clusters import with_

from mllm_seqpar.cli.plan_report import patch_options
from mllm_seqpar.planner import ParallelSpec, read_cluster
from mllm_seqpar.planner.memory import USABLE, peak_memory
from mllm_seqpar.planner.model_sizes import read_model
from mllm_seqpar.planner.plan import make_plan
from mllm_seqpar.planner.workload import Workload

A100 = read_cluster("a100-80g-8xN")
QWEN, QWEN3 = (read_model(name) for name in ("qwen2_5_vl_7b", "qwen3_vl_8b"))
STEP = Workload(model=QWEN, frames=1024, text=1024, gpus=8, self_attention="auto", checkpointing=True)
ASK = replace(STEP, trained="none", checkpointing=False, parameter=2, answer=100)
RING = ParallelSpec("ring", (1, 8))


def test_frames_are_pairs_of_images_of_any_size() -> None:
    assert STEP.encoded_frames == 512 and replace(STEP, frames=1023).encoded_frames == 512
    assert STEP.rows == (512 * 299 + 1024) // 8
    assert (QWEN.tokens_of_image(360, 640), QWEN.tokens_of_image(720, 1280)) == (13 * 23, 26 * 46)
    assert (QWEN3.tokens_of_image(360, 640), QWEN3.tokens_of_image(8, 8)) == (11 * 20, 1)
    large = QWEN.with_frame_tokens(1196)
    assert large.vision.tokens == 4 * 1196 and large.parameters == QWEN.parameters


def test_parts_on_one_gpu_are_flops_over_rates() -> None:
    cluster = with_(A100, block_overhead_s=0.0)
    run = replace(STEP, gpus=1, frames=200, text=100, checkpointing=False)
    (row,) = make_plan(run, cluster).rows
    tokens = 100 * 299 + 100
    assert set(row.parts) == {"vision tower", "self-attention", "MLP", "vocabulary", "parameters"}
    attention = 28 * 4 * tokens * tokens / 2 * 28 * 128 / cluster.attention_forward
    attention += 2 * QWEN.parameters_of("attention") * tokens / cluster.matmul
    assert row.parts["self-attention"].forward.seconds == pytest.approx(attention)
    patches = 100 * 1196
    tower = 2 * (QWEN.vision.parameters * patches + 100 * 299 * (5120 * 5120 + 5120 * 3584)) / cluster.matmul
    tower += 4 * patches * (4 * 1196 + 28 * 64) * 1280 / cluster.attention_forward
    assert row.parts["vision tower"].forward.seconds == pytest.approx(tower)


@pytest.mark.parametrize(("model", "channels"), [(QWEN, 3584), (QWEN3, 4 * 4096)])
@pytest.mark.parametrize("trained", ["no-vision", "language"])
def test_embeddings_travel_once_each_way(model: Any, channels: int, trained: str) -> None:
    """Seven of eight shards, with deepstack features, in bf16; backward only if something before them is trained."""
    part = make_plan(replace(STEP, model=model, trained=trained), A100).best.parts["vision tower"]
    passes = 2 if trained == "no-vision" else 1
    assert (
        part.both.node_bytes == passes * 7 * 64 * model.vision.keys * channels * 2 // 8 and part.both.network_bytes == 0
    )
    gathered = make_plan(replace(STEP, model=model, trained=trained, self_attention="local"), A100).best
    assert gathered.parts["vision tower"].both.node_bytes == 8 * part.both.node_bytes
    assert gathered.parts["self-attention"].exposed == 0


def test_auto_compares_ring_mesh_and_ulysses() -> None:
    plan = make_plan(STEP, A100)
    assert {row.spec.strategy for row in plan.rows} == {"ring", "mesh", "ulysses"} and plan.best.spec == RING
    seconds = {row.spec.strategy: row.seconds for row in plan.rows}
    for name, expected in seconds.items():
        (row,) = make_plan(replace(STEP, self_attention=name), A100).rows
        assert row.seconds == expected
    slow = with_(A100, network_link=1e9)  # a ring sends K and V of all other ranks between the nodes
    waiting = make_plan(replace(ASK, gpus=16, frames=64), slow)
    assert waiting.best.spec.strategy != "ring" and waiting.rows[-1].spec.strategy == "ring"
    local = make_plan(replace(ASK, self_attention="local"), A100)
    assert patch_options(local) == {"self_attention": "local"} and not local.illegal
    five = make_plan(replace(STEP, gpus=5), A100)
    assert five.illegal.keys() == {"mesh", "ulysses"} and "no group of the 5 GPUs divides 28" in five.illegal["ulysses"]
    assert {*make_plan(replace(STEP, gpus=1), A100).illegal.values()} == {"one GPU has no other GPU to share with"}


def test_memory_per_gpu_falls_with_gpus_and_longest_video_just_fits() -> None:
    held = {n: peak_memory(replace(STEP, gpus=n, self_attention="ring"), ParallelSpec("ring", (1, n))) for n in (2, 8)}
    logits = STEP.text * QWEN.text.vocabulary * (2 + 8)  # all targets may be on one rank
    saved = {n: held[n]["activations"] - logits for n in held}
    assert saved[2] == pytest.approx(4 * saved[8], rel=0.03)
    assert held[2]["features"] == pytest.approx(4 * held[8]["features"], rel=1e-3)
    assert held[8]["features"] == 512 * 299 // 8 * 3584 * 2
    plan = make_plan(STEP, A100)

    def fits(frames: int, **changes: Any) -> bool:
        run = replace(STEP, frames=frames, self_attention="ring", **changes)
        return sum(peak_memory(run, ParallelSpec("ring", (1, run.gpus))).values()) <= USABLE * A100.memory_bytes

    longest = plan.best.max_frames
    assert fits(longest) and not fits(longest + 16)
    assert plan.min_gpus is not None
    assert fits(1024, gpus=plan.min_gpus) and not fits(1024, gpus=plan.min_gpus // 2)


def test_lora_trains_adapters_only_and_of_cross_attention_there_are_none() -> None:
    full, lora, same = (
        make_plan(replace(STEP, **options), A100).best
        for options in ({}, {"lora_r": 16}, {"lora_r": 16, "lora_target": ("attention", "mlp")})
    )
    assert lora.memory == same.memory and lora.memory["optimizer"] < full.memory["optimizer"] / 100
    assert lora.parts["MLP"].backward.seconds < full.parts["MLP"].backward.seconds


def test_answer_is_generated_over_sharded_keys_and_values() -> None:
    prompt, answer = (make_plan(run, A100).best for run in (replace(ASK, answer=0), ASK))
    token = 2 * 28 * 4 * 128 * 2  # K and V of 28 layers in bf16
    assert answer.memory["cache"] == token * (ASK.tokens + 13) and "cache" not in prompt.memory
    assert answer.memory["parameters"] == QWEN.parameters * 2  # on every GPU
    assert prompt.memory["activations"] - answer.memory["activations"] == (ASK.tokens - 1) * QWEN.text.vocabulary * 2
    decoding = answer.parts["decoding"]
    merged = 28 * 7 * 28 * 129 * 4  # the partial results of 28 heads with their log-sum-exp, in float32
    assert decoding.both.node_bytes == 100 * merged
    weights = QWEN.parameters_of("attention", "mlp") + 152064 * 3584
    read = (2 * weights + answer.memory["cache"]) / A100.memory_rate
    assert decoding.seconds == pytest.approx(100 * read + decoding.exposed)
    assert answer.forward.seconds - decoding.forward.seconds < prompt.forward.seconds  # the logits of one token only
    sharded = make_plan(replace(ASK, shard_weights=True), A100).best
    assert sharded.memory["parameters"] == prompt.memory["parameters"]
    assert sharded.parts["decoding"].seconds > 5 * decoding.seconds  # each token gathers the weights
    one = make_plan(replace(ASK, gpus=1, frames=64), A100).best
    assert one.parts["decoding"].exposed == 0
