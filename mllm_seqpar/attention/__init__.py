"""Exact distributed attention; the functional layer is exported here.

From the bottom up: `call_spec` (what is resolved once per forward pass), `executor` (one block by a block kernel, and
one set of keys by any schedule), `streamed` (keys that arrive in chunks), `ulysses` (all-to-all), `joint` (one softmax
over several `keys`, as an autograd function, and its merge over ranks), and on top of them `functional`.
"""

from .functional import decode_attention, lv_xattn, mesh_attention, ring_attention, ulysses_attention

__all__ = ["decode_attention", "lv_xattn", "mesh_attention", "ring_attention", "ulysses_attention"]
