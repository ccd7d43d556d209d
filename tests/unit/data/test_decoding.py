"""Layer: one process. The options --decode_threads and --decoder, and the way to the decoder."""

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mllm_seqpar.cli.check_data import check
from mllm_seqpar.data import ChatDataset, VideoSource, decoding, sources
from mllm_seqpar.data.needle import make_needle_videos
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.serving.engine import MediaFile


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The (threads, decoder) of each read."""
    found: list[tuple[Any, Any]] = []
    read = sources.read_frames

    def recorded(*args: Any, threads: Any, decoder: Any, **options: Any) -> Any:
        found.append((threads, decoder))
        return read(*args, threads=threads, decoder=decoder, **options)

    monkeypatch.setattr(sources, "read_frames", recorded)
    return found


def test_more_threads_than_cores_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(decoding, "available_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        for threads in (None, 2, 3):
            decoding.check_decoding(threads, "pyav")
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
        decoding.check_decoding(None, "torchcodec")


def test_options_reach_the_decoder(tmp_path: Path, used: list[Any]) -> None:
    (video,) = make_needle_videos(tmp_path, 1, frames=(4, 4), rate=2)
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(video.sample(tmp_path)) + "\n")
    (source,) = ChatDataset(path, None, threads=2)[0].sources
    assert isinstance(source, VideoSource) and len(list(source.read(0, 2))) == 1
    list(MediaFile.of("video", str(video.path), fps=1.0).open(None, threads=3, decoder="pyav").read(0, 1))
    assert check([str(path)]) == 0 and check([str(path), "--decode_threads", "2"]) == 0
    assert list(dict.fromkeys(used)) == [(2, "pyav"), (3, "pyav"), (1, "pyav")]
    with pytest.raises(ConfigError, match="--decode_threads: -1 is not allowed"):
        check([str(path), "--decode_threads", "-1"])
