"""Layer: one process. The processor against the published ones: options, prompts token for token, tiles of images."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoProcessor, AutoTokenizer

from mllm_seqpar.chats.chat_family import chat_family
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.processors.mplug_owl3.chat import image_text
from mllm_seqpar.processors.mplug_owl3.image_processing import best_grid
from tiny_models.mplug_owl3 import GATES

LAYER = "language_model.model.layers.0.self_attn."
GATE_NAMES = {"per_head": ["gate_proj.0.weight", "gate_proj.0.bias"], "vector": ["gate"], None: []}
OPTIONS = {"per_head": (384, False, "v2"), "vector": (384, True, "v3"), None: (378, True, "v3")}


def write_published(folder: Path, gate: str | None, weights: bool = True) -> Path:
    """Write the files of a published directory that a processor reads: config, tokenizer, and weights by name."""
    write_published_tokenizer(folder)
    remote = {"AutoConfig": "configuration_mplugowl3.mPLUGOwl3Config", "AutoModel": "modeling_mplugowl3.mPLUGOwl3Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "mplugowl3", "auto_map": remote}))
    if weights:
        names = [LAYER + name for name in ["v_kv_proj.weight", *GATE_NAMES[gate]]]
        save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
    return folder


def options(processor: Any) -> tuple:
    return processor.image_processor.image_size, processor.video_span, processor.cut_template


def tiny(tokenizer: Any, *options: Any) -> MPlugOwl3Processor:
    return MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=28), tokenizer, *options)


def write_published_tokenizer(folder: Path) -> None:
    """Write a small tokenizer in the published form: Qwen2's byte pairs, no token for `<|image|>`.

    As in Qwen2's merges, `>` merges with a line break after it and `<` with a space before it.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = [chr(byte) for byte in plain] + [chr(256 + number) for number in range(len(others))]
    merges = ["> Ċ", "Ġ <", "i m", "im a", "ima g", "imag e", "Ċ Ċ"]
    words = characters + [merge.replace(" ", "") for merge in merges]
    marks = {number: mark for number, mark in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), len(words))}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    token = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = {
        "added_tokens_decoder": {str(number): token | {"content": mark} for number, mark in marks.items()},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_published_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


class TestDirectories:
    @pytest.mark.parametrize("gate", GATES)
    def test_options_follow_from_weights_and_are_saved(self, tmp_path: Path, gate: str | None) -> None:
        published = write_published(tmp_path / "published", gate)
        found = AutoProcessor.from_pretrained(published)
        assert isinstance(found, MPlugOwl3Processor)
        assert options(found) == OPTIONS[gate] and found.cut_enable
        found.cut_enable = False
        found.save_pretrained(tmp_path / "saved")
        again = MPlugOwl3Processor.from_pretrained(tmp_path / "saved")
        assert options(again) == OPTIONS[gate] and not again.cut_enable

    def test_arguments_override_files_and_weights(self, tmp_path: Path) -> None:
        published = write_published(tmp_path, "per_head")
        given = {"image_size": 28, "video_span": True, "cut_template": "v3", "cut_enable": False}
        found = MPlugOwl3Processor.from_pretrained(published, **given)
        assert options(found) == (28, True, "v3") and not found.cut_enable
        found.save_pretrained(tmp_path)
        assert options(MPlugOwl3Processor.from_pretrained(tmp_path, image_size=56)) == (56, True, "v3")

    def test_directory_of_unknown_generation_is_refused(self, tmp_path: Path) -> None:
        published = write_published(tmp_path, None, weights=False)
        lacking = r"no file that states the processor's video_span, cut_template, and no .*pas"
        with pytest.raises(DataError, match=lacking):
            MPlugOwl3Processor.from_pretrained(published, image_size=378)
        given: dict[str, Any] = {"image_size": 378, "video_span": True}
        assert options(MPlugOwl3Processor.from_pretrained(published, **given, cut_template="v3")) == OPTIONS[None]
        with pytest.raises(ConfigError, match="cut_template is 'v1'; expected one of 'v2', 'v3'"):
            MPlugOwl3Processor.from_pretrained(published, **given, cut_template="v1")


def dialogue(*texts: str) -> list[dict[str, str]]:
    """Return messages of user and assistant in turn, of which the last is an empty answer."""
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate((*texts, ""))]


SYSTEM = {"role": "system", "content": "Be brief."}
# Text that byte pairs merge with the marks of a video, several videos, images, a system message, several turns.
CHATS: list[tuple[list[dict[str, str]], list[int], list[tuple[int, int]]]] = [
    (dialogue("<|video|>\nDescribe."), [3], []),
    (dialogue("See <|video|> and <|video|>\n\nSay <|video|>"), [2, 1, 2], []),
    ([SYSTEM, *dialogue("\n<|video|><|video|>>\n", "\nred\n", "?")], [1, 2], []),
    (dialogue(" <|image|> <|image|>\n", "a", "<|image|>"), [], [(50, 40), (30, 90), (20, 80)]),
    (dialogue("no media"), [], []),
]


def expected_row(tokenizer: Any, chat: list[dict[str, str]], texts: dict[str, list[str]]) -> tuple[list, list, list]:
    """Return tokens, whether each is a target, and placeholder positions, by the published code's steps."""
    chunks = [] if chat[0]["role"] == "system" else [("<|im_start|>system\n<|im_end|>", False)]
    for message in chat:
        content = re.sub(r"<\|(image|video)\|>", lambda found: texts[found[1]].pop(0), message["content"])
        if message["role"] == "assistant":
            chunks += [("\n<|im_start|>assistant\n", False), (content + "<|im_end|>", True), ("<|endoftext|>", True)]
        else:
            start = "" if message["role"] == "system" else "\n"
            turn = f"{start}<|im_start|>{message['role']}\n{content}<|im_end|>"
            chunks += [(chunk, False) for chunk in re.split(r"(<\|image\|>)", turn)]
    ids, is_target, positions = [], [], []
    for chunk, target in chunks:
        positions += [len(ids)] if chunk == "<|image|>" else []
        tokens = tokenizer(chunk)["input_ids"] if chunk else []
        ids, is_target = ids + tokens, is_target + [target] * len(tokens)
    return ids, is_target, positions


class TestPrompts:
    @pytest.mark.parametrize("gate", GATES)
    @pytest.mark.parametrize(("chat", "videos", "images"), CHATS)
    def test_prompts_equal_the_published_ones_token_for_token(
        self, tokenizer: Any, gate: str | None, chat: list, videos: list, images: list
    ) -> None:
        _, span, template = OPTIONS[gate]
        processor = tiny(tokenizer, span, True, template)
        marks = ("<|start_video_frame|>", "<|end_video_frame|>") if span else ("", "")
        grids = [best_grid(height, width, 28) for height, width in images]
        texts = {
            "video": [marks[0] + "<|image|>" * count + marks[1] for count in videos],
            "image": [image_text(grid, template) for grid in grids],
        }
        ids, is_target, positions = expected_row(tokenizer, chat, texts)
        encoded = processor.encode(chat, frames_per_video=videos, image_grids=grids, return_labels=True)
        assert encoded["input_ids"][0].tolist() == ids
        assert (encoded["labels"][0] != -100).tolist() == is_target
        assert encoded["media_offset"][0].tolist() == positions
        # A final assistant message of empty content is the generation prompt, without `<|im_end|><|endoftext|>`.
        asked = processor.encode(chat, frames_per_video=videos, image_grids=grids)
        assert asked["input_ids"][0].tolist() == ids[:-2]
        # A call with formatted text and media gives the same tokens.
        shown: dict[str, Any] = {
            "images": [np.zeros((*size, 3), np.uint8) for size in images] or None,
            "videos": [np.zeros((count, 30, 30, 3), np.uint8) for count in videos] or None,
        }
        called = processor(text=processor.apply_chat_template(chat), **shown)
        assert torch.equal(called["input_ids"], asked["input_ids"])
        assert len(called.get("pixel_values", [])) == len(positions)

    def test_generation_ends_and_pads_as_published(self, tokenizer: Any) -> None:
        chat_format = chat_family(tiny(tokenizer))
        ends = [tokenizer.convert_tokens_to_ids(mark) for mark in ("<|im_end|>", "<|endoftext|>")]
        assert chat_format.generation(None) == {"eos_token_id": ends, "pad_token_id": 0}

    def test_tokenizer_merges_marks_with_their_neighbours(self, tokenizer: Any) -> None:
        """This property of the tokenizer makes the prompts above sensitive to the split of the text."""
        lengths = {text: len(tokenizer(text)["input_ids"]) for text in ("<|image|>", ">\n", " <")}
        assert lengths == {"<|image|>": 5, ">\n": 1, " <": 1}


class TestCutting:
    @pytest.mark.parametrize(
        ("size", "sizes_and_grids"),
        [
            (384, {(500, 500): (2, 2), (240, 640): (1, 3), (200, 900): (1, 4), (640, 240): (3, 1)}),
            (384, {(900, 200): (4, 1), (720, 1280): (2, 3)}),
            (378, {(1061, 709): (3, 2)}),
            # Near ties that float32 and whole pixels decide; exact arithmetic gives another grid.
            (378, {(445, 363): (2, 2), (701, 859): (2, 3)}),
            (384, {(183, 634): (1, 4)}),
        ],
    )
    def test_grids_equal_the_published_ones(self, size: int, sizes_and_grids: dict) -> None:
        """The expected grids were computed by the published image processor."""
        assert {shape: best_grid(*shape, size) for shape in sizes_and_grids} == sizes_and_grids

    def test_texts_of_cut_images_are_the_published_ones(self) -> None:
        assert image_text((2, 3), "v2") == (
            "Cut to 2 rows 3 columns with a global view\n"
            "subimg(0,0)<|image|> subimg(0,1)<|image|> subimg(0,2)<|image|>\n"
            "subimg(1,0)<|image|> subimg(1,1)<|image|> subimg(1,2)<|image|>\n"
            "global_view<|image|>"
        )
        assert image_text((3, 1), "v3") == "<|start_cut|>3*1\n<|image|>\n<|image|>\n<|image|>\n<|image|><|end_cut|>"
        assert image_text(None, "v3") == "<|image|>"

    @pytest.mark.parametrize("form", ["Pillow", "array", "floating"])
    def test_tiles_are_crops_of_the_grid_and_the_whole_image(self, tokenizer: Any, form: str) -> None:
        # No value is clamped at 0 or 255, where Pillow's levels and floating numbers would differ by more.
        array = np.random.default_rng(0).integers(90, 160, (60, 90, 3), dtype=np.uint8)
        image = Image.fromarray(array)
        large, small = (image.resize(size, Image.Resampling.BICUBIC) for size in ((84, 56), (28, 28)))
        crops = [large.crop((28 * x, 28 * y, 28 * x + 28, 28 * y + 28)) for y in range(2) for x in range(3)]
        expected = torch.stack([torch.from_numpy(np.array(tile)).permute(2, 0, 1) for tile in [*crops, small]])
        given = {"Pillow": image, "array": array, "floating": torch.from_numpy(array).permute(2, 0, 1) / 255}[form]
        frame = np.zeros((28, 28, 3), np.uint8)
        found = tiny(tokenizer)(text="<|video|><|image|>", images=given, videos=[[frame]])["pixel_values"]
        assert found.shape[0] == 1 + 7 and found[0].eq(-1).all()
        error = (found[1:] - (expected / 255 - 0.5) / 0.5).abs().max()
        assert error == 0 if form != "floating" else error < 2.1 / 255
