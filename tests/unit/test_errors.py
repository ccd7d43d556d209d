"""Layer: pure Python. Checks whose messages say what was found and what is allowed."""

from typing import Any

import pytest

from mllm_seqpar.errors import ConfigError, DataError, ShapeError, require_one_of, require_shape


@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        ((3, 4, 32), {"frames": None, "visual_tokens": None, "width": 64}, "(3, 4, 32); expected (frames, visual tok"),
        (
            (3, 4),
            {"frames": None, "tokens": None, "width": 64},
            "x has shape (3, 4); expected (frames, tokens, 64), all",
        ),
        ((), {"images": 4}, "x has shape (); expected (4), all"),
        (None, {"images": None}, "x is missing; expected (images), all"),
    ],
)
def test_other_dimensions_are_named(shape: Any, dims: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as raised:
        require_shape("x", shape, ", all in one list", **dims)
    assert message in str(raised.value)


def test_allowed_shapes_and_values_pass_and_others_name_the_allowed_ones() -> None:
    require_shape("x", (0, 4), frames=None, width=4)
    require_one_of("mode", None, ("a", None))
    for kind in (ConfigError, DataError):
        with pytest.raises(kind, match="mode is 'b'; expected one of 'a', None: as published"):
            require_one_of("mode", "b", ("a", None), ": as published", kind)
