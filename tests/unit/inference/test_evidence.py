"""Layer: one process. Moments, the text of tokens, and the evidence page."""

import html.parser
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from browser import CHROMIUM, Chromium
from mllm_seqpar import patch_model
from mllm_seqpar.chats.clip import FeatureFrames
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.data import VideoSource
from mllm_seqpar.inference import (
    Sampling,
    answer,
    encode_video,
    evidence_page,
    load_for_inference,
)
from mllm_seqpar.inference.evidence import (
    FrameAttention,
    FrameTime,
    Moment,
    clock,
    evidence_of,
    find_moments,
    frame_times,
)
from mllm_seqpar.inference.evidence_page import write_evidence_page
from mllm_seqpar.models.loading import load_processor

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked=1'>&amp;\u2028"


def times(count: int) -> list[FrameTime]:
    return [FrameTime(0, float(number), number + 1.0) for number in range(count)]


def test_moment_takes_neighbours_above_the_middle_between_its_peak_and_the_median() -> None:
    shares = [0.02, 0.10, 0.20, 0.16, 0.03, 0.0, 0.30, 0.10, 0.10, 0.0]  # the median is 0.1
    first, second, third = find_moments(shares, times(10), 3)
    assert (first.first, first.last, first.peak) == (2, 3, 2)  # 0.36 in all, although frame 6 alone has more than 2
    assert first.share == pytest.approx(0.36) and (first.start, first.end) == (2.0, 4.0)
    assert (second.first, second.last) == (6, 6)
    assert (third.first, third.last) == (7, 8)
    assert len(find_moments(shares, times(10), 99)) == 6  # frames without any attention are in no moment
    assert [(m.first, m.last) for m in find_moments([0.25] * 4, times(4), 5)] == [(0, 3)]
    assert find_moments([0.0, 0.0], times(2), 5) == ()


def test_moment_does_not_go_on_into_another_video() -> None:
    two = [FrameTime(0, 0.0, 1.0), FrameTime(0, 1.0, 2.0), FrameTime(1, 0.0, 1.0), FrameTime(1, 1.0, 2.0)]
    found = find_moments([0.1, 0.3, 0.3, 0.3], two, 5)
    assert [(moment.medium, moment.first, moment.last) for moment in found] == [(1, 2, 3), (0, 1, 1), (0, 0, 0)]


def test_attention_to_temporal_patches_is_split_between_their_frames() -> None:
    attention = FrameAttention(
        frames=torch.tensor([[0.4, 0.2, 0.1]]), text=torch.tensor([0.3]), visible=torch.tensor([[True, False, True]])
    )
    found = attention.split([2, 2, 1])
    torch.testing.assert_close(found.frames, torch.tensor([[0.2, 0.2, 0.1, 0.1, 0.1]]))
    assert found.visible.tolist() == [[True, True, False, False, True]]
    assert attention.split([1, 1, 1]) is attention


def test_times_are_written_as_minutes_and_hours() -> None:
    assert [clock(x) for x in (0, 9.96, 62.5, 3725.4)] == ["0:00.0", "0:10.0", "1:02.5", "1:02:05.4"]
    assert (
        str(Moment(share=0.312, first=3, last=4, peak=3, start=3.0, end=5.0))
        == " 31.2%  0:03.0 to 0:05.0  frames 3 to 4"
    )
    assert Moment(share=1.0, first=7, last=7, peak=7).span == "frame 7"


def fake_attention(frames: int, visible: int | None = None) -> FrameAttention:
    """Return the attention of 3 tokens, to frame 2; of the second one half to frame 0; of the last one to all."""
    shares = torch.zeros(3, frames)
    shares[:, 2] = 1.0
    shares[1, 0] = shares[1, 2] = 0.5
    shares[2] = 1 / frames
    seen = torch.ones(3, frames, dtype=torch.bool)
    if visible is not None:
        seen = torch.zeros_like(seen)
        seen[:, visible] = True
    return FrameAttention(frames=shares, text=torch.zeros(3), visible=seen)


class Words:
    """A tokenizer whose tokens are the words of a list; token 0 ends an answer."""

    all_special_ids = (0,)

    def __init__(self, *words: str) -> None:
        self._words = ("", *words)

    def decode(self, tokens: Any, skip_special_tokens: bool) -> str:
        return "".join(self._words[token] for token in tokens)


def test_special_tokens_do_not_count_for_moments() -> None:
    found = evidence_of(fake_attention(8), [1, 2, 0], Words("a", "b"), [FeatureFrames(8)], 3)
    assert [(m.first, m.share, m.start) for m in found.moments] == [(2, 0.75, None), (0, 0.25, None)]
    assert found.pieces == ("a", "b", "")
    assert found.describe().splitlines()[1:] == ["  1.  75.0%  frame 2", "  2.  25.0%  frame 0"]


def test_frames_are_not_ranked_where_the_mask_leaves_one() -> None:
    found = evidence_of(fake_attention(8, visible=7), [1, 2, 0], Words("a", "b"), [FeatureFrames(8)], 3)
    assert found.moments == ()
    assert "single frame only (frame 7)" in found.describe()
    assert evidence_of(fake_attention(3), [1, 2, 0], Words("a", "b"), [FeatureFrames(3)], 1).moments


class Elements(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture
def page(tmp_path: Path, inference_files: Path) -> Path:
    """A page about a video of 100 frames, whose question and answer try to break out of it."""
    video = VideoSource.open(inference_files / "clip.mp4")
    found = evidence_of(fake_attention(100), [1, 2, 0], Words(HOSTILE, "b"), [video], 3)
    path = tmp_path / "report.html"
    again = evidence_of(fake_attention(100), [1, 2, 0], Words("c", "d"), [video], 3)
    write_evidence_page(path, [(HOSTILE, found), ("Why?", again)], [video], name="my clip", model="my model")
    return path


def test_page_is_self_contained_and_escapes_text(page: Path, inference_files: Path) -> None:
    text = page.read_text()
    parsed = Elements()
    parsed.feed(text)
    assert [tag for tag, _ in parsed.found].count("script") == 2 and "img" not in {tag for tag, _ in parsed.found}
    assert not any(name in ("src", "href") for _, attributes in parsed.found for name in attributes)
    assert re.findall(r"https?://[^\"\s]+", text) == ["http://www.w3.org/2000/svg"]
    whole = json.loads(re.search(r'application/json">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    data = whole["answers"][0]
    assert data["question"] == HOSTILE and data["tokens"][0]["text"] == HOSTILE
    assert data["edges"][50] == 2.0 and len(data["mean"]) == 100 == len(data["edges"]) - 1
    moment, _ = data["moments"]
    assert moment["image"].startswith("data:image/jpeg;base64,") and moment["start"] == 0.08
    (video,) = whole["media"]
    assert (page.parent / video["href"]).resolve() == (inference_files / "clip.mp4").resolve()
    facts = dict(whole["facts"])
    assert facts["Video"] == "my clip" and facts["Model"] == "my model"
    assert facts["Frames"] == "100 frames, 25 per second" and facts["Length"] == "0:04"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", facts["Written"])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_page_shows_the_time_line_of_a_token(page: Path, chromium: Chromium) -> None:
    with chromium.page(page.as_uri()) as browser:
        browser.wait("document.querySelectorAll('.answer span').length === 4")
        assert browser.value("document.querySelector('h2').textContent") == HOSTILE
        browser.wait("document.querySelector('svg .mean')?.getAttribute('d').length > 0")
        labels = browser.value("[...document.querySelector('svg').querySelectorAll('text')].map(x => x.textContent)")
        assert {"0%", "50%", "100%", "0:01", "time in the video", "1", "2"} <= set(labels)
        assert browser.value("document.querySelectorAll('svg')[0].querySelectorAll('.band').length") == 2
        browser.value("document.querySelectorAll('.answer span')[1].focus(); null")
        assert browser.value("document.querySelectorAll('svg .token').length") == 1
        assert browser.value("document.querySelector('.caption').textContent").startswith('"b": most at 0:00')
        assert browser.value("document.querySelector('li img').naturalWidth") > 0
        cards = browser.value("[...document.querySelector('ol').children].map(card => card.innerText)")
        assert [card.split("%")[0].split()[-1] for card in cards] == ["75.0", "25.0"]
        assert browser.value("window.hacked") is None
        browser.value(
            "plots[0].zoom([0, 1]); document.querySelector('[aria-label=\"Logarithmic scale\"]').click(); null"
        )
        labels = browser.value("[...document.querySelector('svg').querySelectorAll('text')].map(x => x.textContent)")
        assert {"10%", "0.01%", "0:00.4"} <= set(labels) and "0:02" not in labels
        assert browser.errors == []


def test_long_videos_are_plotted_in_columns_that_sum_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_page, "NUMBERS", 600)
    found = evidence_of(fake_attention(1003), [1, 2, 0], Words("a", "b"), [FeatureFrames(1003)], 2)
    write_evidence_page(tmp_path / "page.html", [("?", found)], [FeatureFrames(1003)])
    text = (tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'application/json">(.*?)</script>', text, re.S)[1])["answers"][0]  # type: ignore[index]
    assert len(data["mean"]) == len(data["edges"]) - 1 == 400 and data["framesInColumn"] == 3
    assert not data["byTime"] and data["edges"][-1] == 1003
    assert sum(data["mean"]) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_answer_with_evidence_is_the_same_on_every_rank(inference_files: Path) -> None:
    folder = str(inference_files / "gated")
    models = [load_for_inference(folder, "auto", torch.device("cpu")) for _ in range(2)]
    processor, source = load_processor(folder), VideoSource.open(inference_files / "clip.mp4", fps=2)

    def run(comm: Communicator) -> Any:
        model = patch_model(models[comm.rank], group=comm)
        video, sampling = encode_video(model, processor, source, group=comm), Sampling(max_new_tokens=5)
        plain = answer(model, processor, "What?", video, sampling)
        result = answer(model, processor, "What?", video, sampling, evidence=2)
        found = result.evidence
        assert found is not None and result.tokens == plain.tokens and plain.evidence is None
        stored = replace(video, source=None)  # as read from a store
        for given, first in ((None, None), (source, 0.0)):
            again = answer(model, processor, "What?", stored, sampling, source=given, evidence=5).evidence
            assert again is not None and again.times[0].start == first and again.shares == found.shares
        return found

    one, two = run_loopback(2, run)
    assert one.moments == two.moments and len(one.moments) == 2
    assert one.attention.frames.shape == (5, len(source))
    torch.testing.assert_close(one.attention.frames.sum(1), torch.ones(5))
    assert [time.start for time in frame_times([source])] == [n / 2 for n in range(len(source))]
    assert one.times[-1].end == pytest.approx(len(source) / 2)
