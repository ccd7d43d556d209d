"""Layer: gloo ranks. Training on stored outputs of the vision tower is training on frames, bit for bit."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file, save_file

from launch import launch_environment
from mllm_seqpar.chats import clip as clip_module
from mllm_seqpar.cli.check_data import check
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.mplug_owl3.modeling import MPlugOwl3VisionModel
from mllm_seqpar.training import batches
from mllm_seqpar.training.finetune import fine_tune
from ranks import ranks
from ranks_worker import reset_global_state
from training_logs import assert_same_trajectory, fine_tuning, log_of

STEPS, VIDEOS = 4, 3  # two epochs of two steps: 4 samples, one without a video


@pytest.fixture(scope="module")
def training_files(training_files: Path) -> Path:
    """The files of training with `short.jsonl`, the first samples, and `few.jsonl`, some of them for evaluation."""
    rows = (training_files / "train.jsonl").read_text().splitlines(keepends=True)
    (training_files / "short.jsonl").write_text("".join(rows[: VIDEOS + 1]))
    (training_files / "few.jsonl").write_text("".join(rows[VIDEOS - 1 : VIDEOS + 1]))  # the last has no video
    return training_files


def arguments(files: Path, output: Path, *more: object) -> list[str]:
    options = ["--data", files / "short.jsonl", "--global_batch_size", 2, "--save_strategy", "no", "--max_steps", STEPS]
    options += ["--eval_data", files / "few.jsonl", "--eval_strategy", "steps", "--eval_steps", STEPS // 2]
    return fine_tuning(files, output, *options, "--vision_chunk_size", 2, *more)  # the tower runs several times


def counted(argv: list[str]) -> tuple[int, int]:
    """Train; return how many runs the tower had, and how many micro-batches were decoded."""
    tower = mock.patch.object(
        MPlugOwl3VisionModel, "penultimate", autospec=True, side_effect=MPlugOwl3VisionModel.penultimate
    )
    decoding = mock.patch.object(batches, "load_local_images", side_effect=batches.load_local_images)
    with tower as runs, decoding as decoded:
        assert fine_tune(argv) == 0
    reset_global_state()
    return runs.call_count, decoded.call_count


def trained(output: Path) -> Any:
    return {name: weight.tolist() for name, weight in load_file(output / "model" / "model.safetensors").items()}


@pytest.mark.slow
def test_second_epoch_runs_no_tower_and_trains_the_same(training_files: Path, tmp_path: Path) -> None:
    argv = arguments(training_files, tmp_path / "plain", "--freeze", "vision")
    plain = counted(argv)
    stored = arguments(training_files, tmp_path / "stored", "--freeze", "vision", "--features", tmp_path / "features")
    first = counted(stored)
    again = arguments(training_files, tmp_path / "again", "--freeze", "vision", "--features", tmp_path / "features")
    second = counted(again)
    assert plain[1] == 2 * VIDEOS + 2 and first[0] < plain[0]  # two epochs and two evaluations
    assert first[1] == VIDEOS and second == (0, 0)
    assert log_of(tmp_path / "plain") == log_of(tmp_path / "stored") == log_of(tmp_path / "again")
    assert trained(tmp_path / "plain") == trained(tmp_path / "stored") == trained(tmp_path / "again")


@pytest.mark.slow
def test_training_on_a_frame_store_is_training_on_videos(training_files: Path, tmp_path: Path) -> None:
    store, data = tmp_path / "frames", [str(training_files / f"{name}.jsonl") for name in ("short", "few")]
    assert check([*data, "--store", str(store)]) == 0
    assert fine_tune(arguments(training_files, tmp_path / "videos")) == 0
    reset_global_state()
    with mock.patch.object(clip_module, "read_frames", side_effect=AssertionError("a video is decoded")):
        assert fine_tune(arguments(training_files, tmp_path / "stored", "--frame_store", store)) == 0
    reset_global_state()
    assert log_of(tmp_path / "videos") == log_of(tmp_path / "stored")
    assert trained(tmp_path / "videos") == trained(tmp_path / "stored")
    with pytest.raises(DataError, match="the frame store does not have the"):
        fine_tune(arguments(training_files, tmp_path / "other", "--frame_store", store, "--fps", 0.5))
    reset_global_state()


def on_ranks(
    rank: int, world: int, files: Path, features: Path, more: list[str], runs: tuple[str, ...]
) -> list[tuple[int, int]]:
    """Train once for each run, with stored features except in "plain"; the runs are the names of the outputs."""
    found = []
    for name in runs:
        given = [] if name == "plain" else ["--features", features]
        found.append(counted(arguments(files, features.parent / name, "--freeze", "vision", *more, *given)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "more"),
    [(2, ["--shard_weights"]), (2, ["--sp", "1", "--shard_weights"]), (2, ["--use_peft", "--lora_r", "4"])],
    ids=["fsdp2", "two-groups", "lora"],
)
def test_ranks_store_and_read_their_frames(training_files: Path, tmp_path: Path, world: int, more: list[str]) -> None:
    runs = ("plain", "stored", "again")
    results = ranks(world).run(on_ranks, training_files, tmp_path / "features", more, runs)
    assert all(again == (0, 0) for _, _, again in results)
    assert all(stored[0] < plain[0] and stored[1] < plain[1] for plain, stored, _ in results)
    plain, stored, again = (log_of(tmp_path / name) for name in runs)
    assert plain == stored == again and len(plain) == STEPS + 2


@pytest.mark.slow
def test_features_of_one_process_are_read_by_two(training_files: Path, tmp_path: Path) -> None:
    features = tmp_path / "features"
    counted(arguments(training_files, tmp_path / "one", "--freeze", "vision", "--features", features))
    environment = launch_environment("configs/fsdp2_cpu_2.yaml")
    results = ranks(2, environment).run(on_ranks, training_files, features, ["--sp", "2"], ("stored",))
    assert results == [[(0, 0)]] * 2
    assert_same_trajectory(log_of(tmp_path / "stored"), log_of(tmp_path / "one"))


@pytest.mark.slow
def test_features_that_do_not_fit_are_one_sentence(training_files: Path, tmp_path: Path) -> None:
    features, number, model = tmp_path / "features", itertools.count(), tmp_path / "model"

    def argv(*more: object) -> list[str]:
        return arguments(training_files, tmp_path / f"out-{next(number)}", "--features", features, *more)

    frozen = ("--freeze", "vision")
    shutil.copytree(training_files / "model", model)
    config = json.loads((model / "config.json").read_text())
    config["vision_config"]["attention_dropout"] = 0.1
    (model / "config.json").write_text(json.dumps(config))
    for options, message in (
        ((), r"64 of its tensors are trained, such as .*; freeze it \(--freeze vision\)"),
        (("--use_peft",), r"tensors are trained, such as .*lora_A.*; freeze it \(--freeze vision\)"),
        ((*frozen, "--model", model), r"random in training \(attention_dropout = 0.1\); set it to 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            fine_tune(argv(*options))
    counted(argv(*frozen))
    shutil.copy(training_files / "model" / "config.json", model)
    weights = load_file(model / "model.safetensors")
    weights = {name: w + 1 if name.startswith("vision_model.") else w for name, w in weights.items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    for options, message in (
        (("--fps", "2"), "made with fps = None, and now it is 2.0; give --features another directory"),
        (("--model", model), "made with model = "),
    ):
        with pytest.raises(DataError, match=message):
            fine_tune(argv(*frozen, *options))
    files = sorted(features.glob("frames/*/*.safetensors"))
    files[0].unlink()  # these frames are encoded again
    counted(argv(*frozen))
    assert files[0].exists()
