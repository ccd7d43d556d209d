"""Layer: gloo ranks. The whole script but for its launch: answers against the unpatched model, features, errors."""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from mllm_seqpar import patch_model
from mllm_seqpar.data import VideoSource, plan_frames, probe, read_frames
from mllm_seqpar.errors import AgreementError, ConfigError, DataError, VideoError
from mllm_seqpar.inference import Sampling, answer, encode_video, load_for_inference
from mllm_seqpar.inference.run import infer
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration, MPlugOwl3Processor
from ranks import ranks

QUESTIONS = ("What is it?", "Which one comes first, <|video|> or this?")
ASK = ["--no-progress", "--max-new-tokens", "16", "--encode-batch", "3"]


def run(rank: int, world: int, argv: list[str], of_rank: dict[int, list[str]] | None = None) -> tuple[str, str]:
    """What a rank wrote to standard output and error. `of_rank` has arguments that only one rank gets."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        infer([*argv, *(of_rank or {}).get(rank, [])])
    return out.getvalue(), err.getvalue()


def ask(world: int, folder: Path, *argv: object, questions: tuple[str, ...] = QUESTIONS) -> tuple[str, dict[str, Any]]:
    """(standard output of rank 0, report) of a run."""
    report = folder / "report.json"
    asked = [part for question in questions for part in ("--question", question)]
    written = ranks(world).run(run, [*map(str, argv), *ASK, *asked, "--report", str(report)])
    assert all(out == "" for out, _ in written[1:])
    return written[0][0], json.loads(report.read_text())


def tokens_of(report: dict[str, Any]) -> list[list[int]]:
    return [answer["tokens"] for answer in report["answers"]]


def unpatched(folder: Path, model: str, **frames: Any) -> list[list[int]]:
    """The same by the model alone: all frames decoded, in one call."""
    processor = MPlugOwl3Processor.from_pretrained(folder / model)
    owl = MPlugOwl3ForConditionalGeneration.from_pretrained(folder / model).eval()
    pictures = torch.cat(list(read_frames(plan_frames(probe(folder / "clip.mp4"), **frames))))
    found = []
    for question in QUESTIONS:
        text = question if "<|video|>" in question else f"<|video|>{question}"
        prompt = processor.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        inputs = processor(text=prompt, videos=[pictures])
        output = owl.generate(**inputs, do_sample=False, max_new_tokens=16)
        found.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return found


@pytest.mark.parametrize(
    ("world", "model", "frames"),
    [
        (1, "gated", {"fps": 3}),
        (2, "gated", {"fps": 3}),
        (3, "fused", {"fps": 3}),
        (4, "gated", {"num_frames": 2}),
        (3, "gated", {"fps": 25, "max_frames": 10}),
    ],
)
def test_answers_are_the_unpatched_models(folder: Path, world: int, model: str, frames: dict[str, int]) -> None:
    options = [part for name, value in frames.items() for part in (f"--{name.replace('_', '-')}", value)]
    text, report = ask(world, folder, "--model", folder / model, "--video", folder / "clip.mp4", *options)
    assert tokens_of(report) == unpatched(folder, model, **frames)
    expected = "".join(f"> {answer['question']}\n{answer['text']}\n" for answer in report["answers"])
    assert text == expected
    assert report["frames"] == len(plan_frames(probe(folder / "clip.mp4"), **frames))
    assert report["visual_tokens"] == 4 * report["frames"]
    assert len(report["peak_memory_mib"]) == len(report["bytes_sent"]) == world


def test_the_pieces_without_the_script(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = patch_model(load_for_inference(str(folder / "gated"), "auto", torch.device("cpu")))
    processor = MPlugOwl3Processor.from_pretrained(folder / "gated")
    video = encode_video(model, processor, VideoSource.open(folder / "clip.mp4", fps=3))
    sampling, pieces = Sampling(max_new_tokens=16), []
    answers = [answer(model, processor, asked, video, sampling, on_text=pieces.append) for asked in QUESTIONS]
    assert [result.tokens for result in answers] == unpatched(folder, "gated", fps=3)
    assert "".join(pieces) == "".join(result.text for result in answers)
    assert not caplog.records
    model.config.max_position_embeddings = 40
    answer(model, processor, QUESTIONS[0], video, sampling)
    assert "the model was made for 40: take fewer frames" in caplog.text


def test_answers_depend_on_the_video(folder: Path) -> None:
    """Without this the other tests could compare answers of a model that does not look."""
    answers = [unpatched(folder, "gated", num_frames=count) for count in (2, 10)]
    assert answers[0] != answers[1]


def test_drawn_answers_depend_on_the_seed_alone(folder: Path) -> None:
    argv = ["--model", folder / "gated", "--video", folder / "clip.mp4", "--temperature", 1.5, "--top-p", 0.9]
    alone = tokens_of(ask(1, folder, *argv, "--seed", 3)[1])
    assert tokens_of(ask(3, folder, *argv, "--seed", 3)[1]) == alone
    assert tokens_of(ask(3, folder, *argv, "--seed", 4)[1]) != alone


def test_sharded_weights_change_no_answer(folder: Path) -> None:
    argv = ["--model", folder / "fused", "--video", folder / "clip.mp4", "--num-frames", 5]
    assert tokens_of(ask(3, folder, *argv, "--shard-weights")[1]) == unpatched(folder, "fused", num_frames=5)


def test_features_written_by_two_ranks_are_read_by_any_number(folder: Path) -> None:
    model = ["--model", folder / "gated"]
    kept = folder / "kept"
    ask(2, folder, *model, "--video", folder / "clip.mp4", "--num-frames", 7, "--save-features", kept, questions=())
    expected = unpatched(folder, "gated", num_frames=7)
    for world in (1, 3):
        _, report = ask(world, folder, *model, "--features", kept)
        assert tokens_of(report) == expected
        assert "read and encode" not in report["seconds"] and "read features" in report["seconds"]
    video = ["--video", folder / "clip.mp4", "--num-frames", 7]
    assert tokens_of(ask(3, folder, *model, "--features", kept, *video)[1]) == expected

    refused = [
        (["--model", folder / "other"], "made by another model"),
        ([*model, "--num-frames", 8], "made with num_frames = 7, now it is 8"),
        ([*model, "--fps", 2], "made with fps = None, now it is 2.0"),
        ([*model, "--video", folder / "twin.mp4", "--num-frames", 7], "made with source_size"),
        ([*model, "--video", folder / "clip.mp4"], "made with frames = 7, now it is 4"),
        ([*model, "--dtype", "bfloat16"], "these features are float32 and the model runs in bfloat16"),
    ]
    for argv, message in refused:
        errors = ranks(2).errors(run, [*map(str, argv), "--features", str(kept), "--question", "?"])
        assert [type(error) for error in errors] == [DataError] * 2, errors
        assert message in str(errors[0])


def write_sound(path: Path) -> None:
    with av.open(str(path), "w") as out:
        stream = out.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        out.mux([*stream.encode(frame), *stream.encode()])


def test_bad_files_are_one_sentence_on_every_rank(folder: Path) -> None:
    (folder / "empty.mp4").touch()
    (folder / "text.mp4").write_text("not a film " * 99)
    write_sound(folder / "sound.wav")
    (folder / "hollow").mkdir()
    clip, model = str(folder / "clip.mp4"), str(folder / "gated")
    cases: list[tuple[type, str, str, str]] = [
        (VideoError, model, str(folder / "none.mp4"), "no such file"),
        (VideoError, model, str(folder / "empty.mp4"), "the file is empty"),
        (VideoError, model, str(folder / "text.mp4"), "not a readable video"),
        (VideoError, model, str(folder / "sound.wav"), "holds no video stream (found: audio)"),
        (ConfigError, str(folder / "hollow"), clip, "no config.json there"),
    ]
    for kind, where, video, message in cases:
        errors = ranks(2).errors(run, ["--model", where, "--video", video, "--question", "?"])
        assert [type(error) for error in errors] == [kind] * 2, errors
        assert message in str(errors[0]) and "\n" not in str(errors[0])


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (["--question", "Why?"], "arguments: the ranks differ in question: rank 0: ('What?',); rank 1: "),
        (["--video", "twin.mp4"], "arguments: the ranks differ in video"),
        (["--fps", "none"], "arguments: rank 1: argument --fps: invalid float value: 'none'"),
    ],
)
def test_ranks_that_are_told_other_things(folder: Path, own: list[str], message: str) -> None:
    argv = ["--model", str(folder / "gated"), "--video", str(folder / "clip.mp4"), "--question", "What?"]
    errors = ranks(2).errors(run, argv, {1: own})
    assert isinstance(errors[0], AgreementError) and str(errors[0]).startswith(message)
    assert errors[1] is not None


def in_own_folder(rank: int, world: int, folders: list[str], argv: list[str]) -> tuple[str, str]:
    before = os.getcwd()
    os.chdir(folders[rank])
    try:
        return run(rank, world, argv)
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    ("other", "message"),
    [("twin.mp4", "the ranks differ in video's size: rank 0: "), (None, "rank 1: clip.mp4: no such")],
)
def test_one_name_two_videos(folder: Path, tmp_path: Path, other: str | None, message: str) -> None:
    """Nodes with disks of their own."""
    if other:
        (tmp_path / "clip.mp4").write_bytes((folder / other).read_bytes())
    argv = ["--model", str(folder / "gated"), "--video", "clip.mp4", "--question", "What?"]
    errors = ranks(2).errors(in_own_folder, [str(folder), str(tmp_path)], argv)
    assert isinstance(errors[0], AgreementError) and str(errors[0]).startswith(f"inputs: {message}")
    assert isinstance(errors[1], VideoError if other is None else AgreementError)
