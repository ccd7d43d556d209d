"""The training steps that `network.py` measures: models and settings in the proportions of the paper's tables 3 and 4.

The paper (arXiv 2502.02406) reports its largest ratio of whole steps, 5.58, for mPLUG-Owl3-1B with 4,096 text tokens
and 2,048 frames on 16 A100. Its tables of Llama 3-V are not in `paper/`; Llama's cases have the proportions of the
mPLUG-Owl3-7B row with the same lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from models import ScaledModel, scaled
from network_settings import Setting, scaled_row
from paper_tables import PaperRow, read_table

STEP_SUITES = {
    "steps": "training steps, emulated blocks, 8 ranks",
    "real-steps": "training steps, real blocks, 2 ranks",
    "smallest-steps": "training steps of two ranks, to check that the benchmark works",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its setting.

    Attributes:
        setting: of one cross-attention call.
        layers: how many of its layers have cross-attention.
        rest: time of a step outside cross-attention, over that of cross-attention without transfers; None: the model's
            own.
    """

    setting: Setting
    model: ScaledModel
    layers: int = 1
    rest: float | None = None

    @property
    def name(self) -> str:
        return self.setting.name

    @property
    def ranks(self) -> int:
        return self.setting.ranks


def step_cases(suite: str) -> list[Case]:
    """Return the cases of one of STEP_SUITES."""
    owl3, owl3_7b = paper_row("table3", "mPLUG-Owl3-1b", 2), paper_row("table3", "mPLUG-Owl3-7b", 2)
    owl3_a30, flamingo = paper_row("table4", "mPLUG-Owl3-1b", 0), paper_row("table4", "OpenFlamingo-3b", 2)
    if suite == "smallest-steps":
        return [scaled_case("a100-owl3", owl3, "mplug_owl3", 16, ranks=2, rows=4, block_s=0.002)]
    if suite == "real-steps":
        return [
            scaled_case("a100-owl3", owl3, "mplug_owl3", 4, ranks=2, layers=2, rows=32),
            scaled_case("a30-flamingo", flamingo, "open_flamingo", 16, ranks=2, layers=2, rows=128),
            scaled_case("llama", owl3_7b, "mllama", 16, ranks=2, layers=2, rows=32),
        ]
    return [
        scaled_case("a100-owl3", owl3, "mplug_owl3", 16, ranks=8, rows=16, block_s=0.016),
        scaled_case("a30-owl3", owl3_a30, "mplug_owl3", 16, ranks=8, rows=16, block_s=0.008),
        scaled_case("a30-flamingo", flamingo, "open_flamingo", 16, ranks=8, rows=64, block_s=0.012),
        scaled_case("llama", owl3_7b, "mllama", 32, ranks=8, rows=16, block_s=0.016),
        short_video(scaled_case("short-video", owl3, "mplug_owl3", 16, ranks=8, rows=256, block_s=0.01)),
    ]


def paper_row(table: str, label: str, number: int) -> PaperRow:
    """Return a model's row: 0 has the longest video, 1 half the frames, 2 half of text and frames."""
    return [row for row in read_table(table) if row.label == label][number]


def scaled_case(
    name: str,
    row: PaperRow,
    family: str,
    scale: int,
    *,
    ranks: int,
    rows: int,
    layers: int = 1,
    block_s: float | None = None,
) -> Case:
    """Return a case with the proportions of a row of the paper.

    Args:
        family: that of the model. Llama's is not the paper's model of that row.
        scale: divisor of all widths.
        rows: query rows of a rank.
        layers: layers with cross-attention, every second layer of the model.
        block_s: seconds of an emulated block's forward pass; None: real blocks.
    """
    llama = family == "mllama"
    model = scaled(family, scale, "llama-3.2-11b-vision" if llama else row.model.name, 2 * layers, every=2)
    cross = model.sizes.cross
    heads = {"heads": cross.heads, "kv_heads": cross.kv_heads, "dim": cross.head_dim}
    setting = replace(scaled_row(name, row, ranks, rows, block_s), **heads, dtype="bfloat16" if block_s else "float32")
    return Case(
        setting=replace(setting, paper=None) if llama else setting,
        model=model,
        layers=layers,
        rest=row.step_seconds["lv-xattn"] / row.seconds["lv-xattn"] - 1,
    )


def short_video(case: Case) -> Case:
    """Return the case with so few keys that K and V are smaller than Q and O, and LV-XAttn is not the fastest."""
    setting = replace(case.setting, keys=2 * case.setting.rows, mbit=25, transfer_in_blocks=None, paper=None)
    return replace(case, setting=setting, rest=None)
