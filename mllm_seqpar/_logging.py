"""Logging that knows the rank: one line of information per group, and warnings that say where they come from."""

import logging

import torch.distributed as dist

_ROOT = "mllm_seqpar"


def _rank_and_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class _ByRank(logging.Filter):
    """Drops information from ranks other than 0 and puts the rank in front of warnings.

    It hangs on each logger, not on a handler: handlers belong to the application, and a filter of a parent logger is
    not asked for records of its children. The rank is read per record, since a logger is made before its group is.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        rank, size = _rank_and_size()
        if size == 1:
            return True
        if record.levelno < logging.WARNING:
            return rank == 0
        record.msg = f"[rank {rank}] {record.msg}"
        return True


def get_logger(name: str) -> logging.Logger:
    """A logger below `mllm_seqpar` that is quiet on ranks other than 0 of the default group, warnings excepted.

    Args:
        name: the module's `__name__`; other names become children of `mllm_seqpar`.
    """
    if name != _ROOT and not name.startswith(_ROOT + "."):
        name = f"{_ROOT}.{name}"
    logger = logging.getLogger(name)
    if not any(isinstance(f, _ByRank) for f in logger.filters):
        logger.addFilter(_ByRank())
    return logger
