"""Layer: one process. The options --decode_threads and --decoder, and the way to the decoder."""

import importlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from chats import chat, video, write_rows
from clips import write_clip
from mllm_seqpar.chats import clip as clip_module
from mllm_seqpar.chats.clip import Clip
from mllm_seqpar.chats.needle import make_needle_videos
from mllm_seqpar.cli.check_data import check
from mllm_seqpar.data import ChatDataset, FrameChoice, VideoSource
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.videos import decode_options
from mllm_seqpar.videos.decode_cost import frames_to_decode
from mllm_seqpar.videos.video import scan


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The (threads, decoder) of each read."""
    found: list[tuple[Any, Any]] = []
    read = clip_module.read_frames

    def recorded(*args: Any, threads: Any, decoder: Any, **options: Any) -> Any:
        found.append((threads, decoder))
        return read(*args, threads=threads, decoder=decoder, **options)

    monkeypatch.setattr(clip_module, "read_frames", recorded)
    return found


def test_more_threads_than_cores_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(decode_options, "available_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        for threads in (None, 2, 3):
            decode_options.check_decoding(threads, "pyav")
    (record,) = caplog.records
    assert record.getMessage() == (
        "--decode_threads 3 on 4 ranks of this machine is more than its 8 cores, which decodes no faster; leave it "
        "out for 2"
    )


def test_a_decoder_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name=name.partition(".")[0])

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"--decoder torchcodec needs the module .* pip install 'mllm-seqpar\[torch"):
        decode_options.check_decoding(None, "torchcodec")


def test_options_reach_the_decoder(tmp_path: Path, used: list[Any]) -> None:
    (needle,) = make_needle_videos(tmp_path, 1, frames=(4, 4), rate=2)
    path = write_rows(tmp_path / "one.jsonl", [needle.sample(tmp_path)])
    (source,) = ChatDataset(path, None, threads=2)[0].sources
    assert isinstance(source, VideoSource) and len(list(source.read(0, 2))) == 1
    list(Clip.of_file("video", needle.path, FrameChoice(fps=1.0)).open(None, threads=3, decoder="pyav").read(0, 1))
    assert check([str(path)]) == 0 and check([str(path), "--decode_threads", "2"]) == 0
    assert list(dict.fromkeys(used)) == [(2, "pyav"), (3, "pyav"), (1, "pyav")]
    with pytest.raises(ConfigError, match="--decode_threads: -1 is not allowed"):
        check([str(path), "--decode_threads", "-1"])


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_frames_to_decode_are_those_since_the_keyframe_or_the_last_entry(tmp_path: Path, suffix: str) -> None:
    path = write_clip(tmp_path / f"clip.{suffix}", options={"bf": "0", "g": "12", "sc_threshold": "0"})
    info = scan(path)
    ticks = info.ticks
    assert ticks is not None and len(ticks) == 60
    for frames, expected in (
        (range(60), 60),
        ([0], 1),
        ([20], 9),  # from keyframe 12
        ([20, 22], 9 + 2),
        ([20, 30], 9 + 7),  # keyframe 24 is nearer
        ([11, 12, 59], 12 + 1 + 12),
        ([5, 5], 6),
    ):
        assert frames_to_decode(info.plan(ticks[frame] for frame in frames)) == expected


def test_check_data_prints_the_decoding_of_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = write_clip(tmp_path / "clip.mp4", options={"bf": "0", "g": "60", "sc_threshold": "0"})
    write_rows(tmp_path / "data.jsonl", 2 * [chat(video(clip, num_frames=3), "What?")])
    assert check([str(tmp_path / "data.jsonl")]) == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("decoding: ")]
    # the middles of three parts of 60 frames are frames 10, 30 and 50, of which 51 frames are decoded
    assert re.fullmatch(
        r"decoding: 17\.0 frames of the videos for each frame that is used, about \d+\.\d seconds of one core", line
    )
