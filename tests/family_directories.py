"""Tiny model directories of each family in the form users have them, and chats that use every feature of the format.

Weights are random, no gate is closed, and answers depend on the images. A token is a character.
"""

import atexit
import importlib.util
import shutil
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    IdeficsProcessor,
    LlamaConfig,
    MllamaProcessor,
    MptConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics.image_processing_pil_idefics import IdeficsImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.utils import is_torchvision_available

from chats import asks, image, says, write_rows
from mllm_seqpar.chats.needle import make_needle_videos
from tiny_models.idefics import tiny_model as tiny_idefics
from tiny_models.mllama import TILES
from tiny_models.mllama import tiny_model as tiny_mllama
from tiny_models.moss_vl import tiny_model as tiny_moss
from tiny_models.video_mllama import tiny_model as tiny_video_mllama

VOCABULARY = 128

LLAMA_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<|image|>' }}{%- else %}{{- part['text'] | trim }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
"""A template in the form of the published one."""


def character_tokenizer(*marks: str, bos: str, eos: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each character and each mark, and 0 for padding."""
    special = [*dict.fromkeys(("<pad>", "<unk>", bos, eos)), *marks]
    tokens = [*special, *map(chr, range(32, 127)), "\n"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.add_special_tokens(special)
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": bos, "eos_token": eos, "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=list(marks), **named)


def make_idefics(folder: Path, *, resampler: bool = False) -> None:
    """Write the tiny model and its processor; images of 16 x 16."""
    marks = ("<fake_token_around_image>", "<image>", "<end_of_utterance>")
    tokenizer = character_tokenizer(*marks, bos="<s>", eos="</s>")
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    tiny_idefics(use_resampler=resampler, max_position_embeddings=2048, **ids).save_pretrained(folder)
    IdeficsProcessor(IdeficsImageProcessorPil(image_size=16), tokenizer).save_pretrained(folder)


def make_mllama(folder: Path, *, video: bool = False) -> None:
    """Write the tiny model and its processor: images of up to 3 tiles of 5 patches, or frames of 5 visual tokens."""
    from mllm_seqpar.models.video_mllama import VideoMllamaProcessor

    media = ("<|image|>", "<|video|>")[: 1 + video]
    marks = (*media, "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
    tokenizer = character_tokenizer(*marks, bos="<|begin_of_text|>", eos="<|eot_id|>")
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    tiny, side, tiles = (tiny_video_mllama, 56, 1) if video else (tiny_mllama, 28, TILES)
    model = tiny(vocab_size=VOCABULARY, max_position_embeddings=2048, **ids)
    for mark, name in zip(media, ("image_token_index", "video_token_index"), strict=False):
        setattr(model.config, name, tokenizer.convert_tokens_to_ids(mark))
    model.save_pretrained(folder)
    images = MllamaImageProcessorPil(size={"height": side, "width": side}, max_image_tiles=tiles)
    processor = VideoMllamaProcessor if video else MllamaProcessor
    processor(images, tokenizer, chat_template=LLAMA_TEMPLATE).save_pretrained(folder)


def make_open_flamingo(folder: Path, kind: str = "llama") -> None:
    """Write a Flamingo over 3 layers of width 32 with a cross-attention block in every second; images of 16 x 16."""
    from mllm_seqpar.models.open_flamingo import OpenFlamingoConfig, OpenFlamingoProcessor
    from mllm_seqpar.models.open_flamingo.modeling import OpenFlamingo

    tokenizer = character_tokenizer("<|endofchunk|>", "<image>", bos="<s>", eos="</s>")
    common = {"vocab_size": VOCABULARY, "pad_token_id": 0}
    common |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    texts: dict[str, Any] = {
        "llama": LlamaConfig(**common | sizes, hidden_size=32, intermediate_size=48, num_hidden_layers=3),
        "mpt": MptConfig(**common, d_model=48, n_heads=3, n_layers=2, max_seq_len=2048),
    }
    vision = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = OpenFlamingoConfig(
        text_config=texts[kind],
        vision_config=CLIPVisionConfig(hidden_size=24, intermediate_size=32, **vision),
        media_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        eoc_token_id=tokenizer.convert_tokens_to_ids("<|endofchunk|>"),
        cross_attn_every_n_layers=2 if kind == "llama" else 1,
    )
    torch.manual_seed(0)
    model, generator = OpenFlamingo(config).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("_gate"):
                weight.copy_(0.8 + 0.2 * noise)
            elif weight.dim() == 1:
                weight.copy_(0.2 * noise + name.endswith("weight"))
            elif "embed" in name and "patch" not in name:
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(noise * weight[0].numel() ** -0.5)
    model.save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    OpenFlamingoProcessor(images, tokenizer).save_pretrained(folder)


CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""A template in the form of the published ones of Qwen2.5-VL and Qwen3-VL."""


def make_qwen(folder: Path, family: str) -> None:
    """Write the tiny model of one of the two families and its processor; images of up to 9 tokens."""
    marks = ("<|im_start|>", *(f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")))
    tokenizer = character_tokenizer(*marks, bos="<|endoftext|>", eos="<|im_end|>")
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "vocab_size": VOCABULARY}
    tiny = import_module(f"tiny_models.{family}")
    model = tiny.tiny_model(**ids, max_position_embeddings=2048)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    for name, mark in zip(names, ("image_pad", "video_pad", "vision_start", "vision_end"), strict=True):
        setattr(model.config, name, tokenizer.convert_tokens_to_ids(f"<|{mark}|>"))
    model.save_pretrained(folder)
    three = family == "qwen3_vl"
    cut = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    images = transformers.Qwen2VLImageProcessor(size={"shortest_edge": 64, "longest_edge": 576}, **cut)
    videos: Any = transformers.Qwen3VLVideoProcessor if three else transformers.Qwen2VLVideoProcessor
    budget = {"shortest_edge": 64, "longest_edge": 576 * (3 if three else 1)}
    processor: Any = transformers.Qwen3VLProcessor if three else transformers.Qwen2_5_VLProcessor
    video_processor = videos(size=budget, cap_pixels_per_frame=False, **cut)
    processor(images, tokenizer, video_processor, chat_template=CHATML).save_pretrained(folder)


def make_moss_vl(folder: Path) -> None:
    """Write the tiny model and its processor; an image has 1 to 9 visual tokens besides the separator."""
    from mllm_seqpar.models.moss_vl import MossVLImageProcessor, MossVLProcessor
    from mllm_seqpar.processors.moss_vl.media import VideoPixelOptions

    marks = ("<|im_start|>", *(f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")))
    tokenizer = character_tokenizer(*marks, "<|time_start|>", "<|time_end|>", bos="<|endoftext|>", eos="<|im_end|>")
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "vocab_size": VOCABULARY}
    model = tiny_moss(**ids)
    for name, mark in (("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start")):
        setattr(model.config, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{mark}|>"))
    model.save_pretrained(folder)
    pixels = {"size": {"shortest_edge": 64, "longest_edge": 576}, "patch_size": 4}
    images = MossVLImageProcessor(**pixels, multi_image_max_pixels=5760)
    MossVLProcessor(images, tokenizer, VideoPixelOptions(**pixels)).save_pretrained(folder)


def take_samples_without_images(processor: Any) -> None:
    """Replace the image processor of Mllama by the one without torchvision.

    The one with torchvision (transformers 5.24) omits samples without images at the end of a batch, and raises
    IndexError if the first sample of a batch is one.
    """
    processor.image_processor = transformers.MllamaImageProcessorPil(**processor.image_processor.to_dict())


MAKERS = {"idefics": make_idefics, "mllama": make_mllama, "moss_vl": make_moss_vl}
MAKERS["video_mllama"] = partial(make_mllama, video=True)
if is_torchvision_available():  # without it, transformers loads no processor of videos
    MAKERS |= {name: partial(make_qwen, family=name) for name in ("qwen2_5_vl", "qwen3_vl")}
if importlib.util.find_spec("open_flamingo"):  # scripts/test.sh installs it, without its dependencies
    MAKERS["open_flamingo"] = make_open_flamingo


VIDEO = {"type": "video", "path": "clip.mp4", "num_frames": 3}
CHATS: dict[str, list[dict[str, Any]]] = {
    "a video": [asks(VIDEO, "What is it?"), says("A dot.")],
    "an image within text": [
        asks("Here ", image("0.png"), "or ", image("1.png"), "?"),
        says("The second."),
    ],
    "turns": [
        {"role": "system", "content": "Be brief."},
        asks(image("2.png"), VIDEO, "First?"),
        says("Red."),
        asks("And now? ", image("1.png")),
        says("Blue, I think."),
    ],
    "words alone": [asks("Say hello."), says("Hello!")],
}


@cache
def family_folder() -> Path:
    """Write `clip.mp4`, images of several sizes, `train.jsonl` and a directory of each family, once per session."""
    root = Path(mkdtemp())
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    Path(make_needle_videos(root, 1, frames=(20, 20), rate=10)[0].path).rename(root / "clip.mp4")
    rng = np.random.default_rng(0)
    for number, size in enumerate(((40, 40), (24, 90), (80, 30))):
        Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)).save(root / f"{number}.png")
    write_rows(root / "train.jsonl", [{"messages": messages} for messages in CHATS.values()])
    for name, make in MAKERS.items():
        make(root / name)
    return root


@pytest.fixture(scope="session")
def folder() -> Path:
    """`family_folder`, as a fixture: import it into a conftest.py."""
    return family_folder()
