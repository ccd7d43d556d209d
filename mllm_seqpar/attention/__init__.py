"""Exact distributed attention; the functional layer is exported here.

From the bottom up: `call_spec` (what is resolved once per forward pass), `block_math` (one block, by a block kernel),
`executor` (one KV source, any schedule), `ulysses` (head sharding by all-to-all), `joint` (one softmax over several
`kv_sources`, as an autograd function), and on top of them `functional` and `decode`.
"""

from .decode import decode_attention
from .functional import lv_xattn, mesh_attention, ring_attention, ulysses_attention

__all__ = ["decode_attention", "lv_xattn", "mesh_attention", "ring_attention", "ulysses_attention"]
