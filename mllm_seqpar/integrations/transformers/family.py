"""A model family: what its author writes, and the forward of a model that it is installed on."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import modeling_outputs
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from mllm_seqpar._compat import cache_name, drops_cache, takes_cache
from mllm_seqpar.errors import AdapterError, ConfigError, ShapeError
from mllm_seqpar.masks import FrameMask
from mllm_seqpar.models.cache import SequenceParallelCacheState
from mllm_seqpar.patching import Patch
from mllm_seqpar.patching.registry import is_instance_by_name
from mllm_seqpar.runtime.context import SeqParContext
from mllm_seqpar.sharding import tensor_of

from .attention import use_seqpar_attention
from .facts import InputsT, ModelFacts
from .generation import patch_generate
from .inputs import ForwardInputs
from .passes import Pass
from .rotary import rotate_by_whole_text

MULTIMODAL_OUTPUT: type = getattr(modeling_outputs, "MultimodalCausalLMOutputWithPast", CausalLMOutputWithPast)
"""The class of the outputs of most multimodal models since transformers 5.24."""


class Family(ModelFacts[InputsT]):
    """A model family. The class states facts about its models; an instance is what the passes of one model call.

    The class is the adapter of the family (`mllm_seqpar.patching.registry.Adapter`): `matches`, `check` and `install`
    find and patch a model. A family states the attributes without a default, and defines these members:

    - the sites: `decoder`, and `visual_attention` if layers attend to frames;
    - the arguments of the model's forward: `inputs`;
    - the frames: `encode`, and `visibility`, which says what rows may attend to.

    The other members, also those of `ModelFacts`, have defaults that suit a model with one frame per unit and no state
    of its own in the cache.

    Attributes:
        name: the family's name in messages.
        model_class, package: the name of the class of its models, and how the name of their package begins.
        chat: of a family outside this package, the `ChatFamily` of its processors. With it, programs can also fine-tune
            and question the model. The index of the families of this package names theirs.
        sizes: of a family outside this package, by `model_type` of a `config.json`: (config, name) -> the `ModelSizes`
            of the model that it describes, for the planner.
        parts: the module paths of the parts of a model that fine-tuning can freeze by name: "vision", "projector",
            "language".
        visual_arguments: the arguments by which `generate` passes frames, if the model's own `generate` would repeat
            them for beams. The patched one repeats none of them, because the beams of a sample share its frames, and
            passes them with the prompt only. With beams, a forward that takes `visual_samples` receives the number of
            samples before they were repeated.
        forward_doc: what the docstring of the patched forward adds to that of the unpatched one; "{frames}" stands for
            the `frame_arguments`.
    """

    name: str
    model_class: str
    package = "transformers."
    chat: type[Any] | None = None
    sizes: Mapping[str, Callable[[dict[str, Any], str], Any]] = {}
    parts: Mapping[str, tuple[str, ...]] = {}
    visual_arguments: tuple[str, ...] = ()
    forward_doc = """
        Sequence-parallel (patched by mllm_seqpar): `visual_shard` says that {frames} hold only this rank's frames of
        `visual_shard.total`, in one flat list without a batch dimension. On several ranks a cache is returned only with
        `use_cache=True`, or when one is passed.
"""

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
        named: list[Any] = [each for each in type(model).__mro__ if each.__name__ == cls.model_class]
        if named and type(model).forward is not named[0].forward:
            raise AdapterError(
                f"patch_model: {type(model).__name__} overrides the forward of {cls.model_class}, and the patched "
                f"forward would not call it. Patch a {cls.model_class}, and write what the override adds as a module "
                "or a function that calls the model"
            )
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

    def mlps(self) -> Iterable[nn.Module]:
        """Return the modules that `mlp_chunk_size` applies to (`Patch.chunk_forwards`)."""
        return [layer.mlp for layer in self.decoder.layers if hasattr(layer, "mlp")]

    def install_more(self, patch: Patch) -> None:
        """Replace what this family needs beyond the sites."""

    # The arguments of a pass.

    def inputs(self, *args: Any, **kwargs: Any) -> InputsT:
        """Return the inputs of a pass, given the arguments of the model's forward.

        A family declares ``inputs(self, text, ...)``. `text` has the arguments of `ForwardInputs` that are the same in
        all families: text, labels, cache and `visual_shard`. The others are those arguments of the forward that the
        family supports, each with its default; further ones may be added to the forward in this way. An argument that
        is not named is refused as unknown.
        """
        raise NotImplementedError


class DecoderOnlyFamily(Family[InputsT]):
    """A patched model without cross-attention: embeddings of its frames replace placeholders in the text.

    Frames may have different numbers of tokens. Each rank encodes its own frames, and one all-to-all sends their
    embeddings to the ranks that have the rows of the placeholders (`runtime.visual_tokens`). From then on they are
    text.
    """

    has_cross_attention = False

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


# The forward of a patched model.


TEXT_ARGUMENTS = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "use_cache"),
    *("labels", "shift_labels", "visual_shard"),
)
"""The arguments of a forward that are the same in all families."""


def text_arguments(family: ModelFacts[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments of `ForwardInputs` that are the same in all families, given `TEXT_ARGUMENTS` of a call.

    A pass uses a cache if it is given one or the caller requests one (`use_cache`). If the caller does not say, one
    process makes a cache as the unpatched model does, except in training, where the cache would hold K and V that are
    otherwise recomputed. Several ranks make none: with a cache, every rank computes all rows of the text, unless
    `shard_prompt_from` shards a long prompt. Where gradient checkpointing drops the cache, no new one is made. With
    offloaded features none is made in grad mode, because its K and V in host memory have no gradients.

    Raises:
        ShapeError: the text is no tensor.
    """
    model, context = family.model, family.context
    text: dict[str, Any] = {**dict.fromkeys(TEXT_ARGUMENTS), **given}
    for name in ("input_ids", "inputs_embeds"):
        if not isinstance(text[name], Tensor | None):
            raise ShapeError(f"{name}: expected a tensor, got {type(text[name]).__name__}")
    has_cache, use_cache = text["cache"] is not None, text["use_cache"]
    by_default = bool(getattr(family.text_config, "use_cache", False))  # not every config has it
    wanted = by_default if use_cache is None else use_cache
    unpatched_has_cache = has_cache or (bool(wanted) and not drops_cache(family.decoder))
    if use_cache is None and wanted:
        trains = torch.is_grad_enabled() and (model.training or context.config.visual_offload is not None)
        has_labels = text["labels"] is not None or text["shift_labels"] is not None
        wanted = context.comm.size == 1 and not has_labels and not trains
    makes_cache = bool(wanted) and not (model.training and any(map(drops_cache, family.checkpointed_modules)))
    return text | {"use_cache": has_cache or makes_cache, "detects_packing": not unpatched_has_cache}


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
        if args and len(args) > len(names):
            raise TypeError(f"forward() takes {len(names) + 1} positional arguments but {len(args) + 1} were given")
        for name, value in zip(names, args, strict=False):
            if name in kwargs:
                raise TypeError(f"forward() got multiple values for argument {name!r}")
            kwargs[name] = value
        text: dict[str, Any] = {}
        given: dict[str, Any] = {}
        for name in taken & kwargs.keys():
            (text if name in TEXT_ARGUMENTS else given)[name] = kwargs.pop(name)
        logits_to_keep, cache = kwargs.pop("logits_to_keep", 0), text.get("cache")
        inputs: ForwardInputs
        try:
            inputs = family.inputs(text_arguments(family, text), **given)
        except Exception as error:
            # Several ranks compare the inputs of a pass that begins a text, but not those of every other one.
            begins = cache is None or (isinstance(cache, Cache) and cache.get_seq_length() == 0)
            if family.context.comm.size == 1 or not begins:
                raise
            inputs = ForwardInputs(frames=None, frames_are_features=False, compared_tensors={}, error=error)
        return Pass(family, inputs, logits_to_keep, kwargs).run()

    # `generate` would pass an argument of the unpatched forward that the family does not take.
    supported = [x for x, name in zip(unpatched[1:], names, strict=True) if name in taken or name == "logits_to_keep"]
    added = [name for name in ("visual_shard", *own) if name not in names]
    further = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in added]
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [unpatched[0], *supported, *further, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
    )
    frames = " or ".join(f"`{name}`" for name in family.frame_arguments)
    return as_forward(family.model, forward, family.forward_doc.replace("{frames}", frames))
