"""The strategies by name, and how each distributes a call: its mesh shape and head-sharding degree."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from mllm_seqpar.errors import ConfigError

from .bytes_sent import Problem, mesh_bytes
from .mesh import MeshShape, OverlapRatios

STRATEGIES = ("lv-xattn", "ring", "mesh", "ulysses", "replicate")
"""The exact strategies. The planner selects the first of several candidates with equal cost."""

TEXT_STRATEGIES = ("ring", "mesh", "ulysses")
"""The strategies that the self-attention of text may use.

Text has as many queries as keys: moving Q, O and the log-sum-exp (LV-XAttn) never sends less than moving K and V (Ring
Attention).
"""

TILE_STRATEGIES = ("mesh", "ulysses")
"""The strategies that take a mesh shape, the option `tile`."""


@dataclass(frozen=True)
class ParallelSpec:
    """The strategy, mesh shape and head-sharding degree of one attention call.

    Attributes:
        strategy: one of STRATEGIES, or "local" for text that every rank computes.
        mesh_shape: (a, b), Q shards by KV shards; of the ranks, or of the groups of `head_degree` ranks.
        head_degree: the number of consecutive ranks that shard the heads by all-to-all (Ulysses); 1 for none.
        all_pairs: whether LV-XAttn sends Q shards point to point, from their owner to each rank and back.
        overlap_ratios: the ratios that a mesh orders its steps by, forward and backward; None: by the bytes of the
            transfers. Specs that differ in these only are equal.
    """

    strategy: str
    mesh_shape: tuple[int, int]
    head_degree: int = 1
    all_pairs: bool = False
    overlap_ratios: tuple[OverlapRatios, OverlapRatios] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        a, b = self.mesh_shape
        if self.strategy == "mesh":
            return f"mesh {a}x{b}"
        if self.strategy == "ulysses" and self.mesh_shape != (1, 1):
            return f"ulysses {self.head_degree} x tile {a}x{b}"
        return f"{self.strategy} among all pairs" if self.all_pairs else self.strategy


def mesh_shapes_of(size: int) -> list[MeshShape]:
    """Return all mesh shapes (a, b) of `size` ranks, from LV-XAttn's (n, 1) to Ring Attention's (1, n)."""
    return [(a, size // a) for a in range(size, 0, -1) if size % a == 0]


def check_tile(tile: object) -> MeshShape:
    """Return the option `tile` as a tuple (a, b).

    Raises:
        ConfigError: it is not a pair of positive integers.
    """
    if isinstance(tile, (tuple, list)) and len(tile) == 2 and all(type(x) is int and x > 0 for x in tile):
        return tile[0], tile[1]
    raise ConfigError(f"tile: {tile!r} is invalid; expected (a, b) with two positive integers, or None")


def resolve_tile(strategy: str, tile: MeshShape | None, size: int) -> tuple[MeshShape | None, int]:
    """Return the mesh shape of a strategy on `size` ranks, and its head-sharding degree.

    Args:
        strategy: "lv-xattn", "ring", "mesh", "ulysses", or "star", in which a rank computes only its own block.
        tile: for "mesh", (a, b) with a * b = size, or None for any (the mesh shape returned is then None). For
            "ulysses", None to shard the heads over all ranks, or (a, b) for the hybrid with the mesh shape (a, b) over
            groups of size / (a * b) ranks that shard the heads.

    Raises:
        ConfigError: the tile does not fit the number of ranks.
    """
    if strategy == "lv-xattn":
        return (size, 1), 1
    if strategy == "ring":
        return (1, size), 1
    if strategy == "star":
        return (1, 1), 1
    if strategy == "ulysses":
        a, b = tile or (1, 1)
        if size % (a * b):
            raise ConfigError(
                f"tile: ({a}, {b}) with ulysses needs a multiple of {a * b} ranks, but the group has {size}; choose "
                "(a, b) such that a * b divides the number of ranks"
            )
        return (a, b), size // (a * b)
    if strategy != "mesh":
        raise ValueError(f"strategy {strategy!r} has no mesh shape")
    if tile is not None and tile[0] * tile[1] != size:
        allowed = ", ".join(map(str, mesh_shapes_of(size)))
        raise ConfigError(f"tile: {tile} is for {tile[0] * tile[1]} ranks, but the group has {size}; choose {allowed}")
    return tile, 1


def parallel_spec(strategy: str, tile: MeshShape | None, problem: Problem) -> ParallelSpec:
    """Return how a strategy distributes a call; a mesh without a tile has the shape that sends the fewest bytes.

    `strategy` and `tile` are those of `resolve_tile`, which raises ConfigError if they do not fit the number of ranks.
    """
    shape, head_degree = resolve_tile(strategy, tile, problem.ranks)
    return ParallelSpec(strategy, shape or least_bytes_mesh_shape(problem), head_degree)


@lru_cache(maxsize=256)
def least_bytes_mesh_shape(problem: Problem) -> MeshShape:
    """Return the mesh shape that minimises the largest number of bytes that any rank sends in both passes together."""

    def sent(mesh_shape: MeshShape) -> int:
        ranks = range(problem.ranks if len(set(problem.keys)) > 1 else 1)  # with even shards, all ranks send the same
        problems = (replace(problem, rank=rank) for rank in ranks)
        return max(sum(sum(mesh_bytes(p, mesh_shape, backward=b).values()) for b in (False, True)) for p in problems)

    return min(mesh_shapes_of(problem.ranks), key=sent)
