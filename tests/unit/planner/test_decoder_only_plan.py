"""Layer: pure Python, and one process. Plans for Qwen2.5-VL and Qwen3-VL: sizes, times, memory, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import with_

from mllm_seqpar.__main__ import main
from mllm_seqpar.cli.check_data import Totals, _visual
from mllm_seqpar.planner import ParallelSpec, read_cluster
from mllm_seqpar.planner.memory import USABLE, peak_memory
from mllm_seqpar.planner.model_sizes import read_model
from mllm_seqpar.planner.plan import make_plan
from mllm_seqpar.planner.records import find_file
from mllm_seqpar.planner.report import patch_options
from mllm_seqpar.planner.workload import Workload

PUBLISHED = {
    "qwen2_5_vl_3b": 3_754_622_976,
    "qwen2_5_vl_7b": 8_292_166_656,
    "qwen2_5_vl_32b": 33_452_718_336,
    "qwen2_5_vl_72b": 73_410_777_344,
    "qwen3_vl_2b": 2_127_532_032,
    "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696,
    "qwen3_vl_32b": 33_357_390_064,
}
"""Parameters of the published checkpoints."""
A100 = read_cluster(find_file("cluster", "a100-80g-8xN"))
QWEN, QWEN3 = (read_model(find_file("model", name)) for name in ("qwen2_5_vl_7b", "qwen3_vl_8b"))
STEP = Workload(model=QWEN, frames=1024, text=1024, gpus=8, self_attention="auto", checkpointing=True)
ASK = replace(STEP, trained="none", checkpointing=False, parameter=2, answer=100)
RING = ParallelSpec("ring", (1, 8))
RUN = ["plan", "--model", "qwen2_5_vl_7b", "--cluster", "a100-80g-8xN"]
RUN += ["--frames", "1024", "--text", "1024", "--gpus", "8"]


def hf_config(name: str) -> dict[str, Any]:
    """Return the configuration that a model file describes, with the names of the published `config.json`."""
    sizes = read_model(find_file("model", name))
    text, vision, deepstack = sizes.text, sizes.vision, sizes.vision.deepstack
    language = {"hidden_size": text.hidden, "num_hidden_layers": text.layers, "num_attention_heads": text.heads}
    language |= {"num_key_value_heads": text.kv_heads, "intermediate_size": text.mlp_inner}
    language |= {"vocab_size": text.vocabulary, "tie_word_embeddings": text.tied_embeddings}
    tower = {"depth": vision.layers, "hidden_size": vision.width, "num_heads": vision.heads, "patch_size": vision.patch}
    tower |= {"intermediate_size": vision.mlp_inner, "out_hidden_size": text.hidden}
    if not deepstack:
        tower |= {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
        return {"model_type": "qwen2_5_vl", **language, "vision_config": tower}
    tower |= {"deepstack_visual_indexes": list(range(deepstack)), "num_position_embeddings": 2304}
    return {"model_type": "qwen3_vl", "text_config": language | {"head_dim": text.head_dim}, "vision_config": tower}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_real_classes(name: str) -> None:
    """The classes of transformers on the meta device have as many; the sizes leave out norms and biases."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = hf_config(name)
    text = {key: value for key, value in config.items() if key not in ("model_type", "vision_config", "text_config")}
    fields = {"text_config": config.get("text_config", text), "vision_config": config["vision_config"]}
    fields["tie_word_embeddings"] = fields["text_config"]["tie_word_embeddings"]
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(config["model_type"], **fields))
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert read_model(find_file("model", name)).parameters == pytest.approx(PUBLISHED[name], rel=0.0025)


@pytest.mark.parametrize("name", ["qwen2_5_vl_7b", "qwen3_vl_8b"])
@pytest.mark.parametrize("nested", [True, False])
def test_model_directory_equals_the_model_file(name: str, nested: bool, tmp_path: Path) -> None:
    """Files of before and after transformers moved the fields of the language model into `text_config`."""
    (folder := tmp_path / name).mkdir()
    config = hf_config(name)
    if not nested:
        config |= config.pop("text_config", {})
    elif "text_config" not in config:
        config["text_config"] = {k: v for k, v in config.items() if k not in ("model_type", "vision_config")}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model(folder) == read_model(find_file("model", name))
    assert _visual(Totals(), str(folder)) == ""  # the number of visual tokens depends on the size of the pictures


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
    attention += 2 * 28 * QWEN.linear["attention"].parameters * tokens / cluster.matmul
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


def test_lora_trains_adapters_only() -> None:
    lora = make_plan(replace(STEP, lora_r=16), A100).best
    full = make_plan(STEP, A100).best
    assert lora.memory["optimizer"] < full.memory["optimizer"] / 100
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
    weights = 28 * (QWEN.linear["attention"].parameters + QWEN.linear["mlp"].parameters) + 152064 * 3584
    read = (2 * weights + answer.memory["cache"]) / A100.memory_rate
    assert decoding.seconds == pytest.approx(100 * read + decoding.exposed)
    assert answer.forward.seconds - decoding.forward.seconds < prompt.forward.seconds  # the logits of one token only
    sharded = make_plan(replace(ASK, shard_weights=True), A100).best
    assert sharded.memory["parameters"] == prompt.memory["parameters"]
    assert sharded.parts["decoding"].seconds > 5 * decoding.seconds  # each token gathers the weights
    one = make_plan(replace(ASK, gpus=1, frames=64), A100).best
    assert one.parts["decoding"].exposed == 0


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main([*RUN, *options]) == 0
    return capsys.readouterr().out


def test_command_prints_tables_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = printed(capsys, "--gradient_checkpointing", "--lora_r", "16", "--samples", "1000")
    assert "1,024 frames, 299 tokens for every 2 of them" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100
    assert "  patch_model(model)\n" in text and "LoRA of rank 16 on attention, mlp)" in text
    assert "cross" not in text and "K and V of frames" not in text and "\n  ring: " in text
    shown = json.loads(printed(capsys, "--gradient_checkpointing", "--self_attention", "mesh", "--json"))
    (row,) = shown["strategies"]
    expected = {"self_attention": "mesh", "tile": row["tile"]}
    assert shown["best"]["patch_model"] == expected and "self_attention_call" in row
    answer = ["--trained", "none", "--answer", "64"]
    text = printed(capsys, *answer)
    assert (
        "time of an answer of 64 tokens" in text and "each token" in text and "bytes, parameters of 2, on every" in text
    )
    assert "cache" in json.loads(printed(capsys, *answer, "--json"))["strategies"][0]["memory"]
    tall = json.loads(printed(capsys, *answer, "--frame-tokens", "1280x720", "--json"))["run"]["model"]["vision"]
    assert (tall["keys"], tall["tokens"]) == (1196, 4 * 1196)


def test_command_draws_self_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main([*RUN, "--gradient_checkpointing", "--timeline", str(tmp_path / "ring.svg")]) == 0
    assert "One self-attention layer of qwen2_5_vl_7b" in (tmp_path / "ring.svg").read_text()
