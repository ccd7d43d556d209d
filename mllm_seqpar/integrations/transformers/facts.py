"""What a forward pass reads of a model: its modules, its frames, its decoder and its cache.

`passes.Pass` runs a pass by these methods. A family (`family.Family`) defines them for its models.

Shape legend: B samples, L text tokens of the pass, s of them on this rank, U units of a sample, F frames of all samples
and ranks (f on this rank). A frame is held by one rank as a whole. It consists of one or more units; masks are made of
units.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast

from mllm_seqpar._compat import cache_argument
from mllm_seqpar.errors import AdapterError
from mllm_seqpar.fsdp_units import modules_around
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.models.cache import SequenceParallelCacheState
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.strategy_selector import CrossAttentionShape
from mllm_seqpar.runtime.visual_tokens import VisualTokenLayout
from mllm_seqpar.sharding import Spans

from .attention import causal_masks
from .inputs import ForwardInputs

InputsT = TypeVar("InputsT", bound=ForwardInputs)


class ModelFacts(ABC, Generic[InputsT]):
    """What the passes of one patched model read of it.

    It is apart from `Family`, whose forward runs passes: `passes` would otherwise import the module that imports it.

    Attributes:
        frame_arguments: the arguments of the forward that hold frames or features; they take `HostFrames`.
        repeats_frames: whether its `generate` passes frames again with every token.
        output_class: the class of the model's outputs.
        has_cross_attention: whether layers attend to frames; otherwise frames are tokens of the text.
        frame_layout: how frames map to ranks if the caller passes all of them: "zigzag" where rows attend to earlier
            frames only, which balances the load.
        model, context: the model, its group and its options.
        has_adapters: whether the last pass that compared weights found adapters of PEFT.
    """

    frame_arguments: tuple[str, ...] = ("pixel_values",)
    repeats_frames = False
    output_class: type = CausalLMOutputWithPast
    has_cross_attention = True
    frame_layout = "contiguous"
    has_adapters = False

    def __init__(self, model: Any, context: SeqParContext) -> None:
        self.model, self.context = model, context

    # The sites.

    @property
    @abstractmethod
    def decoder(self) -> Any:
        """The decoder of the text, a module with `layers`."""

    def text_attention(self) -> Iterable[nn.Module]:
        """Return the self-attention of the text, which uses transformers' attention interface."""
        modules = [layer.self_attn for layer in self.decoder.layers if hasattr(layer, "self_attn")]
        if not modules:
            raise AdapterError(
                f"{type(self).__name__}: no layer of {type(self.decoder).__name__} has a self_attn, so nothing would "
                "attend to the text of the other ranks; return the attention modules in text_attention"
            )
        return modules

    def visual_attention(self) -> Iterable[tuple[nn.Module, Callable[..., Any]]]:
        """Return the modules that attend to frames, each with its `forward(module, ..., seqpar=state)`."""
        return ()

    def rotary_embeddings(self) -> Iterable[nn.Module]:
        """Return the modules that compute the rotations of the text, which are called with `position_ids` (..., s)."""
        embedding = getattr(self.decoder, "rotary_emb", None)
        return [] if embedding is None else [embedding]

    @property
    def called_modules(self) -> Iterable[nn.Module]:
        """The modules within `model` that a pass calls itself, rather than through the modules that contain them.

        Those that `encode` calls must be added.
        """
        own = (self.model.get_input_embeddings(), self.model.get_output_embeddings(), self.decoder)
        return [module for module in own if module is not None]

    @property
    def frame_modules(self) -> Iterable[nn.Module | None]:
        """The modules that compute with frames: what `encode` calls, and attention to frames; None for one that
        the model lacks."""
        text = {self.model.get_input_embeddings(), self.model.get_output_embeddings(), self.decoder}
        encoders = [module for module in self.called_modules if module not in text]
        return [*encoders, *(module for module, _ in self.visual_attention())]

    # The frames, and what rows may attend to.

    def check_inputs(self, inputs: InputsT) -> None:
        """Raise for inputs of this rank that are invalid or not supported; the other ranks then raise too."""

    @abstractmethod
    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """Encode this rank's frames (f, ...) and their extras, and return features (f * units, tokens, width).

        It must not read `context`: `ChatFamily.encode` calls it for models that are not patched.
        """

    def blank_frame(self) -> tuple[Tensor, ...]:
        """Return one empty frame and its extras, as `encode` takes them, on the model's device."""
        weight = self.embedding_weight()
        try:
            vision = self.model.config.vision_config
            shape = (1, vision.num_channels, vision.image_size, vision.image_size)
        except AttributeError as error:
            raise AdapterError(
                f"{type(self).__name__}: a rank without frames encodes an empty one, but the model's config does not "
                f"describe images as most do ({error}); define blank_frame"
            ) from error
        return (torch.zeros(shape, device=weight.device, dtype=weight.dtype),)

    def check_new_frames(self, inputs: InputsT) -> None:
        """Raise for frames that do not fit the text, in a prompt and in later passes that bring frames.

        It is called once the ranks agree on their inputs, before frames are encoded, and raises on all ranks.
        """

    def appends_frames(self, inputs: InputsT, known: bool) -> bool:
        """Return whether the frames of a pass follow those of its cache; otherwise they are the same, or replace them.

        `known` says whether they are equal to frames that the cache has. The answer must be the same on all ranks.
        """
        return not known

    @abstractmethod
    def visibility(self, inputs: InputsT, units: int, tokens: int) -> FrameMask:
        """Return which of `units` units of `tokens` keys each the rows (B, L) of this pass may attend to.

        If passes with the same cache have brought frames one after the other, it is called for the frames of each of
        them, with its own `inputs.cache_state` (rows, samples, and what `complete_cache` stored). It is not called in a
        pass without frames, whose rows attend to none.
        """

    def row_facts(self, inputs: InputsT, mask: FrameMask) -> Mapping[str, Tensor]:
        """Return what layers read of the rows as `state.row_facts`: tensors (B, L) on the model's device, by name.

        They are sharded like tokens. `mask` is that of all rows; without frames, it has the empty frame that keeps the
        ranks of FSDP in step, and no row attends to it.
        """
        return {}

    def unit_index(self, inputs: InputsT, frames: Spans) -> Tensor:
        """Return (units, ...), what projections may need of each unit of these frames: its position, or its rotation.

        `frames` are those of this rank, or of all ranks if each gets all features. A pass without frames has one, the
        empty one.
        """
        return torch.zeros(inputs.sizes.count(frames), dtype=torch.long)

    def cross_attention_shape(self) -> CrossAttentionShape | None:
        """Return what `strategy="auto"` selects by before any layer runs; None if each layer selects.

        By default, the modules of `visual_attention` have the heads of the text.
        """
        config, layers = self.text_config, len(list(self.visual_attention()))
        heads = getattr(config, "num_attention_heads", 0)
        if not heads or not layers:
            return None
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return CrossAttentionShape(heads, kv_heads, head_dim, layers)

    # Decoder-only models, in which embeddings of frames replace placeholders of the text.

    def visual_token_layout(self, inputs: InputsT) -> VisualTokenLayout:
        """Return where the visual tokens of this pass are, and which embedding each has.

        Raises:
            ShapeError: the placeholders of the text and the frames do not match.
        """
        raise NotImplementedError

    def frames_between(self, inputs: InputsT, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the frames ``start <= f < stop`` of all, which this rank has, as `encode` takes them."""
        raise NotImplementedError

    # The decoder, its cache, and the loss.

    def target_weights(self, targets: Tensor) -> Tensor | None:
        """Return weights, of the shape of `targets`, by which the loss of each target is multiplied; None: all are 1.

        The sum is divided by the number of targets, not by the sum of the weights.
        """
        return None

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        """Return the decoder's `attention_mask` for text that this rank has whole, made for the patched attention.

        The decoder itself would create one for the attention that its config names.
        """
        return causal_masks(self.decoder, self._attention_config, embeds, mask, positions, cache)

    def run_decoder(
        self, embeds: Tensor, positions: Tensor, mask: Any, cache: Cache | None, state: ForwardState, **kwargs: Any
    ) -> Any:
        """Run the decoder's layers.

        Args:
            embeds: (B, s, C) of this rank's rows, or of all rows if the text is not sharded.
            positions: (B or 1, s).
            mask: the decoder's `attention_mask`. It is a four-dimensional dummy if the text is sharded.
            cache: the cache to fill, or None.
            state: pass it to the layers as `seqpar`.
            **kwargs: the caller's further arguments.

        Returns:
            An object with `last_hidden_state` (B, s, C), and with `hidden_states` or None.
        """
        return self.decoder(**decoder_arguments(embeds, positions, mask, cache, state), **kwargs)

    def model_output(self, out: CausalLMOutputWithPast, features: Tensor | None, inputs: InputsT) -> Any:
        """Return an `output_class`; `features` are what this rank encoded in this pass, or None.

        Since transformers 5.24 it may have `image_outputs`, the output of the vision tower, which no pass keeps. They
        are empty if `generate` reads them to pass frames again (`repeats_frames`); otherwise they are None.
        """
        if self.output_class is CausalLMOutputWithPast:
            return out
        reads = self.repeats_frames and "image_outputs" in {field.name for field in fields(self.output_class)}
        return self.output_class(**out, **({"image_outputs": BaseModelOutputWithPooling()} if reads else {}))

    def continue_cache(self, inputs: InputsT, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        """Bring `cache_state` up to date with the cache, before each pass that uses it.

        Since the last pass, the text may have been cropped, and the unpatched model may have stored K and V of frames.

        Raises:
            ConfigError: the cache holds K and V of frames that cannot be taken over.
        """

    def complete_cache(self, inputs: InputsT, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        """Complete the cache after the frames of this pass were stored in `cache_state`.

        Store there what `visibility` needs in later passes. Change the cache so that the unpatched model finds these
        frames, or fails.
        """

    # What methods and passes read of the model.

    @functools.cached_property
    def text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    def embedding_weight(self) -> Tensor:
        """Return a parameter of the language model, whose device and dtype the features take."""
        embedding = self.model.get_input_embeddings()
        weight = getattr(embedding, "weight", None)  # every token asks for it, and walking modules is slower
        return weight if isinstance(weight, Tensor) else next(embedding.parameters())

    @functools.cached_property
    def _attention_config(self) -> Any:
        """The config of an attention module of the text, which names the patched attention."""
        return next(iter(self.text_attention())).config

    @functools.cached_property
    def bypassed_modules(self) -> list[nn.Module]:
        """The modules that contain one of `called_modules`.

        FSDP2 gathers the parameters of a unit when it is called. These modules are not called, or not around everything
        that they contain, so the pass gathers their parameters itself.
        """
        return modules_around(self.model, self.called_modules)

    @functools.cached_property
    def checkpointed_modules(self) -> list[nn.Module]:
        """The modules that transformers' gradient checkpointing can be enabled for."""
        return [module for module in self.model.modules() if hasattr(module, "gradient_checkpointing")]


def decoder_arguments(embeds: Tensor, positions: Tensor, mask: Any, cache: Any, state: ForwardState) -> dict[str, Any]:
    """Return the arguments of `run_decoder` under the names that transformers' decoders have for them."""
    text = {"inputs_embeds": embeds, "position_ids": positions, "attention_mask": mask}
    return text | cache_argument(cache) | {"use_cache": cache is not None, "seqpar": state}
