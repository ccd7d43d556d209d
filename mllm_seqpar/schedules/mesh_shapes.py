"""From a strategy's name to a tile, and to the number of ranks that deal heads. No torch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from mllm_seqpar.errors import ConfigError

from .bytes_sent import Problem, mesh_bytes

Tile = tuple[int, int]


def tiles_of(size: int) -> list[Tile]:
    """All tiles (a, b) of `size` ranks, from LV-XAttn's (n, 1) to Ring Attention's (1, n)."""
    return [(a, size // a) for a in range(size, 0, -1) if size % a == 0]


def check_tile(tile: object) -> Tile:
    """`tile` as a pair of numbers of ranks.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(tile, (tuple, list)) and len(tile) == 2 and all(type(x) is int and x > 0 for x in tile):
        return tile[0], tile[1]
    raise ConfigError(f"tile: {tile!r} is no tile; pass (a, b), two numbers of ranks, or None")


def tile_and_heads(strategy: str, tile: Tile | None, size: int) -> tuple[Tile | None, int]:
    """(tile, how many consecutive ranks deal heads among themselves) of a strategy on `size` ranks.

    Args:
        strategy: "lv-xattn", "ring", "mesh", "ulysses", or "star", in which a rank has all that its rows see.
        tile: for "mesh", with a * b = size, or None: any (then None is returned); for "ulysses" None, all ranks deal
            heads, or a tile of the hybrid: heads are dealt to size / (a * b) ranks.
        size: ranks.

    Raises:
        ConfigError: a tile that does not fit the number of ranks.
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
                f"tile: ({a}, {b}) makes {a * b} ranks of each group that deals heads, which does not divide the "
                f"{size} ranks there are"
            )
        return (a, b), size // (a * b)
    if strategy != "mesh":
        raise ValueError(f"strategy {strategy!r} has no tile")
    if tile is not None and tile[0] * tile[1] != size:
        legal = ", ".join(map(str, tiles_of(size)))
        raise ConfigError(f"tile: {tile} is for {tile[0] * tile[1]} ranks, but the group has {size}; choose {legal}")
    return tile, 1


@lru_cache(maxsize=256)
def least_bytes_tile(problem: Problem) -> Tile:
    """The tile of which the rank that sends most sends least, forward and backward together."""

    def sent(tile: Tile) -> int:
        ranks = (replace(problem, rank=rank) for rank in range(problem.ranks))
        return max(sum(sum(mesh_bytes(p, tile, backward=b).values()) for b in (False, True)) for p in ranks)

    return min(tiles_of(problem.ranks), key=sent)
