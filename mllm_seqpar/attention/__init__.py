"""Exact distributed attention; the functional layer is exported here.

From the bottom up: `call_spec` (what is resolved once per forward pass), `block_math` (one block, by a block kernel),
`executor` and `streamed` (one set of keys, any schedule), `ulysses` (all-to-all), `decode` (merges over ranks), `joint`
(one softmax over several `keys`, as an autograd function), and on top of them `functional`.
"""

from .functional import decode_attention, lv_xattn, mesh_attention, ring_attention, ulysses_attention

__all__ = ["decode_attention", "lv_xattn", "mesh_attention", "ring_attention", "ulysses_attention"]
