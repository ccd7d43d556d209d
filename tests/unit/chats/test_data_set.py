"""Layer: one process, real files, the real processor. Records become batches, of which ranks load their frames."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from chats import chat, image, video, write_rows
from clips import decode_all, write_clip
from mllm_seqpar import SeqParDataCollator
from mllm_seqpar.chats.batch import MediaError
from mllm_seqpar.chats.chat import FILES, Chat, Clip
from mllm_seqpar.chats.clip import VideoSource
from mllm_seqpar.chats.needle import make_tokenizer
from mllm_seqpar.data import ChatDataset, FrameChoice, chat_family, load_local_images
from mllm_seqpar.errors import DataError, VideoError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.sharding import frame_bounds

ROWS = [
    chat(video("clips/a.mp4"), "Which colour is the marker?"),  # 60 frames in 2.4 s: 3
    chat(video("clips/a.mp4", num_frames=7), "What?", answer="green"),
    chat({"type": "video", "images": ["0.png", "1.png", "2.png"]}, image("3.png"), "What?"),
    chat("No image.", answer="white"),
    {
        "messages": [
            {"role": "system", "content": "Answer."},
            *chat(image("1.png"), video("clips/b.mkv"))["messages"],
            *chat("And now?", image("2.png"), answer="blue")["messages"],
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
    write_rows(root / "train.jsonl", [*ROWS, ""])
    return root


@pytest.fixture(scope="module")
def processor() -> MPlugOwl3Processor:
    """A processor that does not cut still images: each is one frame."""
    tokenizer = make_tokenizer(["What?", "No image. And now?"])
    return MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=32), tokenizer, cut_enable=False)


def medium(part: dict[str, Any]) -> Clip:
    (found,) = Chat.parse([{"role": "user", "content": [part]}], FILES).media
    return found


def sharded(batch: Any, processor: Any, world: int, at_once: int) -> Tensor:
    """Return the frames that `world` ranks load together."""
    bounds = frame_bounds(batch.frames, world)
    chat_format = chat_family(processor)
    shards = [load_local_images(batch, range(*part), chat_format, at_once=at_once)[0] for part in bounds]
    assert [len(shard) for shard in shards] == [stop - start for start, stop in bounds]
    return torch.cat(shards)


def test_frame_counts_need_no_decoding(folder: Path, processor: Any) -> None:
    data = ChatDataset(folder / "train.jsonl", processor)
    assert [data[i].frames for i in range(len(data))] == [3, 7, 4, 0, 1 + 3 + 1]
    assert [data[i].place for i in (0, 4)] == [f"{folder / 'train.jsonl'}:{line}" for line in (1, 5)]
    assert ChatDataset(folder / "train.jsonl", processor).records.digest == data.records.digest


def test_callers_sampling_overrides_the_data(folder: Path, processor: Any) -> None:
    def frames(**options: Any) -> list[int]:
        data = ChatDataset(folder / "train.jsonl", processor, **options)
        return [data[i].frames for i in range(2)]

    assert frames(fps=5) == [12, 12] and frames(num_frames=4) == [4, 4]
    assert frames(max_frames=5) == [3, 5] and frames(fps=5, max_frames=2) == [2, 2]


def test_collator_chooses_the_frames_that_a_data_set_chooses(folder: Path, processor: Any) -> None:
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[:2]]
    parts = [row["messages"][0]["content"][0] for row in rows]
    parts.append(video("clips/a.mp4", max_frames=4))
    write_rows(folder / "choices.jsonl", map(chat, parts))
    for options in ({}, {"fps": 5}, {"num_frames": 4}, {"max_frames": 5}, {"fps": 5, "max_frames": 2}):
        data = ChatDataset(folder / "choices.jsonl", processor, **options)
        collator = SeqParDataCollator(processor, **options)
        for index, part in enumerate(parts):
            assert collator._source(medium(part | {"path": str(folder / part["path"])})) == data[index].sources[0]


def test_clips_are_sampled_within_their_times(folder: Path, processor: Any) -> None:
    part = video("clips/a.mp4")  # 2.4 seconds
    rows = [chat(part | {"fps": 5, "start": 1.0, "end": 2.0}, "What?"), chat(part | {"start": 9}, "What?")]
    write_rows(folder / "clips.jsonl", rows)
    for fps, seconds in ((None, [1.0, 1.2, 1.4, 1.6, 1.8]), (2, [1.0, 1.5])):
        dataset = ChatDataset(folder / "clips.jsonl", processor, fps=fps)
        (source,) = dataset[0].sources
        assert isinstance(source, VideoSource)
        assert [source.plan.seconds(n) for n in range(len(source))] == pytest.approx(seconds)
        with pytest.raises(
            VideoError, match=r"clips.jsonl:2: .*a.mp4: the clip starts at 9 s, but the video has 2.400"
        ):
            dataset[1]
    part = rows[0]["messages"][0]["content"][0] | {"path": str(folder / "clips/a.mp4")}
    source = SeqParDataCollator(processor)._source(medium(part))
    assert isinstance(source, VideoSource) and source.plan.seconds(0) == 1.0 and len(source) == 5


def test_labels_are_the_answers_and_padding_is_right(folder: Path, processor: Any) -> None:
    batch = ChatDataset(folder / "train.jsonl", processor).batch([4, 0, 3])
    tokenizer = processor.tokenizer
    image = tokenizer.convert_tokens_to_ids("<|image|>")
    assert (batch.input_ids == image).sum(1).tolist() == [5, 3, 0] and batch.frames == 8
    assert batch.places == tuple(f"{folder / 'train.jsonl'}:{line}" for line in (5, 1, 4))
    assert [tokenizer.decode(row[row != -100]) for row in batch.labels] == [
        "red<|im_end|><|endoftext|>blue<|im_end|><|endoftext|>",
        "red<|im_end|><|endoftext|>",
        "white<|im_end|><|endoftext|>",
    ]
    assert torch.equal(batch.labels[batch.labels != -100], batch.input_ids[batch.labels != -100])
    assert batch.targets == 12 and batch.tokens == int(batch.attention_mask.sum()) < batch.input_ids.numel()
    assert bool((batch.attention_mask.diff(dim=1) <= 0).all())
    for row, offsets in zip(batch.input_ids, batch.text.extras["media_offset"], strict=True):
        assert torch.equal(offsets[offsets >= 0], (row == image).nonzero()[:, 0])
    whole = tokenizer.decode(batch.input_ids[1][batch.attention_mask[1] == 1])
    assert "<|im_start|>user\n" + 3 * "<|image|>" + "Which colour is the marker?<|im_end|>\n" in whole


def test_frames_follow_the_order_of_the_placeholders(folder: Path, processor: Any) -> None:
    batch = ChatDataset(folder / "train.jsonl", processor, num_frames=2).batch([4, 2])
    pictures = [torch.from_numpy(np.array(Image.open(folder / f"{i}.png"))).permute(2, 0, 1) for i in range(4)]
    clip = [image for _, image in decode_all(folder / "clips/b.mkv")]
    frames = [pictures[1], clip[15], clip[45], pictures[2], pictures[0], *pictures[2:]]
    expected = processor.image_processor(frames)["pixel_values"]
    assert torch.equal(load_local_images(batch, range(batch.frames), chat_family(processor))[0], expected)


@pytest.mark.parametrize("world", [1, 3, 40])
def test_shards_of_the_frames_concatenate_to_all_frames(folder: Path, processor: Any, world: int) -> None:
    batch = ChatDataset(folder / "train.jsonl", processor, fps=4).batch(range(len(ROWS)))
    whole = load_local_images(batch, range(batch.frames), chat_family(processor))[0]
    assert whole.shape == (batch.frames, 3, 32, 32) and batch.frames == 10 + 10 + 4 + 1 + 10 + 1
    assert torch.equal(sharded(batch, processor, world, at_once=4), whole)


def test_still_images_are_cut_into_tiles_but_video_frames_are_not(folder: Path, processor: Any) -> None:
    cutting = MPlugOwl3Processor(processor.image_processor, processor.tokenizer)
    data = ChatDataset(folder / "train.jsonl", cutting)
    assert [data[index].frames for index in range(len(data))] == [3, 7, 3 + 7, 0, 7 + 3 + 7]
    batch = data.batch([2])
    pictures = [Image.open(folder / f"{number}.png") for number in range(4)]
    expected = cutting.apply_chat_template(
        ROWS[2]["messages"], tokenize=True, images=pictures[3:], videos=[pictures[:3]], return_labels=True
    )
    found = {"input_ids": batch.input_ids, "labels": batch.labels, **batch.text.extras}
    for name in ("input_ids", "labels", "media_offset"):
        assert torch.equal(found[name], expected[name])
    assert torch.equal(sharded(batch, cutting, 3, at_once=2), expected["pixel_values"])


def test_problems_of_a_batch_name_the_line(folder: Path, processor: Any) -> None:
    data = ChatDataset(folder / "train.jsonl", processor, max_length=30)
    data.batch([0])
    message = r"train.jsonl:5: \d+ tokens \(5 of them are placeholders of frames\), more than max_length"
    with pytest.raises(DataError, match=message):
        data.batch([0, 4])
    (folder / "clips/bad.mp4").write_bytes(b"nothing")
    path = write_rows(folder / "bad.jsonl", [ROWS[0], chat(video("clips/bad.mp4"))])
    with pytest.raises(VideoError, match=r"bad.jsonl:2: .*clips/bad.mp4: not a readable video"):
        ChatDataset(path, processor).batch([1])


def test_unreadable_size_names_its_sample(folder: Path, processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chat_format = type(chat_family(processor))
    text_of = chat_format.text

    def text(self: Any, conversations: Any, media: Any, **options: Any) -> Any:
        """As in families that need the size of a video."""
        if any(len(sources) == 2 for sources in media):
            raise VideoError("frame 0 cannot be decoded")
        return text_of(self, conversations, media, **options)

    monkeypatch.setattr(chat_format, "text", text)
    with pytest.raises(MediaError, match="train.jsonl:3: frame 0 cannot be decoded") as caught:
        ChatDataset(folder / "train.jsonl", processor).batch([0, 2])
    assert caught.value.sample == 1


VIDEO = video("clips/a.mp4")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (chat({"type": "video", "images": ["0.png", "9.png"]}), r"message 0 \(user\): .*9.png: no such file"),
        (chat(VIDEO | {"fps": "1"}), "fps: '1' is not allowed; give a number above 0"),
        (chat("<|image|> what?"), "has 0 files .* and the placeholders <image>; write one for each file"),
        (chat(VIDEO, "What?", answer="<|image|>"), r"has <\|image\|> in its text; show media by parts"),
    ],
)
def test_malformed_line_is_refused(folder: Path, processor: Any, row: Any, message: str) -> None:
    path = write_rows(folder / "wrong.jsonl", [ROWS[0], "", row])
    with pytest.raises(DataError, match=message) as caught:
        ChatDataset(path, processor)
    assert str(caught.value).startswith(f"{path}:3: ")


@pytest.fixture
def image_list(tmp_path: Path) -> dict[str, Any]:
    """A video that is a list of nine images."""
    for number in range(9):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    return {"type": "video", "images": [str(tmp_path / f"{number}.png") for number in range(9)]}


@pytest.mark.parametrize(
    ("part", "options", "expected"),
    [
        ({}, {}, 9),
        ({"num_frames": 3}, {}, 3),
        ({"max_frames": 5}, {"max_frames": 2}, 2),
        ({"num_frames": 20}, {"max_frames": 10}, 9),
        ({}, {"num_frames": 2}, 2),
        ({"num_frames": 3}, {"num_frames": 4}, 4),
        ({"max_frames": 3}, {"num_frames": 4}, 3),
        ({"num_frames": 3}, {"fps": 1}, 3),  # images have no time, so a rate does not choose among them
    ],
)
def test_image_lists_are_sampled_evenly(
    tmp_path: Path, processor: Any, image_list: Any, part: dict[str, int], options: dict[str, int], expected: int
) -> None:
    write_rows(tmp_path / "chat.jsonl", [chat(image_list | part)])
    (source,) = ChatDataset(tmp_path / "chat.jsonl", processor, **options)[0].sources
    names = [int(Path(name).stem) for name in source.paths]
    assert len(names) == expected and names == sorted(8 - number for number in names)  # symmetric: evenly spaced
    collator, frames = SeqParDataCollator(processor, **options), [Image.open(name) for name in image_list["images"]]
    assert collator._source(medium(image_list | part)) == source
    assert len(collator._source(Clip("video", frames, FrameChoice(**part)))) == expected
