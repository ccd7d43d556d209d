"""Layer: one process. The processor of MOSS-Video-Preview: marks, the mask and positions of frames, and sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from family_directories import make_mllama
from mllm_seqpar.chats.needle import make_needle_videos
from mllm_seqpar.errors import DataError
from mllm_seqpar.models.loading import load_processor
from mllm_seqpar.processors.video_mllama.processing import frame_numbers

BEGIN = "<|begin_of_text|>"


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    make_mllama(Path(folder), video=True)
    return load_processor(str(folder))


def frames(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(0, 256, (3, 40, 60), generator=generator, dtype=torch.uint8) for _ in range(count)]


def test_a_row_sees_all_frames_at_or_before_it_and_a_frame_has_the_position_of_its_token(processor: Any) -> None:
    texts = [f"{BEGIN}a<|video|>b<|image|>", f"{BEGIN}<|image|>", f"{BEGIN}no"]
    found = processor(images=frames(2), videos=[frames(3)], text=texts, padding_side="left")
    ids, image = found["input_ids"], processor.image_token_id
    assert (ids == image).sum(1).tolist() == [4, 1, 0]
    assert found["pixel_values"].shape == (3, 4, 1, 3, 56, 56)
    assert found["aspect_ratio_ids"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    seen = found["cross_attention_mask"][..., 0]
    assert seen[0].sum(1).tolist() == [0, 0, 1, 2, 3, 3, 4]
    assert seen[1].sum(1).tolist() == [0] * 6 + [1]
    assert not seen[2].any()
    assert found["vision_position_ids"].tolist() == [[2, 3, 4, 6], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert found["position_ids"][1].tolist() == [0] * 6 + [1]
    right = processor(images=frames(2), videos=[frames(3)], text=texts, padding_side="right")
    assert "position_ids" not in right
    assert torch.equal(right["vision_position_ids"], found["vision_position_ids"])
    assert right["cross_attention_mask"][1, :, :, 0].sum(1).tolist() == [0, 1, 0, 0, 0, 0, 0]


def test_wrong_numbers_of_media_are_refused(processor: Any) -> None:
    for media in ({"images": frames(2)}, {"videos": [frames(2)]}, {}):
        with pytest.raises(DataError, match="pass one for each"):
            processor(text=f"{BEGIN}<|image|>", **media)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"text": None}, "text is None; pass a text"),
        ({"text": []}, r"text is \[\]; pass a text"),
        ({"text": [3]}, r"text is \[3\]; pass a text"),
        ({"text": "a", "return_tensors": "np"}, "return_tensors is 'np'; expected one of 'pt'"),
    ],
)
def test_calls_without_texts_or_for_other_tensors_are_refused(
    processor: Any, call: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        processor(**call)


def test_a_file_may_be_a_path_or_a_url(processor: Any, tmp_path: Path) -> None:
    path = Path(make_needle_videos(tmp_path, 1, frames=(20, 20), rate=10)[0].path)
    expected = processor(text="<|video|>", videos=str(path))["pixel_values"]
    for video in (path, path.as_uri()):
        assert torch.equal(processor(text="<|video|>", videos=video)["pixel_values"], expected)


@pytest.mark.parametrize(
    ("total", "rate", "expected"),
    [
        (300, 30.0, [0, 30, 60, 90, 120, 150, 180, 210, 240, 270]),
        (300, 29.97, [0, 29, 59, 89, 119, 149, 179, 209, 239, 269, 299]),  # 10.01 seconds
        (90, 30.0, [0, 12, 25, 38, 50, 63, 76, 89]),  # 3 seconds: 8 frames
        (5, 30.0, [0, 1, 2, 3, 4]),
    ],
)
def test_frames_are_chosen_as_published(total: int, rate: float, expected: list[int]) -> None:
    assert frame_numbers(total, rate) == expected


def test_long_videos_have_at_most_256_frames() -> None:
    found = frame_numbers(30 * 3600, 30.0)
    assert (len(found), found[0], found[-1]) == (256, 0, 30 * 3600 - 1)
