"""Llama 3.2 Vision with every strategy, as `harness` looks for it."""

from strategy_cases import MLLAMA as CASES
from tiny_mllama import inputs_of, local_frames, model_of

__all__ = ["CASES", "inputs_of", "local_frames", "model_of"]
