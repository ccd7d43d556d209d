"""The interface between the forward pass and the planner, which selects a strategy for `"auto"`.

`patch_model` imports the implementation, `mllm_seqpar.planner.auto`, only if an option asks for a selection; the core
depends on `StrategySelector` alone. A selection is a pure function of facts that all ranks share: the shape of the
call, its mask, and the rates of the cluster. All ranks therefore select the same strategy without communication. Only
the first selection for a device, a dtype and numbers of heads communicates if the rates of the cluster are measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mllm_seqpar.schedules.bytes_sent import Problem
from mllm_seqpar.schedules.mesh_shapes import STRATEGIES, TEXT_STRATEGIES, ParallelSpec

if TYPE_CHECKING:  # the planner's cost model, which imports this module, runs without torch
    import torch

    from mllm_seqpar.kernels import KernelOption
    from mllm_seqpar.masks import BlockMasks


class CrossAttentionShape(NamedTuple):
    """A model's cross-attention: query heads, KV heads, head_dim, and the number of layers that have it."""

    heads: int
    kv_heads: int
    dim: int
    layers: int


@dataclass(frozen=True, kw_only=True)
class VisualProjection:
    """The projection of visual features with `dim` channels to the K and V of a cross-attention call.

    Attributes:
        layers: cross-attention layers of the model; the cost of gathering the features is divided by it.
        recompute: whether backward projects K and V again.
        trained: whether the features require gradients (the vision tower or the projector is trained).
        weights_trained: whether the weights of the projection do; with LoRA they do not.
    """

    dim: int
    layers: int = 1
    recompute: bool = True
    trained: bool = True
    weights_trained: bool = True


class CandidateStrategies(NamedTuple):
    """The strategies that a selection compares, and the option that requested it.

    Attributes:
        option: the option of `patch_model` that requests the selection, for the log.
        strategies: the strategies to compare.
        causal: whether a query attends to no later keys.
    """

    option: str
    strategies: tuple[str, ...]
    causal: bool = False


# Star Attention is approximate, so it is never a candidate.
CROSS = CandidateStrategies('strategy="auto"', STRATEGIES)
SELF = CandidateStrategies('self_attention="auto"', TEXT_STRATEGIES, causal=True)
_ALL_MESH_SHAPES = ("lv-xattn", "ring", "mesh")
CROSS_MESH = CandidateStrategies('strategy="mesh"', _ALL_MESH_SHAPES)
SELF_MESH = CandidateStrategies('self_attention="mesh"', _ALL_MESH_SHAPES, causal=True)


class StrategySelector(Protocol):
    """Selects strategies for one patched model and caches its selections.

    Attributes:
        kernel: the block kernel of the model's options; instead of "auto", the rates by which it decides, if the
            cluster file has them.
    """

    kernel: KernelOption

    def select(
        self,
        problem: Problem,
        blocks: BlockMasks,
        candidates: CandidateStrategies,
        like: torch.Tensor,
        *,
        training: bool,
        mesh_shape: tuple[int, int] | None = None,
        visual: VisualProjection | None = None,
    ) -> ParallelSpec:
        """Return the fastest of `candidates` for one attention call, a mesh with its overlap ratios.

        All ranks call this at the same point of the pass.

        Args:
            problem: the call of one layer.
            blocks: its mask.
            candidates: the strategies to compare.
            like: any tensor with the device and dtype of the queries.
            training: whether a backward pass follows.
            mesh_shape: the only mesh shape to consider; None for any.
            visual: if the selection is for all cross-attention layers of a pass. Replication gathers the features
                before the first layer runs, so it is no candidate for a single call.
        """
