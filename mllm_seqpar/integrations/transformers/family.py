"""What a model family says of itself, so that the passes of `hf_passes` can run it sequence-parallel.

Shape legend: B samples, L text tokens of the pass, s of them on this rank, F frames of all samples and ranks (f on this
rank). A frame is what one rank holds whole; it consists of `units_per_frame` units, which the mask speaks of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from mllm_seqpar.masks import FrameMask
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.selection import CrossAttentionShape

from .cache import SequenceParallelCacheState
from .inputs import ForwardInputs
from .outputs import refuse_other_losses, refuse_reentrant, refuse_unlike_attention

VISUAL_SHARD = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that {frames} hold only this rank's frames of
        `visual_shard.total`, in one flat list without a batch dimension. On several ranks a cache is returned only with
        `use_cache=True`, or when one is passed.
"""


@dataclass(frozen=True)
class Visibility:
    """What the text rows of a pass see.

    Attributes:
        mask: of all rows (B, L) against the units of all ranks.
        rows: further facts of the rows, (B, L) each, on the model's device; dealt to ranks as the tokens are.
    """

    mask: FrameMask
    rows: Mapping[str, Tensor] = field(default_factory=dict)


class Family(ABC):
    """One patched model, as the passes see it.

    Attributes:
        model: the patched model.
        context: its group and configuration.
        repeats_frames: whether its `generate` passes the frames again with every token.
        checkpoints_look: whether the layers that transformers' gradient checkpointing recomputes look at the frames.
    """

    repeats_frames = False
    checkpoints_look = True

    def __init__(self, model: Any, context: SeqParContext) -> None:
        self.model, self.context = model, context

    @property
    def text_config(self) -> Any:
        """The language model's config."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def lm_head(self) -> Any:
        """The vocabulary's projection."""
        return self.model.get_output_embeddings()

    def embed(self, ids: Tensor) -> Tensor:
        """(B, s) token ids -> (B, s, C)."""
        return self.model.get_input_embeddings()(ids)

    def embedding_weight(self) -> Tensor:
        """A parameter of the language model: its device and dtype are those that features come in."""
        return next(iter(self.model.get_input_embeddings().parameters()))

    @property
    def loss_of(self) -> Any:
        """What has the loss function: the model."""
        return self.model

    def loss_function(self, **kwargs: Any) -> Tensor:
        """The model's own loss, for text that every rank has whole."""
        return self.loss_of.loss_function(**kwargs)

    def units_per_frame(self, inputs: ForwardInputs) -> int:
        """What the mask speaks of, per frame."""
        return 1

    def cross_shape(self) -> CrossAttentionShape | None:
        """The model's cross-attention, for a strategy to be chosen before any layer runs; None: by each layer then."""
        return None

    @abstractmethod
    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """Frames (f, ...) of this rank, and what else belongs to each -> features (f * units, tokens, width)."""

    @abstractmethod
    def blank(self) -> tuple[Tensor, ...]:
        """One empty frame and its extras, as `encode` takes them, on the model's device."""

    @abstractmethod
    def view(self, inputs: ForwardInputs, units: int, tokens: int, note: Any) -> Visibility:
        """What the rows see of `units` units of `tokens` keys each; `note` is what `note` returned for the prompt."""

    @abstractmethod
    def decode(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Cache | None, call: ForwardState, **kwargs: Any
    ) -> Any:
        """Runs the decoder's layers.

        Args:
            embeds: (B, s, C) of this rank's rows, or of all rows where the text is not dealt.
            positions: (B or 1, s).
            mask: what the decoder takes as `attention_mask`; four-dimensional, and read by nobody, where the text is
                dealt.
            cache: to be filled, or None.
            call: to be handed to the layers as `seqpar`.
            **kwargs: the caller's further arguments.

        Returns:
            An object with `last_hidden_state` (B, s, C), and `hidden_states` or None.
        """

    def check(self, inputs: ForwardInputs, kwargs: dict[str, Any]) -> None:
        """Raises for inputs that do not fit together; the other ranks are told."""
        for config in (self.model.config, self.text_config):
            refuse_unlike_attention(config, kwargs)
        if self.checkpoints_look and self.model.training and torch.is_grad_enabled():
            refuse_reentrant(self.model)
        if self.context.comm.size > 1 and self.context.config.self_attention != "local" and not inputs.use_cache:
            refuse_other_losses(self.loss_of, inputs.target_labels() is not None)

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        """Return the decoder's `attention_mask` for text that every rank has whole, made for the patch's attention.

        The decoder itself would make one for the attention that its config names.
        """
        return mask

    def adopt(self, cache: Any, beside: SequenceParallelCacheState) -> None:
        """Take over what an unpatched model kept with a cache of this text.

        Without K and V of frames in it, as here, the cache can be continued unchanged.

        Raises:
            ConfigError: it has K and V of frames that cannot be taken over.
        """
        return None

    def cropped(self, note: Any, past: int) -> Any:
        """Return the note of a text of which the cache has `past` tokens now, perhaps fewer than the note knows."""
        return note

    def mark_cache(self, cache: Any, beside: SequenceParallelCacheState) -> None:
        """Show an unpatched model that K and V of the frames are kept elsewhere, where it would not notice."""
        return None

    def in_order(self, inputs: ForwardInputs, note: Any) -> bool:
        """Whether the cache's rows stand beside the samples that they had when the frames came."""
        return True

    def note(self, inputs: ForwardInputs) -> Any:
        """What `view` must know of the prompt's frames, in later passes over the same cache too.

        Called once the ranks have agreed on their inputs: what does not fit together is raised here, on all ranks.
        """
        return None

    def empty_visibility(self, inputs: ForwardInputs, units: int, tokens: int) -> Visibility:
        """The view of a pass without frames over an empty one that keeps FSDP in step."""
        none = torch.zeros(inputs.batch, inputs.length, dtype=torch.long)
        return Visibility(FrameMask.from_intervals(none, none, tokens, units))

    def index(self, inputs: ForwardInputs, units: int) -> Tensor:
        """(units,) a number for each unit of all ranks that projections may need."""
        return torch.zeros(units, dtype=torch.long)

    def output(self, out: CausalLMOutputWithPast, features: Tensor | None, inputs: ForwardInputs) -> Any:
        """The model's own kind of output; `features` are those of this rank's frames, None where none were encoded."""
        return out
