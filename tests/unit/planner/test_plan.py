"""Layer: one process. Plans of models with cross-attention, LoRA and offload included.

Times are worked out by hand, memory by formula.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from clusters import with_
from peft import LoraConfig, get_peft_model

from mllm_seqpar.cli.plan_report import patch_options
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.masks.frame_mask import frame_masks
from mllm_seqpar.patches.sizes import mplug_owl3 as model_sizes
from mllm_seqpar.planner import Cluster, ParallelSpec, read_cluster
from mllm_seqpar.planner.cluster import Cost
from mllm_seqpar.planner.memory import (
    CHUNK_BYTES,
    COMMUNICATOR_BYTES,
    COMMUNICATORS,
    KINDS,
    USABLE,
    peak_memory,
    receive_buffer_bytes,
)
from mllm_seqpar.planner.model_sizes import read_model
from mllm_seqpar.planner.plan import StrategyPlan, attention_selection, make_plan, max_frames
from mllm_seqpar.planner.step import HOST_LINK, PARTS
from mllm_seqpar.planner.workload import TARGETS, Workload
from mllm_seqpar.runtime import visual_features
from mllm_seqpar.sharding import frame_spans, sequence_positions
from model_copies import tiny_model

OWL = read_model("mplug-owl3-7b")
A100 = read_cluster("a100-80g-4x4")
STEP = Workload(model=OWL, frames=4096, text=8192, gpus=16)
LV, RING = ParallelSpec("lv-xattn", (16, 1)), ParallelSpec("ring", (1, 16))
MESH, REPLICATE = ParallelSpec("mesh", (4, 4)), ParallelSpec("replicate", (16, 1))
ONE_GPU, LV8 = ParallelSpec("lv-xattn", (1, 1)), ParallelSpec("lv-xattn", (8, 1))
A30 = read_cluster("a30-24g-8x1")
ASK = replace(STEP, gpus=8, trained="none", parameter=2)
KEYS = 256 * 729
"""Visual tokens of each rank."""


def lv_plan(cluster: Cluster = A100, **changes: Any) -> StrategyPlan:
    return make_plan(replace(STEP, **changes), cluster, ("lv-xattn",)).rows[0]


def memory(spec: ParallelSpec = LV, **changes: Any) -> Mapping[str, int]:
    return peak_memory(replace(STEP, **changes), spec)


def test_parts_add_up_and_lv_xattn_is_best_for_a_long_video() -> None:
    plan = make_plan(STEP, A100)
    rows = {row.spec.strategy: row for row in plan.rows}
    assert rows.keys() == {"lv-xattn", "ring", "mesh", "ulysses", "replicate"}
    for row in plan.rows:
        assert {*row.parts, "launches"} == set(PARTS) and set(row.memory) == set(KINDS)
        assert row.seconds == pytest.approx(sum(part.seconds for part in row.parts.values()))
    lv, ring = rows["lv-xattn"], rows["ring"]
    assert plan.best is lv and lv.fits
    assert ring.parts["self-attention"] == lv.parts["self-attention"]
    assert ring.parts["cross-attention"].exposed > 100 * lv.parts["cross-attention"].exposed


def test_parts_on_one_gpu_are_flops_over_rates() -> None:
    parts = lv_plan(with_(A100, block_overhead_s=0.0), gpus=1, frames=100, text=1000).parts
    vision = OWL.vision
    mlp = 2 * 28 * 3 * 3584 * 18944 * 1000 / A100.matmul
    assert parts["MLP"].forward.seconds == pytest.approx(mlp) and parts["MLP"].backward.seconds == pytest.approx(
        2 * mlp
    )
    calls = 4 * 4 * (1000 - 50) * 72900 * 28 * 128  # the 100 placeholders attend to half of the frames
    kv = 4 * 4 * 72900 * 3584 * 4 * 128
    # 36 bytes per channel of the features in bf16, and of K and V; in backward once more, and twice for its gradients
    elementwise = 4 * 72900 * (3584 + 2 * 4 * 128) * 36 / A100.memory_rate
    forward = calls / A100.attention_forward + kv / A100.matmul + elementwise
    assert parts["cross-attention"].forward.seconds == pytest.approx(forward)
    backward = 2.5 * calls / A100.attention_backward + 3 * kv / A100.matmul + 3 * elementwise
    assert parts["cross-attention"].backward.seconds == pytest.approx(backward)
    self_attention = 28 * (4 * 1000 * 1000 / 2 * 28 * 128 / A100.attention_forward)
    self_attention += 2 * OWL.parameters_of("attention") * 1000 / A100.matmul
    assert parts["self-attention"].forward.seconds == pytest.approx(self_attention)
    tower = 2 * vision.parameters * 72900 / A100.matmul + 4 * 72900 * 729 * 1152 * 27 / A100.attention_forward
    tower += 2 * 1152 * 3584 * 72900 / A100.matmul
    assert parts["vision tower"].forward.seconds == pytest.approx(tower)
    assert parts["parameters"].seconds == 0 and all(part.exposed == 0 for part in parts.values())


def test_measured_rates_of_masks_and_of_the_tower_and_launches_count() -> None:
    run = {"gpus": 1, "frames": 100, "text": 1000}
    free = with_(A100, block_overhead_s=0.0, memory_rate=None)
    rates = {"masked_forward": A100.attention_forward / 2, "masked_backward": A100.attention_backward / 4}
    measured = with_(free, **rates, tower=A100.matmul / 2, layer_forward_s=1.0, layer_backward_s=3.0)
    before, after = lv_plan(free, **run).parts, lv_plan(measured, **run).parts
    calls = 4 * 4 * (1000 - 50) * 72900 * 28 * 128
    forward, backward = (getattr(after["cross-attention"], name).seconds for name in ("forward", "backward"))
    assert forward - before["cross-attention"].forward.seconds == pytest.approx(calls / A100.attention_forward)
    assert backward - before["cross-attention"].backward.seconds == pytest.approx(
        3 * 2.5 * calls / A100.attention_backward
    )
    tower = 2 * OWL.vision.parameters * 72900 + 4 * 72900 * 729 * 1152 * 27
    connector = 2 * 1152 * 3584 * 72900 / A100.matmul
    assert after["vision tower"].forward.seconds == pytest.approx(2 * tower / A100.matmul + connector)
    # a layer takes at least the time of its launches
    layers = after["self-attention"] + after["MLP"] + after["launches"]
    assert (layers.forward.seconds, layers.backward.seconds) == pytest.approx((28 * 1.0, 28 * 3.0))
    short = lv_plan(with_(measured, layer_forward_s=1e-9, layer_backward_s=1e-9), **run).parts
    assert short["launches"].seconds == 0


def test_backward_depends_on_what_is_trained_and_recomputed() -> None:
    def backward(part: str, **changes: Any) -> float:
        return lv_plan(**changes).parts[part].backward.seconds

    assert backward("MLP", trained="connector") == pytest.approx(backward("MLP") / 2)
    assert backward("MLP", checkpointing=True) == pytest.approx(backward("MLP") * 1.5)
    assert backward("vision tower", trained="all") > 3 * backward("vision tower")
    assert backward("cross-attention", recompute=False) < backward("cross-attention")
    again = {"checkpointing": True, "recompute_attention": True}
    assert backward("cross-attention", **again) > 1.2 * backward("cross-attention")
    assert backward("cross-attention", checkpointing=True) == pytest.approx(backward("cross-attention"))
    projection = 4 * 256 * 729 * 3584 * 4 * 128 / A100.matmul * OWL.cross.layers  # of the gradient of the features
    frozen = backward("cross-attention", trained="language")
    assert frozen == pytest.approx(backward("cross-attention") - projection)


@pytest.mark.parametrize("name", ["mplug-owl3-7b", "idefics-9b", "llama-3.2-11b-vision", "open-flamingo-9b"])
def test_forward_pass_costs_what_the_forward_part_of_a_step_costs(name: str) -> None:
    again = {"checkpointing": True, "recompute_attention": True}
    for options in ({}, again, {"self_attention": "local", "mlp_chunk_size": 64}, {"self_attention": "ulysses"}):
        given: dict[str, Any] = {"model": read_model(name), "gpus": 4, "batch": 2} | options
        inference, *steps = (lv_plan(trained=trained, **given).parts for trained in ("none", "all", "connector"))
        assert all(passes.backward == Cost() for passes in inference.values())
        for parts in steps:
            assert {part: passes.forward for part, passes in parts.items()} == {
                part: passes.forward for part, passes in inference.items()
            }


def test_features_have_a_gradient_where_something_before_them_is_trained() -> None:
    for trained, expected in {"all": 1, "no-vision": 1, "connector": 1, "language": 0, "none": 0}.items():
        given = replace(STEP, trained=trained)
        assert given.visual.trained == given.trains_features == expected
    for target, expected in {"connector": 1, "cross": 0}.items():
        given = replace(STEP, lora_r=8, lora_target=(target,))
        assert given.visual.trained == given.trains_features == expected


def test_recomputed_layers_send_at_most_head_shards_again() -> None:
    for name in ("ring", "ulysses"):
        options: list[dict[str, Any]] = [{}, {"checkpointing": True}]
        options.append(options[1] | {"recompute_attention": True})
        parts = [lv_plan(self_attention=name, **changes).parts["self-attention"] for changes in options]
        plain, kept, again = (part.both.node_bytes + part.both.network_bytes for part in parts)
        assert plain < kept < again if name == "ulysses" else plain == kept < again
    assert lv_plan(trained="none").backward.seconds == 0


def test_parameter_traffic_hides_under_computation() -> None:
    """One rank per node at 0.1 GB/s: 15 of 16 shards of 16 GB forward and backward, and of 30.5 GB of gradients."""
    slow = with_(A100, gpus_per_node=1, network_link=1e8, network_latency_s=0.0, step_overhead_s=0.0)
    parts = lv_plan(slow).parts
    gather, reduce = (size * 15 / 16 / 1e8 for size in (OWL.parameters * 2, STEP.trained_parameters * 4))
    traffic, others = parts["parameters"], [part for name, part in parts.items() if name != "parameters"]
    assert traffic.forward.seconds == pytest.approx(gather - sum(part.forward.seconds for part in others))
    assert traffic.backward.seconds == pytest.approx(gather + reduce - sum(part.backward.seconds for part in others))
    assert traffic.exposed + traffic.both.hidden == pytest.approx(2 * gather + reduce)
    assert traffic.both.network_bytes == pytest.approx((2 * gather + reduce) * 1e8, rel=1e-6)


def test_local_text_is_computed_by_every_rank() -> None:
    local, sharded = lv_plan(self_attention="local"), lv_plan()
    assert local.parts["MLP"].seconds == pytest.approx(16 * sharded.parts["MLP"].seconds)
    assert local.parts["self-attention"].exposed == 0
    # every rank gathers the rows of O: 512 per rank forward in bf16, their gradients in float32
    rows = 4 * 15 * 512 * 28 * 128 * (2 + 4)
    cross = [row.parts["cross-attention"].both for row in (local, sharded)]
    sent = [cost.node_bytes + cost.network_bytes for cost in cross]
    assert sent[0] == sent[1] + rows
    assert local.memory["activations"] > 8 * sharded.memory["activations"]


def test_auto_self_attention_is_the_fastest() -> None:
    names = ("auto", "ring", "mesh", "ulysses")
    auto, *others = [lv_plan(self_attention=name).parts["self-attention"].seconds for name in names]
    assert auto == min(others) < others[0]


def test_plan_has_the_text_that_the_runtime_selects() -> None:
    """Ring Attention unless another strategy is faster by more than the margin, with the memory of the selected one."""
    auto = replace(STEP, model=read_model("idefics-9b"), frames=64, gpus=4, self_attention="auto")
    times = attention_selection(auto, A100, "self-attention").candidates
    assert times[0].spec.strategy == "mesh" and make_plan(auto, A100).text == ParallelSpec("ring", (1, 4))
    auto = replace(STEP, gpus=4, self_attention="auto", checkpointing=True)
    plan = make_plan(auto, A100)
    assert plan.text == ParallelSpec("ulysses", (1, 1), 4)
    for row in plan.rows:
        assert row.memory == peak_memory(replace(auto, self_attention="ulysses"), row.spec)
    mesh = make_plan(replace(auto, gpus=12, self_attention="mesh"), A100, ("lv-xattn",))
    assert mesh.text.mesh_shape != (2, 6)  # which sends the fewest bytes: the plan's options have a tile
    calls = [(mesh.workload.problem("cross-attention"), mesh.rows[0].spec)]
    calls += [(mesh.workload.problem("self-attention"), mesh.text)]
    nccl = COMMUNICATORS * COMMUNICATOR_BYTES
    assert mesh.rows[0].memory["transfers"] == nccl + receive_buffer_bytes(calls, training=True)


def test_chunked_mlps_are_recomputed_once() -> None:
    options: list[dict[str, Any]] = [{}, {"mlp_chunk_size": 128}, {"mlp_chunk_size": 128, "checkpointing": True}]
    plain, chunked, both = (lv_plan(**changes).parts["MLP"] for changes in options)
    assert chunked.forward == plain.forward
    assert chunked.backward.seconds == pytest.approx(1.5 * plain.backward.seconds)
    assert both.backward == chunked.backward  # the recomputation of a layer stops before its MLP
    idefics = read_model("idefics-9b")  # its cross-attention layers have MLPs, before a gate
    chunked, both = (lv_plan(model=idefics, **changes).parts["MLP"].backward.seconds for changes in options[1:])
    assert both / chunked == pytest.approx((32 * 3 + 8 * 4) / (32 * 3 + 8 * 3))


def test_memory_of_parameters_features_and_activations() -> None:
    held = memory()
    assert held["parameters"] == OWL.parameters * 4 // 16
    trained = OWL.parameters - OWL.vision.parameters
    assert held["gradients"] == trained * 4 // 16 and held["optimizer"] == trained * 8 // 16
    features = KEYS * 3584 * 2
    assert held["features"] == 2 * features  # and their gradient: the projector is trained
    assert memory(REPLICATE)["features"] == 2 * 16 * features
    checkpointed = memory(checkpointing=True)["activations"]
    assert checkpointed < held["activations"] / 2
    # o in bf16 and the log-sum-exp in float32 of 28 heads, 512 rows, 28 layers; 4 of them have a second call
    kept = checkpointed - memory(checkpointing=True, recompute_attention=True)["activations"]
    assert kept == (28 + (4 if OWL.cross.gate == "per_head" else 0)) * 28 * 512 * (128 * 2 + 4)
    inference = memory(trained="none")
    assert inference["gradients"] == inference["optimizer"] == 0 and inference["features"] == features
    # without recomputation, 4 layers save K and V, the normalized features, their float32 copy, a factor per token
    kept = memory(recompute=False)["activations"] - held["activations"]
    assert kept == 4 * KEYS * (2 * 4 * 128 * 2 + 3584 * (2 + 2 + 4) + 4)
    smaller = replace(OWL, text=replace(OWL.text, vocabulary=OWL.text.vocabulary - 1000))
    logits = held["activations"] - memory(model=smaller)["activations"]
    assert logits == 512 * 1000 * (2 + 4 + 4)


def test_memory_of_chunked_mlps() -> None:
    assert memory()["activations"] - memory(mlp_chunk_size=128)["activations"] == 28 * 512 * 4 * 18944 * 2
    assert memory(mlp_chunk_size=512) == memory()  # a rank has 512 tokens
    # with two frames the MLP needs the largest buffers: 2048 tokens, or one chunk and three weight gradients
    whole, chunked = (
        memory(ONE_GPU, frames=2, text=2048, gpus=1, mlp_chunk_size=size)["buffers"] for size in (None, 128)
    )
    assert (whole, chunked) == (2048 * 2 * 18944 * 2, 128 * 6 * 18944 * 2 + 3 * 3584 * 18944 * 4)


def test_buffers_of_each_strategy() -> None:
    """In addition to one GPU with the same shards: gathered layers, and the shards of other ranks."""
    one_gpu = memory(ONE_GPU, gpus=1, frames=256, text=512)["buffers"]
    layer = 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)
    # of a layer four times, gradients and copies included; embeddings and head, and the gradient of the head
    gathered = 2 * (4 * layer + 3 * 151851 * 3584)
    dq, dkv = 512 * 28 * 128 * 4, 2 * KEYS * 4 * 128 * 4
    # one GPU holds most at the gradient of the features, where K, V and dq are gone; shards of others come with them
    gone = KEYS * 2 * (3584 - 2 * 4 * 128) - dq
    for strategy, shards in ((LV, 2 * dq), (RING, 2 * dkv), (MESH, 3 * (dq + dkv))):
        assert memory(strategy)["buffers"] == one_gpu + gathered + max(0, shards - gone)
    # the gradient of all features: as shards, in float32, and concatenated
    assert memory(REPLICATE)["buffers"] == gathered + 16 * KEYS * 3584 * (2 + 4 + 4)
    # the backward pass of the norms: three tensors in float32 of all frames at once
    kept = memory(recompute=False)["buffers"]
    assert kept - memory()["buffers"] == 3 * 4 * KEYS * 3584 - (gone - 2 * dq)


def test_memory_of_transfers() -> None:
    """Receive buffers of both directions, of text and of frames, where the larger ones serve both."""
    nccl = COMMUNICATORS * COMMUNICATOR_BYTES
    rows, keys = 512 * 28, 2 * KEYS * 4 * 128
    text = 512 * 4 * 128 * 2  # elements of K and V of one text shard
    lse = 5 * 4 * rows  # two times lse and delta of the backward pass, lse of the forward pass
    q = 4 * rows * 128 * 2 + rows * 128 * 4 + lse  # two times q and do; O or dQ
    kv = 2 * keys * 2 + keys * 4  # two times K and V; dK and dV
    assert memory(LV)["transfers"] == nccl + q + 2 * text * 2 + text * 4
    assert memory(RING)["transfers"] == nccl + kv
    assert memory(RING, trained="none")["transfers"] == nccl + 2 * keys * 2
    assert memory(LV, self_attention="local")["transfers"] > nccl
    assert memory(ParallelSpec("ulysses", (1, 1), 4), gpus=4, self_attention="ulysses")["transfers"] == nccl
    assert memory(ONE_GPU, gpus=1)["transfers"] == 0
    # A mesh of text has the shape that sends the fewest bytes in both passes, as in the runtime, even in inference.
    ask, lv = replace(STEP, gpus=12, trained="none", self_attention="mesh"), ParallelSpec("lv-xattn", (12, 1))
    calls = [(ask.problem("cross-attention"), lv), (ask.problem("self-attention"), ParallelSpec("mesh", (2, 6)))]
    assert peak_memory(ask, lv)["transfers"] == nccl + receive_buffer_bytes(calls, training=False)


def test_strategy_that_does_not_fit_comes_last() -> None:
    """With fast links and little computation, replication is fastest, but holds all features."""
    fast = with_(A100, gpus_per_node=16, node_link=1e15, node_latency_s=1.0)
    plan = make_plan(replace(STEP, text=64, frames=8192), fast, ("lv-xattn", "replicate"))
    assert [row.fits for row in plan.rows] == [True, False]
    assert plan.rows[1].seconds < plan.rows[0].seconds


def test_mesh_shape_that_fits_is_preferred() -> None:
    workload = replace(STEP, gpus=8, frames=4 * 3600)
    sizes = {shape: sum(peak_memory(workload, ParallelSpec("mesh", shape)).values()) for shape in ((4, 2), (2, 4))}
    smallest = min(sizes.values())
    assert smallest < max(sizes.values())
    cluster = with_(A100, gpus_per_node=8, memory_bytes=(smallest + 1e6) / USABLE)
    (row,) = make_plan(workload, cluster, ("mesh",)).rows
    assert row.fits and sizes[row.spec.mesh_shape] == smallest


def test_lv_xattn_is_best_within_the_margin() -> None:
    plan = make_plan(replace(STEP, gpus=4, frames=64), A100)
    seconds = {row.spec.strategy: row.seconds for row in plan.rows}
    assert plan.rows[0].spec.strategy != "lv-xattn" and seconds["lv-xattn"] < 1.02 * plan.rows[0].seconds
    assert plan.best.spec.strategy == "lv-xattn"


def fits(spec: ParallelSpec, **changes: Any) -> bool:
    return sum(memory(spec, **changes).values()) <= USABLE * A100.memory_bytes


def test_longest_video_and_fewest_gpus_just_fit() -> None:
    longest = max_frames(STEP, A100, LV)
    text = STEP.text - STEP.frames + longest  # a placeholder for each frame
    assert fits(LV, frames=longest, text=text) and not fits(LV, frames=longest + 16, text=text + 16)
    assert longest > max_frames(replace(STEP, recompute=False), A100, LV)
    assert max_frames(STEP, replace(A100, memory_bytes=1e9), LV) == 0
    fewest = make_plan(replace(STEP, gpus=2), A100, ("lv-xattn",)).min_gpus
    several, fewer = (ParallelSpec("lv-xattn", (count, 1)) for count in (fewest, fewest // 2))
    assert fits(several, gpus=fewest) and not fits(fewer, gpus=fewest // 2)
    assert make_plan(STEP, replace(A100, memory_bytes=1e6), ("lv-xattn",)).min_gpus is None


def test_illegal_strategies_are_named_with_the_reason() -> None:
    plan = make_plan(replace(STEP, gpus=5), A100)
    assert "5 GPUs have no tile" in plan.illegal["mesh"]
    assert "no group of the 5 GPUs divides 28 heads" in plan.illegal["ulysses"]
    (reason,) = {*make_plan(replace(STEP, gpus=1), A100).illegal.values()}
    assert reason == "one GPU has no other GPU to share with"
    offloaded = make_plan(replace(ASK, visual_offload="cpu"), A30)
    assert [row.spec.strategy for row in offloaded.rows] == ["lv-xattn"]
    assert offloaded.illegal["ring"] == "features in host memory need lv-xattn"
    for name in ("ulysses", "mesh"):
        with pytest.raises(ConfigError, match=f"self_attention: {name} cannot shard 28 heads over 5 GPUs"):
            make_plan(replace(STEP, gpus=5, self_attention=name), A100)


def test_text_attends_to_half_of_the_frames_of_its_placeholders_on_every_rank() -> None:
    """The busiest rank has the mean of the load, because the frames are zigzag."""
    given = Workload(model=OWL, frames=512, text=768, gpus=8)
    rows = torch.arange(768)
    mask = FrameMask.from_intervals(torch.zeros(1, 768).long(), (rows + 1).clamp(max=512)[None], 729, 512)
    masks = [mask.take(sequence_positions(768, rank, 8, "zigzag")) for rank in range(8)]
    visible = frame_masks(masks, frame_spans(512, 8, "zigzag")).visible_fractions()
    busiest = max(sum(row[rank] for row in visible) / 8 for rank in range(8))
    assert busiest == pytest.approx(given.visible("cross-attention"), rel=0.01)
    assert (
        replace(given, text=500).visible("cross-attention")
        == replace(given, model=read_model("idefics-9b")).visible("cross-attention")
        == 1.0
    )


def test_lora_trains_adapters_over_frozen_weights() -> None:
    text, r = OWL.text, 16
    attention = 28 * r * (2 * (3584 + 28 * 128) + 2 * (3584 + 4 * 128))
    cross = 4 * r * 2 * (3584 + 4 * 128)
    adapters = attention + 28 * r * 3 * (3584 + 18944) + cross
    held, full = memory(lora_r=r), memory()
    assert replace(STEP, lora_r=r).trained_parameters == adapters
    assert held["gradients"] == adapters * 4 // 16 and held["optimizer"] == adapters * 8 // 16
    assert held["parameters"] == (OWL.parameters * 2 + adapters * 4) // 16  # frozen weights in bf16
    assert held["features"] == full["features"] / 2  # no gradient: what follows the tower is frozen
    quantised = memory(lora_r=r, base_parameter=0.5)
    embeddings = 2 * text.vocabulary * text.hidden
    frozen = (OWL.parameters - embeddings) // 2 + embeddings * 2
    assert quantised["parameters"] == (frozen + adapters * 4) // 16
    assert replace(STEP, lora_r=r, lora_target=("cross",)).trained_parameters == cross
    connector = replace(STEP, lora_r=r, lora_target=("connector",))
    assert connector.trained_parameters == r * (1152 + 3584) and connector.trains_features


@pytest.mark.parametrize("name", ["mplug-owl3-2b", "idefics-9b", "llama-3.2-11b-vision", "open-flamingo-9b"])
def test_adapted_layers_have_all_parameters_of_their_part(name: str) -> None:
    model = read_model(name)
    adapted = sum(one.layers * a * b for one in model.linear for a, b in one.channels)
    gates = model.cross.layers * (model.cross.head_dim**2 if model.cross.gate == "per_head" else 0)
    assert adapted + gates + model.text.embeddings + model.vision.parameters == model.parameters
    assert {one.target for one in model.linear} == set(TARGETS) and {one.part for one in model.linear} < set(PARTS)


def test_lora_has_no_weight_gradients_but_those_of_adapters() -> None:
    full, adapted = lv_plan().parts, lv_plan(lora_r=1).parts
    for name in ("MLP", "vocabulary", "self-attention"):
        assert adapted[name].forward.seconds == pytest.approx(full[name].forward.seconds, rel=0.01)
    assert adapted["MLP"].backward.seconds == pytest.approx(full["MLP"].backward.seconds / 2, rel=0.01)
    assert adapted["cross-attention"].backward.seconds < full["cross-attention"].backward.seconds
    ranks = [lv_plan(lora_r=r, lora_target=("mlp",)).parts["MLP"] for r in (1, 257)]
    more = 2 * 28 * 256 * 3 * (3584 + 18944) * 512 / A100.matmul
    assert ranks[1].forward.seconds - ranks[0].forward.seconds == pytest.approx(more)
    assert ranks[1].backward.seconds - ranks[0].backward.seconds == pytest.approx(2 * more)
    assert adapted["parameters"].both.network_bytes < full["parameters"].both.network_bytes


def test_adapters_have_as_many_parameters_as_those_of_peft() -> None:
    layers = r".*language_model.*(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
    model = tiny_model()
    sizes = model_sizes(model.config.to_dict(), "tiny")
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules=layers))
    workload = Workload(model=sizes, frames=4, text=64, gpus=1, lora_r=3, lora_target=("attention", "mlp"))
    assert workload.trained_parameters == adapted.get_nb_trainable_parameters()[0]


@pytest.mark.parametrize("trained", ["none", "language"])
def test_memory_with_offload_does_not_grow_with_the_video(trained: str) -> None:
    def total(frames: int, offload: str | None) -> int:
        return sum(peak_memory(replace(ASK, frames=frames, trained=trained, visual_offload=offload), LV8).values())

    assert total(4096, "cpu") == total(65536, "cpu") < total(4096, None)
    assert total(65536, None) - total(4096, None) > replace(ASK, frames=65536 - 4096).features_bytes
    assert CHUNK_BYTES == visual_features.CHUNK_BYTES
    runs = [replace(ASK, trained=name, visual_offload="cpu") for name in (trained, "no-vision")]
    chunks = [peak_memory(run, LV8)["features"] for run in runs]
    assert chunks[1] == chunks[0] / 2 * 5  # two of the features; two of their gradient, and one to add


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
