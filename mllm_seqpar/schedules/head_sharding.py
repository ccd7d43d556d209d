"""Which heads each rank computes under head sharding (DeepSpeed-Ulysses, arXiv 2309.14509).

Query heads are sharded evenly and in order. A rank needs the KV heads of its query heads and no others. With at least
as many KV heads as ranks, each KV head is sent once; with fewer, it is sent to every rank that needs it.

With groups of u consecutive ranks and a mesh shape (a, b) over the n / u groups, this is the hybrid of USP (arXiv
2405.07719): heads are sharded within a group, Q and KV between groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from mllm_seqpar.errors import ConfigError


@dataclass(frozen=True)
class HeadShards:
    """`heads` query heads that use `kv_heads` KV heads, sharded over `size` ranks.

    Raises:
        ConfigError: `size` does not divide the number of query heads.
    """

    heads: int
    kv_heads: int
    size: int

    def __post_init__(self) -> None:
        if self.heads % self.size:
            largest = max(size for size in range(1, min(self.heads, self.size) + 1) if self.heads % size == 0)
            raise ConfigError(
                f"ulysses: {self.heads} query heads cannot be sharded over {self.size} ranks; the largest group that "
                f"divides them is {largest}. Use a group of that size, another strategy, or tile=(a, b), with which "
                "heads are sharded over n / (a b) ranks only"
            )

    def query_heads_of(self, rank: int) -> range:
        count = self.heads // self.size
        return range(rank * count, (rank + 1) * count)

    def kv_heads_of(self, rank: int) -> range:
        """Return the KV heads that the query heads of `rank` use, each once."""
        heads, per_kv_head = self.query_heads_of(rank), self.heads // self.kv_heads
        return range(heads.start // per_kv_head, -(-heads.stop // per_kv_head))

    def kv_head_index(self, rank: int) -> list[int] | None:
        """Return indices into `kv_heads_of(rank)` such that each entry is used by the same number of query heads, or
        None.

        A rank whose first or last KV head serves fewer of its query heads than the others needs some KV heads twice.
        With 3 query heads per KV head and 2 query heads per rank, the ranks compute with KV heads (0 0) (0 1) (1 1).
        None means that the KV heads can be used unchanged.
        """
        per_kv_head = self.heads // self.kv_heads
        heads, kv_heads = self.query_heads_of(rank), self.kv_heads_of(rank)
        if len(kv_heads) == 1:
            return None
        step = gcd(per_kv_head, heads.start, heads.stop)
        index = [head // per_kv_head - kv_heads.start for head in range(heads.start, heads.stop, step)]
        return None if index == list(range(len(kv_heads))) else index

    def computed_kv_heads(self, rank: int) -> int:
        """Return the number of KV heads that a rank computes with, repetitions included."""
        return len(self.kv_head_index(rank) or self.kv_heads_of(rank))
