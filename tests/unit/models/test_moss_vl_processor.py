"""Layer: one process. The processor of MOSS-VL: texts, labels, sizes, sampled frames and files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from family_directories import character_tokenizer
from mllm_seqpar.chats.needle import make_needle_videos
from mllm_seqpar.errors import DataError
from mllm_seqpar.models.loading import load_processor
from mllm_seqpar.models.moss_vl import MossVLImageProcessor, MossVLProcessor
from mllm_seqpar.processors.moss_vl.media import ImagePixelOptions, VideoPixelOptions

MARKS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|time_start|>", "<|time_end|>")
CALL: dict[str, Any] = {"padding": True, "return_tensors": "pt"}


@pytest.fixture
def processor() -> MossVLProcessor:
    tokenizer = character_tokenizer(*MARKS, bos="<|endoftext|>", eos="<|im_end|>")
    return MossVLProcessor(MossVLImageProcessor(), tokenizer)


def decoded(processor: MossVLProcessor, ids: Any) -> str:
    return "".join(processor.tokenizer.convert_ids_to_tokens([int(token) for token in ids]))


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video of 20 frames, 10 a second."""
    return Path(make_needle_videos(tmp_path_factory.mktemp("videos"), 1, frames=(20, 20), rate=10)[0].path)


class TestText:
    def test_image_has_one_placeholder_and_video_one_for_each_frame_after_its_time(
        self, processor: MossVLProcessor
    ) -> None:
        video = [picture(32, 64)] * 3
        found = processor(
            "a<|image|>b<|video|>",
            images=[picture(64, 64)],
            videos=[video],
            video_metadata=[{"fps": 29.97, "frames_indices": [0, 36, 71]}],
        )
        text = decoded(processor, found["input_ids"][0])
        frames = "".join(
            f"<|time_start|>{seconds} seconds<|time_end|><|image_pad|>" for seconds in ("0.0", "1.2", "2.4")
        )
        assert text == f"a<|image_pad|>b<|vision_start|>{frames}<|vision_end|>"
        assert found["grid_thw"].tolist() == [[1, 4, 4], [3, 4, 6]] and found["media_nums_per_sample"] == [2]

    def test_frames_without_times_count_24_a_second(self, processor: MossVLProcessor) -> None:
        found = processor("<|video|>", videos=[[picture(64, 64)] * 13])
        assert "<|time_start|>0.5 seconds<|time_end|>" in decoded(processor, found["input_ids"][0])

    def test_published_format_has_no_system_message_and_marks_directly_before_the_text(
        self, processor: MossVLProcessor
    ) -> None:
        content = [{"type": "image"}, {"type": "text", "text": "What?"}]
        question = [{"role": "user", "content": content}, {"role": "assistant", "content": "A dot."}]
        text = processor.apply_chat_template(question[:1], add_generation_prompt=True)
        assert text == "<|im_start|>user\n<|image|>What?<|im_end|>\n<|im_start|>assistant\n"
        assert processor.apply_chat_template(question) == f"{text}A dot.<|im_end|>\n"
        found = processor.apply_chat_template([question], tokenize=True, images=[picture(64, 64)], return_labels=True)
        labels = found["labels"][0]
        assert decoded(processor, labels[labels != -100]) == "A dot.<|im_end|>"

    def test_wrong_numbers_of_media_and_reserved_tokens_are_refused(self, processor: MossVLProcessor) -> None:
        for text, media, message in (
            ("<|image|>", {}, "[1] <|image|>, and 0 images"),
            ("a", {"images": [picture(64, 64)]}, "[0] <|image|>, and 1 images"),
            ("<|video|>", {"videos": [[picture(64, 64)]] * 2}, "[1] <|video|>, and 2 videos"),
            ("<|image_pad|>", {}, "contains <|image_pad|>"),
        ):
            with pytest.raises(DataError, match=re.escape(message)):
                processor(text, **media)
        for text in ("", "  ", None, []):
            with pytest.raises(DataError, match="pass a text"):
                processor(text)

    def test_truncation_that_cuts_a_placeholder_is_refused(self, processor: MossVLProcessor) -> None:
        call = {"images": [picture(64, 64)], "truncation": True}
        assert len(processor("abc<|image|>d", max_length=4, **call)["input_ids"][0]) == 4
        with pytest.raises(DataError, match="must not cut placeholders off"):
            processor("abc<|image|>d", max_length=3, **call)


class TestLabels:
    def test_answers_are_targets_without_media(self, processor: MossVLProcessor) -> None:
        text = "ab<|image|>cd<|video|>ef"
        spans = [[text.index("b"), len("ab<|image|>c")], [text.index("d<|video|>"), len(text) - 1]]
        found = processor(
            text, images=[picture(64, 64)], videos=[[picture(64, 64)] * 2], labels_spans=spans, ignore_index=-7
        )
        labels = torch.tensor(found["labels"][0])
        assert decoded(processor, labels[labels != -7]) == "bcde"
        assert spans == [[1, 12], [12, 23]]  # the caller's ranges are not changed

    def test_ranges_of_several_texts_follow_their_own_media(self, processor: MossVLProcessor) -> None:
        texts = ["<|image|>abc", "xyz"]
        found = processor(texts, images=[picture(64, 64)], labels_spans=[[[10, 12]], [[0, 1]]], **CALL)
        answers = [decoded(processor, row[row != -100]) for row in found["labels"]]
        assert answers == ["bc", "x"]
        with pytest.raises(DataError, match="ranges of 1 texts, and 2"):
            processor(texts, images=[picture(64, 64)], labels_spans=[[[10, 12]]])


class TestMask:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_row_attends_to_the_frames_up_to_its_place_and_padding_to_none(
        self, processor: MossVLProcessor, side: str
    ) -> None:
        texts = ["a<|image|>b<|image|>", "cd<|image|>efgh"]
        found = processor(texts, images=[picture(64, 64)] * 3, padding_side=side, **CALL)
        shown = ~found["cross_attention_mask"][:, 0]
        assert shown.shape == (2, 7, 2)
        real = found["attention_mask"].bool()
        assert shown[0][real[0]].sum(1).tolist() == [0, 1, 1, 2] and not shown[0][~real[0]].any()
        assert shown[1].sum(1).tolist() == [0, 0, 1, 1, 1, 1, 1] and not shown[1, :, 1].any()

    def test_text_without_media_gets_a_hidden_blank_image(self, processor: MossVLProcessor) -> None:
        texts = ["abc", "<|image|>de", "f"]
        found = processor(texts, images=[picture(64, 64)], **CALL)
        assert found["media_nums_per_sample"] == [1, 1, 1]
        assert found["grid_thw"].tolist() == [[1, 8, 8], [1, 4, 4], [1, 8, 8]]
        assert not found["pixel_values"][:64].any() and not found["pixel_values"][-64:].any()
        assert found["cross_attention_mask"][[0, 2]].all() and not found["cross_attention_mask"][1].any()
        assert found["pixel_values"].dtype is torch.float32 and found["grid_thw"].dtype is torch.int64


class TestSizes:
    @pytest.mark.parametrize(
        ("size", "grid"),
        [((64, 64), (4, 4)), ((17, 19), (4, 6)), ((20, 600), (2, 38)), ((600, 17), (38, 2)), ((720, 1280), (44, 80))],
    )
    def test_images_have_sides_of_whole_visual_tokens(self, size: tuple[int, int], grid: tuple[int, int]) -> None:
        found = MossVLImageProcessor()([picture(*size)])
        height, width = ImagePixelOptions().grid(*ImagePixelOptions().sizes([size]))
        assert found["image_grid_thw"].tolist() == [[1, height, width]]
        assert found["pixel_values"].shape == (height * width, 768)
        assert height % 2 == width % 2 == 0 and 4096 <= height * width * 256 <= 16777216
        assert size not in ((64, 64), (720, 1280)) or (height, width) == grid

    def test_images_of_a_call_share_one_budget_in_proportion_to_their_pixels(self) -> None:
        options = ImagePixelOptions(multi_image_max_pixels=40000)
        alone, together = options.sizes([(160, 160)]), options.sizes([(160, 160), (160, 160), (64, 64)])
        assert alone == [(160, 160)] and together == [(128, 128), (128, 128), (64, 64)]
        assert (
            ImagePixelOptions(multi_image_max_pixels=4096).sizes([(320, 64)] * 2) == [(128, 32)] * 2
        )  # the least of each

    def test_long_images_and_small_frames_are_refused(self) -> None:
        with pytest.raises(DataError, match="10 x 2010 pixels; one side may be at most 200 times"):
            ImagePixelOptions().sizes([(10, 2010)])
        assert ImagePixelOptions().sizes([(10, 2000)])
        with pytest.raises(DataError, match="frames of 31 x 64 pixels; each side needs at least 32"):
            VideoPixelOptions().sizes([(2, 31, 64)])

    def test_videos_of_a_call_share_one_budget_by_frames_and_pixels(self) -> None:
        options = VideoPixelOptions(video_max_pixels=10 * 128 * 128)
        assert options.sizes([(10, 128, 128)]) == [(128, 128)]
        assert options.sizes([(40, 128, 128)]) == [(64, 64)]
        assert options.sizes([(10, 128, 128), (10, 128, 128)]) == [(64, 64)] * 2
        assert options.sizes([(1000, 128, 128)]) == [(64, 64)]  # the fewest pixels of a frame

    def test_patches_of_a_visual_token_follow_one_another(self) -> None:
        options = ImagePixelOptions(patch_size=2)
        frames = torch.arange(3 * 4 * 8, dtype=torch.float).view(1, 3, 4, 8)
        patches = options.patches(frames)
        assert patches.shape == (1, 8, 12)
        second, third = frames[0, :, :2, 2:4], frames[0, :, 2:4, :2]
        assert torch.equal(patches[0, 1], second.flatten()) and torch.equal(patches[0, 2], third.flatten())
        assert torch.equal(patches[0, 4], frames[0, :, :2, 4:6].flatten())
        levels = torch.tensor([0, 127, 255], dtype=torch.uint8).view(1, 1, 1, 3).expand(1, 3, 1, 3)
        assert options.normalised(levels)[0, 0, 0].tolist() == pytest.approx([-1, -1 / 255, 1])


class TestFrames:
    def test_frames_are_spread_over_the_whole_video(self) -> None:
        options = VideoPixelOptions(video_max_pixels=201326592)
        assert options.frame_numbers(299, 9.966) == [0, 33, 66, 99, 132, 165, 198, 231, 264, 298]
        assert options.frame_numbers(30, 1.0) == [0] and options.frame_numbers(3, 100.0) == [0, 1, 2]
        assert len(options.frame_numbers(100_000, 3600.0)) == 256
        assert len(VideoPixelOptions(min_frames=4).frame_numbers(50, 2.0)) == 4
        assert len(VideoPixelOptions(video_max_pixels=3 * 4096).frame_numbers(500, 20.0)) == 3

    def test_videos_of_a_call_share_the_frames_by_duration(self) -> None:
        assert VideoPixelOptions(max_frames=10).frames_of_videos([60.0, 20.0]) == [7, 3]
        assert VideoPixelOptions(max_frames=11).frames_of_videos([10.0, 10.0, 10.0]) == [4, 4, 3]
        assert VideoPixelOptions(max_frames=2).frames_of_videos([5.0] * 3) == [1, 1, 1]
        assert VideoPixelOptions(max_frames=9).frames_of_videos([7.0]) == [9]

    def test_segments_share_the_frames_by_duration_and_end_before_their_end(self) -> None:
        options = VideoPixelOptions(max_frames=4)
        assert options.segment_times([[0.0, 3.0], [7.5], [10.0, 11.0]]) == [[0.0, 1.0, 2.0], [7.5], [10.0]]
        assert VideoPixelOptions(max_frames=4).segment_times([[0, 8]]) == [[0.0, 2.0, 4.0, 6.0]]

    def test_file_is_decoded_by_the_rules_of_the_published_processor(
        self, processor: MossVLProcessor, clip: Path
    ) -> None:
        found = processor("<|video|>?", videos=[str(clip)], video_fps=2.0)
        numbers = np.linspace(0, 19, 4).astype(int)
        times = "".join(f"<|time_start|>{n / 10:.1f} seconds<|time_end|><|image_pad|>" for n in numbers)
        assert decoded(processor, found["input_ids"][0]) == f"<|vision_start|>{times}<|vision_end|>?"
        segments = {"video_path": str(clip), "segments": [[0.5, 1.5], [1.9]]}
        parts = processor("<|video|> and <|video|>", videos=[segments], video_fps=3.0, max_frames=9)
        assert [grid[0] for grid in parts["grid_thw"].tolist()] == [3, 1] and parts["media_nums_per_sample"] == [2]
        text = decoded(processor, parts["input_ids"][0])
        assert [text.count(f"{t} seconds") for t in ("0.5", "0.8", "1.2", "1.9")] == [1, 1, 1, 1]

    def test_frames_of_a_file_equal_those_decoded_before(self, processor: MossVLProcessor, clip: Path) -> None:
        from mllm_seqpar.chats.clip import VideoSource

        every = torch.cat(list(VideoSource.open(clip).read(0, 20)))
        given = {"fps": 10.0, "frames_indices": [0, 19]}
        decoded = processor("<|video|>", videos=[every[[0, 19]]], video_metadata=[given])
        found = processor("<|video|>", videos=[clip], max_frames=2)
        assert torch.equal(found["pixel_values"], decoded["pixel_values"])
        assert found["input_ids"] == decoded["input_ids"]
        (middle,) = (processor("<|video|>", videos=[{"video_path": clip, "segments": [[1.3]]}]) for _ in range(1))
        exact = processor("<|video|>", videos=[every[[13]]], video_metadata=[given | {"frames_indices": [13]}])
        assert torch.equal(middle["pixel_values"], exact["pixel_values"])


class TestFiles:
    def test_saved_processor_loads_with_its_options_and_template(
        self, processor: MossVLProcessor, tmp_path: Path
    ) -> None:
        processor.videos = VideoPixelOptions(max_frames=7, video_max_pixels=99)
        processor.image_processor.options = ImagePixelOptions(multi_image_max_pixels=12345)
        processor.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "moss_vl"}))
        found = load_processor(str(tmp_path))
        assert type(found) is MossVLProcessor
        assert found.videos == processor.videos and found.image_processor.options == processor.image_processor.options
        assert found.chat_template == processor.chat_template

    def test_published_files_load_and_state_their_own_template(
        self, processor: MossVLProcessor, tmp_path: Path
    ) -> None:
        processor.tokenizer.chat_template = "{{ messages[0].content }}"
        processor.tokenizer.save_pretrained(tmp_path)
        common = {"size": {"longest_edge": 16777216, "shortest_edge": 4096}, "patch_size": 16, "merge_size": 2}
        common |= {"temporal_patch_size": 1, "processor_class": "MossVLProcessor"}
        images = common | {"multi_image_max_pixels": 201326592, "image_processor_type": "MossVLImageProcessorFast"}
        videos = common | {"video_max_pixels": 201326592, "video_fps": 1.0, "min_frames": 1, "max_frames": 256}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(images | {"auto_map": {}}))
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(videos | {"num_extract_threads": 4}))
        found = MossVLProcessor.from_pretrained(tmp_path)
        assert found.image_processor.options.multi_image_max_pixels == found.videos.video_max_pixels == 201326592
        assert found.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"
        assert MossVLProcessor.from_pretrained(tmp_path.parent, subfolder=tmp_path.name).videos == found.videos
        (tmp_path / "video_preprocessor_config.json").unlink()
        with pytest.raises(DataError, match="no video_preprocessor_config.json"):
            MossVLProcessor.from_pretrained(tmp_path)


def test_arrays_pil_images_and_paths_give_the_same_patches(tmp_path: Path) -> None:
    array, images, path = picture(40, 70), MossVLImageProcessor(), tmp_path / "a.png"
    Image.fromarray(array).save(path)
    for form in ([Image.fromarray(array)], [str(path)], [path], path):
        assert torch.equal(images([array])["pixel_values"], images(form)["pixel_values"])
    with pytest.raises(DataError, match="an image is torch.float64; pass levels from 0 to 255 as uint8"):
        images([array / 255])
