"""The state of one forward pass, which all layers of a patched model share; it reaches them as a keyword argument.

Rows of text are sharded over ranks in training, in any pass without a cache, and while a long prompt is prefilled. In
the other passes with a cache, and with `self_attention="local"`, every rank has all rows. Frames are on the ranks that
encoded them, or on every rank if the strategy is "replicate". A layer does not distinguish these cases: it makes its
sets of keys and attends to them,

    keys = [state.text_keys(q, k, v), state.frame_keys(q, layer, project)]
    o = state.attend(q, keys, scale)

and the placements of rows and keys decide what is computed where (`attention.attend`).

The state is neither a dataclass nor another container that FSDP, checkpointing or device placement traverse: they would
cast its tensors in every layer, and lead the gradients of the features through all of them. It is not stored on a
module, so that recomputation in backward uses the state of its own forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from mllm_seqpar._compat import eager
from mllm_seqpar.attention.attend import attend
from mllm_seqpar.attention.call_spec import CallSpec, Placement, accumulation, call_spec_for, problem_of
from mllm_seqpar.attention.keys import GivenKeys, Keys, attend_unmasked, attention_dtype, cast_for_attention
from mllm_seqpar.masks import BlockMask, BlockMasks
from mllm_seqpar.masks.block_masks import decoder_mask
from mllm_seqpar.schedules.mesh_shapes import ParallelSpec, parallel_spec

from .context import Recorder, SeqParContext
from .frames import Frames
from .projections import Projection
from .strategy_selector import CROSS, CROSS_MESH, SELF, SELF_MESH, CandidateStrategies
from .text import TextShards
from .visual_tokens import VisualTokens

MAX_TEXT_MASK = 1 << 24
"""On one process, torch's own attention takes a mask (B, L, L) of at most this many entries for padded text."""


ModelAttention = Callable[[Tensor, Tensor, Tensor | None, Tensor, float], Tensor]
"""The unpatched model's attention to text: k, v (B, G, t, D), the decoder's mask, q (B, H, s, D), scale -> o."""

TextMaskKind = Literal["decoder", "causal", "intervals"]
"""What says which tokens a row attends to, and thereby what computes the attention to text; see
`ForwardState.text_mask_kind`.

"decoder": the decoder's mask. The model's own attention computes text that this rank has whole.
"causal": the order of the tokens alone. The model's own attention computes it without a mask.
"intervals": the interval of keys of each row. The block kernels compute it.
"""


class ForwardState:
    """The state that all layers of one forward pass share.

    `text`, `cached_text` and `text_length` say which of four kinds of pass it is:

    | pass | `text` | `shards_text` | `cached_text` | `text_length` | rows in `attend` |
    |---|---|---|---|---|---|
    | without a cache, or the prefill of a long prompt | given | True | None | None | sharded |
    | the same with `self_attention="local"` | given | False | None | None | sharded, in `attend` only |
    | over a cache with the whole text on every rank | None | False | None | given | replicated |
    | over a cache whose text is sharded | None | False | given | given | replicated |

    Args:
        context: group and configuration.
        text: the sharding of the text; None in a pass over a cache, whose rows every rank has.
        frames: the frames that rows attend to; None without any.
        row_facts: further facts about the rows of this pass, (B, s) each, by name.
        cached_text: window -> the mask of all rows against the tokens that this rank's cache has, in a pass with a
            cache whose text is sharded.
        visual_tokens: the embeddings of the visual tokens among this rank's rows, of a decoder-only model. The first
            replace rows of the text, and layers add the others. Taking an entry out of the list frees its
            memory.
        text_length: the number of text tokens so far, this pass included, in a pass with a cache. A static cache is
            longer.
        recorder: receives a row of each layer that attends to frames, in a pass whose attention to them is recorded.
        whole_positions: the positions (..., L) of the whole text, from which rotary embeddings may take its length.

    Attributes:
        shards_text: whether hidden states hold this rank's tokens only.
        torch_attends: whether torch's own operators may take the place of schedules and block kernels: on one process,
            unless a block kernel is named.
    """

    def __init__(
        self,
        context: SeqParContext,
        *,
        text: TextShards | None = None,
        frames: Frames | None = None,
        row_facts: Mapping[str, Tensor] | None = None,
        cached_text: Callable[[int | None], BlockMask] | None = None,
        visual_tokens: list[VisualTokens] | None = None,
        text_length: int | None = None,
        recorder: Recorder | None = None,
        whole_positions: Tensor | None = None,
    ) -> None:
        self.context, self.text, self.frames, self.row_facts = context, text, frames, row_facts or {}
        self.cached_text, self.text_length, self.recorder = cached_text, text_length, recorder
        self.whole_positions = whole_positions
        self.visual_tokens = [] if visual_tokens is None else visual_tokens
        config = context.config
        self.shards_text = text is not None and config.shards_text
        self.torch_attends = context.comm.size == 1 and config.kernel == "auto"
        self._text_specs: dict[Hashable, CallSpec] = {}
        if text is not None and self.text_mask_kind() == "intervals" and text.is_plain and cached_text is None:
            self._text_specs = context.specs_of_plain_text(type(text), text.length)

    def text_mask_kind(self, window: int | None = None) -> TextMaskKind:
        """Return what says which tokens a row attends to in layers with this window, or without one in all layers."""
        text = self.text
        if text is None or not self.shards_text:  # this rank has all rows
            return "decoder" if self.cached_text is None else "intervals"
        if not self.torch_attends:
            return "intervals"
        if text.is_plain:
            return "causal" if window is None or window >= text.length else "intervals"
        return "decoder" if text.batch * text.length**2 <= MAX_TEXT_MASK else "intervals"

    def attend(self, q: Tensor, key_sets: Sequence[Keys], scale: float) -> Tensor:
        """q (B, H, s, D) -> o (B, H, s, D): one softmax over all keys on all ranks; 0 for rows that attend to none."""
        return self.attend_each(q, [key_sets], scale)[0]

    @eager
    def attend_each(self, q: Tensor, softmaxes: Sequence[Sequence[Keys]], scale: float) -> list[Tensor]:
        """Compute `attend` for each list of keys. Partial results that must be merged over ranks share one exchange."""
        (q,) = cast_for_attention(q)
        comm, config, selector = self.context.comm, self.context.config, self.context.selector
        by_torch: list[Callable[[Tensor, float], Tensor] | None] = []
        by_kernels: list[Sequence[Keys]] = []
        for keys in softmaxes:
            torch_attend = keys[0].torch_attend if len(keys) == 1 else None
            by_torch.append(torch_attend)
            if torch_attend is None:
                by_kernels.append(keys)
        results: list[tuple[Tensor, Tensor]] = []
        if by_kernels:
            # self_attention="local": every rank has all rows, and they are sharded for this attention only.
            local = None if self.shards_text else self.text
            results = attend(
                q if local is None else local.shard(q, 2),
                by_kernels,
                rows="replicated" if self.text is None and comm.size > 1 else "sharded",
                comm=comm,
                scale=scale,
                kernel=config.kernel if selector is None else selector.kernel,
                recompute=config.recompute_attention,
            )
            if local is not None:
                results = [(local.unshard(o, 2), lse) for o, lse in results]
        outputs, of_kernels = list[Tensor](), iter(results)
        for keys, torch_attend in zip(softmaxes, by_torch, strict=True):
            # torch's own operators return no log-sum-exp
            o, lse = next(of_kernels) if torch_attend is None else (torch_attend(q, scale), None)
            outputs.append(o)
            if self.recorder is not None:
                self.recorder.add(q, keys, lse, scale)
        return outputs

    def text_keys(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None = None,
        mask: Tensor | None = None,
        model_attention: ModelAttention | None = None,
    ) -> Keys:
        """Return the keys of the text up to each row.

        Args:
            q: (B, H, s, D), the rows; for its shape.
            k, v: (B, G, t, D): of this rank's tokens, of all tokens, or what this rank's cache returned.
            window: the number of keys that a token attends to at most, itself included; None: all before it.
            mask: the decoder's attention mask; read if `text_mask_kind` is "decoder".
            model_attention: the model's own attention, for text that one rank has. None: the block kernels.
        """
        k, v = cast_for_attention(k, v)
        torch_attend = None
        if model_attention is not None and (kind := self.text_mask_kind(window)) != "intervals":
            torch_attend = functools.partial(model_attention, k, v, mask if kind == "decoder" else None)
        if self.text_length is not None and self.cached_text is None:
            k, v = k[:, :, : self.text_length], v[:, :, : self.text_length]  # the rest of a static cache is empty
        key = q.shape, k.shape, k.dtype, window, torch.is_grad_enabled()
        spec = self._text_specs.get(key)
        if spec is None:
            spec = self._text_specs[key] = self._text_spec(q, k, window, mask)
        return GivenKeys(spec, k, v, torch_attend, window)

    def frame_keys(self, q: Tensor, layer: Hashable, project: Projection) -> Keys:
        """Return the keys of the frames that rows attend to, in a pass that has `frames`.

        Args:
            q: (B, H, s, D), the rows; for its shape and dtype.
            layer: identifies the layer in the cache of K and V.
            project: how K and V are projected from features: a `KVProjection`, or a `FunctionProjection`.
        """
        frames = self.frames
        assert frames is not None, "this pass has no frames"
        dtype = attention_dtype(q)
        key = q.shape, dtype, q.device, torch.is_grad_enabled()
        spec = frames.specs.get(key)
        if spec is None:
            spec = frames.specs[key] = self._frame_spec(q, dtype, frames, project)
        keys = frames.source.keys(layer, spec, project, dtype)
        if self.torch_attends and isinstance(keys, GivenKeys) and (common := frames.common_keys) is not None:
            torch_attend = functools.partial(attend_unmasked, keys.k[:, :, common], keys.v[:, :, common])
            return GivenKeys(spec, keys.k, keys.v, torch_attend)
        return keys

    def _text_spec(self, q: Tensor, k: Tensor, window: int | None, mask: Tensor | None) -> CallSpec:
        text = self.text
        if text is not None and self.shards_text:
            name = self.context.config.self_attention
            candidates = {"auto": SELF, "mesh": SELF_MESH}.get(name)
            blocks, lengths = text.blocks(window), (text.local,) * self.context.comm.size
            return self._spec("ring" if name == "auto" else name, candidates, blocks, lengths, q.shape, k.shape, k)
        if self.cached_text is not None:
            block = self.cached_text(window)
        elif text is None:
            block = decoder_mask(mask, q.shape[2], k.shape[2])
        else:
            block = text.local_mask(window)
        placement: Placement = "replicated" if self.cached_text is None else "sharded"
        accumulate = accumulation("auto", k.dtype)
        return CallSpec((1, 1), BlockMasks.of_block(block), (k.shape[2],), accumulate, placement=placement)

    def _frame_spec(self, q: Tensor, dtype: torch.dtype, frames: Frames, project: Projection) -> CallSpec:
        config, comm, masks, lengths = self.context.config, self.context.comm, frames.masks, frames.key_lengths
        like = q.new_empty(0, dtype=dtype)
        if self.text is None or frames.placement == "replicated" or comm.size == 1:
            accumulate = accumulation("auto" if self.text is None else config.accumulate_dtype, dtype)
            return CallSpec((1, 1), masks, lengths, accumulate, config.overlap, placement=frames.placement)
        rows = q.shape[2] if self.shards_text else self.text.local
        candidates, kv_heads = {"auto": CROSS, "mesh": CROSS_MESH}.get(config.strategy), frames.kv_heads or q.shape[1]
        if candidates is not None and frames.kv_heads is None:
            # Projecting zero frames gives the number. Under FSDP2 the call gathers the parameters over all groups, of
            # which one may have selected "replicate": models state the number in their `cross_attention_shape`.
            with torch.no_grad():
                empty = frames.source.empty_features
                kv_heads = project(empty.features, empty.index)[0].shape[1]
        # "replicate" without gathered features: a prompt whose K and V stay where they are.
        name = "lv-xattn" if config.strategy in ("auto", "replicate") else config.strategy
        q_shape = (*q.shape[:2], rows, q.shape[3])
        return self._spec(name, candidates, masks, lengths, q_shape, (1, kv_heads), like, frames.selection)

    def _spec(
        self,
        strategy: str,
        candidates: CandidateStrategies | None,
        masks: BlockMasks,
        key_lengths: tuple[int, ...],
        q_shape: Sequence[int],
        k_shape: Sequence[int],
        like: Tensor,
        selection: ParallelSpec | None = None,
    ) -> CallSpec:
        """Return the spec of the selection among `candidates` if there is a selector; else that of `strategy`."""
        config, selector = self.context.config, self.context.selector
        problem = problem_of(q_shape, k_shape, key_lengths, like.dtype, config.accumulate_dtype)
        tile, accumulate = config.tile_for(strategy), accumulation(config.accumulate_dtype, like.dtype)
        if candidates is None or selector is None or problem.ranks == 1:
            selection = parallel_spec(strategy, tile, problem)
        elif selection is None:
            training = torch.is_grad_enabled()
            selection = selector.select(problem, masks, candidates, like, training=training, mesh_shape=tile)
        return call_spec_for(selection, masks, problem, accumulate, config.overlap)
