"""Layer: one process, and gloo ranks. The Python samples of the documentation run; see also `test_examples`."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_examples import ROOT, blocks
from torch import nn
from torch.nn import functional as F

from family_directories import make_moss_vl
from family_harness import family_module
from mllm_seqpar import FrameShard, HostFrames, attention, patch_model, patches, unpatch_model
from mllm_seqpar.chats.store import open_features, save_features
from mllm_seqpar.data import ChatDataset
from mllm_seqpar.families import built_in_chats, built_in_families
from mllm_seqpar.inference import Sampling
from mllm_seqpar.models.loading import load_model, load_processor
from mllm_seqpar.patching.patch import patch_of
from ranks import ranks
from tiny_models.mplug_owl3 import Case, inputs_of, tiny_model

PATCHED = ("docs/concepts/decoding.md", "docs/concepts/evidence.md", "docs/concepts/lv_xattn.md 1")
"""Pages, or samples, that begin with a patched model."""
ON_FOUR_RANKS = (
    *(f"docs/concepts/{name}.md 0" for name in ("ring", "ulysses", "lv_xattn", "recomputation", "replicate")),
    *(f"docs/concepts/{name}.md 0" for name in ("chunked_mlp", "checkpointing", "decoding", "evidence", "auto")),
    *("docs/concepts/evidence.md 1", "docs/concepts/lv_xattn.md 1", "README.md 0", "docs/index.md 0"),
)
ON_EIGHT_RANKS = ("docs/concepts/mesh.md 0", "docs/get_started.md 1")
ON_ONE_RANK = (
    *("docs/checkpoints.md 0", "docs/guides/chat.md 0", "docs/concepts/offload.md 0"),
    *("docs/guides/data.md 0", "docs/guides/data.md 1", "docs/guides/trainer.md 1"),
)
ELSEWHERE = {
    "README.md 1": "test_examples",
    "docs/get_started.md 0": "test_examples",
    "docs/concepts/auto.md 1": "test_docs",
    "docs/concepts/how_it_works.md 0": "test_loop_of_lv_xattn_equals_dense_attention",
    "docs/guides/trainer.md 0": "test_examples",
    "docs/guides/trainer.md 2": "test_examples",
    "docs/guides/own_model.md 0": "test_own_adapter",
    **{f"docs/concepts/decoder_only.md {i}": "test_samples_of_decoder_only_models_run" for i in range(3)},
    "docs/guides/add_a_family.md 0": "test_registry_entry_of_the_guide",
    "docs/guides/add_a_family.md 1": "test_guide_family",
    "docs/guides/running_on_gpus.md 0": "test_sample_for_gpus_trains_on_the_cpu",
    "docs/guides/serve.md 0": "test_app, with OpenAI's client",
    "docs/guides/moss_vl.md 0": "test_sample_of_moss_vl_answers",
}
"""Samples that another test runs."""


def test_every_sample_runs_in_a_test() -> None:
    assert set(blocks()) == {*ON_FOUR_RANKS, *ON_EIGHT_RANKS, *ON_ONE_RANK, *ELSEWHERE}


def patch_again(model: nn.Module, **options: Any) -> nn.Module:
    """Patch a model, in a sample that shows several ways to do so."""
    return patch_model(unpatch_model(model) if patch_of(model) else model, **options)


def run_sample(rank: int, world: int, name: str, code: str) -> None:
    case = Case(frames=(3,), length=16, labels=None)
    model, (q, k, v) = tiny_model().train(), (torch.randn(1, heads, 16, 8) for heads in (8, 8, 8))
    given = {name: getattr(attention, name) for name in attention.__all__} | {"patch_model": patch_again}
    if name.startswith(PATCHED):
        patch_model(model.eval())
    text = (inputs := inputs_of(case, model)).copy()
    pixels = text.pop("pixel_values")
    given |= {"model": model, "q": q, "k": k, "v": v, "inputs": inputs, "text": text, "total": len(pixels)}
    given |= {"FrameShard": FrameShard, "group": None}
    given |= {"frames_of": lambda ranges: torch.cat([pixels[:0], *(pixels[x.start : x.stop] for x in ranges)])}
    exec(compile(code, name, "exec"), given)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ON_FOUR_RANKS, *ON_EIGHT_RANKS])
def test_sample_runs_on_several_ranks(name: str) -> None:
    code = blocks()[name].replace('"configs/', f'"{ROOT}/configs/').replace("=256", "=8").replace("=64", "=8")
    ranks(8 if name in ON_EIGHT_RANKS else 4).run(run_sample, name, code)


def run_loop(rank: int, world: int, code: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return o of the loop in the documentation, of `lv_xattn` and of dense attention, of this rank's rows."""
    q, k, v = (
        torch.randn(2, 3, tokens, 8, dtype=torch.float64) for tokens in (5 * world, 7 * world - 1, 7 * world - 1)
    )
    dense = F.scaled_dot_product_attention(q, k, v).chunk(world, 2)[rank]
    q, k, v = (x.chunk(world, 2)[rank].contiguous() for x in (q, k, v))
    names: dict[str, Any] = {}
    exec(compile(code, "how_it_works.md", "exec"), names)
    return names["lv_xattn_loop"](q, k, v)[0], attention.lv_xattn(q, k, v), dense


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_loop_of_lv_xattn_equals_dense_attention(world: int) -> None:
    code = blocks()["docs/concepts/how_it_works.md 0"]
    assert len([line for line in code.splitlines() if line]) == 30  # as its heading says
    for loop, library, dense in ranks(world).run(run_loop, code):
        assert loop.allclose(dense, rtol=1e-12, atol=1e-12) and library.allclose(dense, rtol=1e-12, atol=1e-12)


def write_data(folder: Path, video: Path) -> None:
    """Write a table of questions and a store of features under the names that the samples have."""
    import pyarrow
    from pyarrow import parquet

    (folder / "videomme").mkdir()
    shutil.copy(video, folder / "videomme" / "a.mp4")
    question = {"videoID": "a", "question": "How many?", "options": ["A. One.", "B. Two."], "answer": "B"}
    parquet.write_table(pyarrow.Table.from_pylist([question]), folder / "videomme" / "test-00000-of-00001.parquet")
    save_features(folder / "features", torch.zeros(3, 4, 64), start=0, total=3, rank=0, world=1)


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_sample_runs_in_one_process(
    name: str, training_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = training_files / "model"
    values = {'"DIR"': directory, '"movie.mp4"': next(training_files.rglob("*.mp4"))}
    code = blocks()[name].replace('"train.jsonl"', repr(str(training_files / "train.jsonl")))
    for shown, path in values.items():
        code = code.replace(shown, repr(str(path)))
    given: dict[str, Any] = {"processor": load_processor(str(directory)), "patch_model": patch_again}
    given |= {"model": load_model(str(directory)), "open_features": open_features}
    given |= {"HostFrames": HostFrames, "FrameShard": FrameShard}
    if "chat.md" in name or "data.md" in name:
        patch_model(given["model"])
    given |= {"ChatDataset": ChatDataset, "group": "self", "rank": 0, "step": 0, "total": 1}
    given["Sampling"] = functools.partial(Sampling, max_new_tokens=3)
    given["image"] = torch.zeros(3, 28, 28, dtype=torch.uint8)
    write_data(tmp_path, values['"movie.mp4"'])
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace("import Conversation, Sampling", "import Conversation"), name, "exec"), given)


def train_on_the_cpu(rank: int, world: int, code: str) -> float:
    """Run the sample for GPUs as `rank` of a group that exists, and return the last gradient norm."""
    batches = [inputs_of(Case(frames=(3,), length=16), tiny_model())] * 2
    found: dict[str, Any] = {"batches": batches}
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        exec(compile(code, "running_on_gpus.md", "exec"), found)
    return float(found["model"](**batches[0]).loss)


@pytest.mark.slow
def test_sample_for_gpus_trains_on_the_cpu(training_files: Path) -> None:
    code = blocks()["docs/guides/running_on_gpus.md 0"].replace('"DIR"', repr(str(training_files / "model")))
    code = code.replace('torch.device("cuda", int(os.environ["LOCAL_RANK"]))', 'torch.device("cpu")')
    code = code.replace("torch.cuda.set_device(device)", "").replace('"cuda"', '"cpu"')
    losses = ranks(2).run(train_on_the_cpu, code)
    assert losses[0] == losses[1] and torch.tensor(losses[0]).isfinite()


def test_sample_of_moss_vl_answers(tmp_path: Path, training_files: Path) -> None:
    make_moss_vl(tmp_path / "moss")
    code = blocks()["docs/guides/moss_vl.md 0"].replace('"moss"', repr(str(tmp_path / "moss")))
    code = code.replace('"movie.mp4"', repr(str(next(training_files.rglob("*.mp4"))))).replace("=100", "=3")
    found: dict[str, Any] = {}
    exec(compile(code, "moss_vl.md", "exec"), found)
    assert found["tokens"].shape[1] == found["inputs"]["input_ids"].shape[1] + 3


QUESTION = {"input_ids": torch.full((1, 3), 7), "mm_token_type_ids": torch.zeros(1, 3, dtype=torch.long)}


def inputs_of_video(model: nn.Module) -> dict[str, Any]:
    family = family_module("qwen3_vl")
    return family.inputs_of(family.Case(frames=(((3, 4, 6),),), length=40, labels=None), model)


def with_question(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs | {name: torch.cat([inputs[name], new], 1) for name, new in QUESTION.items()}


def decoder_only(rank: int, world: int, directory: Path, codes: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the samples one after another; return the logits of the second, and the tokens of the third."""
    load, own_frames, ask = codes
    given: dict[str, Any] = {}
    exec(compile(load.replace("Qwen/Qwen3-VL-8B-Instruct", str(directory)), "decoder_only.md 0", "exec"), given)
    inputs = inputs_of_video(given["model"])
    given |= {"text": {name: inputs[name] for name in QUESTION}, "video_grid_thw": inputs["video_grid_thw"]}
    given |= {"image_grid_thw": torch.zeros(0, 3, dtype=torch.long)}
    given |= {"own_rows": family_module("qwen3_vl").local_frames(inputs)["pixel_values_videos"]}
    given |= {"inputs": inputs, "other_question": with_question(inputs), "prefix": inputs["input_ids"].shape[1]}
    with torch.no_grad():
        exec(compile(own_frames.replace("\nmodel(", "\nout = model("), "decoder_only.md 1", "exec"), given)
        exec(compile(ask.replace("=64", "=4"), "decoder_only.md 2", "exec"), given)
    return given["out"].logits, given["second"]


@pytest.mark.slow
def test_samples_of_decoder_only_models_run(tmp_path: Path) -> None:
    model = family_module("qwen3_vl").tiny_model()
    model.save_pretrained(tmp_path)
    inputs = inputs_of_video(model)
    with torch.no_grad():
        logits = model(**inputs).logits
        tokens = model.generate(**with_question(inputs), max_new_tokens=4)
    codes = [blocks()[f"docs/concepts/decoder_only.md {i}"] for i in range(3)]
    for found, answer in ranks(2).run(decoder_only, tmp_path, codes):
        assert found.allclose(logits, atol=1e-4) and answer.equal(tokens)


def test_registry_entry_of_the_guide_is_valid() -> None:
    names: dict[str, Any] = {}
    exec(blocks()["docs/guides/add_a_family.md 1"], names)
    entry = names["FAMILIES"]["my_family"]
    assert entry.family == "my_family:MyFamily" and entry.chats == "chats.my_family:MyChats"


def test_index_of_families_is_that_of_their_classes() -> None:
    for entry in patches.FAMILIES.values():
        (family,) = (x for x in built_in_families({entry.model_class}) if x.__name__ == entry.family.partition(":")[2])
        ((_, chats),) = ((f, x) for f, x in built_in_chats({entry.processor}) if f is family)
        assert family.model_class == entry.model_class and chats.processors == (entry.processor,)
        assert f"{chats.__module__}:{chats.__name__}" == f"mllm_seqpar.patches.{entry.chats}"
