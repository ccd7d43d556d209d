"""Parsing of JSON bodies that may contain videos, without blocking other threads.

Python's parser does not let other threads run, and takes seconds for a video in a data: URL. These URLs are therefore
cut out of the text before it is parsed. What remains may have at most `MOST_BYTES`, with `MOST_VALUES`.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from .protocol import ApiError

MOST_BYTES, MOST_VALUES = 50_000_000, 200_000
_LONG = 1 << 16


def parse(body: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ApiError: 400 if it is not JSON in UTF-8, 413 if it has too many values.
    """
    mark = secrets.token_hex(16)  # nothing in the body is equal to it
    rest, urls = _without_long_urls(body, mark.encode())
    if len(rest) > MOST_BYTES or sum(rest.count(sign) for sign in (b",", b"[", b"{", b":")) > MOST_VALUES:
        raise ApiError(
            413,
            f"the body has more than {MOST_BYTES} bytes outside of data: URLs without escapes, or more than "
            f"{MOST_VALUES} values; upload files (POST /v1/files), or send less",
            code="too_large",
        )
    try:
        return _restored(json.loads(rest.decode(), parse_constant=_refuse), urls)
    except UnicodeError as error:
        raise ApiError(400, "the body is not valid Unicode; send UTF-8 without lone surrogates") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON ({error})") from error


def _without_long_urls(body: bytes, mark: bytes) -> tuple[bytes, dict[str, memoryview]]:
    """Return the body with each long data: URL replaced by a mark, and the URLs by their marks."""
    urls: dict[str, memoryview] = {}
    view = memoryview(body)  # slices of it do not copy
    parts: list[memoryview | bytes] = []
    position, found = 0, -1
    while (found := body.find(b'"data:', found + 1)) >= 0:
        start, stop = found + 1, body.find(b'"', found + 1)
        if stop - start < _LONG or body[found - 1 : found] == b"\\" or body.find(b"\\", start, stop) >= 0:
            continue  # short, inside a text, or with an escape that only the parser reads
        name = b"%s-%d" % (mark, len(urls))
        urls[name.decode()] = view[start:stop]
        parts += [view[position:start], name]
        position = found = stop
    return b"".join([*parts, view[position:]]), urls


def _restored(value: Any, urls: dict[str, memoryview]) -> Any:
    """Return a parsed value with the marks replaced by their URLs; raise UnicodeError for a lone surrogate."""
    if isinstance(value, dict):
        return {_restored(name, urls): _restored(item, urls) for name, item in value.items()}
    if isinstance(value, list):
        return [_restored(item, urls) for item in value]
    if isinstance(value, str):
        value.encode()
        return str(urls[value], "utf-8") if value in urls else value
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
