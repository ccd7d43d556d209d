"""Masks of one block of rows: over the keys of its frames, over the text's keys, and both side by side.

Shape legend: L text tokens, K text keys.
"""

import torch
from torch import Tensor

from .visual_inputs import RowBlock, VisualInputs


def visible_keys(visual: VisualInputs, sample: int, block: RowBlock) -> Tensor | None:
    """(rows, keys of the block's frames) bool, or None when every row sees all of them."""
    if block.uniform:
        return None
    frames = torch.arange(block.first_frame, block.stop_frame, device=visual.first.device)
    first, stop = (bound[sample, block.start : block.stop, None] for bound in (visual.first, visual.stop))
    return ((first <= frames) & (frames < stop)).repeat_interleave(visual.tokens_per_frame, dim=1)


def text_visibility(attention_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """(B or 1, L, K), boolean or additive, or None when every text key is visible to every row."""
    length, keys = q.shape[2], k.shape[2]
    if attention_mask is not None:
        if attention_mask.dim() != 4 or attention_mask.shape[1] != 1:
            raise TypeError(
                f"a model without a gate needs the text mask as (batch, 1, rows, keys) and got "
                f"{tuple(attention_mask.shape)}; use attn_implementation 'sdpa' or 'eager'"
            )
        return attention_mask[:, 0, :, :keys]
    if length == 1:
        return None
    # transformers leaves the mask out where plain causal attention is meant: the first row sees the first key, and a
    # static cache has more keys than there is text yet.
    return torch.ones(length, keys, dtype=torch.bool, device=q.device).tril()[None]


def joint_mask(
    visible: Tensor | None, visual_keys: int, text_mask: Tensor | None, rows: int, text_keys: int
) -> Tensor | None:
    """(rows, visual_keys + text_keys): both parts' masks side by side, in the text mask's form."""
    if text_mask is None:
        if visible is None:
            return None
        text_mask = torch.ones(rows, text_keys, dtype=torch.bool, device=visible.device)
    if visible is None:
        visible = torch.ones(rows, visual_keys, dtype=torch.bool, device=text_mask.device)
    if text_mask.dtype != torch.bool:
        hidden = torch.finfo(text_mask.dtype).min
        visible = torch.zeros_like(visible, dtype=text_mask.dtype).masked_fill(~visible, hidden)
    return torch.cat([visible, text_mask], dim=1)
