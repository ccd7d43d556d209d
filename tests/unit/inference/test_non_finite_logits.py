"""Layer: one process. Logits that are NaN or infinite are an error of their question, on all ranks, and no answer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.comm.agreement import attempt
from mllm_seqpar.data import VideoSource
from mllm_seqpar.errors import NonFiniteLogitsError
from mllm_seqpar.inference import Sampling
from mllm_seqpar.inference.arguments import parse
from mllm_seqpar.inference.ask import ask_videos
from mllm_seqpar.inference.conversation import Conversation
from mllm_seqpar.inference.data_set import AnswerFile, answer_data_set
from mllm_seqpar.inference.generation import FiniteLogits
from mllm_seqpar.models.loading import load_processor
from model_copies import load_model

pytestmark = pytest.mark.usefixtures("load_models_once")
CPU = torch.device("cpu")
GOOD, BAD = "Which one?", "Which one!"
FRAMES = ["--num_frames", "3", "--no_progress"]


@pytest.fixture(scope="module")
def overflowing(inference_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory whose logits are NaN after a prompt that has an exclamation mark."""
    folder = tmp_path_factory.mktemp("overflowing")
    model, processor = load_model(str(inference_files / "gated")), load_processor(str(inference_files / "gated"))
    token = processor.tokenizer.convert_tokens_to_ids("!")
    assert token != processor.tokenizer.unk_token_id
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.inf  # type: ignore[operator]
    model.save_pretrained(folder)  # type: ignore[operator]
    processor.save_pretrained(folder)
    return folder


def run(function: Any, world: int, *argv: Any) -> list[Any]:
    """Return what `ask_videos` or `answer_data_set` returns or raises on each rank."""

    def result(comm: Communicator) -> Any:
        found, error = attempt(lambda: function(parse([*map(str, [*argv, *FRAMES])]), comm, CPU))
        return error or found

    return run_loopback(world, result)


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, ["--choices"]),
        (2, ["--choices"]),
        (1, ["--temperature", 1.5, "--max_new_tokens", 4]),  # ranks that are threads share random numbers
        (2, ["--max_new_tokens", 4]),
    ],
)
def test_question_without_finite_logits_has_an_error_in_place_of_an_answer(
    overflowing: Path, inference_files: Path, tmp_path: Path, world: int, options: list[Any], capsys: Any
) -> None:
    questions, output = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    colours = {"options": ["red", "blue"], "answer": "A"}
    texts = [GOOD, BAD, "What?"]
    rows = [{"video": str(inference_files / "clip.mp4"), "question": text, **colours} for text in texts]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--questions", questions, "--output", output, *options]
    assert run(answer_data_set, world, "--model", overflowing, *argv)[0] == 1
    lines = [json.loads(line, parse_constant=pytest.fail) for line in output.read_text().splitlines()]
    assert ["error" in line for line in lines] == [False, True, False] and "answer" not in lines[1]
    assert "logits of the model are not finite" in lines[1]["error"] and lines[1]["place"] == f"{questions}:2"
    shown = capsys.readouterr()
    assert "2 of 3 questions are answered" in shown.err and "nan" not in (shown.out + shown.err).lower().split()
    assert ("(1 of 2)" in shown.out or "(2 of 2)" in shown.out or "(0 of 2)" in shown.out) == (options == ["--choices"])
    # The other answers are those of a model that was asked these questions alone: the failure left nothing in a cache.
    questions.write_text("".join(json.dumps(rows[number]) + "\n" for number in (0, 2)))
    output.unlink()
    assert run(answer_data_set, world, "--model", overflowing, *argv)[0] == 0
    alone = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["answer"] for line in alone] == [lines[0]["answer"], lines[2]["answer"]]


@pytest.mark.parametrize("world", [1, 2])
def test_question_about_a_video_without_finite_logits_is_reported(
    overflowing: Path, inference_files: Path, tmp_path: Path, world: int, capsys: Any
) -> None:
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    argv = ["--model", overflowing, "--video", inference_files / "clip.mp4", "--evidence", 2, "--evidence_html", page]
    argv += ["--report", report, "--max_new_tokens", 4]
    assert run(ask_videos, world, *argv, "--question", GOOD, "--question", BAD) == [1] * world
    first, second = json.loads(report.read_text(), parse_constant=pytest.fail)["answers"]
    assert first["tokens"] and "not finite" in second["error"] and "NaN" not in page.read_text()
    assert "1 of 2 questions have no answer" in capsys.readouterr().err
    errors = run(ask_videos, world, *argv, "--question", BAD)
    assert [type(error) for error in errors] == [NonFiniteLogitsError] * world
    assert json.loads(report.read_text())["answers"][0]["error"] and "nan%" not in capsys.readouterr().err


def test_failure_of_one_rank_is_raised_on_all(overflowing: Path, inference_files: Path) -> None:
    loaded = [load_model(str(inference_files / "gated")).eval() for _ in range(2)]

    def asked(comm: Communicator) -> Any:
        model = patch_model(loaded[comm.rank], group=comm)
        source = VideoSource.open(str(inference_files / "clip.mp4"), num_frames=3)
        conversation = Conversation(model, load_processor(str(overflowing)), [source])
        head = model.get_output_embeddings()
        spoiled = comm.rank == 1
        hook = head.register_forward_hook(lambda *call: call[-1] * (torch.nan if spoiled else 1.0))  # type: ignore
        short = Sampling(max_new_tokens=1)
        failure = attempt(lambda: conversation.ask(GOOD, short))[1]
        hook.remove()
        return failure, conversation.ask(GOOD, short).tokens

    failures, answers = zip(*run_loopback(2, asked), strict=True)
    assert [type(failure) for failure in failures] == [NonFiniteLogitsError] * 2
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("scores", "finite"),
    [
        ([0.0, 1.0, -torch.inf], True),
        ([-torch.inf] * 3, False),
        ([0.0, torch.inf, 0.0], False),
        ([1e30, 0.0, 1e31], True),
        ([1e34, 0.0, 0.0], False),  # infinite after the division by a small temperature
        ([0.0, 0.0, torch.nan], False),
    ],
)
def test_only_excluded_tokens_may_have_a_logit_of_minus_infinity(scores: list[float], finite: bool) -> None:
    given = torch.tensor([scores])
    processor = FiniteLogits(end_token=1)
    found = processor(torch.zeros(1, 1), given)
    assert torch.equal(found, given) if finite else found.softmax(-1).tolist() == [[0.0, 1.0, 0.0]]
    outcomes = run_loopback(1, lambda comm: attempt(lambda: processor.require(torch.float16, comm))[1])
    assert (outcomes == [None]) == finite
    assert finite or "use --dtype bfloat16 or float32" in str(outcomes[0])


def test_failed_run_may_be_repeated_with_another_dtype(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    for dtype in ("float16", "bfloat16"):
        file = AnswerFile(output)
        assert file.resume({"dtype": dtype}) == {}
        file.open(0)
        file.write({"index": 0, "error": "the logits are not finite"})
        file.close()
