"""Layer: real launch, on two nodes in network namespaces (root, iproute2) with capped links.

Losses and tokens are those of one process, and a node that fails brings down the other with a message.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from launch import Launched
from mllm_seqpar.inference.ask import ask
from mllm_seqpar.training.finetune import fine_tune
from nodes import TwoNodes, two_nodes
from training_logs import assert_same_trajectory, log_of

pytestmark = [pytest.mark.launch, pytest.mark.slow]
HERE = Path(__file__).resolve().parent
STEPS = 2
TIMEOUT = 300
"""Of the process group, in seconds, where a lost rank is to be noticed before."""
CLOSED = "closed|reset|broken pipe"
LOST = re.compile(r"\[rank (\d)\] stopped: another rank ended or does not answer \((.*)\)")


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with two_nodes() as pair:
        yield pair


def arguments(files: Path, *more: object) -> list[str]:
    argv = ["--model", files / "model", "--data", files / "train.jsonl", "--disable_tqdm", True, "--max_steps", STEPS]
    argv += ["--global_batch_size", 2, "--learning_rate", 1e-3, "--adam_epsilon", 1e-4, "--ddp_timeout", TIMEOUT]
    return [*map(str, [*argv, "--warmup_steps", 0, *more])]


@pytest.fixture(scope="module")
def one_process(training_files: Path) -> Path:
    """A run of this process alone."""
    output = training_files / "one-machine"
    fine_tune(arguments(training_files, "--output_dir", output))
    return output


def assert_stopped(done: Launched, ranks: set[int], cause: str) -> None:
    """Assert that a launcher failed, that these ranks of it say so in one line each, and that a line has the cause."""
    assert done.returncode != 0, done.output
    found = dict(LOST.findall(done.output))
    assert {int(rank) for rank in found} == ranks, done.output
    assert re.search(cause, " ".join(found.values()), re.IGNORECASE), done.output


def test_nodes_share_samples_or_are_data_parallel_and_a_killed_rank_ends_both(
    nodes: TwoNodes, training_files: Path, one_process: Path, tmp_path: Path
) -> None:
    """One sequence-parallel group over both nodes; one in each, with parameters over all ranks, then copies (HSDP)."""
    program, options = HERE / "train_until_killed.py", arguments(training_files)
    first, second = nodes.accelerate("configs/fsdp2_hsdp_cpu_2x2.yaml", program, tmp_path, *options)
    names = ["shared", "sharded", "hsdp"]
    reached = [name for name in names if (tmp_path / name / "trainer_state.json").exists()]
    assert reached == names, first.output + second.output
    assert first.output.count("1 data parallel x 4 sequence parallel ranks") == 1
    assert_same_trajectory(log_of(tmp_path / "shared"), log_of(one_process))
    files = [folder / "model" / "model.safetensors" for folder in (tmp_path / "shared", one_process)]
    assert load_file(files[0]).keys() == load_file(files[1]).keys()
    assert first.output.count("2 data parallel x 2 sequence parallel ranks") == 2
    assert_same_trajectory(log_of(tmp_path / "sharded"), log_of(one_process))
    assert_same_trajectory(log_of(tmp_path / "hsdp"), log_of(one_process)[:-1])
    everywhere, hybrid = json.loads((tmp_path / "groups.json").read_text())
    assert everywhere == [["Shard", [0, 1, 2, 3]]]
    assert hybrid == [["Replicate", [0, 2]], ["Shard", [0, 1]]]

    assert_stopped(first, {0, 1}, CLOSED)
    assert_stopped(second, {2}, CLOSED)
    assert "SIGKILL" in second.output


def test_two_nodes_answer_as_one_process(nodes: TwoNodes, inference_files: Path, tmp_path: Path) -> None:
    reports = [tmp_path / "nodes.json", tmp_path / "one.json"]
    options = ["--model", inference_files / "gated", "--video", inference_files / "clip.mp4", "--fps", 3]
    options += ["--question", "What is it?", "--question", "Why?", "--max-new-tokens", 8, "--no-progress", "--report"]
    done = nodes.torchrun("scripts/infer_long_video.py", *options, reports[0])
    assert [node.returncode for node in done] == [0, 0], done[0].output + done[1].output
    ask([*map(str, options), str(reports[1])])
    found, expected = (json.loads(path.read_text()) for path in reports)
    assert (found["ranks"], found["frames"]) == (2, expected["frames"])
    assert [row["tokens"] for row in found["answers"]] == [row["tokens"] for row in expected["answers"]]
    assert min(found["bytes_sent"]) > 0


def test_a_lost_node_is_noticed_at_the_timeout(nodes: TwoNodes, tmp_path: Path) -> None:
    def cut_when_ranks_run(wait_until: Callable) -> None:
        wait_until(lambda: len([*tmp_path.glob("reduces-*")]) == 2)
        nodes.links.cut(1)

    first, second = nodes.torchrun(HERE / "reduce_until_failure.py", 8, tmp_path, during=cut_when_ranks_run)
    assert_stopped(first, {0}, "timed out")
    assert_stopped(second, {1}, "timed out")
