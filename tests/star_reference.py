"""The reference for Star Attention: unpatched models that apply its mask and read the whole text in every pass.

    prompt = c_1 ... c_n query: a token of block c_i attends to c_1 and, up to itself, c_i; a later token to all
    before it

The anchor's K and V are those of c_1 itself, whose tokens attend to nothing else. One forward pass over the whole text
with this mask is therefore phase 1 and phase 2 together, and one such pass for each new token is generation.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar._compat import cache_name


def star_mask(prompt: int, block: int, ranks: int, real: Tensor, window: int | None = None) -> Tensor:
    """Return the mask that attention adds to its scores, (B, 1, L, L) float32; `real` (B, L) is False for padding."""
    length = real.shape[1]
    position = torch.arange(length)
    row, key = position[:, None], position[None]
    part = position // block
    assert block * ranks < prompt <= length
    visible = (key <= row) & ((row >= block * ranks) | (part[None] == 0) | (part[None] == part[:, None]))
    if window is not None:
        visible &= row - key < window
    visible = visible & real[:, None]
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[:, None]


def counted(mask: Tensor) -> Tensor:
    """Return positions that count real tokens only, as IDEFICS computes them from its attention mask."""
    return (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)


def opt_positions(mask: Tensor) -> Tensor:
    """Return positions as OPT computes them."""
    return mask.cumsum(1) * mask - 1


@contextmanager
def under_star_mask(
    owner: Any,
    prompt: int,
    block: int,
    ranks: int,
    positions: Callable[[Tensor], Tensor] | None = None,
    window: int | None = None,
) -> Iterator[None]:
    """Apply Star Attention's mask in every pass of an unpatched model over a text that begins with the prompt.

    Args:
        owner: the module whose `forward` takes `attention_mask`.
        prompt: number of tokens of the prompt.
        block: number of tokens of each rank's block.
        ranks: number of ranks.
        positions: how the model computes positions from a padding mask, which it cannot from this mask.
        window: of sliding layers, which then have a mask of their own.
    """
    unpatched = owner.forward

    @functools.wraps(unpatched)
    def forward(input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        assert mask.shape == input_ids.shape and not kwargs.get(cache_name()), "a pass over the whole text"
        if positions is not None and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = positions(mask)
        whole: Any = star_mask(prompt, block, ranks, mask.bool())
        if window is not None:
            sliding = star_mask(prompt, block, ranks, mask.bool(), window)
            whole = {"full_attention": whole, "sliding_attention": sliding}
        return unpatched(input_ids=input_ids, attention_mask=whole, **kwargs)

    owner.forward = forward
    try:
        yield
    finally:
        del owner.forward
