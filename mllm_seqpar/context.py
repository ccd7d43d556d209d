"""What a patched model knows for as long as it is patched. No module-level state: two models never share a context."""

from __future__ import annotations

from dataclasses import dataclass

from .comm import Communicator
from .config import SeqParConfig


@dataclass(frozen=True)
class SeqParContext:
    """The group a model is parallel over, and how.

    Attributes:
        comm: transfers of this model, with its byte counter.
        config: the user's choices.
    """

    comm: Communicator
    config: SeqParConfig
