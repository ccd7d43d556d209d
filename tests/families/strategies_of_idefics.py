"""IDEFICS with every strategy, as `harness` looks for it."""

from strategy_cases import GENERATED
from strategy_cases import IDEFICS as CASES
from tiny_idefics import inputs_of, local_frames, model_of

__all__ = ["CASES", "GENERATED", "inputs_of", "local_frames", "model_of"]
