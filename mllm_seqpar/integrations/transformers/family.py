"""A model family: the interface between its facts and the forward passes in `passes`, which run it sequence-parallel.

Shape legend: B samples, L text tokens of the pass, s of them on this rank, F frames of all samples and ranks (f on this
rank). A frame is held by one rank as a whole. It consists of `units_per_frame` units; masks are made of units.
"""

from __future__ import annotations

import functools
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import modeling_outputs
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from mllm_seqpar._compat import cache_argument, cache_name, drops_cache, takes_cache
from mllm_seqpar.errors import AdapterError, ConfigError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.models.cache import SequenceParallelCacheState
from mllm_seqpar.patching import Patch
from mllm_seqpar.patching.registry import is_instance_by_name
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.runtime.forward_state import ForwardState
from mllm_seqpar.runtime.fsdp_units import modules_around
from mllm_seqpar.runtime.strategy_selector import CrossAttentionShape
from mllm_seqpar.runtime.visual_tokens import VisualTokenLayout
from mllm_seqpar.sharding import Spans, frame_spans, tensor_of

from .attention import use_seqpar_attention
from .checks import check_frames, check_labels, refuse_custom_loss, refuse_reentrant_checkpointing
from .frames import AttendedFrames, EmbeddedFrames, PassFrames
from .generation import patch_generate
from .inputs import ForwardInputs
from .passes import run_pass

if TYPE_CHECKING:
    from mllm_seqpar.data.chat_family import ChatFamily
    from mllm_seqpar.planner.model_sizes import ModelSizes

InputsT = TypeVar("InputsT", bound=ForwardInputs)

MULTIMODAL_OUTPUT: type = getattr(modeling_outputs, "MultimodalCausalLMOutputWithPast", CausalLMOutputWithPast)
"""The class of the outputs of most multimodal models since transformers 5.24."""

_TEXT_ARGUMENTS = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "use_cache"),
    *("labels", "shift_labels", "visual_shard"),
)

VISUAL_SHARD_DOC = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that {frames} hold only this rank's frames of
        `visual_shard.total`, in one flat list without a batch dimension. On several ranks a cache is returned only with
        `use_cache=True`, or when one is passed.
"""


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


class Family(ABC, Generic[InputsT]):
    """A model family: everything that the package has to know of it. Each patched model has an instance.

    The class is the adapter of the family (`mllm_seqpar.patching.registry.Adapter`): its class methods find and patch a
    model. The methods of an instance name the sites of the model, and what the forward passes use. The abstract methods
    and `inputs` are the minimum: which arguments a pass takes, how frames are encoded, what rows may attend to, and how
    the decoder runs. The other methods have defaults that suit a model with one frame per unit and no state of its own
    in the cache. With a `chat`, programs can also fine-tune and question the model; with `model_sizes`, the planner can
    plan it.

    Attributes:
        name: the family's name in messages.
        model_class, package: the name of the class of its models, and how the name of their package begins.
        processors: class names of its processors.
        chat: the chat format of these processors.
        model_types: values of `model_type` in the `config.json` of its models.
        model_sizes: (config, name) -> the sizes of the model that such a file describes, for the planner.
        parts: the module paths of the parts of a model that fine-tuning can freeze by name: "vision", "projector",
            "language".
        frame_arguments: the arguments of the forward that hold frames or features; they take `HostFrames`.
        visual_arguments: the arguments by which `generate` passes frames, if the model's own `generate` would repeat
            them for beams. The patched one repeats none of them, because the beams of a sample share its frames, and
            passes them with the prompt only. With beams, a forward that takes `visual_samples` receives the number of
            samples before they were repeated.
        refused_arguments: inherited parameters of `inputs` that this family does not support.
        output_class: the class of the model's outputs.
        forward_doc: what the docstring of the patched forward adds to that of the unpatched one.
        repeats_frames: whether its `generate` passes `visual_arguments` again with every token.
        has_cross_attention: whether layers attend to frames; otherwise frames are tokens of the text.
        checkpoints_visual_layers: whether transformers' gradient checkpointing recomputes layers that attend to frames.
        frame_layout: how frames map to ranks if the caller passes all of them: "zigzag" where rows attend to earlier
            frames only, which balances the load.
    """

    name: str
    model_class: str
    package = "transformers."
    processors: tuple[str, ...] = ()
    chat: type[ChatFamily] | None = None
    model_types: tuple[str, ...] = ()
    model_sizes: Callable[[dict[str, Any], str], ModelSizes] | None = None
    parts: Mapping[str, tuple[str, ...]] = {}
    frame_arguments: tuple[str, ...] = ("pixel_values",)
    visual_arguments: tuple[str, ...] = ()
    refused_arguments: tuple[str, ...] = ()
    output_class: type = CausalLMOutputWithPast
    forward_doc = ""
    repeats_frames = False
    has_cross_attention = True
    checkpoints_visual_layers = True
    frame_layout = "contiguous"

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
        cls._refuse_own_forward(model)
        family = cls(model, context)
        text, visual = list(family.text_attention()), dict(family.visual_attention())
        use_seqpar_attention(patch, text)
        for module, forward in visual.items():
            patch.set_forward(module, forward)
        patch.chunk_forwards(family.mlps())
        patch.guard(model, [*text, *visual])
        family.install_more(patch)
        patch.set(model, "forward", family._model_forward())
        patch_generate(model, patch, family.visual_arguments, family.repeats_frames)

    @classmethod
    def _refuse_own_forward(cls, model: nn.Module) -> None:
        """Raise AdapterError if a subclass of the family's model class overrides its forward, which is replaced."""
        named = (each for each in type(model).__mro__ if each.__name__ == cls.model_class)
        known: Any = next(named, type(model))
        if type(model).forward is not known.forward:
            raise AdapterError(
                f"patch_model: {type(model).__name__} overrides the forward of {known.__name__}, and the patched "
                f"forward would not call it. Patch a {known.__name__}, and write what the override adds as a module or "
                "a function that calls the model"
            )

    def _model_forward(self) -> Any:
        unpatched = list(inspect.signature(type(self.model).forward).parameters.values())
        names = ["cache" if x.name == cache_name() else x.name for x in unpatched[1:]]  # without self
        of_inputs = list(inspect.signature(self.inputs).parameters)[1:]
        own = [name for name in of_inputs if name not in self.refused_arguments]
        taken = {*_TEXT_ARGUMENTS, *own}

        def forward(_: Any, *args: Any, **kwargs: Any) -> Any:
            for name, value in zip(names, args, strict=False):
                if name in kwargs:
                    raise TypeError(f"forward() got multiple values for argument {name!r}")
                kwargs[name] = value
            text: dict[str, Any] = dict.fromkeys(_TEXT_ARGUMENTS)
            given: dict[str, Any] = {}
            for name in taken & kwargs.keys():
                (text if name in text else given)[name] = kwargs.pop(name)
            logits_to_keep = kwargs.pop("logits_to_keep", 0)
            return run_pass(self, self.inputs(self._text_arguments(**text), **given), logits_to_keep, kwargs)

        # `generate` would pass an argument of the unpatched forward that the family does not take.
        supported = [
            x for x, name in zip(unpatched[1:], names, strict=True) if name in taken or name == "logits_to_keep"
        ]
        added = [name for name in ("visual_shard", *own) if name not in names]
        further = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in added]
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [unpatched[0], *supported, *further, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
        )
        return as_forward(self.model, forward, self.forward_doc)

    # The sites.

    def text_attention(self) -> Iterable[nn.Module]:
        """Return the self-attention of the text, which uses transformers' attention interface."""
        return ()

    def visual_attention(self) -> Iterable[tuple[nn.Module, Callable[..., Any]]]:
        """Return the modules that attend to frames, each with its `forward(module, ..., seqpar=state)`."""
        return ()

    def mlps(self) -> Iterable[nn.Module]:
        """Return the modules that `mlp_chunk_size` applies to (`Patch.chunk_forwards`)."""
        return ()

    def install_more(self, patch: Patch) -> None:
        """Replace what this family needs beyond the sites."""

    def inputs(self, *args: Any, **kwargs: Any) -> InputsT:
        """Return the inputs of a pass, given the arguments of the model's forward.

        A family declares ``inputs(self, text, ...)``. `text` has the arguments of `ForwardInputs` that are the same in
        all families: text, labels, cache and `visual_shard`. The others are those arguments of the forward that the
        family supports, each with its default; further ones may be added to the forward in this way. An argument that
        is not named is refused as unknown.
        """
        raise NotImplementedError

    @property
    def packing_decoder(self) -> Any:
        """The decoder of the unpatched model if positions separate packed sequences in it, otherwise None."""
        return None

    # The frames.

    @abstractmethod
    def encode(self, frames: Tensor, *extras: Tensor) -> Tensor:
        """Encode this rank's frames (f, ...) and their extras, and return features (f * units, tokens, width).

        It must not read `context`: `ChatFamily.encode` calls it for models that are not patched.
        """

    @abstractmethod
    def blank_frame(self) -> tuple[Tensor, ...]:
        """Return one empty frame and its extras, as `encode` takes them, on the model's device."""

    def layout_of_frames(self, inputs: InputsT) -> str:
        """Return how the frames of this pass map to ranks: as the caller has sharded them, or as `frame_layout`."""
        shard, comm = inputs.visual_shard, self.context.comm
        layout = self.frame_layout if shard is None else shard.layout(comm.rank, comm.size)
        assert layout is not None, "checked before"
        return layout

    def frame_spans(self, inputs: InputsT) -> Sequence[Spans]:
        """Return the frames of every rank. Without frames, rank 0 has the empty one."""
        return frame_spans(max(1, inputs.total_frames), self.context.comm.size, self.layout_of_frames(inputs))

    def begin_frames(self, inputs: InputsT, cache_state: SequenceParallelCacheState | None = None) -> PassFrames:
        """Return the frames of a pass, which are not encoded yet."""
        return AttendedFrames(self, inputs, cache_state)

    def units_per_frame(self, inputs: InputsT) -> int:
        return 1

    def unit_index(self, inputs: InputsT, units: int) -> Tensor:
        """Return (units, ...), what projections may need of each unit of all ranks: its position, or its rotation."""
        return torch.zeros(units, dtype=torch.long)

    # The arguments of a pass.

    def _text_arguments(
        self,
        *,
        cache: Any,
        use_cache: bool | None,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        **given: Any,
    ) -> dict[str, Any]:
        either, decoder = labels if shift_labels is None else shift_labels, self.packing_decoder
        return given | {
            "cache": cache,
            "use_cache": self.makes_cache(cache, use_cache, either),
            "labels": labels,
            "shift_labels": shift_labels,
            "detects_packing": decoder is not None and not self.unpatched_makes_cache(decoder, cache, use_cache),
        }

    def makes_cache(self, past: Any, use_cache: bool | None, labels: Tensor | None) -> bool:
        """Return whether a pass fills or continues a cache: if there is one, or the caller requests one.

        If the caller does not say (`use_cache=None`), one process makes a cache as the unpatched model does, except in
        training, where the cache would hold K and V that are otherwise recomputed. Several ranks make none, because a
        cache needs all text on every rank. Where gradient checkpointing drops the cache, no new one is made. With
        offloaded features none is made in grad mode, because its K and V in host memory have no gradients.

        `labels` are those of either kind, shifted or not.
        """
        if past is not None or use_cache is False:
            return past is not None
        if self.model.training and any(map(drops_cache, self._checkpointed_modules)):
            return False
        if use_cache:
            return True
        trains = self.model.training and torch.is_grad_enabled()
        trains |= self.context.config.visual_offload is not None and torch.is_grad_enabled()
        return self.context.comm.size == 1 and labels is None and not trains and bool(self.text_config.use_cache)

    def unpatched_makes_cache(self, decoder: Any, past: Any, use_cache: bool | None) -> bool:
        """Return whether a pass of the unpatched model has a cache; it then ignores packed sequences of positions."""
        wanted = self.text_config.use_cache if use_cache is None else use_cache
        return past is not None or (bool(wanted) and not drops_cache(decoder))

    # What rows may attend to.

    def media_position(self, inputs: InputsT) -> Any:
        """Return what `visibility` needs about the prompt's frames, in this pass and in later ones over its cache.

        It is called once the ranks agree on their inputs. An exception raised here is therefore raised on all ranks.
        """
        return None

    @abstractmethod
    def visibility(self, inputs: InputsT, units: int, tokens: int, media_position: Any) -> FrameMask:
        """Return which of `units` units of `tokens` keys each the rows (B, L) of this pass may attend to.

        It is not called in a pass without frames, whose rows attend to none.
        """

    def row_facts(self, inputs: InputsT, mask: FrameMask, media_position: Any) -> Mapping[str, Tensor]:
        """Return what layers read of the rows as `state.rows`: tensors (B, L) on the model's device, by name.

        They are sharded like tokens. `mask` is that of all rows; without frames, it has the empty frame that keeps the
        ranks of FSDP in step, and no row attends to it.
        """
        return {}

    # The language model.

    @property
    def called_modules(self) -> Iterable[nn.Module]:
        """The modules within `model` that a pass calls itself, rather than through the modules that contain them."""
        return [module for module in (self.model.get_input_embeddings(), self.lm_head) if module is not None]

    @functools.cached_property
    def bypassed_modules(self) -> list[nn.Module]:
        """The modules that contain one of `called_modules`.

        FSDP2 gathers the parameters of a unit when it is called. These modules are not called, or not around everything
        that they contain, so the pass gathers their parameters itself.
        """
        return modules_around(self.model, self.called_modules)

    @functools.cached_property
    def _checkpointed_modules(self) -> list[nn.Module]:
        """The modules that transformers' gradient checkpointing can be enabled for."""
        return [module for module in self.model.modules() if hasattr(module, "gradient_checkpointing")]

    @functools.cached_property
    def text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @property
    def lm_head(self) -> Any:
        return self.model.get_output_embeddings()

    def embed(self, ids: Tensor) -> Tensor:
        """(B, s) token ids -> (B, s, C)."""
        return self.model.get_input_embeddings()(ids)

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens that `embed` takes; None if that is unknown."""
        tables = [module for module in self.model.get_input_embeddings().modules() if isinstance(module, nn.Embedding)]
        return sum(table.weight.shape[0] for table in tables) or None

    def embedding_weight(self) -> Tensor:
        """Return a parameter of the language model, whose device and dtype the features take."""
        return next(iter(self.model.get_input_embeddings().parameters()))

    def cross_attention_shape(self) -> CrossAttentionShape | None:
        """Return what `strategy="auto"` selects by before any layer runs; None if each layer selects."""
        return None

    def text_mask(self, embeds: Tensor, mask: Any, positions: Tensor, cache: Any) -> Any:
        """Return the decoder's `attention_mask` for text that every rank has whole, made for the patched attention.

        The decoder itself would create one for the attention that its config names.
        """
        return mask

    @abstractmethod
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

    # Inputs, outputs and the cache.

    def check_inputs(self, inputs: InputsT, kwargs: Mapping[str, Any]) -> None:
        """Raise for inputs of this rank that are invalid or not supported; the other ranks then raise too."""
        check_frames(self.context.comm, inputs)
        if self.checkpoints_visual_layers and self.model.training and torch.is_grad_enabled():
            refuse_reentrant_checkpointing(self._checkpointed_modules)
        shards_text = self.context.comm.size > 1 and self.context.config.self_attention != "local"
        own_loss = (shards_text and not inputs.use_cache) or self.leaves_out_logits(
            inputs, kwargs.get("logits_to_keep", 0)
        )
        if own_loss and inputs.has_labels:
            refuse_custom_loss(self.model)
            check_labels(inputs)

    def leaves_out_logits(self, inputs: InputsT, logits_to_keep: int | Tensor) -> bool:
        """Return whether a pass returns a loss and no logits; the head then computes only the rows with a target."""
        wanted = self.context.config.logits != "none" or inputs.is_decoding_step
        return not wanted and inputs.has_labels and isinstance(logits_to_keep, int) and logits_to_keep == 0

    def model_output(self, out: CausalLMOutputWithPast, features: Tensor | None, inputs: InputsT) -> Any:
        """Return an `output_class`; `features` are what this rank encoded in this pass, or None.

        Since transformers 5.24 it may have `image_outputs`, the output of the vision tower, which no pass keeps. They
        are empty if `generate` reads them to pass frames again (`repeats_frames`); otherwise they are None.
        """
        if self.output_class is CausalLMOutputWithPast:
            return out
        reads = self.repeats_frames and "image_outputs" in {field.name for field in fields(self.output_class)}
        return self.output_class(**out, **({"image_outputs": BaseModelOutputWithPooling()} if reads else {}))

    def continue_cache(self, cache: Any, cache_state: SequenceParallelCacheState, past_length: int) -> None:
        """Bring `cache_state` up to date with a cache of `past_length` tokens, before each pass that uses the cache.

        Since the last pass, the text may have been cropped, and the unpatched model may have stored K and V of frames.

        Raises:
            ConfigError: the cache holds K and V of frames that cannot be taken over.
        """

    def mark_cache(self, cache: Any, cache_state: SequenceParallelCacheState) -> None:
        """Change the cache for the unpatched model, after frames were stored in `cache_state`.

        The unpatched model must then find these frames, or fail.
        """

    def rows_match_frames(self, inputs: InputsT, media_position: Any) -> bool:
        """Return whether the rows of the cache are still in the order of the samples that the frames came with."""
        return True


class DecoderOnlyFamily(Family[InputsT]):
    """A patched model without cross-attention: embeddings of its frames replace placeholders in the text.

    Frames may have different numbers of tokens. Each rank encodes its own frames, and one all-to-all sends their
    embeddings to the ranks that have the rows of the placeholders (`runtime.visual_tokens`). From then on they are
    text.
    """

    has_cross_attention = False
    checkpoints_visual_layers = False

    def begin_frames(self, inputs: InputsT, cache_state: SequenceParallelCacheState | None = None) -> PassFrames:
        return EmbeddedFrames(self, inputs, cache_state)

    @abstractmethod
    def media_position(self, inputs: InputsT) -> VisualTokenLayout:
        """Return where the visual tokens of this pass are, and which embedding each has.

        Raises:
            ShapeError: the placeholders of the text and the frames do not match.
        """

    @abstractmethod
    def frames_between(self, inputs: InputsT, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the frames ``start <= f < stop`` of all, which this rank has, as `encode` takes them."""

    def visibility(self, inputs: InputsT, units: int, tokens: int, media_position: Any) -> FrameMask:
        """Raise AssertionError: rows attend to frames only through the text."""
        raise AssertionError("a decoder-only model has no cross-attention")

    @classmethod
    def check(cls, model: Any, context: SeqParContext) -> None:
        if (offload := context.config.visual_offload) is not None:
            raise ConfigError(
                f"visual_offload={offload!r}: a decoder-only model has no visual features besides its text to offload; "
                "leave it out"
            )

    def continue_cache(self, cache: Any, cache_state: SequenceParallelCacheState, past_length: int) -> None:
        if cache_state.media_position is not None:
            cache_state.media_position = cache_state.media_position.before(past_length)


def decoder_arguments(embeds: Tensor, positions: Tensor, mask: Any, cache: Any, state: ForwardState) -> dict[str, Any]:
    """Return the arguments of `run_decoder` under the names that transformers' decoders have for them."""
    text = {"inputs_embeds": embeds, "position_ids": positions, "attention_mask": mask}
    return text | cache_argument(cache) | {"use_cache": cache is not None, "seqpar": state}
