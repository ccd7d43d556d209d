"""Layer: one process. OpenFlamingo directories: conversion of published parts, saving, loading by any tensor name."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flamingo_reference import authors_flamingo
from published_flamingo import EVERY, published_parts
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText, MptConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from family_directories import MAKERS, character_tokenizer
from mllm_seqpar.__main__ import main
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.loading import load_model, load_processor
from mllm_seqpar.models.open_flamingo import OpenFlamingoProcessor, convert
from mllm_seqpar.models.open_flamingo.language import QKNormMptForCausalLM, load_language_model
from outcomes import error

if "open_flamingo" not in MAKERS:
    pytest.skip("open-flamingo is not installed", allow_module_level=True)

Parts = dict[str, Path]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Parts, str]]:
    """Return a function that writes the published parts over a type of language model and converts them, once each.

    It returns the parts and the directory of the converted model.
    """
    root = tmp_path_factory.mktemp("published")

    @cache
    def made(kind: str) -> tuple[Parts, str]:
        parts = published_parts(root / kind, kind)
        options = [part for name, value in parts.items() for part in (f"--{name}", str(value))]
        assert main(["convert", *options, "--output", str(root / kind / "converted")]) == 0
        return parts, str(root / kind / "converted")

    return made


@pytest.mark.parametrize(
    "kind", ["mosaic_gpt", *(pytest.param(k, marks=pytest.mark.slow) for k in EVERY if k != "mosaic_gpt")]
)
def test_converted_model_equals_the_authors_model(published: Any, kind: str) -> None:
    parts, folder = published(kind)
    model: Any = load_model(folder)
    processor: Any = load_processor(folder)
    texts = ["<image>Question:Is it so? Short answer:Yes<|endofchunk|>", "<image>Output:A dog"]
    pictures = torch.randint(0, 255, (2, 3, 20, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    inputs = processor(text=texts, images=[[pictures[0]], [pictures[1]]], padding_side="left")

    raw = Tokenizer.from_file(str(parts["language_model"] / "tokenizer.json"))
    end_of_chunk, image, pad = range(raw.get_vocab_size(), raw.get_vocab_size() + 3)
    first = [1] if kind == "llama" else []  # LLaMA's tokenizer adds <s> at the beginning
    question, caption = (
        [*first, image, *raw.encode(text, add_special_tokens=False).ids]
        for text in ("Question:Is it so? Short answer:Yes", "Output:A dog")
    )
    question.append(end_of_chunk)
    assert inputs["lang_x"].tolist() == [question, [pad] * (len(question) - len(caption)) + caption]

    reference = authors_flamingo(parts, kind)
    assert (model.media_token_id, model.eoc_token_id) == (image, end_of_chunk)
    assert processor.tokenizer.pad_token_id == pad and len(processor.tokenizer) == pad + 1
    with torch.no_grad():
        found, expected = model(**inputs).logits, reference(**inputs).logits
    # The authors' loader initialises the new rows of LLaMA's head randomly, since its checkpoints lack them.
    real, stop = inputs["attention_mask"].bool(), -3 if kind == "llama" else None
    assert error(found[real][:, :stop], expected[real][:, :stop]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_neox", "llama"])
def test_each_tensor_is_saved_once_and_loaded_unchanged(published: Any, tmp_path: Path, kind: str) -> None:
    _, one = published(kind)
    model: Any = load_model(one)
    assert any(c.__module__ == "open_flamingo.src.flamingo" for c in type(model).__mro__) and not model.training
    saved = load_file(f"{one}/model.safetensors")
    distinct = {id(x) for x in model.state_dict(keep_vars=True).values()}
    assert len(saved) == len(distinct) < len(model.state_dict())
    assert saved.keys() <= model.state_dict().keys()
    assert any(".gated_cross_attn_layer." in name for name in saved)  # as in published checkpoints
    assert not any("gated_cross_attn_layers" in name or "old_decoder_blocks" in name for name in saved)
    model.save_pretrained(tmp_path / "two")
    again: Any = load_model(str(tmp_path / "two"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert load_file(tmp_path / "two" / "model.safetensors").keys() == saved.keys()
    assert model.config.to_diff_dict() == again.config.to_diff_dict()


@pytest.mark.slow
def test_dtype_applies_to_saved_tensors_only(published: Any, tmp_path: Path) -> None:
    parts, folder = published("llama")
    whole: Any = load_model(folder)
    convert(tmp_path / "one", **parts, dtype=torch.bfloat16, only_attend_immediate_media=False)
    saved = {name: x.bfloat16() for name, x in whole.state_dict().items()}
    for options in ({}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}, {"torch_dtype": torch.float64}):
        again: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "one", **options)
        dtype = [*options.values(), torch.bfloat16][0]
        assert all(x.dtype == dtype and torch.equal(x, saved[name].to(dtype)) for name, x in again.state_dict().items())
        assert not again.lang_encoder.gated_cross_attn_layers[-1].attn.only_attend_immediate_media
    computed = {name: x for name, x in whole.named_buffers() if name not in whole.state_dict()}
    assert any(name.endswith("inv_freq") for name in computed)
    assert all(torch.equal(x, computed[name]) for name, x in again.named_buffers() if name in computed)
    with pytest.raises(ConfigError, match="device_map: not known to OpenFlamingo.from_pretrained"):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "one", device_map="auto")


@pytest.mark.slow
def test_conversion_without_checkpoint_keeps_the_language_model(published: Any, tmp_path: Path) -> None:
    parts, _ = published("gpt_neox")
    convert(tmp_path / "one", language_model=parts["language_model"], vision_model=parts["vision_model"])
    model: Any = load_model(str(tmp_path / "one"))
    processor: Any = load_processor(str(tmp_path / "one"))
    # The published files state no pad token, although the tokenizer's class has a default.
    assert processor.tokenizer.pad_token == "<PAD>"
    rows = len(processor.tokenizer)
    before = torch.load(parts["language_model"] / "pytorch_model.bin", weights_only=True)
    assert torch.equal(model.lang_encoder.get_output_embeddings().weight, before["embed_out.weight"][:rows].float())
    assert all(not x.any() for name, x in model.named_parameters() if name.endswith("_gate"))


def edit_state(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(file: Path) -> None:
        state = torch.load(file, weights_only=True)
        change(state)
        torch.save(state, file)

    return edit


def drop(*names: str) -> Callable[[Path], None]:
    return edit_state(lambda state: [state.pop(name) for name in list(state) if name.endswith(names)])


def put(name: str, *shape: int) -> Callable[[Path], None]:
    return edit_state(lambda state: state.update({name: torch.zeros(shape)}))


def edit_json(name: str, value: Any) -> Callable[[Path], Any]:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))


def put_code(file: Path) -> None:
    torch.save({"perceiver.latents": print}, file)


GATE = "lang_encoder.transformer.blocks.1.gated_cross_attn_layer.attn_gate"
TWICE = "lang_encoder.gated_cross_attn_layers.1.attn_gate"
FREQUENCIES = "lang_encoder.gpt_neox.layers.1.decoder_layer.attention.rotary_emb.inv_freq"
CLIP, LM, CHECKPOINT = "clip/pytorch_model.bin", "lm/pytorch_model.bin", "checkpoint.pt"
CONFIG, PICTURES = "lm/config.json", "clip/preprocessor_config.json"
BAD: dict[str, list[tuple[str, Callable[[Path], Any], str]]] = {
    "mosaic_gpt": [
        (CLIP, drop("pre_layrnorm.weight"), r"clip: .* it lacks 1 tensor .*pre_layrnorm.* the CLIPVision"),
        (LM, drop("blocks.2.attn.q_ln.weight"), r"lm: .* it lacks 1 tensor \(.*blocks.2.attn.q_ln.weight\)"),
        (CHECKPOINT, drop(GATE), r"checkpoint.pt: .* it lacks \d tensors .* the weights of the perceiver"),
        (CHECKPOINT, drop("wte.weight"), "expected .*wte.weight, the trained embedding"),
        (CHECKPOINT, drop("attn_gate"), "has no weights of gated cross-attention"),
        (CHECKPOINT, put("perceiver.latents", 64, 7), r"latents: \(64, 7\) in the checkpoint, \(64, 24\) in"),
        (CHECKPOINT, put(TWICE, 1), r"attn_gate and .*attn_gate are one tensor of the model, and differ"),
        (
            *(CHECKPOINT, put("lang_encoder.transformer.wte.weight", 7, 32)),
            r"embedding has 7 rows, but the tokenizer in .* has 260 tokens .*, and 261 with <PAD>",
        ),
        (CHECKPOINT, put_code, "checkpoint=.*checkpoint.pt: "),
        (CONFIG, edit_json("alibi", False), "only an MPT with alibi=True"),
        (CONFIG, edit_json("n_heads", 6), "n_heads is 6; .* only for powers of two"),
        (PICTURES, edit_json("crop_size", 24), "crops images to 24 x 24, but the vision tower takes 16 x 16"),
    ],
    "gpt_neox": [
        (CHECKPOINT, drop("embed_out.weight"), r"it lacks 1 tensor \(lang_encoder.embed_out.weight\)"),
        (CHECKPOINT, put(FREQUENCIES, 4), r"rotary_emb.inv_freq has other rotary frequencies"),
    ],
    "mpt": [(CONFIG, edit_json("no_bias", False), "no_bias is False")],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "file", "edit", "message"), [(kind, *case) for kind, cases in BAD.items() for case in cases]
)
def test_inconsistent_parts_are_refused(
    published: Any, tmp_path: Path, kind: str, file: str, edit: Callable[[Path], Any], message: str
) -> None:
    original, folder = published(kind)
    shutil.copytree(Path(folder).parent, tmp_path / "parts")
    edit(tmp_path / "parts" / file)
    parts = {name: tmp_path / "parts" / path.name for name, path in original.items()}
    with pytest.raises((ConfigError, DataError), match=message):
        convert(tmp_path / "out", **parts)


@pytest.mark.parametrize("kind", ["mosaic_gpt", "mpt"])
def test_numbers_of_an_mpt_config_may_be_ints_or_floats(kind: str, tmp_path: Path) -> None:
    """Published configs write dropout as 0 and fractions as 1.0; configs that users write have 0.0, 4.0 and 1."""
    folder = published_parts(tmp_path, kind)["language_model"]
    file, clip = folder / "config.json", "clip_qkv" if kind == "mpt" else "attn_clip_qkv"
    published = json.loads(file.read_text())
    written = published | {"emb_pdrop": 0.0, "resid_pdrop": 0.0, "embedding_fraction": 1, "max_seq_len": 2048.0}
    written["expansion_ratio" if kind == "mpt" else "mlp_ratio"] = 4.0
    attention = {"alibi_bias_max": 8.0, "attn_pdrop": 0.0, clip: 8}
    written |= {"attn_config": published["attn_config"] | attention} if kind == "mpt" else attention
    configs = []
    for stated in (published, written):
        file.write_text(json.dumps(stated))
        configs.append(load_language_model(folder).config)
    assert (configs[0].attn_config.clip_qkv, configs[1].attn_config.clip_qkv) == (None, 8)
    configs[1].attn_config.clip_qkv = None
    assert configs[0].to_dict() == configs[1].to_dict()
    file.write_text(json.dumps(written | {"max_seq_len": 2048.5}))
    with pytest.raises(ConfigError, match="'max_seq_len' expected int"):
        load_language_model(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padding_on_the_left_of_mpt_with_norms_gives_finite_logits(dtype: torch.dtype) -> None:
    """Rows of padding see no key; not-a-number in their values would reach every later row."""
    config = MptConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=16, vocab_size=64, attn_config={"qk_ln": True})
    model = QKNormMptForCausalLM(config).to(dtype).eval()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert bool(model(input_ids=torch.ones_like(mask), attention_mask=mask).logits.isfinite().all())


def test_wrong_interval_is_refused(published: Any, tmp_path: Path) -> None:
    parts, _ = published("gpt_neox")
    with pytest.raises(ConfigError, match=r"cross_attn_every_n_layers=4, but .* has 2; pass that"):
        convert(tmp_path / "out", **parts, cross_attn_every_n_layers=4)


def test_processor_takes_pictures_as_other_processors_do(published: Any) -> None:
    processor: Any = load_processor(published("mosaic_gpt")[1])
    a, b, c = (torch.full((3, 20, 30), value, dtype=torch.uint8) for value in (10, 120, 240))
    two = ["<image><image>hi", "<image>ho"]
    for text, nested, flat in ((two, [[a, b], [c]], [a, b, c]), (two[0], [[a, b]], [a, b]), (two[1], [[c]], c)):
        expected, found = processor(text=text, images=nested), processor(text=text, images=flat)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(
        processor(text=two[0], images=torch.stack([a, b]))["vision_x"],
        processor(text=two[0], images=[[a, b]])["vision_x"],
    )
    assert processor(text=["hi", "ho"], images=[])["vision_x"].abs().sum() == 0
    for images, message in (
        ([a, b], r"the texts have \[2, 1\] <image>, and 2 images were passed; pass one for each"),
        ([[a, b], c], r"and \[2, 'no list'\] images were passed"),
        ([[a], [b, c]], r"the texts have \[2, 1\] <image>, and \[1, 2\] images were passed"),
    ):
        with pytest.raises(DataError, match=message):
            processor(text=two, images=images)


def test_processor_refuses_other_arguments_and_tokenizers(published: Any) -> None:
    processor: Any = load_processor(published("mosaic_gpt")[1])
    picture = torch.zeros(3, 20, 30, dtype=torch.uint8)
    with pytest.raises(DataError, match="unknown arguments: colour"):
        processor(text="<image>hi", images=[[picture]], colour=4)
    with pytest.raises(DataError, match=r"the texts have \[1\] <image>, and after truncation \[0\] are left"):
        processor(text="hi<image>", images=[[picture]], truncation=True, max_length=1)
    with pytest.raises(DataError, match=r"no token <image>, <\|endofchunk\|>"):
        OpenFlamingoProcessor(CLIPImageProcessorPil(), character_tokenizer(bos="<s>", eos="</s>"))
