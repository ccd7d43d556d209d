"""What the tests of Star Attention run: a tiny model of every family, with a prompt, by name; ranks find them here."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import mllama_cases
import open_flamingo_cases
import tiny_idefics
import tiny_mllama
import torch

from star_reference import counted, opt_positions
from tiny import tiny_frames, tiny_model, tiny_text

LENGTH = 27
"""Blocks of 13, 8 and 6 tokens for 2, 3 and 4 ranks, and 1, 3 and 3 tokens of query."""
WINDOW = 9
STAR = {"self_attention": "star", "shard_prompt_from": 2}


class Warnings(logging.Handler):
    """Collects what the library warns of, between `addHandler` and `removeHandler`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@dataclass(frozen=True)
class Prompt:
    """A model and what it is asked.

    Attributes:
        model: to be patched.
        owner: the module whose forward takes the attention mask.
        inputs: of `forward` and `generate`.
        reference: how `under_star_mask` is to be called for it.
    """

    model: Any
    owner: Any
    inputs: dict[str, Any]
    reference: dict[str, Any]


@functools.cache
def _mplug(gate: str | None, window: bool) -> Any:
    sliding = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1} if window else {}
    return tiny_model(gate, **sliding)


def mplug_owl3(gate: str | None, frames: tuple[int, ...], padding: int = 0, window: bool = False) -> Prompt:
    """`padding` tokens before the second sample."""
    model = _mplug(gate, window)
    ids = tiny_text(*frames, length=LENGTH)
    inputs = {"input_ids": ids}
    if padding:
        ids[1] = torch.cat([torch.zeros(padding, dtype=torch.long), tiny_text(frames[1], length=LENGTH - padding)[0]])
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][1, :padding] = 0
    if sum(frames):
        inputs["pixel_values"] = tiny_frames(sum(frames))
    return Prompt(model, model, inputs, {"window": WINDOW} if window else {})


def idefics(**fields: Any) -> Prompt:
    """IDEFICS counts its positions by the attention mask."""
    case = tiny_idefics.Case(length=LENGTH, labels=False, **fields)
    model = tiny_idefics.model_of(case)
    return Prompt(model, model, tiny_idefics.inputs_of(case, model), {"positions": counted})


def mllama(**fields: Any) -> Prompt:
    """Llama 3.2 Vision."""
    case = tiny_mllama.Case(length=LENGTH, labels=False, **fields)
    model = mllama_cases.model_of(case)
    return Prompt(model, model, mllama_cases.inputs_of(case, model), {})


def open_flamingo(name: str, **fields: Any) -> Prompt:
    """OpenFlamingo over a language model, whose forward takes the mask."""
    case = open_flamingo_cases.Case(
        media=((1, 9, 20), (5,)), images=3, length=LENGTH, labels=False, padding="left", **fields
    )
    model = open_flamingo_cases.model_of(name, case)
    reference: dict[str, Any] = {"positions": opt_positions} if name == "opt" else {}
    return Prompt(model, model.lang_encoder, open_flamingo_cases.inputs_of(case), reference)


PROMPTS = {
    "mPLUG-Owl3, gated": functools.partial(mplug_owl3, "per_head", (5,)),
    "mPLUG-Owl3, gated, padded batch": functools.partial(mplug_owl3, "per_head", (4, 1), 3),
    "mPLUG-Owl3, fused, padded batch": functools.partial(mplug_owl3, None, (4, 1), 3),
    "mPLUG-Owl3, sliding window": functools.partial(mplug_owl3, None, (3,), window=True),
    "mPLUG-Owl3, text only": functools.partial(mplug_owl3, "per_head", (0, 0)),
    "IDEFICS": functools.partial(idefics, images=(4,), mask="before"),
    "IDEFICS, padded batch": functools.partial(idefics, images=(3, 1), padding="left"),
    "Llama 3.2 Vision": mllama,
    "Llama 3.2 Vision, padded batch": functools.partial(mllama, images=((2, 3, 1), (1,)), padding="left"),
    "OpenFlamingo over LLaMA": functools.partial(open_flamingo, "llama"),
    "OpenFlamingo over OPT": functools.partial(open_flamingo, "opt"),
    "OpenFlamingo over MPT": functools.partial(open_flamingo, "mpt"),
}
