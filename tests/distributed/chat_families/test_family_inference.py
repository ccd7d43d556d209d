"""Layer: gloo ranks. Inference with a model directory of each family: answers equal the unpatched model's."""

import contextlib
import io
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from family_cases import QWENS
from family_directories import MAKERS, make_idefics
from mllm_seqpar.data import VideoSource, chat_family
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.inference.ask import ask
from mllm_seqpar.models.loading import load_processor
from model_copies import load_model
from ranks import ranks

QUESTIONS = ("What is it?", "First this <|video|> and then?")
NEW_TOKENS = 6


def run(rank: int, world: int, argv: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ask(argv)


def answers(world: int, folder: Path, *argv: Any) -> list[list[int]]:
    """Return the tokens of the answers to `QUESTIONS` that the program gives on `world` ranks."""
    report = folder / "report.json"
    arguments = [*argv, "--no-progress", "--max-new-tokens", NEW_TOKENS, "--encode-batch", 2, "--report", report]
    arguments += [part for question in QUESTIONS for part in ("--question", question)]
    arguments = [*map(str, arguments)]
    if world == 1:
        run(0, 1, arguments)
    else:
        ranks(world).run(run, arguments)
    return [answer["tokens"] for answer in json.loads(report.read_text())["answers"]]


def unpatched_answers(folder: Path, name: str, frames: int) -> list[list[int]]:
    """Return the same tokens from the unpatched model in one process, with all images as pixels of one call."""
    processor, model = load_processor(str(folder / name)), load_model(str(folder / name)).eval()
    chat_format, source = chat_family(processor), VideoSource.open(folder / "clip.mp4", num_frames=frames)
    pictures = chat_format.unsharded(source)
    generate = partial(generate_without_cache, model) if chat_format.ids_name == "lang_x" else model.generate
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS} | chat_format.generation(model)
    found = []
    for question in QUESTIONS:
        before, mark, after = question.partition("<|video|>")
        parts = [{"type": "text", "text": before}, {"type": "video"}, {"type": "text", "text": after}]
        if not mark:
            parts = [{"type": "video"}, {"type": "text", "text": question}]
        text = chat_format.text([[{"role": "user", "content": parts}]], [[source]], add_generation_prompt=True)
        output = generate(**chat_format.arguments(text), **pictures, **options)
        found.append(output[0, text.input_ids.shape[1] :].tolist())
    return found


@torch.no_grad()
def generate_without_cache(
    model: Any, vision_x: Tensor, lang_x: Tensor, max_new_tokens: int, bad_words_ids: Any, **_: Any
) -> Tensor:
    """Return what `Flamingo.generate` would; the unpatched method fails with transformers 5."""
    for _step in range(max_new_tokens):
        logits = model(vision_x, lang_x, torch.ones_like(lang_x)).logits[:, -1]
        logits[:, [token for (token,) in bad_words_ids]] = -torch.inf
        lang_x = torch.cat([lang_x, logits.argmax(-1, keepdim=True)], 1)
        if int(lang_x[0, -1]) == model.eoc_token_id:
            break
    return lang_x


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_answers_equal_unpatched_model_also_from_stored_features(folder: Path, name: str) -> None:
    model, store = ["--model", folder / name], folder / f"features-{name}"
    expected = unpatched_answers(folder, name, 5)
    assert expected != unpatched_answers(folder, name, 2)  # the answers depend on the video
    video = ["--video", folder / "clip.mp4", "--num-frames", 5]
    assert answers(2, folder, *model, *video, "--save-features", store) == expected
    assert answers(1, folder, *model, "--features", store) == expected
    other = folder / ("mllama" if name == "idefics" else "idefics")
    with pytest.raises(DataError, match="made by another model"):
        ask([*map(str, ["--model", other, "--features", store, "--question", "?"])])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MAKERS if name in QWENS])
def test_evidence_of_temporal_patches_names_frames_and_times_of_the_video(folder: Path, name: str) -> None:
    """Five frames are three temporal patches, the last of one frame."""
    page = folder / f"evidence-{name}.html"
    argv = ["--model", folder / name, "--video", folder / "clip.mp4", "--num-frames", 5]
    argv += ["--evidence", 9, "--evidence-html", page]
    assert answers(2, folder, *argv) == unpatched_answers(folder, name, 5)
    found = [answer["evidence"] for answer in json.loads((folder / "report.json").read_text())["answers"]]
    assert page.stat().st_size > 1000
    for moments in found:
        covered = sorted(frame for moment in moments for frame in range(moment["first"], moment["last"] + 1))
        assert covered == [0, 1, 2, 3, 4], moments
        assert all(moment["first"] % 2 == 0 and moment["last"] in (1, 3, 4) for moment in moments)
        assert 0 < sum(moment["share"] for moment in moments) < 1
        assert min(moment["start"] for moment in moments) == pytest.approx(0.2)  # the middle of the first of five
    answers(1, folder, *argv)
    alone = [answer["evidence"] for answer in json.loads((folder / "report.json").read_text())["answers"]]
    for moments, others in zip(found, alone, strict=True):
        for moment, other in zip(moments, others, strict=True):
            assert moment == pytest.approx(other, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, ["--shard-weights"]) for name in MAKERS),
        ("idefics with resampler", []),
        ("open_flamingo over mpt", []),
    ],
)
def test_answers_of_sharded_weights_and_other_builds_equal_unpatched_model(
    folder: Path, name: str, options: list[str]
) -> None:
    if name == "idefics with resampler":
        make_idefics(folder / name, resampler=True)
    elif name == "open_flamingo over mpt":
        if "open_flamingo" not in MAKERS:
            pytest.skip("open-flamingo is not installed")
        MAKERS["open_flamingo"](folder / name, "mpt")
    argv = ["--model", folder / name, "--video", folder / "clip.mp4", "--num-frames", 3, *options]
    assert answers(2, folder, *argv) == unpatched_answers(folder, name, 3)


@pytest.mark.parametrize("name", MAKERS)
def test_missing_or_wrong_processor_is_refused_in_one_line(folder: Path, tmp_path: Path, name: str) -> None:
    bare, mixed = tmp_path / "bare", tmp_path / "mixed"
    shutil.copytree(folder / ("idefics" if name == "mllama" else "mllama"), mixed)
    (mixed / "generation_config.json").unlink(missing_ok=True)
    bare.mkdir()
    for target in (bare, mixed):
        for file in ("config.json", "model.safetensors"):
            shutil.copy(folder / name / file, target)
    for target in (bare, mixed):
        argv = ["--model", target, "--video", folder / "clip.mp4", "--num-frames", 2, "--question", "?"]
        with pytest.raises((ConfigError, DataError), match=r"^[^\n]*processor[^\n]*$"):
            ask([*map(str, argv)])
