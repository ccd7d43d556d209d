"""Layer: one process. Inference runs answer as the unpatched model does; the ranks are threads."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator, as_communicator, run_loopback
from mllm_seqpar.comm.agreement import attempt
from mllm_seqpar.data import VideoSource, plan_frames, probe, read_frames
from mllm_seqpar.errors import AgreementError, ConfigError, DataError, LengthError, VideoError
from mllm_seqpar.inference import Sampling, answer, encode_video, load_for_inference
from mllm_seqpar.inference.arguments import parse
from mllm_seqpar.inference.ask import ask as ask_command
from mllm_seqpar.inference.ask import ask_videos
from mllm_seqpar.inference.encoding import PARTS, Encoded
from mllm_seqpar.inference.stored_features import save_video
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration, MPlugOwl3Processor
from mllm_seqpar.sharding import FrameShard

pytestmark = pytest.mark.usefixtures("load_models_once")
CPU = torch.device("cpu")
QUESTIONS = ("What is it?", "Which one comes first, <|video|> or this?")
ENCODE = ["--no_progress", "--encode_batch", "3"]
ASK = [*ENCODE, "--max_new_tokens", "16"]


def run(world: int, *argv: Any, videos: tuple[Path, ...] = ()) -> list[Exception | None]:
    """Run the inference script's steps on loopback ranks, each with its video, and return each rank's error."""

    def failed(comm: Communicator) -> Exception | None:
        own = ["--video", videos[comm.rank]] if videos else []
        return attempt(lambda: ask_videos(parse([*map(str, [*argv, *own])]), comm, CPU))[1]

    return run_loopback(world, failed)


def ask(world: int, folder: Path, *argv: Any, questions: tuple[str, ...] = QUESTIONS) -> dict[str, Any]:
    """The report of a run."""
    options = [part for question in questions for part in ("--question", question)]
    errors = run(world, *argv, *(ASK if questions else ENCODE), *options, "--report", folder / "report.json")
    assert errors == [None] * world
    report = json.loads((folder / "report.json").read_text())
    return report | {"tokens": [answer["tokens"] for answer in report["answers"]]}


def unpatched(folder: Path, model: str, **frames: Any) -> list[list[int]]:
    """The tokens of the unpatched model, which gets all frames as pixels."""
    processor = MPlugOwl3Processor.from_pretrained(folder / model)
    owl = MPlugOwl3ForConditionalGeneration.from_pretrained(folder / model).eval()
    pictures = torch.cat(list(read_frames(plan_frames(probe(folder / "clip.mp4"), **frames))))
    answers = []
    for question in QUESTIONS:
        text = question if "<|video|>" in question else f"<|video|>{question}"
        prompt = processor.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        inputs = processor(text=prompt, videos=[pictures])
        output = owl.generate(**inputs, do_sample=False, max_new_tokens=16)
        answers.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


@pytest.mark.parametrize(
    ("world", "model", "frames"),
    [
        pytest.param(3, "fused", {"fps": 3}, marks=pytest.mark.slow),
        pytest.param(4, "gated", {"num_frames": 2}, marks=pytest.mark.slow),
        (2, "gated", {"fps": 25, "max_frames": 10}),
    ],
)
def test_answers_equal_the_unpatched_models(
    inference_files: Path, capsys: pytest.CaptureFixture[str], world: int, model: str, frames: dict[str, int]
) -> None:
    options = [part for name, value in frames.items() for part in (f"--{name.replace('_', '-')}", value)]
    clip = inference_files / "clip.mp4"
    report = ask(world, inference_files, "--model", inference_files / model, "--video", clip, *options)
    assert report["tokens"] == unpatched(inference_files, model, **frames)
    assert all(answer["evidence"] == [] for answer in report["answers"])
    text = "".join(f"> {answer['question']}\n{answer['text']}\n" for answer in report["answers"])
    assert capsys.readouterr().out == text
    assert report["frames"] == len(plan_frames(probe(clip), **frames))
    assert report["visual_tokens"] == 4 * report["frames"]
    assert len(report["peak_memory_mib"]) == len(report["bytes_sent"]) == world


def test_evidence_is_printed_reported_and_written(inference_files: Path, tmp_path: Path, capsys: Any) -> None:
    page = tmp_path / "page.html"
    options = ["--fps", 3, "--evidence", 2, "--evidence-html", page]
    report = ask(2, tmp_path, "--model", inference_files / "fused", "--video", inference_files / "clip.mp4", *options)
    assert report["tokens"] == unpatched(inference_files, "fused", fps=3)
    shown = capsys.readouterr()
    for found in report["answers"]:
        assert found["text"] in shown.out and "moments" not in shown.out
        assert len(found["evidence"]) == 2 and found["evidence"][0]["share"] >= found["evidence"][1]["share"] > 0
    assert shown.err.count("moments that the answer attends to") == shown.err.count("the text: ") == 2
    assert len(re.findall(r"^moments that .*:\n +1\. +\d+\.\d%  0:0\d\.\d to 0:0", shown.err, re.MULTILINE)) == 2
    assert page.read_text().count('"mean":') == 2
    assert f"\nevidence page: {page}\n" in shown.err
    assert str(inference_files / "clip.mp4") in page.read_text() and str(inference_files / "fused") in page.read_text()
    assert len(report["encoding_seconds"]) == 2
    assert all(
        set(row) == set(PARTS) and row["decode frames"] > 0 < row["encode"] for row in report["encoding_seconds"]
    )
    assert report["seconds"]["prefill"] > 0 < report["seconds"]["generate"]
    (summary,) = [line for line in shown.err.splitlines() if "visual tokens" in line]
    assert re.fullmatch(
        r"12 frames, 48 visual tokens on 2 ranks; open \S+ s, load \S+ s, read and encode \S+ s \(\S+ frames/s; "
        r"decode frames \S+ s, transfer \S+ s, encode \S+ s, wait for frames \S+ s\), "
        r"prefill \S+ s, decode \d+ tokens at \S+ tokens/s; peak memory by rank \(resident\) \d+, \d+ MiB",
        summary,
    )


def test_library_functions_answer_as_the_script_does(inference_files: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = patch_model(load_for_inference(str(inference_files / "gated"), "auto", CPU))
    processor = MPlugOwl3Processor.from_pretrained(inference_files / "gated")
    video = encode_video(model, processor, VideoSource.open(inference_files / "clip.mp4", fps=3))
    sampling, pieces = Sampling(max_new_tokens=16), []
    answers = [answer(model, processor, question, video, sampling, on_text=pieces.append) for question in QUESTIONS]
    expected = unpatched(inference_files, "gated", fps=3)
    assert [result.tokens for result in answers] == expected
    assert expected != unpatched(inference_files, "gated", num_frames=2)  # the answers depend on the video
    assert "".join(pieces) == "".join(result.text for result in answers)
    assert not caplog.records
    model.config.max_position_embeddings = 40
    with pytest.raises(LengthError, match="the context of this model is 40 tokens"):
        answer(model, processor, QUESTIONS[0], video, sampling)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "model", "frames"), [(1, "fused", {"fps": 3}), (2, "gated", {"num_frames": 7})])
def test_answers_with_offload_equal_the_unpatched_models(
    inference_files: Path, tmp_path: Path, world: int, model: str, frames: dict[str, int]
) -> None:
    options = ["--model", inference_files / model, "--visual_offload", "cpu"]
    sampled = [part for name, value in frames.items() for part in (f"--{name.replace('_', '-')}", value)]
    video, expected = ["--video", inference_files / "clip.mp4", *sampled], unpatched(inference_files, model, **frames)
    assert ask(world, tmp_path, *options, *video, "--save_features", tmp_path / "f")["tokens"] == expected
    assert ask(world, tmp_path, *options, "--features", tmp_path / "f")["tokens"] == expected


@pytest.mark.slow
def test_stored_features_give_the_same_answers(inference_files: Path, tmp_path: Path) -> None:
    model, clip = ["--model", inference_files / "gated"], ["--video", inference_files / "clip.mp4", "--num_frames", 7]
    ask(2, tmp_path, *model, *clip, "--save_features", tmp_path / "features", questions=())
    expected = unpatched(inference_files, "gated", num_frames=7)
    for world, video in ((1, clip), (3, [])):
        report = ask(world, tmp_path, *model, "--features", tmp_path / "features", *video)
        assert report["tokens"] == expected
        assert "read and encode" not in report["seconds"] and "read features" in report["seconds"]

    for argv, message in (
        (["--model", inference_files / "other"], "made by another model"),
        ([*model, "--num_frames", 8], "made with num_frames = 7, and now it is 8"),
        ([*model, "--video", inference_files / "twin.mp4", "--num_frames", 7], "made with source_size"),
        ([*model, "--video", inference_files / "clip.mp4"], "made with frames = 7, and now it is 4"),
        ([*model, "--dtype", "bfloat16"], "these features are float32 and the model runs in bfloat16"),
    ):
        errors = run(2, *argv, "--features", tmp_path / "features", "--question", "?")
        assert [type(error) for error in errors] == [DataError] * 2, errors
        assert message in str(errors[0])


def test_evidence_from_stored_features_has_the_times_of_the_video(inference_files: Path, tmp_path: Path) -> None:
    options = ["--model", inference_files / "fused", "--evidence", 2]
    video, features = ["--video", inference_files / "clip.mp4", "--fps", 3], tmp_path / "features"
    expected = ask(1, tmp_path, *options, *video, "--save_features", features)["answers"]
    found = ask(1, tmp_path, *options, "--features", features)["answers"]
    assert [answer["evidence"] for answer in found] == [answer["evidence"] for answer in expected]
    assert all(moment["start"] is not None for answer in found for moment in answer["evidence"])


def test_features_of_another_video_are_not_overwritten(inference_files: Path, tmp_path: Path) -> None:
    options = ["--model", inference_files / "gated", "--save_features", tmp_path / "features"]
    clip = ["--video", inference_files / "clip.mp4"]
    ask(2, tmp_path, *options, *clip, "--num_frames", 3, questions=())
    before = (tmp_path / "features/features.json").read_bytes()
    errors = run(2, *options, "--video", inference_files / "twin.mp4", "--num_frames", 3)
    assert "it has the features of another video" in str(errors[0]) and "clip.mp4" in str(errors[0])
    assert isinstance(errors[0], DataError) and isinstance(errors[1], AgreementError)
    assert (tmp_path / "features/features.json").read_bytes() == before
    ask(1, tmp_path, *options, *clip, "--num_frames", 5, questions=())  # the same video at other times
    assert json.loads((tmp_path / "features/features.json").read_text())["total_frames"] == 5


def test_saved_video_does_not_replace_another_one(tmp_path: Path) -> None:
    features = Encoded(torch.zeros(2, 1, 4), FrameShard(0, 2, 2))
    comm = as_communicator("self")
    for digest in ("x", "x", None):
        save_video(str(tmp_path), features, comm, {"source_digest": digest, "source_size": 7})
    with pytest.raises(DataError, match="it has the features of another video"):
        save_video(str(tmp_path), features, comm, {"source_digest": "x", "source_size": 8})


@pytest.mark.parametrize(
    ("directory", "videos", "options", "messages"),
    [
        ("gated", ["none.mp4"] * 2, [], [(VideoError, "no such file")] * 2),
        (".", ["clip.mp4"] * 2, [], [(ConfigError, "no config.json there")] * 2),
        # the nodes of a cluster may have different files under the same name
        ("gated", ["clip.mp4", "none.mp4"], [], [(AgreementError, "inputs: rank 1: "), (VideoError, "no such file")]),
        ("gated", ["clip.mp4", "twin.mp4"], [], [(AgreementError, "the ranks differ in video's size: rank 0: ")] * 2),
        (
            "gated",
            ["clip.mp4"] * 2,
            ["--evidence_html", "/"],
            [(ConfigError, "--evidence_html /: cannot be written"), (AgreementError, "/: cannot be written")],
        ),
    ],
)
def test_bad_files_are_one_sentence_on_every_rank(
    inference_files: Path, directory: str, videos: list[str], options: list[str], messages: list[tuple[type, str]]
) -> None:
    files = tuple(inference_files / name for name in videos)
    errors = run(2, "--model", inference_files / directory, "--question", "What?", *options, videos=files)
    for error, (kind, message) in zip(errors, messages, strict=True):
        assert type(error) is kind and message in str(error) and "\n" not in str(error)


@pytest.mark.slow
def test_each_of_several_videos_is_asked_each_question(
    inference_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "videos").mkdir()
    for name in ("clip", "twin"):
        (tmp_path / f"videos/{name}.mp4").symlink_to(inference_files / f"{name}.mp4")
    again = inference_files / "clip.mp4"
    videos = ["--video", tmp_path / "videos", "--video", again, "--num_frames", 3]
    source, asked = ["--model", inference_files / "gated"], ["What is it?", "Why?"]
    report = ask(2, tmp_path, *source, *videos, "--save_features", tmp_path / "f", questions=(*asked,))
    names = [str(tmp_path / "videos/clip.mp4"), str(tmp_path / "videos/twin.mp4"), str(again)]
    rows = report["answers"]
    assert [(row["video"], row["question"]) for row in rows] == [(name, text) for name in names for text in asked]
    expected = "".join(
        f"== {name} ==\n" + "".join(f"> {row['question']}\n{row['text']}\n" for row in rows if row["video"] == name)
        for name in names
    )
    assert capsys.readouterr().out == expected
    assert (report["frames"], report["tokens"][:2]) == (9, report["tokens"][4:])
    assert report["tokens"][:2] != report["tokens"][2:4]

    assert sorted(path.name for path in (tmp_path / "f").iterdir()) == ["clip.mp4", "clip.mp4-2", "twin.mp4"]
    again = ask(1, tmp_path, *source, "--features", tmp_path / "f", questions=(*asked,))
    assert sorted(again["tokens"]) == sorted(report["tokens"])

    (tmp_path / "videos/bad.mp4").write_bytes(b"no video")
    capsys.readouterr()
    index = tmp_path / "pages/report.html"
    argv = [*source, "--video", tmp_path / "videos", "--num_frames", 3, *ASK, "--question", "Why?"]
    argv += ["--evidence_html", index]
    assert ask_command([*map(str, argv)]) == 1
    out, err = capsys.readouterr()
    assert out.count(f"== {names[1]} ==\n") == 1
    assert "error: 1 of 3 videos cannot be used; the first: " in err and "bad.mp4" in err
    assert f"evidence page: {index}, the index of 2 pages\n" in err
    shown = json.loads(re.search(r'application/json">(.*?)</script>', index.read_text(), re.DOTALL)[1])  # type: ignore[index]
    assert [page["name"] for page in shown["pages"]] == names[:2] and "bad.mp4" in shown["faults"][0]
    for page in shown["pages"]:
        assert (index.parent / page["href"]).read_text().count('"mean":') == 1
        assert page["answers"][0]["question"] == "Why?" and 0 < page["answers"][0]["moment"]["share"] <= 1
    for path in list((tmp_path / "videos").iterdir()):  # links to files of other tests
        path.unlink()
        path.write_bytes(b"no video")
    errors = run(2, *argv)
    assert [type(error) for error in errors] == [VideoError] * 2 and "3 of 3 videos" in str(errors[0])
