"""The state of a patched model between passes. Nothing is at module level, so two models never share a context."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from mllm_seqpar._logging import get_logger
from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.comm import Communicator
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import ConfigError

from .strategy_selector import StrategySelector
from .text import Rows

_log = get_logger(__name__)

KEPT_LENGTHS = 8
"""Specs of plain text are kept for this number of lengths."""


class Recorder(Protocol):
    """Receives what each layer of one pass computes, such as the record of the attention to frames."""

    def add(self, q: Tensor, keys: Any, lse: Tensor | None, scale: float) -> None:
        """Record a softmax of q (B, H, s, D) over a list of `Keys`, given its final lse (B, H, s) or None."""


class Record(Protocol):
    """What passes with a cache report to while it is among the `records` of a context."""

    def begin_answer(self) -> None:
        """Forget the passes of an earlier answer."""

    def begin_rows(self, running: Any, rows: Rows) -> Recorder | None:
        """Return what records a part of the rows of a running `Pass`, or None."""


@dataclass(eq=False)
class SeqParContext:
    """The group and the options of one patched model, and what its passes count and have logged.

    Attributes:
        comm: transfers of this model, with their byte counter.
        config: the user's options.
        selector: selects strategies and kernels by the rates of a cluster; None unless an option asks for it.
        assumed_alone: whether the group is this process alone because there was no process group.
        records: the record of the attention over frames while there is one.
        frames_seen: the number of frames of the group in all passes so far.
    """

    comm: Communicator
    config: SeqParConfig
    selector: StrategySelector | None = None
    assumed_alone: bool = False
    records: list[Record] = field(default_factory=list, repr=False)
    frames_seen: int = field(default=0, init=False, repr=False)
    specs_of_plain_text: Callable[[type, int], dict[Hashable, CallSpec]] = field(init=False, repr=False)
    """(class of the shards, length) -> the specs of causal text without padding or packing, by shape, of all passes."""
    _passes: Counter[bool] = field(default_factory=Counter, init=False, repr=False)
    _reported: set[str] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        self.specs_of_plain_text = functools.lru_cache(KEPT_LENGTHS)(lambda kind, length: {})

    def recorder(self, running: Any, rows: Rows) -> Recorder | None:
        """Return what records a part of the rows of a pass (`Record.begin_rows`), if something does."""
        return self.records[-1].begin_rows(running, rows) if self.records else None

    def require_same_world(self) -> None:
        """Raise ConfigError if a process group of several ranks was created after patching for a single process."""
        alone = self.assumed_alone or (self.comm.size == 1 and not self.comm.is_open)
        if alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"this model was patched for one process, before the process group of {dist.get_world_size()} ranks "
                "existed. Call torch.distributed.init_process_group(...) before patch_model(model), or pass "
                'group="self" if this process is to run without communication'
            )

    def compares_weights(self, trains: bool) -> bool:
        """Return whether this pass checks the model, and compares the weights of the ranks: the 1st, 2nd, 4th, 8th ...
        pass do. Passes with gradients (`trains`) are counted by themselves, so that an evaluation before training does
        not delay the checks of its first steps.

        Ranks with different weights compute a result that belongs to no model, and nothing else would reveal it.
        Weights differ from the start (another checkpoint, adapters initialised without a seed), or drift apart in
        training when gradients are not averaged.
        """
        self._passes[trains] += 1
        return self._passes[trains].bit_count() == 1

    def count_shards(self, tokens: tuple[int, int], frames: tuple[int, int]) -> None:
        """Add the frames of a pass to `frames_seen`, and log this rank's part of the first pass.

        Args:
            tokens: (of this rank, of the text).
            frames: (of this rank, of the group).
        """
        self.frames_seen += frames[1]
        if "shards" not in self._reported:
            self._reported.add("shards")
            _log.info(
                "rank %d of %d holds %d of %d text tokens (padding included) and %d of %d frames",
                *(self.comm.rank, self.comm.size, *tokens, *frames),
            )

    def report_approximation(self, block: int, query: int) -> None:
        """Warn once, on rank 0, that a prompt is prefilled by Star Attention, which is approximate.

        Args:
            block: tokens of each rank's block of the prompt.
            query: tokens after the blocks.
        """
        if self.comm.rank == 0 and "approximation" not in self._reported:
            self._reported.add("approximation")
            _log.warning(
                'self_attention="star" is approximate: of this prompt, each token attends to the first %d tokens '
                "and to its own block of as many, one of %d blocks; only the last %d tokens, and what is "
                'generated, attend to everything. self_attention="ring" is exact',
                *(block, self.comm.size, query),
            )
