"""Exact distributed attention. The functional layer is `lv_xattn`, `ring_attention` and `decode_attention`.

From the bottom up: `schedule` (who computes what when, as data), `executor` (runs any schedule), `block` (tiles of one
block through a kernel), `distributed` (one set of keys, forward and backward), `sources` and `joint` (one softmax over
several sets of keys, as an autograd function), `api` and `decode`. Partial results merge by `kernels.partials`.
"""

from .api import lv_xattn, ring_attention
from .decode import decode_attention

__all__ = ["decode_attention", "lv_xattn", "ring_attention"]
