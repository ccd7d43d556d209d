"""Layer: pure Python. Plans: times by hand, memory by formula, what fits, the command and its output."""

from __future__ import annotations

import json
import tomllib
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import with_

from mllm_seqpar.cli.planner import main
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import ParallelSpec, read_cluster
from mllm_seqpar.planner.files import CONFIGS, find_file
from mllm_seqpar.planner.memory import KINDS, USABLE, memory, tower_at_work
from mllm_seqpar.planner.model import read_model
from mllm_seqpar.planner.plan import longest_video, make_plan
from mllm_seqpar.planner.step_cost import PARTS
from mllm_seqpar.planner.workload import Workload

OWL = read_model(find_file("model", "mplug-owl3-7b"))
A100 = read_cluster(find_file("cluster", "a100-80g-4x4"))
RUN = Workload(model=OWL, frames=4096, text=8192, gpus=16)
LV, RING = ParallelSpec("lv-xattn", (16, 1)), ParallelSpec("ring", (1, 16))


def test_times_add_up_and_lv_xattn_wins_a_long_video() -> None:
    plan = make_plan(RUN, A100)
    assert plan.best.spec.strategy == "lv-xattn" and plan.best.fits
    assert {row.spec.strategy for row in plan.rows} == {"lv-xattn", "ring", "mesh", "ulysses", "replicate"}
    for row in plan.rows:
        assert set(row.parts) == set(PARTS) and set(row.memory) == set(KINDS)
        assert row.seconds == pytest.approx(sum(part.seconds for part in row.parts.values()))
    ring = next(row for row in plan.rows if row.spec.strategy == "ring")
    lv = plan.best
    assert ring.parts["self-attention"] == lv.parts["self-attention"]
    assert ring.parts["cross-attention"].exposed > 100 * lv.parts["cross-attention"].exposed


def test_parts_by_hand() -> None:
    """One GPU: no transfers, all is FLOPs over rates. 100 frames, 1000 tokens."""
    run = Workload(model=OWL, frames=100, text=1000, gpus=1)
    parts = make_plan(run, with_(A100, block_overhead_s=0.0)).rows[0].parts
    text, vision = OWL.text, OWL.vision
    mlp = 2 * 28 * 3 * 3584 * 18944 * 1000 / A100.matmul
    assert parts["MLP"].forward == pytest.approx(mlp) and parts["MLP"].backward == pytest.approx(2 * mlp)
    calls = 4 * 4 * 1000 * 72900 * 28 * 128
    kv = 4 * 4 * 72900 * 3584 * 4 * 128
    assert parts["cross-attention"].forward == pytest.approx(calls / A100.attention_forward + kv / A100.matmul)
    again = 2.5 * calls / A100.attention_backward + 3 * kv / A100.matmul
    assert parts["cross-attention"].backward == pytest.approx(again)
    own = 28 * (4 * 1000 * 1000 / 2 * 28 * 128 / A100.attention_forward)
    own += 2 * 28 * text.attention_parameters * 1000 / A100.matmul
    assert parts["self-attention"].forward == pytest.approx(own)
    tower = 2 * vision.parameters * 72900 / A100.matmul + 4 * 72900 * 729 * 1152 * 27 / A100.attention_forward
    tower += 2 * 1152 * 3584 * 72900 / A100.matmul
    assert parts["vision tower"].forward == pytest.approx(tower)
    assert parts["parameters"].seconds == 0 and all(part.exposed == 0 for part in parts.values())


def test_what_is_not_trained_or_done_twice_shows() -> None:
    def backward(part: str, **changes: object) -> float:
        row = make_plan(replace(RUN, **changes), A100, ("lv-xattn",)).rows[0]  # type: ignore[arg-type]
        return row.parts[part].backward

    assert backward("MLP", trained="connector") == pytest.approx(backward("MLP") / 2)
    assert backward("MLP", checkpointing=True) == pytest.approx(backward("MLP") * 1.5)
    assert backward("vision tower", trained="all") > 3 * backward("vision tower")
    assert backward("cross-attention", recompute=False) < backward("cross-attention")
    assert backward("cross-attention", checkpointing=True) > 1.2 * backward("cross-attention")
    assert make_plan(replace(RUN, trained="none"), A100).best.backward == 0


def test_memory_by_formula() -> None:
    held = memory(RUN, LV)
    assert held["parameters"] == OWL.parameters * 4 // 16
    trained = OWL.parameters - OWL.vision.parameters
    assert held["gradients"] == trained * 4 // 16 and held["optimizer"] == trained * 8 // 16
    once = 256 * 729 * 3584 * 2
    assert held["features"] == 2 * once  # and their gradient: the projector is trained
    assert memory(RUN, ParallelSpec("replicate", (16, 1)))["features"] == 2 * 16 * once
    kept = memory(replace(RUN, recompute=False), LV)["activations"] - held["activations"]
    # of 4 layers: K and V, 4 heads of 128; features normalised, their float32 copy, a factor of each token
    assert kept == 4 * 256 * 729 * (2 * 4 * 128 * 2 + 3584 * (2 + 2 + 4) + 4)
    keys_values = 2 * 256 * 729 * 4 * 128
    # the ring holds two pieces of K, V, dK, dV of others; LV-XAttn those of rows, which are few
    ring = memory(RUN, RING)["buffers"] - held["buffers"]
    rows = 512 * 28 * (2 * (3 * 128 * 2 + 4) + 2 * 128 * 4)
    assert ring == 2 * keys_values * (2 + 4) - rows
    assert memory(replace(RUN, checkpointing=True), LV)["activations"] < held["activations"] / 2
    inference = memory(replace(RUN, trained="none"), LV)
    assert inference["gradients"] == inference["optimizer"] == 0 and inference["features"] == once


def test_what_makes_the_features_counts() -> None:
    """The projector keeps its input, 1152 channels; a trained tower the inside of each layer, or each layer's input."""
    frozen = memory(RUN, LV)["activations"]
    alone = memory(replace(RUN, model=replace(OWL, projector=None)), LV)["activations"]
    assert frozen - alone == 256 * 729 * 1152 * 2
    inside = 8 * 1152 + 2 * 4304
    assert memory(replace(RUN, trained="all"), LV)["activations"] - frozen == 256 * 729 * 27 * inside * 2
    again = [memory(replace(RUN, trained=name, checkpointing=True), LV)["activations"] for name in ("all", "no-vision")]
    assert again[0] - again[1] == 256 * 729 * (27 * 1152 + inside) * 2


def test_the_peak_may_be_the_towers() -> None:
    """A forward pass of little text: what a layer got, what it added, that normalised, and two inner activations."""
    run = replace(RUN, trained="none", text=64, vision_chunk_size=None)
    frame = 729 * (3 * 1152 + 2 * 4304) * 2
    held = memory(run, LV)
    assert sum(held[kind] for kind in ("features", "activations", "buffers")) == 256 * frame
    assert tower_at_work(replace(run, vision_chunk_size=16)) == 16 * frame


def test_mlps_in_chunks() -> None:
    """512 tokens of a rank, 128 at once: no inner activations are kept, and MLPs are computed twice."""
    chunks = replace(RUN, mlp_chunk_size=128)
    whole, less = memory(RUN, LV), memory(chunks, LV)
    assert whole["activations"] - less["activations"] == 28 * 512 * 4 * 18944 * 2
    assert memory(replace(RUN, mlp_chunk_size=512), LV) == whole
    parts, plain = (make_plan(run, A100, ("lv-xattn",)).rows[0].parts["MLP"] for run in (chunks, RUN))
    assert parts.forward == plain.forward and parts.backward == pytest.approx(1.5 * plain.backward)
    again = make_plan(replace(chunks, checkpointing=True), A100, ("lv-xattn",)).rows[0].parts["MLP"]
    assert again.backward == pytest.approx(parts.backward)  # the layer's own recomputation stops short of the MLP
    # two frames: the buffers are the MLP's, of 2048 tokens or of one chunk with the sums of three weights' gradients
    short = replace(RUN, frames=2, text=2048, gpus=1)
    alone = ParallelSpec("lv-xattn", (1, 1))
    assert memory(short, alone)["buffers"] == 2048 * 2 * 18944 * 2
    sums = 3 * 3584 * 18944 * 4
    assert memory(replace(short, mlp_chunk_size=128), alone)["buffers"] == 128 * 6 * 18944 * 2 + sums


def test_other_buffers_by_formula() -> None:
    held = memory(RUN, LV)
    alone = memory(
        replace(RUN, gpus=1, frames=256, text=512), ParallelSpec("lv-xattn", (1, 1))
    )  # the same share, of one GPU
    two_rings = 512 * 28 * (2 * (3 * 128 * 2 + 4) + 2 * 128 * 4)
    gathered = 151851 * 3584 * 2 * 3  # the embeddings are the largest layer; two of them, and a gradient
    assert held["buffers"] - alone["buffers"] == gathered + two_rings
    # a mesh holds all others of its groups: 3 of rows, 3 of columns
    mesh = memory(RUN, ParallelSpec("mesh", (4, 4)))["buffers"] - alone["buffers"] - gathered
    row, column = 512 * 28 * (3 * 128 * 2 + 4 + 128 * 4), 2 * 256 * 729 * 4 * 128 * (2 + 4)
    assert mesh == 3 * (row + column)
    less = replace(OWL, text=replace(OWL.text, vocabulary=151851 - 1000))
    logits = memory(RUN, LV)["activations"] - memory(replace(RUN, model=less), LV)["activations"]
    assert logits == 512 * 1000 * (2 + 4 + 4)


def test_buffers_where_nothing_is_recomputed_or_all_is_gathered() -> None:
    keys = 256 * 729
    kept = memory(replace(RUN, recompute=False), LV)["buffers"] - memory(RUN, LV)["buffers"]
    assert kept == 3 * 4 * keys * 3584  # three tensors in float32 in the norms' backward, of all frames at once
    gathered = 151851 * 3584 * 2 * 3
    held = memory(RUN, ParallelSpec("replicate", (16, 1)))["buffers"]
    assert held - gathered == 16 * keys * 3584 * (2 + 4 + 4)  # as gradients of parts, in float32, and in a row


def test_parameters_travel_under_computation_as_far_as_there_is_any() -> None:
    """One rank to a node at 0.1 GB/s: 15 of 16 shares of 16 GB forward, again backward, and of 30.5 GB gradients."""
    slow = with_(A100, gpus_per_node=1, network_link=1e8, network_latency_s=0.0, step_overhead_s=0.0)
    parts = make_plan(RUN, slow, ("lv-xattn",)).rows[0].parts
    gather, reduce = (size * 15 / 16 / 1e8 for size in (OWL.parameters * 2, RUN.trained_parameters * 4))
    moved, others = parts["parameters"], [part for name, part in parts.items() if name != "parameters"]
    assert moved.forward == pytest.approx(gather - sum(part.forward for part in others))
    assert moved.backward == pytest.approx(gather + reduce - sum(part.backward for part in others))
    assert moved.exposed + moved.hidden == pytest.approx(2 * gather + reduce)
    assert moved.network_bytes == pytest.approx((2 * gather + reduce) * 1e8, rel=1e-6)


def test_what_does_not_fit_comes_last() -> None:
    """Fast links and little computation: replication is quickest, but holds all features."""
    fast = with_(A100, gpus_per_node=16, node_link=1e15, node_latency_s=1.0)
    plan = make_plan(replace(RUN, text=64, frames=8192), fast, ("lv-xattn", "replicate"))
    assert [row.fits for row in plan.rows] == [True, False]
    assert plan.rows[1].seconds < plan.rows[0].seconds


def test_text_that_is_not_dealt_is_computed_by_every_rank() -> None:
    local = make_plan(replace(RUN, self_attention="local"), A100, ("lv-xattn",)).rows[0]
    dealt = make_plan(RUN, A100, ("lv-xattn",)).rows[0]
    assert local.parts["MLP"].seconds == pytest.approx(16 * dealt.parts["MLP"].seconds)
    assert local.parts["self-attention"].exposed == 0
    # cross-attention's rows go to all: 512 rows of each rank forward in bf16, their gradients back in float32
    rows = 4 * 15 * 512 * 28 * 128 * (2 + 4)
    sent = [sum((part.node_bytes, part.network_bytes)) for part in (p.parts["cross-attention"] for p in (local, dealt))]
    assert sent[0] - sent[1] == rows
    assert local.memory["activations"] > 8 * dealt.memory["activations"]


def test_the_longest_video_just_fits() -> None:
    longest = longest_video(RUN, A100, LV)
    for frames, fits in ((longest, True), (longest + 16, False)):
        assert (sum(memory(replace(RUN, frames=frames), LV).values()) <= USABLE * A100.memory_bytes) == fits
    assert longest_video(RUN, A100, LV) > longest_video(replace(RUN, recompute=False), A100, LV)
    assert longest_video(RUN, replace(A100, memory_bytes=1e9), LV) == 0


def test_strategies_that_are_not_legal_are_named() -> None:
    plan = make_plan(replace(RUN, gpus=5), A100)
    assert "5 GPUs have no tile" in plan.illegal["mesh"]
    assert "no group of the 5 GPUs divides 28 heads" in plan.illegal["ulysses"]
    alone = make_plan(replace(RUN, gpus=1), A100)
    assert set(alone.left_out.values()) == {"one GPU has nobody to share with"}
    for name in ("ulysses", "mesh"):
        with pytest.raises(ConfigError, match=f"self_attention: {name} cannot share out 28 heads over 5 GPUs"):
            make_plan(replace(RUN, gpus=5, self_attention=name), A100)


def test_self_attention_of_its_own_choice_is_the_cheapest() -> None:
    def seconds(name: str) -> float:
        return make_plan(replace(RUN, self_attention=name), A100, ("lv-xattn",)).rows[0].parts["self-attention"].seconds

    assert seconds("auto") == min(map(seconds, ("ring", "mesh", "ulysses"))) < seconds("ring")


def test_the_best_is_lv_xattn_unless_another_is_faster_by_more_than_predictions_are_good_for() -> None:
    plan = make_plan(replace(RUN, gpus=4, frames=64), A100)
    times = {row.spec.strategy: row.seconds for row in plan.rows}
    assert plan.rows[0].way.strategy != "lv-xattn" and times["lv-xattn"] < 1.02 * plan.rows[0].seconds
    assert plan.best.spec.strategy == "lv-xattn"


def test_a_tile_that_fits_is_preferred() -> None:
    """Eight GPUs, four hours: the fastest mesh does not fit, a slower one does."""
    apart = with_(A100, gpus_per_node=8)
    run = replace(RUN, gpus=8, frames=4 * 3600)
    fits = {}
    for tile in ((4, 2), (2, 4)):
        fits[tile] = sum(memory(run, ParallelSpec("mesh", tile)).values())
    least = min(fits.values())
    assert least < max(fits.values())
    just = with_(apart, memory_bytes=(least + 1e6) / USABLE)
    (row,) = make_plan(run, just, ("mesh",)).rows
    assert row.fits and fits[row.spec.mesh_shape] == least


def test_how_many_gpus_are_enough() -> None:
    enough = make_plan(replace(RUN, gpus=2), A100, ("lv-xattn",)).enough
    assert enough is not None
    for gpus, fits in ((enough, True), (enough // 2, False)):
        held = memory(replace(RUN, gpus=gpus), ParallelSpec("lv-xattn", (gpus, 1)))
        assert (sum(held.values()) <= USABLE * A100.memory_bytes) == fits
    assert make_plan(RUN, replace(A100, memory_bytes=1e6), ("lv-xattn",)).enough is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": 0}, "frames: 0 is not a number of frames"),
        ({"gpus": -1}, "gpus: -1"),
        ({"trained": "half"}, "trained: 'half' is unknown; choose one of all, no-vision"),
        ({"self_attention": "star"}, "self_attention: 'star' cannot be planned"),
        ({"element": 0}, "element: 0 is not a number of bytes; give 1 or more"),
        ({"optimizer": -1}, "optimizer: -1 is not a number of bytes; give 0 or more"),
        ({"mlp_chunk_size": 0}, "mlp_chunk_size: 0 is not a number of tokens"),
    ],
)
def test_bad_runs(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(RUN, **changes)  # type: ignore[arg-type]


COMMAND = ["plan", "--model", "mplug-owl3-7b", "--frames", "4096", "--text", "8192", "--gpus", "16"]
COMMAND += ["--cluster", "a100-80g-4x4"]


def test_the_command_prints_a_table_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "t.svg"
    assert main([*COMMAND, "--timeline", str(picture)]) == 0
    printed = capsys.readouterr().out
    for word in (
        "8.04 B parameters",
        "lv-xattn",
        "replicate",
        "vision tower",
        "optimizer",
        "longest video",
        "K and V of frames computed again",
        "Best: lv",
        "patch_model(model, strategy='lv-xattn')",
        "4 GPUs are enough",
    ):
        assert word in printed
    root = xml.etree.ElementTree.parse(picture).getroot()
    rectangles = root.findall("{http://www.w3.org/2000/svg}rect")
    # 16 ranks, forward and backward, each 17 blocks and 15 transfers of either kind
    assert len(rectangles) > 2 * 16 * (17 + 15 + 15)


def test_the_command_is_installed_under_its_name() -> None:
    project = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"mllm-seqpar": f"{main.__module__}:{main.__name__}"}


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json", "--strategy", "ring", "lv-xattn"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["strategy"] for row in told["strategies"]] == ["lv-xattn", "ring"]
    first = told["strategies"][0]
    assert first["seconds"] == pytest.approx(sum(p["forward"] + p["backward"] for p in first["parts"].values()))
    assert first["memory_total"] == sum(first["memory"].values())
    assert told["best"] == {"strategy": "lv-xattn", "tile": [16, 1], "patch_model": {"strategy": "lv-xattn"}}
    assert told["self_attention"]["tile"] == [1, 16] and told["enough_gpus"] == 4
    more = [
        "--strategy",
        "mesh",
        "--keep-visual",
        "--mlp-chunk-size",
        "256",
        "--no-overlap",
        "--self-attention",
        "local",
    ]
    assert main([*COMMAND, "--json", *more]) == 0
    told = json.loads(capsys.readouterr().out)
    options = {"strategy": "mesh", "self_attention": "local", "tile": told["best"]["tile"], "recompute_visual": False}
    assert told["best"]["patch_model"] == options | {"overlap": False, "mlp_chunk_size": 256}


def test_the_command_for_a_forward_pass_and_for_too_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--trained", "none", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"]["parameter"] == 2 and told["strategies"][0]["memory"]["optimizer"] == 0
    assert main([*COMMAND, "--frames", "86400", "--self-attention", "ulysses"]) == 0
    printed = capsys.readouterr().out
    assert "Nothing fits with 86400 frames; at most" in printed and "32 GPUs hold it." in printed
    assert "86400 frames have as many placeholders in the text" in printed and "self-attention ulysses 4 x" in printed


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND[:-1], "nowhere"]) == 2
    assert "cluster: 'nowhere' is neither a file nor a name that is known here" in capsys.readouterr().err
    assert main([*COMMAND, "--frames", "0"]) == 2
    assert "frames: 0 is not a number of frames" in capsys.readouterr().err
    assert main([*COMMAND, "--element", "3"]) == 2
    assert "no floating-point number has 3 bytes" in capsys.readouterr().err
    for idle in (["--keep-visual"], ["--gradient-checkpointing"], ["--optimizer", "4"]):
        assert main([*COMMAND, "--trained", "none", *idle]) == 2
        assert "would have no effect: with --trained none" in capsys.readouterr().err


def test_calibrate_writes_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.yaml"
    assert main(["calibrate", "--device", "cpu", "--heads", "4", "--dim", "32", "--output", str(file)]) == 0
    found = read_cluster(file)
    assert found.gpus_per_node == 1 and "links are not measured" in found.source
    assert main([*COMMAND[:-1], str(file)]) == 2
    assert "16 ranks need gpus_per_node, node_link and network_link, which one process" in capsys.readouterr().err
    assert main(["calibrate", "--heads", "3", "--kv-heads", "2", "--output", str(file)]) == 2
    assert main(["calibrate", "--kv-heads", "0", "--output", str(file)]) == 2
