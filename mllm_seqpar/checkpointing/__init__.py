"""Recomputation in backward: an MLP in chunks of tokens, RNG replay, detached parameters."""
