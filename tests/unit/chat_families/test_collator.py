"""Layer: one process. `SeqParDataCollator` gives each family the inputs of fine-tuning, with TRL's keys of examples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from chats import asks, image, says
from family_directories import CHATS, MAKERS
from mllm_seqpar import SeqParDataCollator
from mllm_seqpar.chats.batch import load_local_images
from mllm_seqpar.chats.chat_family import chat_family
from mllm_seqpar.chats.data_set import ChatDataset
from mllm_seqpar.errors import DataError
from mllm_seqpar.models.loading import load_processor
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.training.batches import BatchReader
from tiny_models.mplug_owl3 import tiny_tokenizer

NAMES = {"lang_x": "input_ids", "vision_x": "pixel_values"}


@pytest.fixture(params=["mplug_owl3", *MAKERS])
def processor(request: pytest.FixtureRequest, folder: Path) -> Any:
    if request.param == "mplug_owl3":
        return MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=28), tiny_tokenizer())
    return load_processor(str(folder / request.param))


def placed(chat: Any, folder: Path) -> list[dict[str, Any]]:
    """Return the chat with absolute paths."""
    return [
        message | {"content": [p | {"path": str(folder / p["path"])} if "path" in p else p for p in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in chat
    ]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


def test_batch_equals_that_of_fine_tuning(processor: Any, folder: Path) -> None:
    examples = [{"messages": placed(chat, folder)} for chat in CHATS.values()]
    found = SeqParDataCollator(processor)(examples)
    batch = ChatDataset(folder / "train.jsonl", processor).batch(range(len(examples)))
    chat_format = chat_family(processor)
    pictures = load_local_images(batch, range(len(batch.text.slots)), chat_format)
    shaped = [x.unflatten(0, (len(examples), -1)) if chat_format.always_sharded else x for x in pictures]
    expected = chat_format.arguments(batch.text) | dict(zip(chat_format.frame_names, shaped, strict=True))
    assert_same(found, {NAMES.get(name, name): x for name, x in expected.items()})


def test_words_alone_are_a_batch_of_fine_tuning(processor: Any, folder: Path) -> None:
    words = [*CHATS].index("words alone")
    batch = BatchReader(ChatDataset(folder / "train.jsonl", processor), "self", "self").read([words])
    assert batch.frames == 0 < batch.targets and batch.samples == (words,) and "labels" in batch.arguments


def test_media_may_be_in_columns_and_in_memory(processor: Any, folder: Path) -> None:
    collate = SeqParDataCollator(processor)
    picture = Image.open(folder / "0.png").convert("RGB")
    expected = collate([{"messages": [asks(image(folder / "0.png"), "What?"), says("It.")]}])
    question = [{"type": "image", "text": None}, {"type": "text", "text": "What?", "image": None}]
    for messages, columns in (
        ([{"role": "user", "content": "What?"}, says("It.")], {"images": [picture]}),
        ([{"role": "user", "content": "What?"}, says("It.")], {"image": picture}),
        ([{"role": "user", "content": question}, says("It.")], {"images": [np.array(picture)]}),
        ([asks({"type": "image", "image": picture}, "What?"), says("It.")], {"images": []}),
    ):
        assert_same(collate([{"messages": messages, **columns}]), expected)


def test_frames_of_a_video_may_be_in_memory(processor: Any, folder: Path) -> None:
    one_size = type(processor).__name__.startswith(("Qwen", "MossVL"))
    names = [str(folder / f"{0 if one_size else number}.png") for number in range(2)]
    frames = [Image.open(name).convert("RGB") for name in names]
    found = [
        SeqParDataCollator(processor)([{"messages": [asks({"type": "video", "video": video}, "?"), says("x")]}])
        for video in (names, frames)
    ]
    assert_same(found[1], found[0])


def test_completions_are_the_targets(processor: Any, folder: Path) -> None:
    collate, picture = SeqParDataCollator(processor), Image.open(folder / "0.png").convert("RGB")
    prompt = [{"role": "user", "content": "First?"}, says("One."), {"role": "user", "content": "Then?"}]
    whole = collate([{"messages": [*prompt, says("Two.")], "images": [picture]}])
    found = collate([{"prompt": prompt, "completion": [says("Two.")], "images": [picture]}])
    both, last = (x["labels"][0][x["labels"][0] != -100] for x in (whole, found))
    assert torch.equal(found["input_ids"], whole["input_ids"]) and torch.equal(both[-len(last) :], last)
    assert processor.tokenizer.decode(last).replace(" ", "").startswith("Two.") and len(both) > len(last)
    pair = {"prompt": prompt, "chosen": [says("Two.")], "rejected": [says("A longer answer.")], "images": [picture]}
    pairs = collate([pair, pair])
    assert torch.equal(pairs["completion_mask"][0].bool().nonzero(), (found["labels"][0] != -100).nonzero())
    assert torch.equal(pairs["input_ids"][::2], pairs["input_ids"][1::2]) and "labels" not in pairs
    all_tokens = SeqParDataCollator(processor, assistant_only_loss=False)(
        [{"messages": [*prompt, says("Two.")]}, {"messages": [*prompt, says("A longer one.")]}]
    )
    assert torch.equal(all_tokens["labels"] == -100, all_tokens["attention_mask"] == 0)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"text": "x"}, "an example has the keys text; expected messages, prompt and completion, or"),
        ({"prompt": "x", "completion": "y"}, "example 0: prompt is 'x'; expected messages"),
        ({"messages": [asks({"type": "image"}), says("x")]}, "example 0 has 0 images in its columns, and 1 parts"),
        ({"messages": [says("x")], "images": [1]}, "example 0 has 1 images in its columns, and 0 parts"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "example 0: message 0 has the role 'tool'"),
        ({"messages": [asks({"type": "audio"})]}, "example 0: message 0 .user. holds .*audio"),
        (
            {"messages": [asks({"type": "video", "path": "a.mp4", "fsp": 2})]},
            "has the unknown key 'fsp' in",
        ),
        (
            {"messages": [asks({"type": "image", "path": "a.png", "fps": 2})]},
            "a part of type image with fps; only a video takes it",
        ),
        ({"messages": [asks({"type": "video", "images": ["a.png"], "fps": 2})]}, "fps of a list of images, which have"),
        ({"messages": [asks({"type": "video", "path": "a.mp4", "fps": 0})]}, "fps: 0 is not allowed; give a number"),
        ({"messages": [asks({"type": "image"}) | {"role": "system"}]}, "only a user message shows media"),
        ({"messages": [says("x")], "tools": ["t"]}, "example 0 has tools"),
        ({"messages": [asks({"type": "image", "image": np.zeros((3, 4, 4))}), says("x")]}, "an image is .*float64"),
        ({"messages": [says("x"), asks("?")]}, "conversation 0 of the batch: message 0 .assistant. is the first"),
        ({"prompt": [asks("?"), says("x")], "completion": [says("y")]}, "message 2 .assistant. follows another answer"),
        (
            {"messages": [asks("a long question"), says("x")]},
            "conversation 0 of the batch: 47 tokens",
        ),
    ],
)
def test_other_examples_are_refused(example: dict[str, Any], message: str) -> None:
    processor = MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=28), tiny_tokenizer())
    with pytest.raises(DataError, match=message):
        SeqParDataCollator(processor, max_length=5)([example])
