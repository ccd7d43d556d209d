"""The settings that `network.py` measures: the proportions of the paper's clusters, and both sides of the crossover.

A setting taken from the paper (arXiv 2502.02406, tables 3 and 4) is scaled down in time and in bytes, by one factor
each. The ratios that decide which strategy is faster are kept: queries to keys, query heads to KV heads, and the time
of an attention block to the time of a transfer. The last one follows from the paper's own seconds and therefore
includes whatever speed its kernels and links reached. With n GPUs, LV-XAttn's transfers overlapped and Ring
Attention's not overlapped:

    block      cross-attention of LV-XAttn / (layers 3.5 n)      backward takes 2.5 times the forward pass
    transfer   cross-attention of Ring / (layers 3 (n - 1))      K, V in forward; K, V, dK, dV in bf16 in backward
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paper_tables import GPUS, PaperRow, read_table

from mllm_seqpar.schedules.bytes_sent import Problem

SUITES = {
    "paper": "the proportions of the paper's clusters, emulated blocks, 8 ranks",
    "tiles": "all mesh shapes on both sides of the crossover, emulated blocks, 4 to 8 ranks",
    "real": "the proportions of the paper's clusters, real blocks, 2 ranks",
    "full": "the paper's unscaled lengths, real blocks, on the GPUs of a launcher",
    "smallest": "two ranks, one second, to check that the benchmark works",
}

PAPER = {
    "a30-flamingo": ("table4", "OpenFlamingo-9b"),
    "a30-owl3": ("table4", "mPLUG-Owl3-7b"),
    "a100-flamingo": ("table3", "OpenFlamingo-9b"),
    "a100-owl3": ("table3", "mPLUG-Owl3-7b"),
}
"""Table and model of each setting taken from the paper, which uses the row with the longest video."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    ranks: int
    rows: int  # of each rank, as are the keys
    keys: int
    heads: int
    kv_heads: int
    dim: int
    block_s: float | None  # emulated seconds of one block (one Q shard by one KV shard) in forward; None: real blocks
    mbit: float | None = None  # cap of each link; None: derived from `transfer_in_blocks`, or uncapped without it
    transfer_in_blocks: float | None = None  # time to send a rank's expanded K and V over a block's forward pass
    paper: PaperRow | None = None  # that is scaled down
    only_mesh_shapes: bool = False  # measure all mesh shapes and nothing else
    dtype: str = "bfloat16"  # of Q, K, V

    def problem(self) -> Problem:
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "dim": self.dim}
        element = 4 if self.dtype == "float32" else 2
        return Problem(rows=self.rows, keys=(self.keys,) * self.ranks, **sizes, element=element)

    def cap_mbit(self, block_s: float) -> float | None:
        """Return the cap of each link, given the seconds of one block's forward pass."""
        if self.transfer_in_blocks is None:
            return self.mbit
        expanded = 2 * self.keys * self.heads * self.dim * self.problem().element
        return expanded * 8e-6 / (self.transfer_in_blocks * block_s)


def suite(name: str, ranks: int | None) -> list[Setting]:
    """Return the settings of a suite, on `ranks` ranks instead of the suite's own number if given."""
    if name == "paper":
        shapes = zip(PAPER, (8, 2, 16, 1), (0.02, 0.025, 0.05, 0.03), strict=True)  # rows of a rank, block_s
        return [_scaled(key, ranks or 8, rows, block_s) for key, rows, block_s in shapes]
    if name == "real":
        row_counts = {"a30-flamingo": 64, "a30-owl3": 16, "a100-flamingo": 64}
        return [replace(_scaled(key, ranks or 2, rows, None), dtype="float32") for key, rows in row_counts.items()]
    if name == "full":
        return [_scaled(key, ranks or 8, None, None) for key in PAPER]
    settings = MESH_SETTINGS if name == "tiles" else [SMALLEST]
    return [replace(setting, ranks=ranks or setting.ranks) for setting in settings]


def _scaled(key: str, ranks: int, rows: int | None, block_s: float | None) -> Setting:
    """Return a row of the paper scaled to `rows` query rows per rank (None: not scaled)."""
    table, model = PAPER[key]
    row = next(row for row in read_table(table) if row.label == model)
    return scaled_row(key, row, ranks, rows or row.rows // ranks, block_s)


def scaled_row(name: str, row: PaperRow, ranks: int, rows: int, block_s: float | None) -> Setting:
    """Return the setting with the proportions of a row of the paper and `rows` query rows per rank."""
    gpus = GPUS[row.table]
    transfer_s, block_of_paper_s = row.seconds["ring"] / (3 * (gpus - 1)), row.seconds["lv-xattn"] / (3.5 * gpus)
    return Setting(
        name=name,
        ranks=ranks,
        rows=rows,
        keys=rows * row.keys // row.rows,
        **row.heads,
        block_s=block_s,
        transfer_in_blocks=transfer_s / block_of_paper_s,
        paper=row,
    )


SMALLEST = Setting(name="smallest", ranks=2, rows=16, keys=512, heads=4, kv_heads=2, dim=32, block_s=0.005, mbit=40)
_MESH = Setting(
    name="", ranks=0, rows=0, keys=0, heads=8, kv_heads=2, dim=64, block_s=0.01, mbit=100, only_mesh_shapes=True
)
# With these heads a query row costs as many bytes as four keys. LV-XAttn is best with more keys than that per row, Ring
# Attention with fewer, and a mesh in between.
_SHAPES = [(4, 512, 512), (4, 128, 2048), (6, 256, 512), (6, 128, 1024), (8, 512, 512), (8, 256, 1024), (8, 128, 2048)]
MESH_SETTINGS = [replace(_MESH, name=f"{n}-ranks-{s}x{t}", ranks=n, rows=s, keys=t) for n, s, t in _SHAPES]
