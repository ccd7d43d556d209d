"""Layer: gloo ranks. The inference script without its launch: sampling, sharded weights, ranks that disagree."""

import contextlib
import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmms_eval_names import lmms_eval_model
from mllm_seqpar.chats.clip import Clip
from mllm_seqpar.cli.options import parse_options
from mllm_seqpar.data import FrameChoice
from mllm_seqpar.errors import AgreementError, ConfigError
from mllm_seqpar.inference import Answer, Sampling
from mllm_seqpar.inference.ask import ask
from mllm_seqpar.inference.job import Job
from mllm_seqpar.serving.chat import ChatOptions
from mllm_seqpar.serving.jobs import joined_worker
from ranks import ranks

pytestmark = pytest.mark.slow


def run(rank: int, world: int, argv: list[str], rank_1_argv: Sequence[str] = ()) -> str:
    """Run the script and return what this rank wrote to standard output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        ask([*argv, *(rank_1_argv if rank == 1 else ())])
    return out.getvalue()


def answer_tokens(world: int, files: Path, *argv: Any) -> list[int]:
    options = ["--model", files / "gated", "--video", files / "clip.mp4", "--num_frames", 5, "--no_progress", *argv]
    options += ["--question", "What is it?", "--max_new_tokens", 16, "--report", files / "report.json"]
    texts = ranks(world).run(run, [*map(str, options)])
    (answer,) = json.loads((files / "report.json").read_text())["answers"]
    assert texts == [answer["text"] + "\n", *[""] * (world - 1)]
    return answer["tokens"]


def test_sampled_answers_depend_on_the_seed_only(inference_files: Path) -> None:
    sampling = ("--temperature", 1.5, "--top_p", 0.9)
    tokens = answer_tokens(1, inference_files, *sampling, "--seed", 3)
    assert answer_tokens(3, inference_files, *sampling, "--seed", 3) == tokens
    assert answer_tokens(3, inference_files, *sampling, "--seed", 4) != tokens


def test_sharded_weights_do_not_change_the_answer(inference_files: Path) -> None:
    assert answer_tokens(3, inference_files, "--shard_weights") == answer_tokens(1, inference_files)


def answers_around_an_interruption(rank: int, world: int, argv: list[str], video: str) -> list[tuple[str, list[int]]]:
    with joined_worker(parse_options(ChatOptions, argv, prog="chat", description=""), keep=1) as worker:
        found: list[tuple[str, list[int]]] = []
        while rank and (followed := worker.follow_one()) is not None:
            assert isinstance(followed, Answer)
            found.append((followed.finish_reason, followed.tokens))
        content = [{"type": "video"}, {"type": "text", "text": "What is it?"}]
        media, sampling = (Clip.of_file("video", video, FrameChoice(num_frames=5)),), Sampling(max_new_tokens=6)
        asked = Job(messages=[{"role": "user", "content": content}], media=media, sampling=sampling)
        for stops in () if rank else (False, True, False):
            polls = itertools.count()  # the second one ends the prefill
            answer = worker.run(asked, interrupted=lambda stops=stops, polls=polls: stops and next(polls) > 0)
            found.append((answer.finish_reason, answer.tokens))
        return found


@pytest.mark.parametrize("options", [[], ["--shard_weights"]])
def test_answer_after_an_interrupted_prefill_is_right(inference_files: Path, options: list[str]) -> None:
    argv = ["--model", str(inference_files / "gated"), *options]
    found = ranks(2).run(answers_around_an_interruption, argv, str(inference_files / "clip.mp4"))
    (whole, stopped, again), other = found
    assert other == [whole, stopped, again] and stopped == ("interrupted", []) and whole == again and whole[1]


def test_an_invalid_option_on_one_rank_stops_all(inference_files: Path) -> None:
    argv = ["--model", str(inference_files / "gated"), "--video", str(inference_files / "clip.mp4"), "--question", "?"]
    errors = ranks(2).errors(run, argv, ["--fps", "none"])
    assert [type(error) for error in errors] == [AgreementError, ConfigError]
    assert str(errors[0]) == f"arguments: rank 1: {errors[1]}"


def make_lmms_eval_model(rank: int, world: int, sp: Sequence[int]) -> None:
    with lmms_eval_model() as module:
        module.SimpleSeqParModel("no model", device="cpu", sp=sp[rank])


def test_different_options_of_lmms_eval_stop_all_ranks_before_groups_are_made() -> None:
    """Ranks with different numbers of groups would wait for each other in their creation."""
    for error in ranks(2).errors(make_lmms_eval_model, (1, 2)):
        assert isinstance(error, AgreementError) and "the ranks differ in options: rank 0: {'sp': 1}" in str(error)
    errors = ranks(2).errors(make_lmms_eval_model, (1, 0))
    assert [type(error) for error in errors] == [AgreementError, ConfigError]
