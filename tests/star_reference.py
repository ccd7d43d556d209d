"""What Star Attention computes, from unpatched models: they are given its mask, and read everything every time.

    prompt = c_1 ... c_n query: a token of block c_i sees c_1 and, up to itself, c_i; later tokens all before them

The anchor's K and V are those of c_1 itself, whose tokens see nothing else, so one forward pass over the whole text
with this mask is phase 1 and phase 2 together, and one such pass for each new token is generation.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def visible(prompt: int, length: int, block: int, ranks: int, real: Tensor, window: int | None = None) -> Tensor:
    """(B, length, length) bool: row sees key. `real` (B, length) says what is no padding."""
    place = torch.arange(length)
    row, key = place[:, None], place[None]
    part = place // block
    context = row < block * ranks
    assert block * ranks < prompt <= length
    seen = (key <= row) & (~context | (part[None] == 0) | (part[None] == part[:, None]))
    if window is not None:
        seen &= row - key < window
    return seen & real[:, None]


def additive(seen: Tensor) -> Tensor:
    """(B, L, L) -> (B, 1, L, L) float32, as attention adds it to its scores."""
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]


def counted(mask: Tensor) -> Tensor:
    """Positions that count real tokens only: what some models make of their attention mask."""
    return (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)


def opt_positions(mask: Tensor) -> Tensor:
    """The same as OPT does it."""
    return mask.cumsum(1) * mask - 1


@contextmanager
def under_star_mask(
    owner: Any,
    prompt: int,
    block: int,
    ranks: int,
    positions: Callable[[Tensor], Tensor] | None = None,
    window: int | None = None,
    form: Callable[[Tensor], Any] = additive,
) -> Iterator[None]:
    """Every pass of this unpatched model, over a text that begins with the prompt, gets Star Attention's mask.

    Args:
        owner: the module whose `forward` takes `attention_mask`.
        prompt: tokens of the prompt.
        block: tokens of each rank's block.
        ranks: how many.
        positions: what the model makes of the mask when no positions are given, as it cannot of this one.
        window: of sliding layers; they and the others then get a mask each.
        form: of the mask, when it is not additive.
    """
    unpatched = owner.forward

    @functools.wraps(unpatched)
    def forward(input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        assert mask.shape == input_ids.shape and not kwargs.get("past_key_values"), "a pass over the whole text"
        seen = functools.partial(visible, prompt, mask.shape[1], block, ranks, mask.bool())
        if positions is not None and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = positions(mask)
        whole: Any = form(seen())
        if window is not None:
            whole = {"full_attention": whole, "sliding_attention": form(seen(window))}
        return unpatched(input_ids=input_ids, attention_mask=whole, **kwargs)

    owner.forward = forward
    try:
        yield
    finally:
        del owner.forward
