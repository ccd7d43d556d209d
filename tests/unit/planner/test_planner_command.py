"""Layer: one process. The commands `plan` and `calibrate`: their tables, JSON, figure and cluster file."""

import functools
import json
import os
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from mllm_seqpar.__main__ import main
from mllm_seqpar.cli import calibrate
from mllm_seqpar.cli.calibrate import measure
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner import read_cluster
from mllm_seqpar.videos import reader

RUN = {"model": "mplug-owl3-7b", "frames": "4096", "text": "8192", "gpus": "16", "cluster": "a100-80g-4x4"}
QWEN = {"model": "qwen2_5_vl_7b", "frames": "1024", "text": "1024", "gpus": "8", "cluster": "a100-80g-8xN"}


def plan(*options: str, **changes: str) -> int:
    """Run the command with `RUN`, where `changes` replaces values, and return its exit status."""
    return main(["plan", *(part for name, value in (RUN | changes).items() for part in (f"--{name}", value)), *options])


def plan_json(capsys: pytest.CaptureFixture[str], *options: str, **changes: str) -> dict[str, Any]:
    status = plan("--json", *options, **changes)
    printed = json.loads(capsys.readouterr().out)
    assert status == (0 if any(row["fits"] for row in printed["strategies"]) else 1)
    return printed


def test_plan_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(text="4096") == 0  # a placeholder for each frame
    assert plan() == 0
    printed = capsys.readouterr().out
    words = ["8.04 B parameters", "replicate", "vision tower", "optimizer", "longest video", "4 GPUs are enough"]
    words += ["no gradient checkpointing", "Best: lv", "  patch_model(model, strategy='lv-xattn')\n"]
    assert not [part for part in words if part not in printed]


@pytest.mark.parametrize("changes", [{}, {"model": "llama-3.2-90b-vision", "gpus": "32", "batch": "2"}])
def test_plan_has_units_in_its_cells_and_fits_100_columns(
    changes: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--self_attention", "auto", "--lora_r", "16", "--gradient-checkpointing", "--samples", "1000000"]
    plan(*options, **changes)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    table = lines[lines.index("") + 3 : lines.index("", lines.index("") + 1)]
    cells = [cell for line in table for cell in line.split("  ")[1:] if cell.strip() and line.startswith("  ")]
    assert len(cells) > 50
    assert not [c for c in cells if c.strip()[0].isdigit() and c.strip() != "0" and not c.strip()[-1].isalpha()]


def test_plan_says_why_its_choice_is_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    plan()
    printed = " ".join(capsys.readouterr().out.split())
    assert "Equal within 2%, and LV-XAttn is preferred among equals: mesh 4x4 (" in printed
    assert "ring takes 1.93 times as long: 2.63 s more of transfers that computation does not hide." in printed
    plan(frames="64", text="64", gpus="4")
    assert "replicate" in capsys.readouterr().out
    why = plan_json(capsys, "--strategy", "lv-xattn")["best"]["why"]
    assert why == "No other strategy was compared."


def test_plan_of_a_data_set_has_hours_and_gpu_hours(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--samples", "10001", "--epochs", "2", "--batch", "2"]
    shown = plan_json(capsys, *options)
    found, seconds = shown["data_set"], next(r["seconds"] for r in shown["strategies"] if r["strategy"] == "lv-xattn")
    assert found["steps"] == 2 * 5001 and found["hours"] == pytest.approx(2 * 5001 * seconds / 3600)
    assert found["gpu_hours"] == pytest.approx(16 * found["hours"])
    assert plan(*options) == 0
    printed = capsys.readouterr().out
    assert "10,001 samples x 2 epochs in 10,002 steps of 2 on 16 GPUs:\n  lv-xattn: " in printed
    assert printed.rstrip().endswith("GPU-hours") and "\n  ring: " in printed
    assert "data_set" not in plan_json(capsys)


def test_plan_takes_whole_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(gpus="15") == 2
    assert "--gpus 15: a node of a100-80g-4x4 has 4 GPUs" in (error := capsys.readouterr().err) and "12 or 16" in error
    assert plan(gpus="3") < 2 and plan(gpus="12") < 2  # a part of one node, and three nodes


def test_plan_draws_a_timeline(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "timeline.svg"
    assert plan("--timeline", str(figure), gpus="3") == 1  # it does not fit
    paths = list(xml.etree.ElementTree.parse(figure).iter("{http://www.w3.org/2000/svg}path"))
    # 3 ranks, forward and backward, each with 4 blocks and 2 transfers of either kind
    assert len(paths) > 2 * 3 * (4 + 2 + 2)
    picture = tmp_path / "timeline.png"
    assert plan("--timeline", str(picture), gpus="3") == 1
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert plan("--timeline", str(tmp_path / "timeline.mp3")) == 2
    assert plan("--gradient_checkpointing", "--timeline", str(figure), **QWEN) == 0
    assert "One self-attention layer of qwen2_5_vl_7b" in figure.read_text()


def test_plan_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    shown = plan_json(capsys, "--strategy", "ring", "lv-xattn")
    assert [row["strategy"] for row in shown["strategies"]] == ["lv-xattn", "ring"]
    first = shown["strategies"][0]
    assert first["seconds"] == pytest.approx(sum(p["forward"] + p["backward"] for p in first["parts"].values()))
    assert first["memory_total"] == sum(first["memory"].values())
    best = {"strategy": "lv-xattn", "tile": [16, 1], "patch_model": {"strategy": "lv-xattn"}}
    assert best.items() <= shown["best"].items()
    assert shown["self_attention"]["tile"] == [1, 16] and shown["enough_gpus"] == 8


def test_plan_prints_the_options_of_patch_model(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--keep-visual", "--mlp-chunk-size", "256", "--no-overlap", "--self-attention", "local"]
    best = plan_json(capsys, "--strategy", "mesh", *options)["best"]
    expected = {"strategy": "mesh", "self_attention": "local", "tile": best["tile"], "recompute_visual": False}
    assert best["patch_model"] == expected | {"overlap": False, "mlp_chunk_size": 256}
    inference = plan_json(capsys, "--trained", "none")
    assert inference["run"]["parameter"] == 2 and inference["strategies"][0]["memory"]["optimizer"] == 0


def test_plan_says_how_many_cores_decode_for_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = plan_json(capsys, "--decode_per_frame", "8")
    for row in shown["strategies"]:
        decoded = shown["run"]["frames"] * shown["run"]["batch"] / shown["run"]["gpus"] * 8
        assert row["cores_per_gpu"] == pytest.approx(decoded / 400 / row["seconds"])
    assert plan() == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("data, cores for each GPU")]
    assert float(line.split()[5]) == pytest.approx(30 / 8 * shown["strategies"][0]["cores_per_gpu"], rel=0.01)


def test_plan_of_lora(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--lora_r", "16", "--lora_target", "attention", "mlp", "--base_parameter", "0.5") == 0
    printed = capsys.readouterr().out
    assert "0.0404 B trained (LoRA of rank 16 on attention, mlp)" in printed
    assert "frozen weights of 0.5, adapters of 4" in printed
    row = plan_json(capsys, "--lora_r", "16")["strategies"][0]
    assert 0 < row["memory"]["optimizer"] < row["memory"]["parameters"] / 20


def test_plan_of_a_decoder_only_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gradient_checkpointing", "--lora_r", "16", "--samples", "1000", **QWEN) == 0
    text = capsys.readouterr().out
    assert "1,024 frames, 299 tokens for every 2 of them" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100
    assert "  patch_model(model)\n" in text and "LoRA of rank 16 on attention, mlp)" in text
    assert "cross" not in text and "K and V of frames" not in text and "\n  ring: " in text
    shown = plan_json(capsys, "--gradient_checkpointing", "--self_attention", "mesh", **QWEN)
    (row,) = shown["strategies"]
    expected = {"self_attention": "mesh", "tile": row["tile"]}
    assert shown["best"]["patch_model"] == expected
    answer = ["--trained", "none", "--answer", "64"]
    assert plan(*answer, **QWEN) == 0
    text = capsys.readouterr().out
    for part in ("time of an answer of 64 tokens", "each token", "bytes, parameters of 2, on every"):
        assert part in text
    shown = plan_json(capsys, *answer, "--frame-tokens", "1280x720", **QWEN)
    assert "cache" in shown["strategies"][0]["memory"]
    tall = shown["run"]["model"]["vision"]
    assert (tall["keys"], tall["tokens"]) == (1196, 4 * 1196)


def test_plan_of_too_long_a_video_says_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--self_attention", "ulysses", frames="86400", text="90000") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "Nothing fits with 86,400 frames; at most" in printed and "GPUs are enough." in printed
    assert "lv-xattn needs the least memory" in printed and "self-attention ulysses 4 x" in printed
    assert "are planned with" not in printed
    assert plan("--keep-visual", "--mlp-chunk-size", "256", frames="86400", text="90000") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.endswith("All strategies are planned with recompute_visual=False, mlp_chunk_size=256.")


def test_plan_with_offload_has_the_host_memory_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--visual_offload", "cpu", "--trained", "none") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"features of a rank in host memory {256 * 729 * 3584 * 2 / 1e9:.3g} GB" in printed


@pytest.fixture
def small_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `calibrate` measure decoding with a video that is written in milliseconds."""
    for name, value in (("_HEIGHT", 72), ("_WIDTH", 128), ("_FRAMES", 30)):
        monkeypatch.setattr(reader, name, value)


@pytest.mark.usefixtures("small_video")
def test_calibrate_appends_to_a_redirected_stream(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("calibrate", "kernel_rates"):  # measured once
        monkeypatch.setattr(calibrate, name, functools.cache(getattr(calibrate, name)))
    for options in ([], ["--output", "/dev/stdout"], ["--output", "/dev/fd/1"]):
        os.write(1, b"first line\n")
        measure(["--device", "cpu", "--heads", "4", "--dim", "32", *options])
        printed = capfd.readouterr().out
        assert printed.startswith("first line\nname: measured\n"), (options, printed)


def test_calibrate_finds_a_missing_folder_before_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(calibrate, "calibrate")
    file = tmp_path / "missing" / "here.yaml"
    with pytest.raises(ConfigError, match=f"--output {file}: cannot be written .No such file or directory.; give a"):
        measure(["--device", "cpu", "--output", str(file)])


@pytest.mark.usefixtures("small_video")
def test_calibrate_writes_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.yaml"
    assert main(["calibrate", "--device", "cpu", "--heads", "4", "--dim", "32", "--output", str(file)]) == 0
    cluster = read_cluster(file)
    printed = capsys.readouterr().err
    assert "measured: 1 rank on cpu, float32, 4 heads (4 KV heads) of 32" in printed
    assert cluster.decode_rate is not None and "decoding, one core: " in printed
    assert "kernel torch_cpu: " in printed and "kernel blocked_matmul: " in printed
    assert cluster.gpus_per_node == 1 and "links are not measured" in cluster.source
    assert plan(cluster=str(file)) == 2
    assert "16 ranks need gpus_per_node, node_link and network_link, which one process" in capsys.readouterr().err
    for options, fault in (
        (["--heads", "3", "--kv-heads", "2"], "--kv_heads 2 do not divide"),
        (["--dim", "0"], "--dim: 0"),
    ):
        with pytest.raises(ConfigError, match=fault):
            measure(options)
