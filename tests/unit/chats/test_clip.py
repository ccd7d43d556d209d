"""Layer: one process. A clip names its files without opening them; opened, it gives the frames that it states."""

import json
from pathlib import Path

import pytest
import torch

from clips import write_clip
from mllm_seqpar.chats.clip import Clip, ImageListSource
from mllm_seqpar.data import FrameChoice, VideoSource
from mllm_seqpar.errors import ConfigError, VideoError
from mllm_seqpar.videos.images import to_pil_images

IMAGE = torch.arange(3 * 4 * 6, dtype=torch.uint8).reshape(3, 4, 6)


@pytest.fixture
def video(tmp_path: Path) -> str:
    return str(write_clip(tmp_path / "a.mp4", frames=30))


@pytest.mark.parametrize(
    "clip",
    [
        Clip("video", "a.mp4", FrameChoice(fps=2.5, end=3.0), version="7", name="mine"),
        Clip("video", ("a.png", "b.png"), FrameChoice(num_frames=1)),
        Clip("image", "a.png"),
        Clip("image"),
    ],
)
def test_clip_survives_its_way_to_other_ranks(clip: Clip) -> None:
    found = Clip.from_json(json.loads(json.dumps(clip.to_json())))
    assert found == clip and found.name == clip.name


def test_changed_file_is_another_clip(video: str) -> None:
    before = Clip.of_file("video", video)
    assert Clip.of_file("video", video) == before
    write_clip(Path(video), frames=20)
    assert Clip.of_file("video", video) != before
    with pytest.raises(ConfigError, match="missing"):
        Clip.of_file("video", f"{video}.missing")


def test_callers_choice_of_frames_precedes_that_of_the_clip(video: str) -> None:
    clip = Clip("video", "a.mp4", FrameChoice(num_frames=4))
    opened = clip.open(frames=FrameChoice(fps=5.0), locate=lambda name: str(Path(video).with_name(name)))
    assert opened == VideoSource.open(video, fps=5.0)
    assert len(Clip("video", video, FrameChoice(num_frames=4)).open()) == 4
    assert len(Clip("video", video).open()) == 2  # one frame a second


def test_images_of_files_and_in_memory_are_frames_of_one_video(tmp_path: Path) -> None:
    (image,) = to_pil_images(IMAGE[None])
    image.save(tmp_path / "a.png")
    clip = Clip("video", (str(tmp_path / "a.png"), IMAGE, IMAGE[:, :2]), FrameChoice(max_frames=3))
    opened = clip.open()
    assert isinstance(opened, ImageListSource) and opened.sizes() == [(4, 6), (4, 6), (2, 6)]
    first, second = opened.read(0, 3)
    assert torch.equal(first, IMAGE[None].expand(2, -1, -1, -1)) and torch.equal(second[0], IMAGE[:, :2])
    with pytest.raises(ConfigError, match="not in files"):
        opened.key()
    with pytest.raises(VideoError, match="leave size out"):
        list(opened.read(1, 2, size=(8, 8)))
