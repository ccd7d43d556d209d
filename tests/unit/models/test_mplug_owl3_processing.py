"""Layer: one process. The processor of mPLUG-Owl3: preprocessing of images, conversations and their placeholders."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from mllm_seqpar.errors import DataError, ShapeError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.processors.mplug_owl3 import image_processing
from model_copies import tiny_model
from tiny_models.mplug_owl3 import IMAGE_TOKEN, tiny_tokenizer

IMAGES = MPlugOwl3ImageProcessor(image_size=28)


def picture(seed: int, height: int = 40, width: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def processor(**options: Any) -> MPlugOwl3Processor:
    return MPlugOwl3Processor(IMAGES, tiny_tokenizer(), **options)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


QUESTION = user([{"type": "video"}, {"type": "text", "text": "what colour?"}])
CHAT = [QUESTION, {"role": "assistant", "content": "red"}]


class TestImages:
    def test_all_forms_of_a_picture_are_equivalent(self) -> None:
        array = picture(0)
        first = IMAGES(array)["pixel_values"]
        assert first.shape == (1, 3, 28, 28) and first.dtype == torch.float32
        for form in (Image.fromarray(array), torch.from_numpy(array), torch.from_numpy(array).permute(2, 0, 1)):
            assert torch.equal(IMAGES(form)["pixel_values"], first)

    @pytest.mark.parametrize("with_pillow", [True, False])
    def test_resizing_equals_pillow(self, with_pillow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Exactly if Pillow is installed, otherwise within one level, for a size that Pillow resizes width first."""
        if not with_pillow:
            monkeypatch.setattr(image_processing, "_pillow", lambda: None)
        array = picture(1, 60, 90)
        found = image_processing.resized(torch.from_numpy(array).permute(2, 0, 1)[None], 42, 28)[0].int()
        reference = np.asarray(Image.fromarray(array).resize((28, 42), Image.Resampling.BICUBIC), dtype=np.int32)
        assert (found - torch.from_numpy(reference).permute(2, 0, 1)).abs().max() <= (0 if with_pillow else 1)

    def test_floating_frames_do_not_overshoot_at_edges(self) -> None:
        frame = torch.zeros(3, 40, 50)
        frame[:, 13:, 21:] = 1
        values = IMAGES(frame)["pixel_values"]
        assert (values.min().item(), values.max().item()) == (-1, 1)

    def test_frames_may_differ_in_size_and_dtype(self) -> None:
        frames = [picture(0), picture(1), picture(2, 30, 30), torch.rand(3, 28, 28), picture(3)]
        apart = torch.cat([IMAGES(frame)["pixel_values"] for frame in frames])
        assert torch.equal(IMAGES(frames)["pixel_values"], apart)
        assert IMAGES([])["pixel_values"].shape == (0, 3, 28, 28)

    def test_invalid_picture_is_refused(self) -> None:
        flat, four_channels = np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8)
        for frame in (flat, four_channels, torch.full((3, 4, 4), 7.0), torch.zeros(3, 4, 4).int()):
            with pytest.raises(ShapeError, match="frame 1 is .*expected"):
                IMAGES([picture(0), frame])


class TestConversations:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_placeholder_positions_include_padding(self, side: str) -> None:
        chats = [CHAT, [user("no video")], [user("a<|image|>b<|video|>")]]
        whole = processor(cut_enable=False)
        encoded = whole.encode(chats, frames_per_video=[4, 2], padding_side=side, return_labels=True)
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
        assert mask.sum(1).tolist() == [
            int(whole.encode(chat, frames_per_video=counts)["attention_mask"].sum())
            for chat, counts in zip(chats, ([4], [], [2]), strict=True)
        ]
        assert bool(mask[1, 0] == (side == "right"))
        for row, offsets in zip(ids, encoded["media_offset"], strict=True):
            assert offsets[offsets >= 0].tolist() == (row == IMAGE_TOKEN).nonzero().flatten().tolist()
        assert (encoded["media_offset"] >= 0).sum(1).tolist() == [4, 0, 3]
        assert bool((encoded["labels"][mask == 0] == -100).all())

    def test_tokenizer_without_end_of_document_ends_with_the_turn(self) -> None:
        bare = MPlugOwl3Processor(MPlugOwl3ImageProcessor(), tiny_tokenizer(end_of_document=False))
        assert bare.apply_chat_template(CHAT).endswith("red<|im_end|>")

    @pytest.mark.parametrize(
        ("chat", "arguments", "message"),
        [
            (user("x") | {"role": "robot"}, {}, "message 0 has the role 'robot'"),
            (user([{"type": "audio"}]), {}, "message 0 .user. holds .*audio"),
            (user([{"type": "text"}]), {}, "message 0 .user. holds a text part without text"),
            (user(None), {}, "message 0 holds"),
            (user("<|image|>") | {"role": "assistant"}, {}, "message 0 .assistant. has the placeholder"),
            (user("<|image|>"), {}, "cut_enable is True: pass image_grids"),
            (user("<|image|>"), {"image_grids": [(2, 2), None]}, "image_grids has 2 grids and the text has 1"),
            (QUESTION, {"frames_per_video": []}, "video"),
            (QUESTION, {"frames_per_video": [1, 2]}, "video"),
        ],
    )
    def test_malformed_conversation_is_refused(self, chat: dict, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(DataError, match=message):
            processor().encode([chat], **arguments)

    def test_grid_determines_the_placeholders_of_an_image(self) -> None:
        for grid, tiles in (((1, 3), 4), (None, 1)):
            encoded = processor().encode([user("<|image|>")], image_grids=[grid])
            assert (encoded["media_offset"] >= 0).sum() == tiles


class TestCall:
    def test_frames_follow_the_placeholders(self) -> None:
        frames = [picture(seed) for seed in range(6)]
        text = ["a<|image|>b<|video|>", "<|video|><|image|>"]
        both = processor(cut_enable=False)
        inputs = both(images=[frames[0], frames[5]], text=text, videos=[frames[1:3], frames[3:5]])
        assert torch.equal(inputs["pixel_values"], both.image_processor(frames)["pixel_values"])
        assert (inputs["media_offset"] >= 0).sum(1).tolist() == [3, 3]

    def test_media_may_be_in_the_parts_of_a_chat(self) -> None:
        content = [{"type": "video", "video": [picture(0), picture(1)]}, {"type": "image", "image": picture(2)}]
        inputs = processor().apply_chat_template([user(content)], tokenize=True, add_generation_prompt=True)
        text = processor().apply_chat_template(
            [user([{"type": "video"}, {"type": "image"}])], add_generation_prompt=True
        )
        expected = processor()(text=text, images=[picture(2)], videos=[[picture(0), picture(1)]])
        assert len(inputs["pixel_values"]) == 2 + 7
        assert all(torch.equal(inputs[name], x) for name, x in expected.items()) and inputs.keys() == expected.keys()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"images": [picture(0), picture(1)], "text": "<|image|>"}, r"the texts have \[1\] .* and 2 images"),
            ({"text": "a", "colour": "red"}, "unknown arguments: colour"),
            ({"images": picture(0)}, "text is None"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(DataError, match=message):
            processor()(**arguments)
        with pytest.raises(DataError, match="unknown arguments: colour"):
            IMAGES(picture(0), colour="red")

    def test_single_picture_and_single_video_need_no_list(self) -> None:
        both = processor()
        assert both(images=picture(0), text="<|image|>", cut_enable=False)["pixel_values"].shape[0] == 1
        video = torch.from_numpy(np.stack([picture(0), picture(1)]))
        assert both(text="<|video|>", videos=video)["pixel_values"].shape[0] == 2


def test_saved_processor_loads_unchanged(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    images = MPlugOwl3ImageProcessor(image_size=28, image_mean=(0.1, 0.2, 0.3))
    saved = MPlugOwl3Processor(images, tiny_tokenizer(), video_span=True)
    saved.save_pretrained(tmp_path)
    for loaded in (AutoProcessor.from_pretrained(tmp_path), MPlugOwl3Processor.from_pretrained(tmp_path)):
        assert isinstance(loaded, MPlugOwl3Processor) and loaded.video_span
        assert (loaded.image_processor.image_size, loaded.image_processor.image_mean) == (28, (0.1, 0.2, 0.3))
        ids, expected = (both.encode(CHAT, frames_per_video=[2])["input_ids"] for both in (loaded, saved))
        assert torch.equal(ids, expected)
