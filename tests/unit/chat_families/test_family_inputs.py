"""Layer: one process, real files. A chat's text, masks and images equal those of the family's own processor."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from chats import chat, image, text, write_rows
from family_cases import QWENS
from family_directories import CHATS, MAKERS, take_samples_without_images
from mllm_seqpar.chats.chat_family import media_parts, tokenize
from mllm_seqpar.chats.clip import ImageListSource
from mllm_seqpar.data import ChatDataset, chat_family, load_local_images
from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.inference.evidence import frame_times
from mllm_seqpar.models.loading import load_processor
from mllm_seqpar.patches.chats.idefics import prompt_items
from mllm_seqpar.sharding import frame_bounds, frame_spans, in_frame_order

BATCHES = {"several turns": [2], "text only": [3], "text only first": [3, 0], "all": [0, 1, 2, 3]}


def pil_images(batch: Any) -> list[Any]:
    """Return all frames of a batch as PIL images."""
    decoded = (part for source in batch.sources for part in source.read(0, len(source)))
    return [Image.fromarray(frame.permute(1, 2, 0).numpy()) for part in decoded for frame in part]


def with_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat in the form of the processors, with the frames of a video as images."""
    converted = []
    for message in messages:
        content = message["content"]
        parts = [text(content)] if isinstance(content, str) else content
        shown = [
            part if part["type"] == "text" else {"type": "image"}
            for part in parts
            for _ in range(part.get("num_frames", 1))
        ]
        converted.append({"role": message["role"], "content": shown})
    return converted


def idefics(processor: Any, chats: list[Any], pictures: list[Any]) -> dict[str, Tensor]:
    items = [prompt_items(chat, False, "<end_of_utterance>") for chat in chats]
    prompts = [[pictures.pop(0) if item is None else item for item in listed] for listed in items]
    return processor(text=prompts, add_end_of_utterance_token=False, padding_side="right")


def mllama(processor: Any, chats: list[Any], pictures: list[Any]) -> dict[str, Tensor]:
    texts = [processor.apply_chat_template(chat) for chat in chats]
    nested = [[pictures.pop(0) for _ in range(text.count("<|image|>"))] for text in texts]
    images = nested if any(nested) else None
    common = {"padding": True, "padding_side": "right", "return_tensors": "pt", "add_special_tokens": False}
    if images and not all(images):
        take_samples_without_images(processor)
    try:
        return processor(images=images, text=texts, **common)
    except ValueError as error:
        if "at least one image per sample" not in str(error):
            raise
        pytest.skip("before transformers 5.23, the family's own processor refuses a batch with and without images")


def open_flamingo(processor: Any, chats: list[Any], pictures: list[Any]) -> dict[str, Tensor]:
    texts = processor.apply_chat_template(chats)
    images = [[pictures.pop(0) for _ in range(text.count("<image>"))] for text in texts]
    return processor(text=texts, images=images, padding_side="right")


def qwen(processor: Any, chats: list[Any], pictures: list[Any]) -> dict[str, Tensor]:
    """Call the published processor. The clip has 20 frames, 10 a second, and three of them are shown."""
    parts = [part for chat in chats for part in media_parts(chat)]
    images, videos = [], []
    for part in parts:
        shown = [np.asarray(pictures.pop(0)) for _ in range(part.get("num_frames", 1))]
        (images if part["type"] == "image" else videos).append(np.stack(shown) if len(shown) > 1 else shown[0])
    media: dict[str, Any] = {"images": images or None}
    if videos:
        clip = {"fps": 10.0, "frames_indices": [3, 10, 17], "total_num_frames": 20}
        media |= {"videos": videos, "video_metadata": [dict(clip) for _ in videos], "do_sample_frames": False}
    texts = [processor.apply_chat_template(chat, tokenize=False) for chat in chats]
    found = dict(processor(text=texts, padding=True, padding_side="right", return_tensors="pt", **media))
    if "second_per_grid_ts" in found:
        found["second_per_grid_ts"] = torch.as_tensor(found["second_per_grid_ts"])
    return found


def moss_vl(processor: Any, chats: list[Any], pictures: list[Any]) -> dict[str, Tensor]:
    """Call the native processor; the chat format has no blank images, and states the mask by numbers of frames."""
    images, videos = [], []
    for part in (part for messages in chats for part in media_parts(messages)):
        shown = [pictures.pop(0) for _ in range(part.get("num_frames", 1))]
        (images if part["type"] == "image" else videos).append(shown[0] if part["type"] == "image" else shown)
    clip = {"fps": 10.0, "frames_indices": [3, 10, 17]}
    texts = [processor.apply_chat_template(chat) for chat in chats]
    found = processor(
        text=texts,
        images=images or None,
        videos=videos or None,
        video_metadata=[clip for _ in videos],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    counts = [text.count("<|image|>") + text.count("<|video|>") for text in texts]
    media, grids, pixels = [], [], []
    parts = iter(zip(found["grid_thw"], found["pixel_values"].split(found["grid_thw"].prod(1).tolist()), strict=True))
    for count, number in zip(counts, found["media_nums_per_sample"], strict=True):
        for grid, patches in [next(parts) for _ in range(number)]:
            if count:
                grids.append(grid)
                pixels.append(patches)
        media.append(count)
    own = {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}
    if not grids:
        return own
    own |= {"grid_thw": torch.stack(grids), "media_nums_per_sample": torch.tensor(media)}
    return own | {
        "cross_attention_mask": (~found["cross_attention_mask"][:, 0]).sum(2),
        "pixel_values": torch.cat(pixels),
    }


def video_mllama(processor: Any, chats: list[Any], pictures: list[Any]) -> dict[str, Tensor]:
    """Call the native processor, with videos as images; it makes the same inputs of `<|video|>` and its frames."""
    texts = [processor.apply_chat_template(chat) for chat in chats]
    images = [[pictures.pop(0) for _ in range(text.count("<|image|>"))] for text in texts]
    found = processor(images=images, text=texts, padding=True, padding_side="right")
    clips = [own for own in images if own]
    marked = [
        re.sub(r"(<\|image\|>)+", "<|video|>", text) if own else text for text, own in zip(texts, images, strict=True)
    ]
    if all(text.count("<|video|>") <= 1 for text in marked):
        again = processor(videos=clips, text=marked, padding=True, padding_side="right")
        assert all(torch.equal(x, again[name]) for name, x in found.items())
    return found


OWN = {
    "idefics": idefics,
    "moss_vl": moss_vl,
    "video_mllama": video_mllama,
    "mllama": mllama,
    "open_flamingo": open_flamingo,
    "qwen2_5_vl": qwen,
    "qwen3_vl": qwen,
}


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("name", MAKERS)
def test_inputs_equal_those_of_the_own_processor(folder: Path, name: str, rows: list[int]) -> None:
    processor: Any = load_processor(str(folder / name))
    chat_format = chat_family(processor)
    batch = ChatDataset(folder / "train.jsonl", processor).batch(rows)
    chats = [list(CHATS.values())[row] for row in rows]
    ragged = chat_format.ragged
    pictures = [picture for row in rows for picture in pil_images(ChatDataset(folder / "train.jsonl", None)[row])]
    expected = dict(OWN[name](processor, chats if ragged else [with_images(chat) for chat in chats], pictures))
    found = chat_format.arguments(batch.text)
    total = len(batch.text.slots)
    parts = [load_local_images(batch, range(*bounds), chat_format) for bounds in frame_bounds(total, 3)]
    if not chat_format.ragged:
        zigzag = frame_spans(total, 3, "zigzag")
        in_two = [load_local_images(batch, [range(*span) for span in spans], chat_format) for spans in zigzag]
        for columns, contiguous in zip(zip(*in_two, strict=True), zip(*parts, strict=True), strict=True):
            assert torch.equal(in_frame_order(columns, zigzag), torch.cat(contiguous))
    if total:
        for argument, *shards in zip(chat_format.frame_names, *parts, strict=True):
            found[argument] = torch.cat(shards) if ragged else torch.cat(shards).unflatten(0, (len(rows), -1))
    found = {argument: x for argument, x in found.items() if len(x)}  # Qwen's images where there are only videos
    labels = found.pop("labels")
    assert found.keys() == expected.keys()
    for argument, value in expected.items():
        tolerance = 1e-2 if argument == "second_per_grid_ts" else 0  # the processor counts seconds in whole frames
        torch.testing.assert_close(found[argument].to(value.dtype), value, rtol=tolerance, atol=0)
    targets = "".join(processor.tokenizer.decode(labels[labels != -100], skip_special_tokens=True).split())
    answers = [message["content"] for chat in chats for message in chat if message["role"] == "assistant"]
    assert targets == "".join("".join(answers).split())
    assert int((labels != -100).sum()) > 0 and torch.equal(labels[labels != -100], batch.input_ids[labels != -100])


@pytest.mark.parametrize("name", MAKERS)
def test_unusable_chats_and_tokenizers_are_refused(folder: Path, name: str) -> None:
    processor: Any = load_processor(str(folder / name))
    mark = {"mllama": "<|image|>", "moss_vl": "<|image_pad|>", "video_mllama": "<|image|>"}.get(
        name, "<|video_pad|>" if name in QWENS else "<image>"
    )
    write_rows(folder / "wrong.jsonl", [{"messages": CHATS["a video"]}, chat(image("0.png"), f"{mark} what?")])
    with pytest.raises(DataError, match=r"wrong.jsonl:2: (message 0 \(user\) )?has .*<"):
        ChatDataset(folder / "wrong.jsonl", processor)
    # A tokenizer without the image token splits it into characters.
    write_rows(folder / "right.jsonl", [{"messages": CHATS["a video"]}])
    unknown = processor.tokenizer.unk_token_id
    processor.image_token_id, processor.tokenizer.convert_tokens_to_ids = unknown, lambda token: unknown
    processor.video_token_id = unknown
    message = r"sample 0 has 3 images, but 0 tokens <\|?image"
    if name == "moss_vl":
        message = r"the media have 3 frames, but the text has \[0\] placeholders <\|image_pad"
    if name in QWENS:
        message = r"the videos have 18 tokens, but the text has 0 of <\|video_pad"
    with pytest.raises(DataError, match=f"right.jsonl:1: {message}"):
        ChatDataset(folder / "right.jsonl", processor).batch([0])


def test_token_that_only_ends_in_an_answer_is_a_target_as_in_transformers() -> None:
    """A tokenizer may merge the last character of the prompt and the first one of the answer."""
    words = Tokenizer(
        WordLevel({word: number for number, word in enumerate(["?", "Answer", ':"', "yes", '"', "."])}, "?")
    )
    words.pre_tokenizer = Split(Regex(r':"|\w+|[^\w]'), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?")
    template = 'Answer:{% generation %}"{{ messages[0]["content"] }}"{% endgeneration %}.'
    own = tokenizer.apply_chat_template(
        [{"role": "assistant", "content": "yes"}],
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, _, labels = tokenize(tokenizer, ['Answer:"yes".'], [[(7, 12)]], padding_side=None, add_special_tokens=True)
    assert labels is not None and own["assistant_masks"] == [0, 1, 1, 1, 0]
    assert (ids[0].tolist(), (labels[0] != -100).long().tolist()) == (own["input_ids"], own["assistant_masks"])


def test_processor_of_no_family_is_refused() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    expected = f"for a {type(tokenizer).__name__}; expected one of .*IdeficsProcessor.* Copy the processor files"
    with pytest.raises(ConfigError, match=expected):
        chat_family(tokenizer)


class Timed(ImageListSource):
    def seconds(self, index: int) -> float:
        return (0.0, 0.5, 2.0)[index]


@pytest.mark.parametrize("family", MAKERS)
def test_stored_features_keep_the_times_of_their_frames(folder: Path, family: str) -> None:
    chat_format = chat_family(load_processor(str(folder / family)))
    video = Timed([torch.zeros(3, 56, 56, dtype=torch.uint8)] * 3)
    metadata = json.loads(json.dumps(chat_format.frame_metadata(video)))
    stored = chat_format.stored_frames(len(chat_format.frame_groups(video)), metadata)
    assert frame_times([stored]) == frame_times([video])
    assert [time.start for time in frame_times([stored])] == [0.0, 0.5, 2.0]
    if family in (*QWENS, "moss_vl"):  # whose text depends on the size of the frames
        assert stored.sizes() == video.sizes()
