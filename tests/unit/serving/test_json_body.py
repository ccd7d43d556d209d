"""Layer: pure Python. JSON bodies with long data: URLs, and what is refused before it is parsed."""

import json

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")

from mllm_seqpar.serving import json_body
from mllm_seqpar.serving.json_body import parse
from mllm_seqpar.serving.protocol import ApiError

LONG = "data:video/mp4;base64," + "QUJD" * 30_000


@pytest.mark.parametrize(
    "value",
    [
        {"a": [LONG, "data:,x", {"b": LONG + "x"}], "c": None},
        {LONG: LONG, "text": f'she said "{LONG}" and "data:'},
        {"text": LONG + "\\" + LONG, "further": ["\\", LONG, "\\", 'x"', LONG]},
        [LONG, [], 1.5, True, "\N{SNOWMAN}"],
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_value_is_that_of_the_standard_parser(value: object, ascii_only: bool) -> None:
    assert parse(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


def test_long_urls_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    loads = json.loads
    monkeypatch.setattr(
        json_body.json, "loads", lambda text, **options: sizes.append(len(text)) or loads(text, **options)
    )
    assert parse(json.dumps([LONG, "x", LONG]).encode()) == [LONG, "x", LONG] and sizes[0] < 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        *[(b"", 400), (b"{", 400), (b"NaN", 400), (b"[1e999, Infinity]", 400), (b"\xff", 400), (b'"\\ud800"', 400)],
        *[(b"[" * 100_000 + b"]" * 100_000, 400), (b"1" * 5000, 400), (b"[" + b"0," * 300_000 + b"0]", 413)],
    ],
)
def test_body_that_is_refused(body: bytes, status: int) -> None:
    with pytest.raises(ApiError) as error:
        parse(body)
    assert error.value.status == status
