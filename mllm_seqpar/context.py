"""What a patched model knows for as long as it is patched. No module-level state: two models never share a context."""

from __future__ import annotations

from dataclasses import dataclass, field

from .comm import Communicator
from .config import SeqParConfig
from .log import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True)
class SeqParContext:
    """The group a model is parallel over, and how.

    Attributes:
        comm: transfers of this model, with its byte counter.
        config: the user's choices.
    """

    comm: Communicator
    config: SeqParConfig
    _reported: list[bool] = field(default_factory=list, repr=False, compare=False)

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
