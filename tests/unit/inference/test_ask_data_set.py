"""Layer: one process. Answers to a data set of questions do not depend on the ranks or on a stop; ranks are threads."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_seqpar.comm import Communicator, as_communicator, run_loopback
from mllm_seqpar.comm.agreement import attempt, is_reported_by_rank_0
from mllm_seqpar.errors import AgreementError, ConfigError, DataError, VideoError
from mllm_seqpar.inference import engine
from mllm_seqpar.inference.arguments import parse
from mllm_seqpar.inference.ask import ask
from mllm_seqpar.inference.conversation import Conversation
from mllm_seqpar.inference.data_set import Answerer, AnswerFile, answer_data_set

pytestmark = pytest.mark.usefixtures("load_models_once")
CPU = torch.device("cpu")
OPTIONS = ["--num_frames", 4, "--max_new_tokens", 6, "--no_progress"]
COLOURS = {"options": ["red", "green", "blue"], "answer": "B"}


def run(world: int, *argv: Any) -> list[Exception | None]:
    def failed(comm: Communicator) -> Exception | None:
        return attempt(lambda: answer_data_set(parse([*map(str, [*argv, *OPTIONS])]), comm, CPU))[1]

    return run_loopback(world, failed)


def write(questions: Path, *records: Any) -> None:
    questions.write_text("".join(json.dumps(record) + "\n" for record in records))


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def questions(inference_files: Path, tmp_path: Path) -> Path:
    """Records in several forms, about two videos in turn; the third and the sixth cannot be used."""
    clip, twin = str(inference_files / "clip.mp4"), str(inference_files / "twin.mp4")
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    content = [{"type": "video_url", "video_url": {"url": twin}}, {"type": "text", "text": "?"}]
    turns = [{"from": "human", "value": "<video>\nWhy?"}, {"from": "gpt", "value": "So."}]
    records = [
        {"video": clip, "question": "What is it?", "id": "first"},
        {"video": twin, "conversations": turns},
        {"video": "bad.mp4", "question": "What is it?", "id": 3},
        {"messages": [{"role": "user", "content": content}]},
        {"video": clip, "question": "Which colour?", **COLOURS},
        {"video": clip},
        {"question": "Say hello."},
    ]
    write(tmp_path / "questions.jsonl", *records)
    return tmp_path / "questions.jsonl"


@pytest.fixture
def source(questions: Path, inference_files: Path) -> list[Any]:
    """The options of a run without those of its output."""
    return ["--model", inference_files / "gated", "--questions", questions]


@pytest.mark.slow
def test_groups_of_ranks_answer_as_one_process_and_go_on_where_they_stopped(
    questions: Path, source: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, four = questions.with_name("one.jsonl"), questions.with_name("out") / "four.jsonl"
    assert run(1, *source, "--output", one) == [None]
    lines = answers(one)
    assert [line["index"] for line in lines] == [*range(7)]
    assert [line.get("id") for line in lines] == ["first", None, 3, None, None, None, None]
    assert [line["index"] for line in lines if "error" in line] == [2, 5]
    assert "bad.mp4" in lines[2]["error"] and lines[2]["place"] == f"{questions}:3"
    assert "not a known format" in lines[5]["error"]
    assert (lines[1]["reference"], lines[4]["reference"], lines[6]["frames"]) == ("So.", "B", 0)

    # A crash after two answers of each group, in the middle of a line.
    asked, whole = [], Answerer._line

    def stopping(self: Answerer, question: Any, outcome: Any) -> Any:
        if len(asked) == 8:
            raise RuntimeError("the machine stops")
        asked.append(question.index)
        return whole(self, question, outcome)

    monkeypatch.setattr(Answerer, "_line", stopping)
    assert any(run(4, *source, "--output", four, "--sp", 2))
    found = [path for path in four.parent.iterdir() if path.name.startswith("four.jsonl") and path.suffix != ".json"]
    assert {path.name for path in found} == {"four.jsonl", "four.jsonl.part-1"}
    with four.open("a") as file:
        file.write('{"index": 4, "answ')
    done = {line["index"] for path in found for line in answers_before_the_last(path) if "error" not in line}
    assert 0 < len(done) < 5

    asked = []
    monkeypatch.setattr(Answerer, "_line", lambda *args: (asked.append(args[1].index), whole(*args))[1])
    assert run(2, *source, "--output", four, "--sp", 1) == [None, None]
    assert sorted(asked) == sorted(set(range(7)) - done)
    assert answers(four) == lines
    assert sorted(path.name for path in four.parent.iterdir()) == ["four.jsonl", "four.jsonl.settings.json"]


def answers_before_the_last(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_another_run_is_refused_and_nothing_is_overwritten(
    questions: Path, source: list[Any], inference_files: Path
) -> None:
    output = questions.with_name("out.jsonl")
    source = [*source, "--output", output]
    questions.write_text(questions.read_text().splitlines()[-1] + "\n")
    assert run(1, *source) == [None]
    before = output.read_text()
    for changed, message in (
        (["--model", inference_files / "other"], "were made with model = "),
        (["--dtype", "bfloat16"], "were made with dtype = 'auto', and now it is 'bfloat16'"),
    ):
        argv = [*source[2:], *changed] if "--model" in changed else [*source, *changed]
        errors = run(2, *argv)
        assert [type(error) for error in errors] == [ConfigError, AgreementError] and message in str(errors[0])
    write(questions, {"question": "Say goodbye."})
    (part := output.with_name("out.jsonl.part-1")).write_text(before)
    error = str(run(1, *source)[0])
    assert "were made with questions = " in error and f"delete {output}, {part} to begin again" in error
    part.unlink()
    assert output.read_text() == before
    output.write_text("[1]\n" + before)
    assert isinstance(run(1, *source)[0], DataError)
    output.with_name("out.jsonl.settings.json").unlink()
    output.write_text(before)
    assert "cannot be read; give another --output" in str(run(1, *source)[0])


def test_arguments_that_fit_no_run_are_refused(questions: Path, source: list[Any]) -> None:
    write(questions, {"question": "Say hello."})
    output = questions.with_name("out.jsonl")
    first = AnswerFile(output)
    first.resume({})
    mesh = ["--output", questions.with_name("x"), "--strategy", "mesh", "--tile", "2x2"]
    for kinds, argv, message in (
        ([ConfigError] * 3, ["--output", output, "--sp", 2], "--sp 2 does not divide the 3 ranks"),
        ([ConfigError] * 2, mesh, "tile: (2, 2) is for 4 ranks"),
        ([ConfigError], ["--output", "/dev/fd/1"], "--output /dev/fd/1: not a regular file"),
        ([ConfigError], ["--output", questions.parent], f"--output {questions.parent}: not a regular file"),
        ([ConfigError, AgreementError], ["--output", output], "another run is writing its answers there"),
    ):
        errors = run(len(kinds), *source, *argv)
        assert [type(error) for error in errors] == kinds and message in str(errors[0])
        assert argv is not mesh or is_reported_by_rank_0(errors[1])  # type: ignore[arg-type]  # and prints nothing
    first.close()
    assert run(1, *source, "--output", output) == [None] and len(answers(output)) == 1
    argv = [*source, "--output", questions, "--choices"]  # without --max_new_tokens
    error = attempt(lambda: answer_data_set(parse([*map(str, argv)]), as_communicator("self"), CPU))[1]
    assert "is a question with options" in str(error)


def test_name_with_half_of_a_surrogate_pair_is_written(tmp_path: Path) -> None:
    file, line = AnswerFile(tmp_path / "out"), {"index": 0, "error": "\ud83d \N{SNOWMAN}.mp4: no such file"}
    file.open(1)
    file.write(line)
    file.close()
    assert answers(tmp_path / "out.part-1") == [line]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_answer_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "out.part-1").symlink_to("/dev/full")
    file = AnswerFile(tmp_path / "out")
    file.open(1)
    with pytest.raises(ConfigError, match="out: cannot be written .No space left on device"):
        file.write({"index": 0})
    file.close()  # does not raise again


@pytest.mark.slow
def test_features_of_a_video_are_freed_before_the_next_is_encoded(
    questions: Path, source: list[Any], inference_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Any]] = []

    class Watched(Conversation):
        def encode(self, *args: Any, **kwargs: Any) -> None:
            if not self.sources or self.encoded is not None:
                return super().encode(*args, **kwargs)
            assert not any(one() is not None for one in alive), "an earlier video is still in memory"
            features = torch.zeros(3)
            alive.extend(map(weakref.ref, (self, features)))
            if len(alive) == 2:
                raise VideoError("the first video breaks off")
            super().encode(*args, **kwargs)

    monkeypatch.setattr(engine, "Conversation", Watched)
    clip, twin = str(inference_files / "clip.mp4"), str(inference_files / "twin.mp4")
    records = [{"video": clip, "question": text, **COLOURS} for text in ("Why?", "How?")]
    records += [
        {**records[0], "video": twin},
        {**records[0], "video": clip, "fps": 2},
        {**records[0], "video": twin, "fps": 2},
    ]
    write(questions, *records)
    gc.disable()
    try:
        output = questions.with_name("out")
        assert run(1, *source, "--output", output) == [None]
    finally:
        gc.enable()
    assert len(alive) == 2 * 4, [line for line in answers(output)]


def test_exit_status_counts_questions_without_an_answer(
    questions: Path, source: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    without_video, bad = {"question": "Say hello.", "vid": "a.mp4"}, {"question": "Why?", "video": "nothere.mp4"}
    for records, status, message in (
        ([without_video], 0, "1 of 1 questions are answered; without a video or image, because"),
        ([without_video, bad], 1, "1 of 2 questions are answered"),
    ):
        write(questions, *records)
        argv = [*source, *OPTIONS, "--output", questions.with_name(f"out-{status}")]
        assert ask([*map(str, argv)]) == status and message in capsys.readouterr().err
    write(questions, bad)
    errors = run(2, *source, "--output", questions.with_name("other"))
    assert [type(error) for error in errors] == [DataError, AgreementError]
    assert "0 of 1 questions are answered; errors: 1, the first at" in str(errors[0])


def test_moments_are_written_beside_the_answers(questions: Path, inference_files: Path) -> None:
    clip = str(inference_files / "clip.mp4")
    rows: list[Any] = [{"video": clip, "question": text} for text in ("Why?", "How?")] + [{"question": "Say hello."}]
    write(questions, *rows)
    source = ["--model", inference_files / "fused", "--questions", questions, "--evidence", 2]
    for world in (1, 2):
        output = questions.with_name(f"out-{world}")
        assert run(world, *source, "--output", output)[0] is None
        lines = answers(output)
        assert [len(line["evidence"]) for line in lines] == [2, 2, 0]
        report = questions.with_name("report.json")
        argv = ["--model", inference_files / "fused", "--video", clip, "--question", "Why?", "--question", "How?"]
        assert ask([*map(str, [*argv, "--evidence", 2, "--report", report, *OPTIONS])]) == 0
        for line, alone in zip(lines, json.loads(report.read_text())["answers"], strict=False):
            assert line["answer"] == alone["text"]
            for found, expected in zip(line["evidence"], alone["evidence"], strict=True):
                assert found == expected | {"share": pytest.approx(expected["share"], abs=1e-4)}
    error = str(run(1, *source[:-2], "--output", questions.with_name("out-1"))[0])
    assert "were made with evidence = 2, and now it is None" in error
    with pytest.raises(ConfigError, match="--evidence 2 would have no effect: --choices generates no text"):
        parse([*map(str, [*source, "--output", "o", "--choices"])])
