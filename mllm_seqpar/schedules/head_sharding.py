"""Which heads a rank computes when attention is dealt by heads: DeepSpeed-Ulysses (arXiv 2309.14509). No torch.

Query heads are dealt evenly and in order. A rank needs the key heads of its query heads and no others: with at least as
many key heads as ranks each is sent once, with fewer it is repeated only as far as the group needs it.

Over groups of u consecutive ranks, with the tile (a, b) of another algorithm over the n / u groups, this is the hybrid
of USP (arXiv 2405.07719): heads are dealt inside a group, rows and columns between groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from mllm_seqpar.errors import ConfigError


@dataclass(frozen=True)
class HeadShards:
    """`heads` query heads that share `kv_heads` key heads, dealt to `size` ranks.

    Raises:
        ConfigError: heads that cannot be dealt evenly.
    """

    heads: int
    kv_heads: int
    size: int

    def __post_init__(self) -> None:
        if self.heads % self.size:
            largest = largest_group(self.heads, self.size)
            raise ConfigError(
                f"ulysses: {self.heads} query heads cannot be dealt to {self.size} ranks; the largest group that can "
                f"is {largest}. Use one of that size, another strategy, or a tile (a, b) of what is left: heads are "
                "then dealt to n / (a b) ranks at a time"
            )

    def query_heads(self, rank: int) -> range:
        """The query heads of a rank."""
        share = self.heads // self.size
        return range(rank * share, (rank + 1) * share)

    def key_heads(self, rank: int) -> range:
        """The key heads that a rank's query heads use, each once."""
        mine, shared = self.query_heads(rank), self.heads // self.kv_heads
        return range(mine.start // shared, -(-mine.stop // shared))

    def uniform(self, rank: int) -> list[int] | None:
        """Which of its key heads stand where, so that equally many query heads use each; None: they do as they are.

        Shares that cut through the query heads of one key head at uneven places need some key heads twice: 3 query
        heads to a key head, dealt two by two, are heads (0 0) (0 1) (1 1) ...
        """
        shared = self.heads // self.kv_heads
        mine, keys = self.query_heads(rank), self.key_heads(rank)
        if len(keys) == 1:
            return None
        step = gcd(shared, mine.start, mine.stop)
        places = [head // shared - keys.start for head in range(mine.start, mine.stop, step)]
        return None if places == list(range(len(keys))) else places

    def computed_key_heads(self, rank: int) -> int:
        """How many key heads a rank computes with, those that it needs twice counted twice."""
        return len(self.uniform(rank) or self.key_heads(rank))


def largest_group(heads: int, limit: int) -> int:
    """The largest number of ranks up to `limit` that `heads` query heads can be dealt to."""
    return max(size for size in range(1, min(heads, limit) + 1) if heads % size == 0)
