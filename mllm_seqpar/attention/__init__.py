"""Exact distributed attention; the functional layer is exported here.

From the bottom up: `call_spec` (what is resolved once per pass and shape), `keys` (what a softmax is over), `executor`
(one block by a block kernel, one set of keys by any schedule), `streamed` (keys that arrive in chunks), `ulysses`
(all-to-all), `attend` (one softmax over several sets of keys, as an autograd function, and its merge over ranks),
`kept_results` (what activation checkpointing reuses instead of computing attention again), and on top of them
`functional`, whose names load on first use: a patched model does not need them.
"""

from mllm_seqpar._lazy_names import lazy_names

__all__ = lazy_names(__name__, __file__)
