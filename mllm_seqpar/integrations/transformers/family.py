"""A model family: what its author writes, and the forward of a model that it is installed on.

`passes.run_pass` runs a forward pass by the methods of the family.

Shape legend: B samples, L text tokens of the pass, s of them on this rank, U units of a sample, F frames of all samples
and ranks (f on this rank). A frame is held by one rank as a whole. It consists of one or more units; masks are made of
units.
"""

from __future__ import annotations

import functools
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import modeling_outputs
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from mllm_seqpar._compat import cache_argument, cache_name, takes_cache
from mllm_seqpar.errors import AdapterError, ConfigError, ShapeError
from mllm_seqpar.fsdp_units import modules_around
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.models.cache import SequenceParallelCacheState
from mllm_seqpar.patching import Patch
from mllm_seqpar.patching.registry import is_instance_by_name
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.strategy_selector import CrossAttentionShape
from mllm_seqpar.runtime.visual_tokens import VisualTokenLayout
from mllm_seqpar.sharding import FrameSizes, Spans, tensor_of

from .attention import causal_masks, use_seqpar_attention
from .generation import patch_generate
from .inputs import TEXT_ARGUMENTS, ForwardInputs, text_arguments
from .passes import run_pass
from .rotary import rotate_by_whole_text

InputsT = TypeVar("InputsT", bound=ForwardInputs)

MULTIMODAL_OUTPUT: type = getattr(modeling_outputs, "MultimodalCausalLMOutputWithPast", CausalLMOutputWithPast)
"""The class of the outputs of most multimodal models since transformers 5.24."""


class Family(ABC, Generic[InputsT]):
    """A model family. The class states facts about its models; an instance is what the passes of one model call.

    The class is the adapter of the family (`mllm_seqpar.patching.registry.Adapter`): `matches`, `check` and `install`
    find and patch a model. A family states the attributes without a default, and defines these members:

    - the sites: `decoder`, and `visual_attention` if layers attend to frames;
    - the arguments of the model's forward: `inputs`;
    - the frames: `encode`, and `visibility`, which says what rows may attend to.

    The other members have defaults that suit a model with one frame per unit and no state of its own in the cache.

    Attributes:
        name: the family's name in messages.
        model_class, package: the name of the class of its models, and how the name of their package begins.
        chat: of a family outside this package, the `ChatFamily` of its processors. With it, programs can also fine-tune
            and question the model. The index of the families of this package names theirs.
        sizes: of a family outside this package, by `model_type` of a `config.json`: (config, name) -> the `ModelSizes`
            of the model that it describes, for the planner.
        parts: the module paths of the parts of a model that fine-tuning can freeze by name: "vision", "projector",
            "language".
        frame_arguments: the arguments of the forward that hold frames or features; they take `HostFrames`.
        visual_arguments: the arguments by which `generate` passes frames, if the model's own `generate` would repeat
            them for beams. The patched one repeats none of them, because the beams of a sample share its frames, and
            passes them with the prompt only. With beams, a forward that takes `visual_samples` receives the number of
            samples before they were repeated.
        repeats_frames: whether its `generate` passes `visual_arguments` again with every token.
        output_class: the class of the model's outputs.
        forward_doc: what the docstring of the patched forward adds to that of the unpatched one; "{frames}" stands for
            the `frame_arguments`.
        has_cross_attention: whether layers attend to frames; otherwise frames are tokens of the text.
        frame_layout: how frames map to ranks if the caller passes all of them: "zigzag" where rows attend to earlier
            frames only, which balances the load.
        model, context: of an instance: the model, its group and its options.
        has_adapters: of an instance: whether the last pass that compared weights found adapters of PEFT.
        whole_positions: of an instance: the positions (..., L) of the whole text of the pass whose layers run.
    """

    name: str
    model_class: str
    package = "transformers."
    chat: type[Any] | None = None
    sizes: Mapping[str, Callable[[dict[str, Any], str], Any]] = {}
    parts: Mapping[str, tuple[str, ...]] = {}
    frame_arguments: tuple[str, ...] = ("pixel_values",)
    visual_arguments: tuple[str, ...] = ()
    repeats_frames = False
    output_class: type = CausalLMOutputWithPast
    forward_doc = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that {frames} hold only this rank's frames of
        `visual_shard.total`, in one flat list without a batch dimension. On several ranks a cache is returned only with
        `use_cache=True`, or when one is passed.
"""
    has_cross_attention = True
    frame_layout = "contiguous"
    whole_positions: Tensor
    has_adapters = False

    def __init__(self, model: Any, context: SeqParContext) -> None:
        self.model, self.context = model, context

    # The adapter: see `Adapter`.

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return is_instance_by_name(model, cls.model_class, cls.package)

    @classmethod
    def check(cls, model: Any, context: SeqParContext) -> None:
        """Raise AdapterError or ConfigError if the model cannot be patched with these options; change nothing."""

    @classmethod
    def install(cls, model: Any, context: SeqParContext, patch: Patch) -> None:
        """Replace the forwards of the sites and of the model, each through `patch`."""
        _refuse_own_forward(model, cls.model_class)
        family = cls(model, context)
        text, visual = list(family.text_attention()), dict(family.visual_attention())
        use_seqpar_attention(patch, text)
        for module, forward in visual.items():
            patch.set_forward(module, forward)
        patch.chunk_forwards(family.mlps())
        patch.guard(model, [*text, *visual])
        rotate_by_whole_text(family, patch)
        family.install_more(patch)
        patch.set(model, "forward", _model_forward(family))
        patch_generate(model, patch, family.visual_arguments, family.repeats_frames)

    # The sites.

    @property
    @abstractmethod
    def decoder(self) -> Any:
        """The decoder of the text, a module with `layers`."""

    def text_attention(self) -> Iterable[nn.Module]:
        """Return the self-attention of the text, which uses transformers' attention interface."""
        found = [layer.self_attn for layer in self.decoder.layers if hasattr(layer, "self_attn")]
        if not found:
            raise AdapterError(
                f"{type(self).__name__}: no layer of {type(self.decoder).__name__} has a self_attn, so nothing would "
                "attend to the text of the other ranks; return the attention modules in text_attention"
            )
        return found

    def visual_attention(self) -> Iterable[tuple[nn.Module, Callable[..., Any]]]:
        """Return the modules that attend to frames, each with its `forward(module, ..., seqpar=state)`."""
        return ()

    def mlps(self) -> Iterable[nn.Module]:
        """Return the modules that `mlp_chunk_size` applies to (`Patch.chunk_forwards`)."""
        return [layer.mlp for layer in self.decoder.layers if hasattr(layer, "mlp")]

    def rotary_embeddings(self) -> Iterable[nn.Module]:
        """Return the modules that compute the rotations of the text, which are called with `position_ids` (..., s)."""
        found = getattr(self.decoder, "rotary_emb", None)
        return [] if found is None else [found]

    def install_more(self, patch: Patch) -> None:
        """Replace what this family needs beyond the sites."""

    @property
    def called_modules(self) -> Iterable[nn.Module]:
        """The modules within `model` that a pass calls itself, rather than through the modules that contain them.

        Those that `encode` calls must be added.
        """
        own = (self.model.get_input_embeddings(), self.model.get_output_embeddings(), self.decoder)
        return [module for module in own if module is not None]

    @property
    def frame_modules(self) -> Iterable[nn.Module | None]:
        """The modules that compute with frames: those that `encode` calls, and attention to frames; None for one that
        the model lacks."""
        text = {self.model.get_input_embeddings(), self.model.get_output_embeddings(), self.decoder}
        encoders = [module for module in self.called_modules if module not in text]
        return [*encoders, *(module for module, _ in self.visual_attention())]

    # The arguments of a pass.

    def inputs(self, *args: Any, **kwargs: Any) -> InputsT:
        """Return the inputs of a pass, given the arguments of the model's forward.

        A family declares ``inputs(self, text, ...)``. `text` has the arguments of `ForwardInputs` that are the same in
        all families: text, labels, cache and `visual_shard`. The others are those arguments of the forward that the
        family supports, each with its default; further ones may be added to the forward in this way. An argument that
        is not named is refused as unknown.
        """
        raise NotImplementedError

    def check_inputs(self, inputs: InputsT) -> None:
        """Raise for inputs of this rank that are invalid or not supported; the other ranks then raise too."""

    # The frames, and what rows may attend to.

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


class DecoderOnlyFamily(Family[InputsT]):
    """A patched model without cross-attention: embeddings of its frames replace placeholders in the text.

    Frames may have different numbers of tokens. Each rank encodes its own frames, and one all-to-all sends their
    embeddings to the ranks that have the rows of the placeholders (`runtime.visual_tokens`). From then on they are
    text.
    """

    has_cross_attention = False

    @abstractmethod
    def visual_token_layout(self, inputs: InputsT) -> VisualTokenLayout:
        """Return where the visual tokens of this pass are, and which embedding each has.

        Raises:
            ShapeError: the placeholders of the text and the frames do not match.
        """

    @abstractmethod
    def frames_between(self, inputs: InputsT, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the frames ``start <= f < stop`` of all, which this rank has, as `encode` takes them."""

    def visibility(self, inputs: InputsT, units: int, tokens: int) -> FrameMask:
        """Raise AssertionError: rows attend to frames only through the text."""
        raise AssertionError("a decoder-only model has no cross-attention")

    @classmethod
    def check(cls, model: Any, context: SeqParContext) -> None:
        if (offload := context.config.visual_offload) is not None:
            raise ConfigError(
                f"visual_offload={offload!r}: a decoder-only model has no visual features besides its text to offload; "
                "leave it out"
            )

    def continue_cache(self, inputs: InputsT, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        if cache_state.frame_tokens is not None:
            cache_state.frame_tokens = cache_state.frame_tokens.before(inputs.past_length)


# What the methods of a family use.


def decoder_arguments(embeds: Tensor, positions: Tensor, mask: Any, cache: Any, state: ForwardState) -> dict[str, Any]:
    """Return the arguments of `run_decoder` under the names that transformers' decoders have for them."""
    text = {"inputs_embeds": embeds, "position_ids": positions, "attention_mask": mask}
    return text | cache_argument(cache) | {"use_cache": cache is not None, "seqpar": state}


def mask_over_samples(
    visible: Tensor, tokens: int, units: int, rows: Tensor | None = None, prompt_batch: int | None = None
) -> FrameMask:
    """Return the mask over the units of all samples, given a table of the units of its sample that each row may attend
    to.

    Args:
        visible: (B, L, U) bool, over the units of the row's sample.
        units: units of all samples and ranks. With beams, B is a multiple of the number of samples, and the beams of a
            sample share its units.
        rows: (B,) for each row, the row of the frames' own pass that it continues; None if this is that pass.
        prompt_batch: rows of the frames' own pass; None: B.
    """
    visible = visible.detach().cpu()
    batch, length, per_sample = visible.shape
    prompt_batch = prompt_batch or batch
    samples = units // per_sample if per_sample else prompt_batch
    if per_sample and (units % per_sample or samples == 0 or prompt_batch % samples):
        raise ShapeError(
            f"{units} frames (or tiles) were passed for {prompt_batch} samples of the text, whose mask is for "
            f"{per_sample} each; expected {prompt_batch * per_sample}, or with beams those of the samples once"
        )
    offset = torch.arange(prompt_batch) // max(1, prompt_batch // samples) * per_sample
    offset = offset if rows is None else offset[rows]
    own = FrameMask.from_dense(visible, tokens).bounds
    return FrameMask(torch.where(own[:, 1:] > own[:, :1], own + offset[:, None], 0), FrameSizes(units, tokens))


# The forward of a patched model.


def as_forward(model: Any, forward: Callable[..., Any], doc: str = "") -> Any:
    """Return `forward(self, ...)` as a method of `model` that takes `return_dict` and `HostFrames`, never compiled.

    Its parameter `cache` is also taken as `past_key_values`. Schedules are planned in Python for each mask. Compiling
    that takes minutes, for every new mask. The docstring is that of the unpatched forward with `doc` appended.
    """
    forward.__doc__ = (model.forward.__doc__ or "") + doc

    @functools.wraps(forward)
    def with_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *map(tensor_of, args), **{name: tensor_of(x) for name, x in kwargs.items()})

    return types.MethodType(torch.compiler.disable(can_return_tuple(takes_cache(with_tensors))), model)


def _model_forward(family: Family[Any]) -> Any:
    """Return the forward of the family's model. It takes the arguments that `Family.inputs` supports."""
    unpatched = list(inspect.signature(type(family.model).forward).parameters.values())
    names = ["cache" if x.name == cache_name() else x.name for x in unpatched[1:]]  # without self
    own = list(inspect.signature(family.inputs).parameters)[1:]
    taken = {*TEXT_ARGUMENTS, *own}

    def forward(_: Any, *args: Any, **kwargs: Any) -> Any:
        for name, value in zip(names, args, strict=False):
            if name in kwargs:
                raise TypeError(f"forward() got multiple values for argument {name!r}")
            kwargs[name] = value
        text: dict[str, Any] = {}
        given: dict[str, Any] = {}
        for name in taken & kwargs.keys():
            (text if name in TEXT_ARGUMENTS else given)[name] = kwargs.pop(name)
        logits_to_keep = kwargs.pop("logits_to_keep", 0)
        return run_pass(family, family.inputs(text_arguments(family, text), **given), logits_to_keep, kwargs)

    # `generate` would pass an argument of the unpatched forward that the family does not take.
    supported = [x for x, name in zip(unpatched[1:], names, strict=True) if name in taken or name == "logits_to_keep"]
    added = [name for name in ("visual_shard", *own) if name not in names]
    further = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in added]
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [unpatched[0], *supported, *further, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
    )
    frames = " or ".join(f"`{name}`" for name in family.frame_arguments)
    return as_forward(family.model, forward, family.forward_doc.replace("{frames}", frames))


def _refuse_own_forward(model: nn.Module, model_class: str) -> None:
    """Raise AdapterError if a subclass of the family's model class overrides its forward, which is replaced."""
    named = (each for each in type(model).__mro__ if each.__name__ == model_class)
    known: Any = next(named, type(model))
    if type(model).forward is not known.forward:
        raise AdapterError(
            f"patch_model: {type(model).__name__} overrides the forward of {known.__name__}, and the patched "
            f"forward would not call it. Patch a {known.__name__}, and write what the override adds as a module or "
            "a function that calls the model"
        )
