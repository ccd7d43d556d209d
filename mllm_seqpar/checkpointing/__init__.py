"""Recomputation in the backward pass: RNG replay, gradients of chunks, and MLPs in chunks of tokens."""
