"""Samples as rows of token ids: pieces of text are tokenized one by one, then truncated and padded."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from mllm_seqpar.errors import DataError

from .chat import IMAGE, Piece


class _Row(NamedTuple):
    """A tokenized sample.

    Attributes:
        ids: the tokens.
        labels: the tokens of the answers, -100 elsewhere.
        positions: where the placeholders begin.
        offsets: for each token its range in the formatted text, if requested.
    """

    ids: list[int]
    labels: list[int]
    positions: list[int]
    offsets: list[tuple[int, int]]


def token_rows(
    tokenizer: Any,
    samples: Sequence[Iterable[Piece]],
    *,
    pad: int,
    padding_side: str,
    padding: bool = True,
    padded_length: int | None = None,
    multiple_of: int | None = None,
    most_tokens: int | None = None,
    return_labels: bool = False,
    return_offsets: bool = False,
) -> dict[str, Any]:
    """Return `input_ids` and `attention_mask` (B, L), `media_offset` (B, N), and what else is requested.

    Args:
        tokenizer: tokenizes a piece without special tokens.
        samples: pieces with one placeholder for each frame.
        pad: the padding token; labels are padded with -100, positions with -1.
        padding: False requires texts of equal length.
        padded_length: the minimum length of the rows.
        multiple_of: the length of the rows is a multiple of this number.
        most_tokens: longer samples are truncated on the tokenizer's `truncation_side`.
        return_labels: add `labels` (B, L).
        return_offsets: add `offset_mapping` (B, L, 2).

    Raises:
        DataError: truncation would cut placeholders off, or the texts have several lengths and are not padded.
    """
    placeholder: list[int] = tokenizer(IMAGE, add_special_tokens=False)["input_ids"]
    rows = [_row(tokenizer, pieces, placeholder, return_offsets) for pieces in samples]
    if most_tokens is not None:
        from_left = getattr(tokenizer, "truncation_side", "right") == "left"
        rows = [_truncated(*row, len(placeholder), most_tokens, from_left) for row in enumerate(rows)]
    lengths = [len(row.ids) for row in rows]
    length = max([padded_length or 0, *lengths])
    length += -length % (multiple_of or 1)
    if not padding:
        if len(set(lengths)) > 1:
            raise DataError(f"the texts have {lengths} tokens, and padding is off; pass padding=True")
        length = lengths[0] if lengths else 0
    most = max((len(row.positions) for row in rows), default=0)
    data: dict[str, Any] = {
        "input_ids": torch.full((len(rows), length), pad),
        "attention_mask": torch.zeros(len(rows), length, dtype=torch.long),
        "media_offset": torch.full((len(rows), most), -1),
    }
    if return_labels:
        data["labels"] = torch.full((len(rows), length), -100)
    if return_offsets:
        data["offset_mapping"] = torch.zeros(len(rows), length, 2, dtype=torch.long)
    for sample, row in enumerate(rows):
        start = length - len(row.ids) if padding_side == "left" else 0
        columns = slice(start, start + len(row.ids))
        data["input_ids"][sample, columns] = torch.tensor(row.ids, dtype=torch.long)
        data["attention_mask"][sample, columns] = 1
        data["media_offset"][sample, : len(row.positions)] = torch.tensor(row.positions, dtype=torch.long) + start
        if return_labels:
            data["labels"][sample, columns] = torch.tensor(row.labels, dtype=torch.long)
        if row.offsets:
            data["offset_mapping"][sample, columns] = torch.tensor(row.offsets, dtype=torch.long)
    return data


def _row(tokenizer: Any, pieces: Iterable[Piece], placeholder: list[int], with_offsets: bool) -> _Row:
    row = _Row([], [], [], [])
    for piece in pieces:
        at = 0
        for number, text in enumerate(piece.text.split(IMAGE)):
            if number:
                row.positions.append(len(row.ids))
                row.ids.extend(placeholder)
                if with_offsets:
                    row.offsets.extend([piece.formatted_range(at, at + len(IMAGE))] * len(placeholder))
                at += len(IMAGE)
            if text:
                encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=with_offsets)
                row.ids.extend(encoded["input_ids"])
                if with_offsets:
                    row.offsets.extend(piece.formatted_range(at + x, at + y) for x, y in encoded["offset_mapping"])
            at += len(text)
        added = row.ids[len(row.labels) :]
        row.labels.extend(added if piece.is_target else [-100] * len(added))
    return row


def _truncated(number: int, row: _Row, placeholder: int, most: int, from_left: bool) -> _Row:
    """Return at most `most` tokens of a sample; `placeholder` is the number of tokens of a placeholder."""
    cut = len(row.ids) - most
    if cut <= 0:
        return row
    first = cut if from_left else 0
    lost = sum(not first <= position <= first + most - placeholder for position in row.positions)
    if lost:
        raise DataError(
            f"text {number} has {len(row.ids)} tokens, and max_length={most} cuts off {lost} of its "
            f"{len(row.positions)} placeholders of frames; raise max_length, or pass truncation=False"
        )
    kept = slice(first, first + most)
    return _Row(row.ids[kept], row.labels[kept], [p - first for p in row.positions], row.offsets[kept])
