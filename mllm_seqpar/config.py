"""The options of `patch_model` as one frozen dataclass, checked on construction. It does not read the environment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import torch

from .errors import ConfigError
from .schedules.mesh_shapes import STRATEGIES, TEXT_STRATEGIES, TILE_STRATEGIES, check_tile, resolve_tile
from .sharding import LAYOUTS

CHOICES: dict[str, tuple[str, ...]] = {
    "strategy": (*STRATEGIES, "auto"),
    "self_attention": (*TEXT_STRATEGIES, "star", "local", "auto"),
    "text_layout": LAYOUTS,
    "logits": ("auto", "full", "local", "none"),
}
SELECTED_STRATEGIES = ("auto", "mesh")
"""The strategies that decide by the rates of a cluster."""


@dataclass(frozen=True, kw_only=True)
class SeqParConfig:
    """The options of `patch_model`.

    Attributes:
        strategy: of cross-attention. "lv-xattn" moves Q, O and the log-sum-exp, "ring" moves K and V, "mesh" moves both
            within smaller groups, "ulysses" shards heads instead of tokens, "replicate" gives every rank all visual
            features (for short visual input). "auto" selects the cheapest of these for the shapes, the mask and the
            machine, and logs its choice.
        self_attention: of the language model's own attention: "ring", "mesh" or "ulysses". "local": text is not
            sharded, every rank computes all text, and only frames are sharded. "auto" selects the cheapest of the first
            three. "star" is for generation from long prompts and is approximate: see `mllm_seqpar.runtime.star`.
        text_layout: how text tokens map to ranks; zigzag and striped balance causal work.
        tile: (a, b). With "mesh", how many Q shards and KV shards a rank computes with (a * b = n; None: the mesh shape
            that sends the fewest bytes). With "ulysses", the mesh shape over groups of n / (a * b) ranks that shard the
            heads (None: one group).
        recompute_visual: compute K and V of visual tokens again in backward instead of saving them.
        recompute_attention: with gradient checkpointing, compute attention and its transfers again when backward
            recomputes a layer. By default (o, lse) of each call are kept, which takes the memory of one hidden state
            per layer.
        kernel: name of a block kernel, or "auto"; `mllm_seqpar.kernels.available_kernels()` lists them. Blocks with a
            mask go to the kernel of "auto" if the named one takes no mask.
        overlap: run transfers during computation; False only to measure.
        accumulate_dtype: dtype in which O, dQ, dK and dV are accumulated and sent: torch.float32, None for the dtype of
            the queries, or "auto", which accumulates in float32. A result sent directly to its owner then uses the
            queries' dtype (one rounding). A result that passes through other ranks is sent in float32.
        shard_prompt_from: `generate` reads prompts of at least this many tokens with sharded text (by
            `self_attention`), and the text KV cache stays sharded while decoding. For shorter prompts every rank holds
            all text, which saves an exchange per layer and token. None: no prompt is sharded.
        mlp_chunk_size: text tokens that the language model's MLPs compute at once, with recomputation in backward
            (blockwise feed-forward, arXiv 2310.01889, section 3). None: all tokens of the rank, without recomputation.
        vision_chunk_size: frames that the vision tower encodes at once; bounds the peak activation memory of the vision
            tower. Under FSDP2 its parameters are gathered once per chunk. None: all frames of the rank.
        visual_offload: "cpu" keeps the visual features in host memory and brings them to the device chunk by chunk,
            forward and backward, so that the memory of the device does not grow with the video. Features that the
            caller passes from a memory-mapped file stay in the file. Needs strategy="lv-xattn". None: no offload.
        cluster: a cluster file of the planner, by its path or by the name of one in `configs/clusters`. "auto" decides
            by its rates (None: measured rates). "mesh" optimises its order of transfers, and its shape without `tile`,
            for them (None: for bytes, or for the measured rates if the other of the two strategies is "auto").
            kernel="auto" takes the kernels that are the fastest by its `kernels`, which `mllm-seqpar calibrate` writes.
        logits: "full": every rank returns the logits of the caller's whole text; "local": of its own tokens; "auto":
            full without labels, local with labels. "none": with labels, the output has a loss and no logits, and the
            head computes only the tokens that have a target, which saves most of the memory of training if few tokens
            of a long text have one; without labels as "auto". With `logits_to_keep`, a pass returns the logits of the
            rows that it asks for, whatever this option says. With labels it also returns the loss: of the whole text if
            they have its shape (an unpatched model raises then), and of these rows if they have theirs. A loss function
            of the model's own receives the labels and the logits of these rows.

    Raises:
        ConfigError: an unknown value; the message lists the known ones.
    """

    strategy: str = "lv-xattn"
    self_attention: str = "ring"
    text_layout: str = "zigzag"
    tile: tuple[int, int] | None = None
    recompute_visual: bool = True
    recompute_attention: bool = False
    kernel: str = "auto"
    overlap: bool = True
    accumulate_dtype: torch.dtype | Literal["auto"] | None = "auto"
    logits: str = "auto"
    shard_prompt_from: int | None = 16384
    mlp_chunk_size: int | None = None
    vision_chunk_size: int | None = 32
    visual_offload: str | None = None
    cluster: str | None = None

    @property
    def shards_text(self) -> bool:
        """Whether a rank of several computes its shard of a text only, where the text has a sharding."""
        return self.self_attention != "local"

    def __post_init__(self) -> None:
        if self.tile is not None:
            object.__setattr__(self, "tile", check_tile(self.tile))
        for problem in self._problems():
            raise ConfigError(problem)

    def _problems(self) -> Iterator[str]:
        """Yield what is wrong with each option, and how to mend it."""
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                yield f"{name}: {getattr(self, name)!r} is unknown; choose one of {', '.join(allowed)}"
        if self.accumulate_dtype not in ("auto", torch.float32, None):
            yield (
                f'accumulate_dtype: {self.accumulate_dtype} cannot be used; choose "auto", torch.float32 (nothing is '
                "rounded before it is sent) or None (the dtype of the queries: an error that grows with the ranks)"
            )
        for name in ("recompute_visual", "recompute_attention", "overlap"):
            if not isinstance(getattr(self, name), bool):
                yield f"{name}: {getattr(self, name)!r} is not a bool; pass True or False"
        counts = (("shard_prompt_from", "tokens"), ("mlp_chunk_size", "tokens"), ("vision_chunk_size", "frames"))
        for name, unit in counts:
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                yield f"{name}: {size!r} is not a number of {unit}; pass a positive int, or None"
        if self.cluster is not None and not isinstance(self.cluster, str):
            yield f"cluster: {self.cluster!r} is not a string; pass the path or name of a cluster file, or None"
        if not isinstance(self.kernel, str):
            yield f"kernel: {self.kernel!r} is not a kernel's name; pass 'auto' or a name"
        of_some_strategies = [("tile", TILE_STRATEGIES, "takes one")]
        if self.kernel != "auto":
            of_some_strategies.append(("cluster", SELECTED_STRATEGIES, "uses it"))
        for name, strategies, verb in of_some_strategies:
            value = getattr(self, name)
            if value is not None and not {self.strategy, self.self_attention} & set(strategies):
                yield (
                    f"{name}: {value!r} was given, but neither strategy={self.strategy!r} nor self_attention="
                    f"{self.self_attention!r} {verb}; use {' or '.join(strategies)}, or leave it out"
                )
        if self.visual_offload not in (None, "cpu"):
            yield f'visual_offload: {self.visual_offload!r} is unknown; choose "cpu", or None'
        if self.visual_offload is not None and self.strategy != "lv-xattn":
            yield (
                f'visual_offload="cpu" reads each chunk of frames once per layer, for the queries of all ranks; with '
                f'strategy={self.strategy!r} other ranks would need the chunks too; use strategy="lv-xattn"'
            )
        if self.visual_offload is not None and not self.recompute_visual:
            yield (
                'visual_offload="cpu" projects K and V again in backward; with recompute_visual=False they would stay '
                "on the device; leave one of the two options out"
            )
        if self.self_attention == "star" and self.shard_prompt_from is None:
            yield (
                'shard_prompt_from: with None no prompt is long enough for self_attention="star", which would never be '
                "used; pass a number of tokens, or another self_attention"
            )
        unused = ['logits="local"'] if self.logits == "local" else []
        if self.shard_prompt_from not in (SeqParConfig.shard_prompt_from, None):
            unused.append(f"shard_prompt_from={self.shard_prompt_from}")
        if self.self_attention == "local" and unused:
            yield (
                f'{unused[0]}: self_attention="local" never shards the text, so this would have no effect; leave it '
                "out, or choose another self_attention"
            )

    @property
    def selects_strategies(self) -> bool:
        """Whether a strategy is selected, or its order of transfers optimised, by the rates of a cluster."""
        return bool({self.strategy, self.self_attention} & set(SELECTED_STRATEGIES))

    def tile_for(self, name: str) -> tuple[int, int] | None:
        """Return the option `tile` if the strategy `name` takes it.

        If cross-attention and self-attention could both take it, "mesh" does and "ulysses" does not.
        """
        if name not in TILE_STRATEGIES or (name == "ulysses" and "mesh" in (self.strategy, self.self_attention)):
            return None
        return self.tile

    def check_ranks(self, size: int) -> None:
        """Raise ConfigError if the tile does not fit the number of ranks."""
        for name in {self.strategy, self.self_attention} & set(TILE_STRATEGIES):
            resolve_tile(name, self.tile_for(name), size)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))
