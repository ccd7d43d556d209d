"""What a user may choose. One frozen dataclass, checked when it is made; nothing here reads the environment."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from .errors import ConfigError
from .schedules.mesh_shapes import check_tile, tile_and_heads
from .sharding import LAYOUTS

CHOICES: dict[str, tuple[str, ...]] = {
    "strategy": ("lv-xattn", "ring", "mesh", "ulysses", "replicate", "auto"),
    "self_attention": ("ring", "mesh", "ulysses", "star", "local", "auto"),
    "text_layout": LAYOUTS,
    "logits": ("auto", "full", "local"),
}
TAKE_TILES = ("mesh", "ulysses")


@dataclass(frozen=True, kw_only=True)
class SeqParConfig:
    """How a patched model runs; the fields of `patch_model`'s options.

    Attributes:
        strategy: cross-attention: "lv-xattn" moves Q, O and the log-sum-exp, "ring" moves K and V, "mesh" moves both
            within smaller groups, "ulysses" deals heads instead of rows and keys, "replicate" gives every rank all
            visual features (for short visual input); "auto" takes the cheapest of these for the shapes, the mask and
            the machine at hand, and logs which and why.
        self_attention: the language model's own attention: "ring", "mesh" or "ulysses"; "local" (text not sharded at
            all: every rank computes all text, only frames are shared out); "auto" (the cheapest of the first three, as
            above); or "star", for generating from long prompts, which is approximate: see `mllm_seqpar.runtime.star`.
        text_layout: how text tokens are dealt to ranks; zigzag and striped balance causal work.
        tile: (a, b): with "mesh", how many ranks' rows and columns a rank computes with (a * b = n; None: the tile that
            sends least); with "ulysses", what is done between the groups of n / (a * b) ranks that deal heads (None:
            all ranks do).
        recompute_visual: project K and V of visual tokens again in backward instead of keeping them.
        kernel: block kernel by name, or "auto"; `mllm_seqpar.kernels.available_kernels()` lists them. Blocks that need
            a mask go to "auto" where the named one takes none.
        overlap: transfers under computation; False only to measure.
        accumulate_dtype: what O is merged in and sent in: torch.float32, or None for the queries' dtype.
        shard_prompt_from: `generate` reads prompts of at least this many tokens with their text dealt to the ranks (by
            `self_attention`), and the text's K and V stay dealt while decoding. Below, every rank has all text, which
            saves an exchange per layer and token; None: always so.
        mlp_chunk_size: tokens that the language model's MLPs compute at once, with recomputation in backward (blockwise
            feed-forward, arXiv 2310.01889, section 3); None: all of a rank's tokens at once, nothing recomputed.
        vision_chunk_size: frames that the vision tower encodes at once, so that a frozen one never holds what is inside
            it for an hour of video; under FSDP2 its parameters are gathered for each such chunk. None: all of a rank's.
        cluster: a cluster file of the planner (`configs/clusters`) whose rates "auto" decides by; None: measured. With
            "mesh" its steps are ordered, and its tile chosen where none is given, by these rates; None: by the bytes.
        logits: "full": every rank gets the caller's whole logits; "local": its own tokens' only; "auto": full without
            labels, local with labels.

    Raises:
        ConfigError: an unknown value, with the ones that are known.
    """

    strategy: str = "lv-xattn"
    self_attention: str = "ring"
    text_layout: str = "zigzag"
    tile: tuple[int, int] | None = None
    recompute_visual: bool = True
    kernel: str = "auto"
    overlap: bool = True
    accumulate_dtype: torch.dtype | None = torch.float32
    logits: str = "auto"
    shard_prompt_from: int | None = 16384
    mlp_chunk_size: int | None = None
    vision_chunk_size: int | None = 32
    cluster: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name}: {value!r} is unknown; choose one of {', '.join(allowed)}")
        if self.accumulate_dtype not in (torch.float32, None):
            raise ConfigError(
                f"accumulate_dtype: {self.accumulate_dtype} cannot be used; choose torch.float32 (exact at any number "
                "of ranks) or None (the queries' dtype: half the bytes, an error that grows with the ranks)"
            )
        if self.tile is not None:
            object.__setattr__(self, "tile", check_tile(self.tile))
            if not {self.strategy, self.self_attention} & set(TAKE_TILES):
                raise ConfigError(
                    f"tile: {self.tile} was given, but neither strategy={self.strategy!r} nor self_attention="
                    f"{self.self_attention!r} takes one; {' and '.join(TAKE_TILES)} do"
                )
        for name in ("recompute_visual", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: {getattr(self, name)!r} is not a bool; pass True or False")
        counts = (("shard_prompt_from", "tokens"), ("mlp_chunk_size", "tokens"), ("vision_chunk_size", "frames"))
        for name, counted in counts:
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ConfigError(f"{name}: {size!r} is not a number of {counted}; pass a positive int, or None")
        if self.cluster is not None:
            if not isinstance(self.cluster, str):
                raise ConfigError(f"cluster: {self.cluster!r} is not a path; pass that of a cluster file, or None")
            if not {self.strategy, self.self_attention} & {"auto", "mesh"}:
                raise ConfigError(
                    f"cluster: {self.cluster!r} was given, but neither strategy={self.strategy!r} nor self_attention="
                    f"{self.self_attention!r} decides anything by it; auto and mesh do"
                )
        if not isinstance(self.kernel, str):
            raise ConfigError(f"kernel: {self.kernel!r} is not a kernel's name; pass 'auto' or a name")
        self._refuse_idle_options()

    def _refuse_idle_options(self) -> None:
        """Raises ConfigError for a choice that the way the text is distributed makes meaningless."""
        if self.self_attention == "star" and self.shard_prompt_from is None:
            raise ConfigError(
                'shard_prompt_from: with None no prompt is long enough for self_attention="star", which would never be '
                "used; pass a number of tokens, or another self_attention"
            )
        idle = [f"shard_prompt_from={self.shard_prompt_from}"] * (
            self.shard_prompt_from not in (type(self).shard_prompt_from, None)
        )
        idle += ['logits="local"'] * (self.logits == "local")
        if self.self_attention == "local" and idle:
            raise ConfigError(
                f'{idle[0]}: self_attention="local" never shards the text, so that this would have no effect; leave it '
                "out, or choose another self_attention"
            )

    def tile_for(self, name: str) -> tuple[int, int] | None:
        """The tile of the strategy of that name: of both kinds of attention, where both take one; first of a mesh."""
        if name not in TAKE_TILES or (name == "ulysses" and "mesh" in (self.strategy, self.self_attention)):
            return None
        return self.tile

    def check_ranks(self, size: int) -> None:
        """Raises ConfigError for a tile that does not fit the number of ranks."""
        for name in {self.strategy, self.self_attention} & set(TAKE_TILES):
            tile_and_heads(name, self.tile_for(name), size)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The options of `patch_model`, in order."""
        return tuple(f.name for f in fields(cls))
