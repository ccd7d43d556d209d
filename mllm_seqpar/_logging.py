"""Loggers that emit information on rank 0 only and prefix warnings with the rank."""

import logging

import torch.distributed as dist

_ROOT = "mllm_seqpar"


class _RankFilter(logging.Filter):
    """Drop records below WARNING on ranks other than 0, and prefix the others with the rank.

    The filter is added to each logger. Handlers belong to the application, and a filter of a parent logger does not
    apply to records of its children. The rank is read per record, because loggers are created before the group is.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return True
        rank = dist.get_rank()
        if record.levelno < logging.WARNING:
            return rank == 0
        record.msg = f"[rank {rank}] {record.msg}"
        return True


def get_logger(name: str) -> logging.Logger:
    """Return a logger below `mllm_seqpar` with the rank filter.

    Args:
        name: the module's `__name__`; other names become children of `mllm_seqpar`.
    """
    if name != _ROOT and not name.startswith(_ROOT + "."):
        name = f"{_ROOT}.{name}"
    logger = logging.getLogger(name)
    if not any(isinstance(f, _RankFilter) for f in logger.filters):
        logger.addFilter(_RankFilter())
    return logger
