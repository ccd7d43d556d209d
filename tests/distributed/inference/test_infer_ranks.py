"""Layer: gloo ranks. The inference script without its launch: sampling, sharded weights, ranks that disagree."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from mllm_seqpar.errors import AgreementError, ConfigError
from mllm_seqpar.inference.run import infer
from ranks import ranks

pytestmark = pytest.mark.slow


def run(rank: int, world: int, argv: list[str], rank_1_argv: list[str] | None = None) -> str:
    """Run the script and return what this rank wrote to standard output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        infer([*argv, *(rank_1_argv or [] if rank == 1 else [])])
    return out.getvalue()


def answer_tokens(world: int, files: Path, *argv: Any) -> list[int]:
    options = [
        "--model",
        files / "gated",
        "--video",
        files / "clip.mp4",
        "--num-frames",
        5,
        "--question",
        "What is it?",
    ]
    options += ["--no-progress", "--max-new-tokens", 16, "--report", files / "report.json", *argv]
    texts = ranks(world).run(run, [*map(str, options)])
    report = json.loads((files / "report.json").read_text())
    (answer,) = report["answers"]
    assert texts == [answer["text"] + "\n", *[""] * (world - 1)]
    return answer["tokens"]


def test_sampled_answers_depend_on_the_seed_only(inference_files: Path) -> None:
    sampling = ("--temperature", 1.5, "--top-p", 0.9)
    tokens = answer_tokens(1, inference_files, *sampling, "--seed", 3)
    assert answer_tokens(3, inference_files, *sampling, "--seed", 3) == tokens
    assert answer_tokens(3, inference_files, *sampling, "--seed", 4) != tokens


def test_sharded_weights_do_not_change_the_answer(inference_files: Path) -> None:
    assert answer_tokens(3, inference_files, "--shard-weights") == answer_tokens(1, inference_files)


@pytest.mark.parametrize(
    ("rank_1_argv", "message"),
    [
        (["--question", "Why?"], "arguments: the ranks differ in question: rank 0: ('What?',); rank 1: "),
        (["--fps", "none"], "arguments: rank 1: argument --fps: invalid float value: 'none'"),
    ],
)
def test_ranks_with_different_options_are_refused(inference_files: Path, rank_1_argv: list[str], message: str) -> None:
    argv = ["--model", str(inference_files / "gated"), "--video", str(inference_files / "clip.mp4")]
    errors = ranks(2).errors(run, [*argv, "--question", "What?"], rank_1_argv)
    assert isinstance(errors[0], AgreementError) and str(errors[0]).startswith(message)
    assert isinstance(errors[1], AgreementError | ConfigError)
