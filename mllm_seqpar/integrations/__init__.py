"""Adaptation to other libraries: transformers and accelerate."""
