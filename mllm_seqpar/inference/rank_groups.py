"""Groups of ranks that work independently: the ranks of a group share each video, and groups take videos in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from mllm_seqpar.cli.launch import collective_timeout
from mllm_seqpar.comm import Communicator, ProcessGroupCommunicator, Subgroup, as_communicator, transfer_communicator
from mllm_seqpar.comm.agreement import agree, attempt
from mllm_seqpar.errors import AgreementError, ConfigError, DataError, SeqParError, VideoError, first_line

T = TypeVar("T")

_LONGEST_WAIT = timedelta(days=30)
"""A group may finish long before another one, so the usual timeout of a collective is too short at the end."""

_OF_THE_INPUT = (VideoError, DataError, AgreementError, torch.OutOfMemoryError)
"""Errors that a single video or question can cause. On ranks where nothing failed, a group raises AgreementError."""


@dataclass(frozen=True)
class RankGroups:
    """The ranks of the world as `count` groups of consecutive ranks.

    Attributes:
        world: all ranks.
        group: the ranks of this rank's group.
        index: the number of this group, from 0.
        end: all ranks, with a time limit of days: for the collectives after the groups have worked independently.
    """

    world: Communicator
    group: Communicator
    index: int
    count: int
    end: Communicator


def divide_ranks(world: Communicator, size: int | None = None, timeout: float | None = None) -> RankGroups:
    """Divide `world` into groups of `size` ranks, or into one of all ranks. Every rank calls this.

    Args:
        timeout: seconds until a collective of a group fails; see `collective_timeout`.

    Raises:
        ConfigError: if `size` does not divide the number of ranks.
    """
    if size is not None and world.size % size:
        raise ConfigError(f"--sp {size} does not divide the {world.size} ranks; use a divisor of {world.size}")
    if size in (None, world.size):
        return RankGroups(world, world, 0, 1, world)
    members = [range(first, first + size) for first in range(0, world.size, size)]
    index = world.rank // size
    if not isinstance(world, ProcessGroupCommunicator):
        return RankGroups(world, Subgroup(world, members[index]), index, len(members), world)
    limit = collective_timeout(timeout, world.device.type == "cuda")
    groups = [dist.new_group([*ranks], timeout=limit) for ranks in members]  # each rank creates all of them
    end = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)
    return RankGroups(world, transfer_communicator(groups[index]), index, len(members), as_communicator(end))


def tried(group: Communicator, what: str, step: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return (what `step` returned, None), or (None, why not) on all ranks if the input made it fail on any rank.

    Args:
        group: every rank of it calls this.
        what: the subject of messages.
        step: either does not communicate, or raises on all ranks if it raises on one.

    Raises:
        SeqParError: on all ranks, if a rank raised one that the input cannot cause, such as ConfigError.
        Exception: any other error, at once: the other ranks may be in a collective of the step.
    """
    result, error = attempt(step)
    fatal = error is not None and not isinstance(error, _OF_THE_INPUT)
    if error is not None and fatal and not isinstance(error, SeqParError):
        raise error
    agree(group, what, error=error if fatal else None)
    try:
        agree(group, what, error=error)
    except _OF_THE_INPUT as found:
        found.__traceback__ = None  # its frames refer to it and to tensors, which would live until a garbage collection
        return None, first_line(found)
    return result, None
