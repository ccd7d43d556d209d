"""Layer: pure Python. Which frames of a video are used: what may be stated, and which statement applies."""

import math
from typing import Any

import pytest

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.videos.frame_choice import DEFAULT_FRAMES, FRAME_FIELDS, FrameChoice


@pytest.mark.parametrize(
    ("given", "default", "expected"),
    [
        ({}, {"fps": 1, "max_frames": 8, "start": 2}, {"fps": 1, "max_frames": 8, "start": 2}),
        ({"fps": 5}, {"num_frames": 3, "max_frames": 8}, {"fps": 5, "max_frames": 8}),
        ({"num_frames": 5}, {"fps": 3}, {"num_frames": 5}),
        ({"max_frames": 9}, {"fps": 3, "max_frames": 8}, {"fps": 3, "max_frames": 8}),
        ({"max_frames": 7}, {"fps": 3, "max_frames": 8}, {"fps": 3, "max_frames": 7}),
        ({"end": 3}, {"start": 5, "end": 9}, {"end": 3}),  # start and end are replaced together
    ],
)
def test_first_statement_applies_and_every_limit_holds(given: Any, default: Any, expected: Any) -> None:
    assert FrameChoice(**given).over(FrameChoice(**default)) == FrameChoice(**expected)


def test_one_frame_per_second_is_the_default() -> None:
    assert FrameChoice(max_frames=4, start=1).over(DEFAULT_FRAMES) == FrameChoice(fps=1, max_frames=4, start=1)
    assert FrameChoice(num_frames=4).over(DEFAULT_FRAMES) == FrameChoice(num_frames=4)


def test_unknown_keys_and_nulls_are_not_statements() -> None:
    assert FrameChoice.of({"type": "video", "fps": None, "num_frames": 3}) == FrameChoice(num_frames=3)
    assert set(FRAME_FIELDS) == {"fps", "num_frames", "max_frames", "start", "end"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fps": "2"}, "fps: '2' is not allowed; give a number above 0"),
        ({"fps": float("nan")}, "fps: nan is not allowed"),
        ({"fps": math.inf}, "fps: inf is not allowed; give a number above 0"),
        ({"fps": 0}, "fps: 0 is not allowed"),
        ({"num_frames": 2.5}, "num_frames: 2.5 is not allowed; give a whole number above 0"),
        ({"max_frames": True}, "max_frames: True is not allowed"),
        ({"start": "soon"}, "start: 'soon' is not allowed"),
        ({"start": -1}, "start: -1 is not allowed; give a number of seconds, 0 or more"),
        ({"fps": 1, "num_frames": 3}, "fps: 1, but num_frames is 3; give one of them"),
        ({"start": 3, "end": 3}, "end: 3 is not after the start of the clip, 3; give a later time"),
    ],
)
def test_values_that_are_not_allowed_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        FrameChoice(**given)
