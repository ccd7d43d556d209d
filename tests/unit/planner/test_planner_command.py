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
from mllm_seqpar.videos import decode_cost

RUN = "--model mplug-owl3-7b --frames 4096 --text 8192 --gpus 16 --cluster a100-80g-4x4"
QWEN = "--model qwen2_5_vl_7b --gpus 8 --cluster a100-80g-8xN --frames 1024 --text 1024"
SHORT = "--model qwen2_5_vl_7b --gpus 8 --frames 64 --text 64 --cluster h200-141g-8xN --trained none"
TOO_LONG = "--frames 86400 --text 90000"
ANSWER = f"{QWEN} --trained none --answer 64"


def plan(options: str = "", *more: Any) -> int:
    """Run the command with `RUN`, unless `options` have a value of it, and return its exit status."""
    given, others = [*options.split(), *map(str, more)], RUN.split()
    pairs = zip(others[::2], others[1::2], strict=True)
    return main(["plan", *given, *(part for name, value in pairs if name not in given for part in (name, value))])


def plan_json(capsys: pytest.CaptureFixture[str], options: str = "") -> dict[str, Any]:
    status = plan(f"--json {options}")
    printed = json.loads(capsys.readouterr().out)
    assert status == (0 if any(row["fits"] for row in printed["strategies"]) else 1)
    return printed


@pytest.mark.parametrize(
    ("options", "words", "absent"),
    [
        ("--text 4096", ["4,096 frames of 729 tokens, 4,096 text"], []),  # a placeholder for each frame
        ("", ["8.04 B parameters", "replicate", "vision tower", "optimizer", "longest video"], ["launches"]),
        ("", ["no gradient checkpointing", "Best: lv", "patch_model(model, strategy='lv-xattn') Equal"], []),
        ("", ["Equal within 2%, and LV-XAttn is preferred among equals: mesh 4x4 (", "8 GPUs are enough"], []),
        ("", ["ring takes 1.93 times as long: 2.63 s more of transfers that computation does not hide."], []),
        ("--frames 64 --text 64 --gpus 4", ["replicate"], []),
        ("--strategy lv-xattn", ["No other strategy was compared."], ["GPU-hours"]),
        ("--samples 10001 --epochs 2 --batch 2", ["10,001 samples x 2 epochs in 10,002 steps of 2 on 16 GPUs: lv"], []),
        ("--samples 10001", [" ring: ", "GPU-hours"], []),
        ("--frames 28000 --text 32096 --strategy ring lv-xattn", ["No other strategy fits."], []),
        (f"{SHORT} --samples 10", ["Best: ulysses", " ring: 0.000168 hours"], ["0.00134 GPU-hours ring"]),  # once
        ("--lora_r 16 --lora_target attention mlp", ["0.0404 B trained (LoRA of rank 16 on attention, mlp)"], []),
        ("--lora_r 16 --base_parameter 0.5", ["frozen weights of 0.5, adapters of 4"], []),
        ("--visual_offload cpu --trained none", ["features of a rank in host memory 1.34 GB"], []),
        (
            f"{QWEN} --gradient_checkpointing",
            ["1,024 frames, 299 tokens for every 2 of them", "patch_model(model) "],
            [],
        ),
        (
            f"{QWEN} --gradient_checkpointing --lora_r 16 --samples 9",
            ["rank 16 on attention, mlp)", " ring: "],
            ["cross", "K and V of frames"],
        ),
        (ANSWER, ["time of an answer of 64 tokens", "each token", "parameters of 2, on every"], []),
        (
            f"{TOO_LONG} --self_attention ulysses",
            ["Nothing fits with 86,400 frames; at most", "64 GPUs are enough."],
            ["are planned with"],
        ),
        (f"{TOO_LONG} --self_attention ulysses", ["self-attention ulysses 4 x", "lv-xattn needs the least memory"], []),
        (
            f"{TOO_LONG} --keep-visual --mlp-chunk-size 256",
            ["planned with recompute_visual=False, mlp_chunk_size=256."],
            [],
        ),
    ],
)
def test_plan_prints_text(
    options: str, words: list[str], absent: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(options) == int(TOO_LONG in options)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    joined = " ".join(printed.split())
    assert not [part for part in words if part not in joined] and not [part for part in absent if part in joined]


@pytest.mark.parametrize("options", ["", "--model llama-3.2-90b-vision --gpus 32 --batch 2"])
def test_plan_has_units_in_its_cells(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan(f"--self_attention auto --lora_r 16 --gradient-checkpointing --samples 1000000 {options}")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    table = lines[lines.index("") + 3 : lines.index("", lines.index("") + 1)]
    cells = [cell for line in table for cell in line.split("  ")[1:] if cell.strip() and line.startswith("  ")]
    assert len(cells) > 50
    assert not [c for c in cells if c.strip()[0].isdigit() and c.strip() != "0" and not c.strip()[-1].isalpha()]


def test_plan_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    shown = plan_json(capsys, "--strategy ring lv-xattn --decode_per_frame 8")
    assert [row["strategy"] for row in shown["strategies"]] == ["lv-xattn", "ring"]
    first = shown["strategies"][0]
    assert first["seconds"] == pytest.approx(sum(p["forward"] + p["backward"] for p in first["parts"].values()))
    assert first["memory_total"] == sum(first["memory"].values())
    best = {"strategy": "lv-xattn", "tile": [16, 1], "patch_model": {"strategy": "lv-xattn"}}
    assert best.items() <= shown["best"].items() and "data_set" not in shown
    assert shown["self_attention"]["tile"] == [1, 16] and shown["enough_gpus"] == 8
    for row in shown["strategies"]:  # 8 frames are decoded for each that is used, at 400 per second and core
        assert row["cores_per_gpu"] == pytest.approx(4096 / 16 * 8 / 400 / row["seconds"])
    assert plan() == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("data, cores for each GPU")]
    assert float(line.split()[5]) == pytest.approx(30 / 8 * first["cores_per_gpu"], rel=0.01)
    assert plan_json(capsys, "--strategy lv-xattn")["best"]["why"] == "No other strategy was compared."
    shown = plan_json(capsys, "--samples 10001 --epochs 2 --batch 2")
    seconds = next(row["seconds"] for row in shown["strategies"] if row["strategy"] == "lv-xattn")
    data, hours = shown["data_set"], 2 * 5001 * seconds / 3600
    assert (data["steps"], data["hours"], data["gpu_hours"]) == pytest.approx((2 * 5001, hours, 16 * hours))
    row = plan_json(capsys, "--lora_r 16")["strategies"][0]
    assert 0 < row["memory"]["optimizer"] < row["memory"]["parameters"] / 20
    shown = plan_json(capsys, f"{ANSWER} --frame-tokens 1280x720")
    assert "cache" in shown["strategies"][0]["memory"]
    tall = shown["run"]["model"]["vision"]
    assert (tall["keys"], tall["tokens"]) == (1196, 4 * 1196)


def test_plan_prints_the_options_of_patch_model(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--strategy mesh --keep-visual --mlp-chunk-size 256 --no-overlap --self-attention local"
    best = plan_json(capsys, options)["best"]
    expected = {"strategy": "mesh", "self_attention": "local", "tile": best["tile"], "recompute_visual": False}
    assert best["patch_model"] == expected | {"overlap": False, "mlp_chunk_size": 256}
    inference = plan_json(capsys, "--trained none")
    assert inference["run"]["parameter"] == 2 and inference["strategies"][0]["memory"]["optimizer"] == 0
    shown = plan_json(capsys, f"{QWEN} --gradient_checkpointing --self_attention mesh")
    (row,) = shown["strategies"]
    assert shown["best"]["patch_model"] == {"self_attention": "mesh", "tile": row["tile"]}


def test_plan_takes_whole_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpus 15") == 2
    assert "--gpus 15: a node of a100-80g-4x4 has 4 GPUs" in (error := capsys.readouterr().err) and "12 or 16" in error
    assert plan("--gpus 3") < 2 and plan("--gpus 12") < 2  # a part of one node, and three nodes


def test_plan_draws_a_timeline(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "timeline.svg"
    assert plan("--gpus 3 --timeline", figure) == 1  # it does not fit
    paths = list(xml.etree.ElementTree.parse(figure).iter("{http://www.w3.org/2000/svg}path"))
    # 3 ranks, forward and backward, each with 4 blocks and 2 transfers of either kind
    assert len(paths) > 2 * 3 * (4 + 2 + 2)
    picture = tmp_path / "timeline.png"
    assert plan("--gpus 3 --timeline", picture) == 1
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert plan("--timeline", tmp_path / "timeline.mp3") == 2
    assert plan(f"{QWEN} --gradient_checkpointing --timeline", figure) == 0
    assert "One self-attention layer of qwen2_5_vl_7b" in figure.read_text()


@pytest.fixture
def small_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `calibrate` measure decoding with a video that is written in milliseconds."""
    for name, value in (("_HEIGHT", 72), ("_WIDTH", 128), ("_FRAMES", 30)):
        monkeypatch.setattr(decode_cost, name, value)


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
    assert plan("--cluster", file) == 2
    assert "16 ranks need gpus_per_node, node_link and network_link, which one process" in capsys.readouterr().err
    for options, fault in (
        (["--heads", "3", "--kv-heads", "2"], "--kv_heads 2 do not divide"),
        (["--dim", "0"], "--dim: 0"),
    ):
        with pytest.raises(ConfigError, match=fault):
            measure(options)
