"""Which sample goes where: index arithmetic without state, the same on every rank.

An optimizer step takes the next `global_batch` samples of the epoch's permutation. They are dealt micro-batch by
micro-batch, and within one to the data parallel groups in turn, so a step trains on the same samples on any layout:
with G = dp * micro_batch, micro-batch m holds samples m*G ... m*G + G - 1 of the step, and group g the g-th
`micro_batch` of those.
"""

import random
from dataclasses import dataclass
from functools import lru_cache

from mllm_seqpar.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrainOrder:
    """The order of the training data. The last samples of an epoch that do not fill a step wait for the next one.

    Attributes:
        samples: number of samples in the data.
        global_batch: samples of one optimizer step.
        micro_batch: samples of one forward pass of one group.
        dp: number of data parallel groups.
        seed: of the permutations.
    """

    samples: int
    global_batch: int
    micro_batch: int
    dp: int
    seed: int

    def __post_init__(self) -> None:
        together = self.micro_batch * self.dp
        if self.global_batch % together:
            raise ConfigError(
                f"--global-batch {self.global_batch} is not a multiple of {together} = --micro-batch "
                f"{self.micro_batch} x {self.dp} data parallel groups; change one of them or --sp"
            )
        if self.samples < self.global_batch:
            raise ConfigError(
                f"--global-batch {self.global_batch} is more than the {self.samples} samples of the training data"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole optimizer steps in one pass over the data."""
        return self.samples // self.global_batch

    @property
    def micro_batches(self) -> int:
        """Forward passes of each group in one optimizer step."""
        return self.global_batch // (self.micro_batch * self.dp)

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, step within the epoch) of optimizer step `step`, counted from 0."""
        return divmod(step, self.steps_per_epoch)

    def step(self, step: int, group: int) -> list[list[int]]:
        """The samples of data parallel group `group` in optimizer step `step`, by micro-batch."""
        epoch, index = self.position(step)
        order = _permutation(self.samples, f"{self.seed}/{epoch}")
        own = order[index * self.global_batch : (index + 1) * self.global_batch]
        size = self.micro_batch
        return [own[start : start + size] for start in range(group * size, self.global_batch, size * self.dp)]


@lru_cache(maxsize=1)
def _permutation(samples: int, seed: str) -> list[int]:
    """An epoch's order, made once: of a million samples it takes most of a second."""
    order = list(range(samples))
    random.Random(seed).shuffle(order)
    return order


def eval_order(samples: int, micro_batch: int, dp: int, group: int) -> list[tuple[list[int], bool]]:
    """(samples, whether they count) of each evaluation pass of `group`; every group has equally many passes.

    A group that has run out repeats sample 0 without counting it: under FSDP all ranks take part in every forward.
    """
    passes = []
    for start in range(0, samples, micro_batch * dp):
        first = start + group * micro_batch
        own = list(range(first, min(first + micro_batch, samples)))
        passes.append((own, True) if own else ([0], False))
    return passes
