"""What a patched model knows for as long as it is patched. No module-level state: two models never share a context."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Communicator
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import ConfigError

from .selection import StrategySelector

_log = get_logger(__name__)


@dataclass(frozen=True)
class SeqParContext:
    """The group a model is parallel over, and how.

    Attributes:
        comm: transfers of this model, with its byte counter.
        config: the user's choices.
        selector: selects strategies by the rates of a cluster; None unless an option asks for it.
        assumed_alone: the group is one of this process alone because there was no process group.
    """

    comm: Communicator
    config: SeqParConfig
    selector: StrategySelector | None = None
    assumed_alone: bool = False
    _reported: list[bool] = field(default_factory=list, repr=False, compare=False)
    _warned: list[bool] = field(default_factory=list, repr=False, compare=False)
    _passes: list[int] = field(default_factory=lambda: [0], repr=False, compare=False)

    def require_same_world(self) -> None:
        """Raise ConfigError if a process group of several ranks came into being after patching for a single one."""
        if self.assumed_alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"this model was patched for one process, before the process group of {dist.get_world_size()} ranks "
                "existed. Call torch.distributed.init_process_group(...) before patch_model(model), or pass "
                'group="self" if this process is to compute alone'
            )

    def compares_weights(self) -> bool:
        """Whether this pass compares the ranks' weights: the 1st, 2nd, 4th, 8th ... do.

        Ranks whose weights differ compute something that no model computes, and nothing else would show it. They differ
        from the start (another checkpoint, adapters made without a seed), or drift apart in training when nobody
        averages the gradients.
        """
        self._passes[0] += 1
        return self.comm.size > 1 and self._passes[0].bit_count() == 1

    def report_shares(self, tokens: tuple[int, int], frames: tuple[int, int]) -> None:
        """Logs once what a rank holds of the first pass: a degree that shards nothing would show here.

        Args:
            tokens: (of this rank, of the text).
            frames: (of this rank, of the group).
        """
        if not self._reported:
            self._reported.append(True)
            _log.info(
                "rank %d of %d holds %d of %d text tokens (padding included) and %d of %d frames",
                *(self.comm.rank, self.comm.size, *tokens, *frames),
            )

    def report_approximation(self, block: int, query: int) -> None:
        """Warns once, on one rank, that a prompt is read by Star Attention, which is no exact attention.

        Args:
            block: tokens of each rank's block of the prompt.
            query: tokens after the blocks.
        """
        if not self._warned:
            self._warned.append(True)
            if self.comm.rank == 0:
                _log.warning(
                    'self_attention="star" is approximate: of this prompt, each token attends to the first %d tokens '
                    "and to its own block of as many, one of %d blocks; only the last %d tokens, and what is "
                    'generated, attend to everything. self_attention="ring" is exact',
                    *(block, self.comm.size, query),
                )
