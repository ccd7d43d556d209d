"""The samples of each step and data parallel group: index arithmetic without state, the same on every rank.

An optimizer step takes the next `global_batch` samples of the epoch's permutation and distributes them over
micro-batches, and each micro-batch over the data parallel groups, so a step trains on the same samples for any number
of ranks: with G = dp * micro_batch, micro-batch m holds samples m*G ... m*G + G - 1 of the step, and group g takes the
g-th `micro_batch` of those.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from mllm_seqpar.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The order of the training data. Samples at the end of an epoch that do not fill a step are left out of it.

    Attributes:
        samples: number of samples in the data.
        global_batch: samples of one optimizer step.
        micro_batch: samples of one forward pass of one group.
        dp: number of data parallel groups.
        seed: seed of the permutations.
    """

    samples: int
    global_batch: int
    micro_batch: int
    dp: int
    seed: int

    def __post_init__(self) -> None:
        per_pass = self.micro_batch * self.dp
        if self.global_batch % per_pass:
            raise ConfigError(
                f"--global_batch_size {self.global_batch} is not a multiple of {per_pass} = "
                f"--per_device_train_batch_size {self.micro_batch} x {self.dp} data parallel groups; change one "
                "of them or --sp"
            )
        if self.samples < self.global_batch:
            raise ConfigError(
                f"a step has {self.global_batch} samples (--per_device_train_batch_size x groups x "
                f"--gradient_accumulation_steps), more than the {self.samples} samples of the training data; lower one "
                "of these options"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in one pass over the data."""
        return self.samples // self.global_batch

    @property
    def micro_batches(self) -> int:
        """Number of forward passes of each group in one optimizer step."""
        return self.global_batch // (self.micro_batch * self.dp)

    def position(self, step: int) -> tuple[int, int]:
        """Return (epoch, step within the epoch) of optimizer step `step`, counted from 0."""
        return divmod(step, self.steps_per_epoch)

    def step(self, step: int, group: int) -> list[list[int]]:
        """Return the samples of data parallel group `group` in optimizer step `step`, by micro-batch."""
        epoch, index = self.position(step)
        order = _permutation(self.samples, f"{self.seed}/{epoch}")
        samples = order[index * self.global_batch : (index + 1) * self.global_batch]
        size = self.micro_batch
        return [samples[start : start + size] for start in range(group * size, self.global_batch, size * self.dp)]

    def passes(self, group: int, first: int, end: int) -> Iterator[list[int]]:
        """Yield the samples of each micro-batch of `group` from optimizer step `first` to the step before `end`."""
        for step in range(first, end):
            yield from self.step(step, group)


@lru_cache(maxsize=1)
def _permutation(samples: int, seed: str) -> list[int]:
    """Return the order of an epoch; cached, because shuffling a million samples takes most of a second."""
    order = list(range(samples))
    random.Random(seed).shuffle(order)
    return order


def eval_order(samples: int, micro_batch: int, dp: int, group: int) -> list[tuple[list[int], bool]]:
    """Return (samples, whether they count) of each evaluation pass of `group`; all groups have the same number of
    passes.

    A group without further samples repeats sample 0 without counting it, because under FSDP all ranks join every
    forward.
    """
    passes = []
    for start in range(0, samples, micro_batch * dp):
        first = start + group * micro_batch
        numbers = list(range(first, min(first + micro_batch, samples)))
        passes.append((numbers, True) if numbers else ([0], False))
    return passes
