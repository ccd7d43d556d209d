"""Conversations over a cache whose rows are moved, for every family that keeps K and V of frames with a cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import tiny_idefics
import tiny_mllama
import torch
from torch import Tensor

from mllm_seqpar import patch_model, unpatch_model
from tiny import tiny_frames, tiny_model, tiny_text

NEW = torch.tensor([[7, 8, 9], [10, 11, 12]])
OTHER = torch.tensor([[13, 14, 15], [16, 17, 18]])
GATE_OF = {"per_head": "per_head", "fused": None}
"""The two kinds of native mPLUG-Owl3 whose placeholders differ in what they see, and their gates."""
FAMILIES = ("mllama", "idefics", *GATE_OF)

MOVES: dict[str, tuple[Callable[[Any], None], list[int]]] = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
}
"""What is done to a cache of two rows, and which rows it then has."""


class Talk:
    """A prompt of two samples with frames, and passes that continue it."""

    def __init__(self, family: str) -> None:
        self.family = family
        if family == "mllama":
            self.case: Any = tiny_mllama.Case(images=((2, 3, 1), (1,)), labels=False)
            self.model = tiny_mllama.model_of(self.case)
            self.prompt = tiny_mllama.inputs_of(self.case, self.model)
        elif family == "idefics":
            self.case = tiny_idefics.Case(images=(3, 2), mask="before", labels=False)
            self.model = tiny_idefics.model_of(self.case)
            self.prompt = tiny_idefics.inputs_of(self.case, self.model)
        else:
            self.model = tiny_model(GATE_OF[family])
            self.prompt = {"input_ids": tiny_text(3, 2), "pixel_values": tiny_frames(5)}

    def masks(self, rows: list[int], start: int, stop: int) -> dict[str, Tensor]:
        """What new tokens see of their own sample's images: what the prompt's last row does. Llama's has all tokens."""
        found = {}
        for name in ("cross_attention_mask", "image_attention_mask"):
            if name in self.prompt:
                prompt = self.prompt[name][rows]
                whole = torch.cat([prompt, prompt[:, -1:].expand(-1, stop, *prompt.shape[2:])], dim=1)
                found[name] = whole if name == "cross_attention_mask" else whole[:, start - stop :]
        return found

    def prompt_and(self, ids: Tensor) -> dict[str, Any]:
        """The prompt with these tokens behind it."""
        given = self.prompt | {"input_ids": torch.cat([self.prompt["input_ids"], ids], dim=1)}
        return given | self.masks([0, 1], -self.prompt["input_ids"].shape[1], ids.shape[1])

    def fill(self, cache: Any = None) -> Any:
        """Read the prompt into a cache."""
        return self.model(**self.prompt, past_key_values=cache, use_cache=True).past_key_values

    def go_on(self, cache: Any, ids: Tensor, rows: list[int], **more: Any) -> Tensor:
        """Logits of two tokens, then of one, of these rows of the prompt."""
        parts = []
        for start, stop in ((0, 2), (2, 3)):
            given = {"input_ids": ids[rows, start:stop], **self.masks(rows, start, stop), **more}
            parts.append(self.model(**given, past_key_values=cache).logits)
        return torch.cat(parts, dim=1)

    def whole(self, ids: Tensor, rows: list[int]) -> Tensor:
        """The same without a cache, both samples computed whole."""
        return self.model(**self.prompt_and(ids), use_cache=False).logits[rows, -ids.shape[1] :]

    def unpatched(self, move: str) -> Tensor:
        """The reference: transformers' own cache where it has the images, otherwise no cache."""
        apply, rows = MOVES[move]
        if self.family != "mllama":
            return self.whole(NEW, rows)
        cache = self.fill()
        apply(cache)
        return self.go_on(cache, NEW, rows)

    def moved(self, move: str) -> tuple[Tensor, Tensor]:
        """Logits over a copy of the cache whose rows were moved, and then over the cache itself with another text."""
        apply, rows = MOVES[move]
        cache = self.fill()
        copied = copy.deepcopy(cache)
        apply(copied)
        return self.go_on(copied, NEW, rows), self.go_on(cache, OTHER, [0, 1])


@torch.no_grad()
def moved_rows(rank: int, world: int, families: tuple[str, ...], options: dict[str, Any]) -> dict[Any, Any]:
    """On a rank: what every move gives in the patched models."""
    found = {}
    for family in families:
        talk = Talk(family)
        patch_model(talk.model, **options)
        try:
            found |= {(family, move): talk.moved(move) for move in MOVES}
        finally:
            unpatch_model(talk.model)
    return found
