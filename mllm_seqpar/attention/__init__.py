"""Exact distributed attention. The functional layer (`api`, `decode`) is what is exported here.

From the bottom up: `executor` (runs any schedule of `mllm_seqpar.schedules`), `block` (tiles of one block through a
kernel), `distributed` (one set of keys, forward and backward), `sources` and `joint` (one softmax over several sets of
keys, as an autograd function), `all_to_all` and `heads` (dealt by heads), `planning` (from a strategy to its plan),
`one_call`, `api` and `decode`. Partial results merge by `kernels.partials`.
"""

from .decode import decode_attention
from .functional import lv_xattn, mesh_attention, ring_attention, ulysses_attention

__all__ = ["decode_attention", "lv_xattn", "mesh_attention", "ring_attention", "ulysses_attention"]
