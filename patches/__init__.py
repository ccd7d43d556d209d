"""The supported model families, one file each: where its modules are, what a token may see, one small forward.

Installed as `mllm_seqpar.patches`. Machinery lives in the core; nothing in the core imports from here except by the
lookup of adapters when a model is patched.
"""
