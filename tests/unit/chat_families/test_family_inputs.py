"""Layer: one process, real files. A chat's text, masks and pictures are those that the family's own processor makes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family_chats import CHATS
from PIL import Image
from tiny_directories import MAKERS
from torch import Tensor

from mllm_seqpar.data import ChatDataset, chat_family, load_local_pictures
from mllm_seqpar.models.loading import load_processor
from mllm_seqpar.patches.idefics.chat import prompt_items
from mllm_seqpar.patches.open_flamingo.chat import write
from mllm_seqpar.sharding import frame_bounds

BATCHES = {name: [number] for number, name in enumerate(CHATS)} | {"all": [0, 1, 2, 3], "two": [3, 0], "mixed": [1, 2]}


def pictures_of(batch: Any) -> list[Any]:
    """All that a batch shows, as PIL images."""
    return [
        Image.fromarray(frame.permute(1, 2, 0).numpy())
        for source in batch.sources
        for decoded in source.read(0, len(source))
        for frame in decoded
    ]


def as_images(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """A chat as the processors want it, a video's frames as images; and how many these are."""
    made, count = [], 0
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        expanded = [p for part in parts for p in [part] * (part.get("num_frames", 1))]
        made.append({"role": message["role"], "content": [
            {"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": "image"} for part in expanded
        ]})  # fmt: skip
        count += sum(part["type"] != "text" for part in expanded)
    return made, count


def idefics(processor: Any, chats: list[Any], pictures: list[Any]) -> dict[str, Tensor]:
    left = iter(pictures)
    prompts = []
    for chat in chats:
        items = prompt_items(chat, False, "<end_of_utterance>")
        prompts.append([next(left) if item is None else item for item in items])
    return processor(text=prompts, add_end_of_utterance_token=False, padding_side="right")


def mllama(processor: Any, chats: list[Any], pictures: list[Any]) -> dict[str, Tensor]:
    texts = [processor.apply_chat_template(chat) for chat in chats]
    counts = [text.count("<|image|>") for text in texts]
    nested = [[pictures.pop(0) for _ in range(count)] for count in counts]
    images = nested if any(counts) else None
    common = {"padding": True, "padding_side": "right", "return_tensors": "pt", "add_special_tokens": False}
    try:
        return processor(images=images, text=texts, **common)
    except ValueError as error:
        if "at least one image per sample" not in str(error):
            raise
        pytest.skip(
            "this version's own processor refuses samples without images beside others; transformers 5.23 has it"
        )


def open_flamingo(processor: Any, chats: list[Any], pictures: list[Any]) -> dict[str, Tensor]:
    texts = [write(chat, False) for chat in chats]
    images = [[pictures.pop(0) for _ in range(text.count("<image>"))] for text in texts]
    return processor(text=texts, images=images, padding_side="right")


REAL = {"idefics": idefics, "mllama": mllama, "open_flamingo": open_flamingo}
REAL = {name: REAL[name] for name in MAKERS}


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("name", REAL)
def test_as_the_processor_makes_them(folder: Path, name: str, rows: list[int]) -> None:
    processor: Any = load_processor(str(folder / name))
    family = chat_family(processor)
    batch = ChatDataset(folder / "train.jsonl", processor).batch(rows)
    pictures = pictures_of(batch)
    chats = [as_images(list(CHATS.values())[row])[0] for row in rows]
    expected = dict(REAL[name](processor, chats, pictures.copy()))
    found = family.arguments(batch.text)
    total = len(batch.text.slots)
    parts = [load_local_pictures(batch, range(*bounds), family) for bounds in frame_bounds(total, 3)]
    if total:
        for argument, *own in zip(family.frame_names, *parts, strict=True):
            found[argument] = torch.cat(own).unflatten(0, (len(rows), -1))
    labels = found.pop("labels")
    assert found.keys() == expected.keys()
    for argument, value in expected.items():
        assert torch.equal(found[argument].to(value.dtype), value), argument
    taught = "".join(processor.tokenizer.decode(labels[labels != -100], skip_special_tokens=True).split())
    answers = [m["content"] for row in rows for m in list(CHATS.values())[row] if m["role"] == "assistant"]
    assert taught == "".join("".join(answers).split())
    assert int((labels != -100).sum()) > 0 and torch.equal(labels[labels != -100], batch.input_ids[labels != -100])
