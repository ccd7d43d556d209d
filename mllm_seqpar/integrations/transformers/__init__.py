"""Sequence-parallel forward passes, caches and generation for model classes of transformers."""
