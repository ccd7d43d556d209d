"""What `network.py` measures: settings that keep the proportions of the paper's clusters, and those around a crossover.

A setting of the paper (arXiv 2502.02406, tables 3 and 4) is scaled down in time and in bytes, by a factor each. What
decides which strategy is faster stays: queries to keys, heads to key heads, and the time of a block to the time of a
transfer. The latter follows from the paper's own seconds, so it holds whatever its kernels and links reached: with n
GPUs, LV-XAttn's transfers hidden and Ring Attention's not,

    block      cross-attention of LV-XAttn / (layers 3.5 n)      backward 2.5 times forward
    transfer   cross-attention of Ring / (layers 3 (n - 1))      K, V forward; K, V, dK, dV in bf16 backward
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mllm_seqpar.schedules.bytes_sent import Problem

SUITES = {
    "paper": "the paper's clusters in proportion, emulated blocks, 8 ranks",
    "tiles": "all tiles on both sides of the crossover, emulated blocks, 4 to 8 ranks",
    "real": "the paper's clusters in proportion, real blocks, 2 ranks",
    "full": "the paper's lengths as they are, real blocks, for GPUs: as many as the launcher started",
    "smallest": "two ranks, a second: to see that it works",
}


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A row of the paper's table 3 (16 A100, 4 nodes) or 4 (8 A30, 8 nodes): seconds of cross-attention a step."""

    cluster: str
    model: str
    gpus: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    ring_s: float
    lv_xattn_s: float

    @property
    def transfer_in_blocks(self) -> float:
        """Time to send K and V, expanded to all heads, in times of one block's forward."""
        return (self.ring_s / (3 * (self.gpus - 1))) / (self.lv_xattn_s / (3.5 * self.gpus))


OWL = {"heads": 28, "kv_heads": 4, "dim": 128, "model": "mPLUG-Owl3-7b"}
FLAMINGO = {"heads": 8, "kv_heads": 8, "dim": 64, "model": "OpenFlamingo-9b"}
A30, A100 = {"cluster": "A30", "gpus": 8}, {"cluster": "A100", "gpus": 16}
PAPER = {
    "a30-flamingo": PaperRow(**A30, **FLAMINGO, rows=8192, keys=524288, ring_s=17.28, lv_xattn_s=3.99),
    "a30-owl3": PaperRow(**A30, **OWL, rows=1024, keys=372736, ring_s=42.41, lv_xattn_s=1.42),
    "a100-flamingo": PaperRow(**A100, **FLAMINGO, rows=65536, keys=4194304, ring_s=95.13, lv_xattn_s=62.4),
    "a100-owl3": PaperRow(**A100, **OWL, rows=8192, keys=2985984, ring_s=174.73, lv_xattn_s=24.08),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One call of cross-attention, on a network.

    Attributes:
        name: of the setting, in rows and tables.
        ranks: n.
        rows, keys: of each rank.
        heads, kv_heads, dim: H, G, D.
        block_s: emulated seconds of one block's forward, all rows of a rank against all keys of a rank; None: real.
        mbit: cap of each link, Mbit/s; None: as `transfer_in_blocks` says, or uncapped.
        transfer_in_blocks: time to send a rank's expanded K and V in times of a block's forward, which sets the cap.
        paper: the row that is scaled down.
        only_tiles: measure all tiles and nothing else.
        dtype: of Q, K, V; real blocks on CPUs are float32, everything else is what it was in the paper.
    """

    name: str
    ranks: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    block_s: float | None
    mbit: float | None = None
    transfer_in_blocks: float | None = None
    paper: PaperRow | None = None
    only_tiles: bool = False
    dtype: str = "bfloat16"

    def problem(self, *, accumulated: int = 4) -> Problem:
        """The call as the formulas know it; `accumulated`: bytes of an element of what is summed over ranks."""
        return Problem(
            rows=self.rows,
            keys=(self.keys,) * self.ranks,
            heads=self.heads,
            kv_heads=self.kv_heads,
            dim=self.dim,
            element=4 if self.dtype == "float32" else 2,
            accumulated=accumulated,
        )

    def cap_mbit(self, block_s: float) -> float | None:
        """The cap, given how long a block's forward takes."""
        if self.transfer_in_blocks is None:
            return self.mbit
        expanded = 2 * self.keys * self.heads * self.dim * self.problem().element
        return expanded * 8e-6 / (self.transfer_in_blocks * block_s)


def suite(name: str, ranks: int | None) -> list[Setting]:
    """The settings of a suite; `ranks`: instead of its own number of them."""
    if name == "paper":
        emulated = {
            "a30-flamingo": (8, 0.02),
            "a30-owl3": (2, 0.025),
            "a100-flamingo": (16, 0.05),
            "a100-owl3": (1, 0.03),
        }
        return [scaled(key, ranks or 8, rows, block_s) for key, (rows, block_s) in emulated.items()]
    if name == "real":
        real = {"a30-flamingo": 64, "a30-owl3": 16, "a100-flamingo": 64}
        return [replace(scaled(key, ranks or 2, rows, None), dtype="float32") for key, rows in real.items()]
    if name == "full":
        ranks = ranks or 8
        return [scaled(key, ranks, PAPER[key].rows // ranks, None) for key in PAPER]
    if name == "tiles":
        return [replace(setting, ranks=ranks or setting.ranks) for setting in TILES]
    return [SMALLEST if ranks is None else replace(SMALLEST, ranks=ranks)]


def scaled(key: str, ranks: int, rows: int, block_s: float | None) -> Setting:
    """A row of the paper with `rows` query rows a rank: keys, and the transfer's time in blocks, in proportion."""
    row = PAPER[key]
    return Setting(
        name=key,
        ranks=ranks,
        rows=rows,
        keys=rows * row.keys // row.rows,
        heads=row.heads,
        kv_heads=row.kv_heads,
        dim=row.dim,
        block_s=block_s,
        transfer_in_blocks=row.transfer_in_blocks,
        paper=row,
    )


def _tiles(ranks: int, rows: int, keys: int) -> Setting:
    name = f"{ranks}-ranks-{rows}x{keys}"
    shape = {"rows": rows, "keys": keys, "heads": 8, "kv_heads": 2, "dim": 64}
    return Setting(name=name, ranks=ranks, **shape, block_s=0.01, mbit=100, only_tiles=True)


# Rows and columns weigh the same where 8 rows = 2 keys: below that LV-XAttn's end of the tiles is better, above Ring's.
TILES = [
    _tiles(4, 512, 512),
    _tiles(4, 128, 2048),
    _tiles(6, 256, 512),
    _tiles(6, 128, 1024),
    _tiles(8, 512, 512),
    _tiles(8, 256, 1024),
    _tiles(8, 128, 2048),
]
SMALLEST = Setting(name="smallest", ranks=2, rows=16, keys=512, heads=4, kv_heads=2, dim=32, block_s=0.005, mbit=40)
