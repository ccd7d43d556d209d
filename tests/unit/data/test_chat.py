"""Layer: one process, real files, the real processor. Chats to micro-batches, and any rank's part of their frames."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import decode_all, write_clip
from PIL import Image

from mllm_seqpar.data import ChatDataset, load_local_frames
from mllm_seqpar.data.needle import make_tokenizer
from mllm_seqpar.errors import DataError, VideoError
from mllm_seqpar.models.mplug_owl3.image_processing import MPlugOwl3ImageProcessor
from mllm_seqpar.models.mplug_owl3.processing import MPlugOwl3Processor
from mllm_seqpar.sharding import frame_bounds


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def chat(*content: Any, answer: str = "red") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content]}, {"role": "assistant", "content": answer}]}


ROWS = [
    chat({"type": "video", "path": "clips/a.mp4"}, text("Which colour is the marker?")),  # 60 frames in 2.4 s: 3
    chat({"type": "video", "path": "clips/a.mp4", "num_frames": 7}, text("What?"), answer="green"),
    chat({"type": "video", "images": ["0.png", "1.png", "2.png"]}, {"type": "image", "path": "3.png"}, text("What?")),
    chat(text("No picture."), answer="white"),
    {
        "messages": [
            {"role": "system", "content": "Answer."},
            {"role": "user", "content": [{"type": "image", "path": "1.png"}, {"type": "video", "path": "clips/b.mkv"}]},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": [text("And now?"), {"type": "image", "path": "2.png"}]},
            {"role": "assistant", "content": "blue"},
        ],
        "id": 17,
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chat")
    (root / "clips").mkdir()
    write_clip(root / "clips/a.mp4")
    write_clip(root / "clips/b.mkv")
    rng = np.random.default_rng(0)
    for i in range(4):
        Image.fromarray(rng.integers(0, 255, (48, 64 + 8 * (i % 2), 3), dtype=np.uint8)).save(root / f"{i}.png")
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n")
    return root


@pytest.fixture(scope="module")
def processor() -> MPlugOwl3Processor:
    """Still images are not cut: each is one frame."""
    tokenizer = make_tokenizer(["What?", "No picture. And now?"])
    return MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=32), tokenizer, cut_enable=False)


def test_samples_say_what_they_show_without_decoding(folder: Path, processor: MPlugOwl3Processor) -> None:
    data = ChatDataset(folder / "train.jsonl", processor)
    assert [data[i].frames for i in range(len(data))] == [3, 7, 4, 0, 1 + 3 + 1]
    assert [data[i].line for i in range(len(data))] == [1, 2, 3, 4, 5]
    assert len({ChatDataset(folder / "train.jsonl", processor).digest, data.digest}) == 1


def test_sampling_of_the_caller_and_of_the_data(folder: Path, processor: MPlugOwl3Processor) -> None:
    def frames(**options: Any) -> list[int]:
        data = ChatDataset(folder / "train.jsonl", processor, **options)
        return [data[i].frames for i in range(2)]

    assert frames(fps=5) == [12, 12]
    assert frames(num_frames=4) == [4, 4]
    assert frames(max_frames=5) == [3, 5]
    assert frames(fps=5, max_frames=2) == [2, 2]


def test_text_and_labels(folder: Path, processor: MPlugOwl3Processor) -> None:
    data = ChatDataset(folder / "train.jsonl", processor)
    batch = data.batch([4, 0, 3])
    tokenizer = processor.tokenizer
    image = tokenizer.convert_tokens_to_ids("<|image|>")
    assert (batch.input_ids == image).sum(1).tolist() == [5, 3, 0] and batch.frames == 8 and batch.lines == (5, 1, 4)
    learned = [tokenizer.decode(row[row != -100]) for row in batch.labels]
    assert learned == [
        "red<|im_end|><|endoftext|>blue<|im_end|><|endoftext|>",
        "red<|im_end|><|endoftext|>",
        "white<|im_end|><|endoftext|>",
    ]
    assert torch.equal(batch.labels[batch.labels != -100], batch.input_ids[batch.labels != -100])
    assert batch.targets == 12 and batch.tokens == int(batch.attention_mask.sum()) < batch.input_ids.numel()
    assert bool((batch.attention_mask.diff(dim=1) <= 0).all())  # padded on the right
    for row, offsets in zip(batch.input_ids, batch.media_offset, strict=True):
        assert torch.equal(offsets[offsets >= 0], (row == image).nonzero()[:, 0])
    whole = tokenizer.decode(batch.input_ids[1][batch.attention_mask[1] == 1])
    assert "<|im_start|>user\n" + 3 * "<|image|>" + "Which colour is the marker?<|im_end|>\n" in whole


def test_frames_stand_in_the_order_of_the_placeholders(folder: Path, processor: MPlugOwl3Processor) -> None:
    data = ChatDataset(folder / "train.jsonl", processor, num_frames=2)
    batch = data.batch([4, 2])
    pictures = [torch.from_numpy(np.array(Image.open(folder / f"{i}.png"))).permute(2, 0, 1) for i in range(4)]
    clip = [image for _, image in decode_all(folder / "clips/b.mkv")]
    expected = [pictures[1], clip[15], clip[45], pictures[2], *pictures]
    made = processor.image_processor(expected)["pixel_values"]
    assert torch.equal(load_local_frames(batch, range(batch.frames), processor.image_processor), made)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 40])
def test_any_split_of_the_frames(folder: Path, processor: MPlugOwl3Processor, world: int) -> None:
    batch = ChatDataset(folder / "train.jsonl", processor, fps=4).batch(range(len(ROWS)))
    whole = load_local_frames(batch, range(batch.frames), processor.image_processor)
    assert whole.shape == (batch.frames, 3, 32, 32) and batch.frames == 10 + 10 + 4 + 1 + 10 + 1
    parts = [
        load_local_frames(batch, range(*bounds), processor.image_processor, at_once=4)
        for bounds in frame_bounds(batch.frames, world)
    ]
    assert [len(part) for part in parts] == [b - a for a, b in frame_bounds(batch.frames, world)]
    assert torch.equal(torch.cat(parts), whole)


def test_still_images_are_cut_as_the_processor_cuts_them(folder: Path, processor: MPlugOwl3Processor) -> None:
    """Counts, text and tiles, however the frames are split over ranks; the pictures of a video are not cut."""
    cutting = MPlugOwl3Processor(processor.image_processor, processor.tokenizer)
    data = ChatDataset(folder / "train.jsonl", cutting)
    assert [data[index].frames for index in range(len(data))] == [3, 7, 3 + 7, 0, 7 + 3 + 7]
    batch = data.batch([2])
    pictures = [Image.open(folder / f"{number}.png") for number in range(4)]
    expected = cutting.apply_chat_template(
        ROWS[2]["messages"], tokenize=True, images=pictures[3:], videos=[pictures[:3]], return_labels=True
    )
    for name in ("input_ids", "labels", "media_offset"):
        assert torch.equal(getattr(batch, name), expected[name])
    for world in (1, 3):
        bounds = frame_bounds(batch.frames, world)
        parts = [load_local_frames(batch, range(*part), processor.image_processor, at_once=2) for part in bounds]
        assert torch.equal(torch.cat(parts), expected["pixel_values"])


def test_too_long_samples_are_refused(folder: Path, processor: MPlugOwl3Processor) -> None:
    data = ChatDataset(folder / "train.jsonl", processor, max_length=30)
    data.batch([0])
    with pytest.raises(
        DataError, match=r"train.jsonl:5: \d+ tokens \(5 of them stand for frames\), more than max_length"
    ):
        data.batch([0, 4])


def test_a_broken_video_is_named_with_its_line(folder: Path, processor: MPlugOwl3Processor) -> None:
    (folder / "clips/bad.mp4").write_bytes(b"nothing")
    path = folder / "bad.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(chat({"type": "video", "path": "clips/bad.mp4"})) + "\n")
    data = ChatDataset(path, processor)
    with pytest.raises(VideoError, match=r"bad.jsonl:2: .*clips/bad.mp4: not a readable video"):
        data.batch([1])


VIDEO = {"type": "video", "path": "clips/a.mp4"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ([1], 'needs "messages"'),
        ({"message": []}, 'needs "messages"'),
        ({"messages": []}, 'needs "messages"'),
        ({"messages": ["hello"]}, "message 0 has the role None"),
        ({"messages": [{"role": "user", "content": "x"}], "images": ["0.png"]}, "has 'images' beside the messages"),
        ({"messages": [{"role": "user", "content": "x", "images": ["0.png"]}]}, r"message 0 \(user\): unknown key 'im"),
        ({"messages": [{"role": "user", "content": [VIDEO | {"fpss": 2}]}]}, "unknown key 'fpss' in"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "message 0 has the role 'robot'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no message of the assistant"),
        ({"messages": [{"role": "user"}]}, "its content is None"),
        (chat({"type": "sound"}), "is no part"),
        (chat({"type": "text"}), "a text part without text"),
        (chat({"type": "video"}), 'type video needs "path", a file, or "images"'),
        ({"messages": [{"role": "user", "content": 5}]}, "its content is 5; a text or a list of parts"),
        (chat({"type": "video", "images": ["0.png"], "fps": 1}), "fps of a list of pictures, which have no time"),
        (chat({"type": "image", "path": "0.png", "num_frames": 2}), "num_frames of an image; only a video takes it"),
        (chat({"type": "video", "images": []}), 'needs "path", a file, or "images"'),
        (chat({"type": "image"}), 'type image needs "path", a file$'),
        (chat({"type": "video", "path": "nowhere.mp4"}), "nowhere.mp4: no such file"),
        (chat({"type": "video", "images": ["0.png", "9.png"]}), "9.png: no such file"),
        (chat(VIDEO | {"images": ["0.png"]}), 'both "path" and "images"'),
        (chat(VIDEO | {"fps": 0}), "fps is 0; it is a number above 0"),
        (chat(VIDEO | {"fps": "1"}), "fps is '1'"),
        (chat(VIDEO | {"num_frames": 2.5}), "num_frames is 2.5; it is a whole number"),
        (chat(VIDEO | {"fps": 1, "num_frames": 2}), "both fps and num_frames"),
        (chat(text("<|image|> what?")), r"its text holds <\|image\|>; show media by parts"),
        (chat(text("x"), answer="y<|im_end|>"), r"message 1 \(assistant\): its text holds <\|im_end\|>"),
        ({"messages": [{"role": "assistant", "content": [VIDEO]}]}, "only a user shows something"),
    ],
)
def test_lines_that_are_no_conversation(folder: Path, processor: Any, row: Any, message: str) -> None:
    path = folder / "wrong.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n\n" + (row if isinstance(row, str) else json.dumps(row)) + "\n")
    with pytest.raises(DataError, match=message) as caught:
        ChatDataset(path, processor)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_files_that_hold_nothing(folder: Path, processor: Any) -> None:
    (folder / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="empty.jsonl: holds no conversation"):
        ChatDataset(folder / "empty.jsonl", processor)
    with pytest.raises(DataError, match="nothing.jsonl: cannot be read"):
        ChatDataset(folder / "nothing.jsonl", processor)


@pytest.mark.parametrize(
    ("part", "flag", "expected"),
    [({}, None, 9), ({"num_frames": 3}, None, 3), ({"max_frames": 5}, 2, 2), ({}, 4, 4), ({"num_frames": 20}, None, 9)],
)
def test_pictures_are_as_many_as_asked_for(
    tmp_path: Path, processor: MPlugOwl3Processor, part: dict[str, int], flag: int | None, expected: int
) -> None:
    for number in range(9):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    shown = {"type": "video", "images": [f"{number}.png" for number in range(9)], **part}
    messages = [{"role": "user", "content": [shown]}, {"role": "assistant", "content": "a"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    source = ChatDataset(tmp_path / "chat.jsonl", processor, max_frames=flag)._source(shown)
    assert len(source) == expected
