"""The arguments of one forward pass of a transformers model, the sizes derived from them, and the checks before it.

Each rank validates its arguments, and all ranks compare their inputs.

Shape legend: B samples, L text tokens, F frames of all samples and ranks, f frames of this rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import TransformersKwargs

from mllm_seqpar._transfers import copy_to_host
from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.comm.base import fingerprint
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.runtime.loss import shifted
from mllm_seqpar.runtime.visual_features import checksum, sampled_bits
from mllm_seqpar.sharding import FRAME_LAYOUTS, FrameShard, describe_spans, frame_spans

from .cache import cache_state_of


@dataclass(frozen=True, kw_only=True)
class ForwardInputs:
    """The inputs of one forward pass.

    Attributes:
        input_ids, inputs_embeds: (B, L) or (B, L, width); exactly one of them is given.
        attention_mask: (B, tokens so far) or None. With a static cache also the mask that `generate` prepares.
        position_ids: (B or 1, L) or None.
        labels, shift_labels: (B, L) or None.
        frames: (F, ...) pixels or features; with `visual_shard` this rank's (f, ...); None without frames.
        pixels_and_features: whether the caller passed both, which is an error.
        compared_tensors: further tensors that must be equal on all ranks: they say where frames belong in the text.
            The host plans the pass by them, so it reads them; see `on_host`.
        use_cache: whether the pass uses or makes a cache.
        detects_packing: whether positions separate packed sequences if there is no mask. As everywhere in transformers,
            this is the case if the unpatched model would not create a cache.
        extras: (F, ...) or (f, ...) each: further tensors with one entry per frame, such as its aspect ratio.
        frame_names: names of the arguments that frames are passed by, pixels first, for messages.
        compare_frames: whether pixels that all ranks have must be equal bit by bit. Computed values may differ.
        frame_layouts: the layouts that `visual_shard` may have.
    """

    frame_layouts: ClassVar[tuple[str, ...]] = FRAME_LAYOUTS

    frames: Tensor | None
    frames_are_features: bool
    compared_tensors: Mapping[str, Tensor]
    input_ids: Tensor | None = None
    inputs_embeds: Tensor | None = None
    attention_mask: Any = None
    position_ids: Tensor | None = None
    labels: Tensor | None = None
    shift_labels: Tensor | None = None
    pixels_and_features: bool = False
    visual_shard: FrameShard | None = None
    past_key_values: Any = None
    use_cache: bool = False
    detects_packing: bool = False
    extras: tuple[Tensor, ...] = ()
    frame_names: tuple[str, ...] = ("pixel_values", "image_embeds")
    compare_frames: bool = True
    _host: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def text(self) -> Tensor:
        """`input_ids` or `inputs_embeds`, whichever was given."""
        given = [x for x in (self.input_ids, self.inputs_embeds) if x is not None]
        if len(given) != 1:
            raise ShapeError("pass either input_ids or inputs_embeds")
        return given[0]

    @functools.cached_property
    def batch(self) -> int:
        return self.text.shape[0]

    @functools.cached_property
    def length(self) -> int:
        return self.text.shape[1]

    @functools.cached_property
    def past_length(self) -> int:
        """Number of tokens in the cache before this pass."""
        return 0 if self.past_key_values is None else int(self.past_key_values.get_seq_length())

    @property
    def text_position_ids(self) -> Tensor | None:
        """The positions (B or 1, L) that count the tokens of the text and separate packed sequences, or None."""
        return self.position_ids

    @functools.cached_property
    def total_frames(self) -> int:
        if self.frames is None:
            return 0
        return self.visual_shard.total if self.visual_shard is not None else self.frames.shape[0]

    @property
    def is_decoding_step(self) -> bool:
        """Whether this pass adds one token to a cache; the ranks do not compare the inputs of such a pass."""
        return self.past_length > 0 and self.length == 1

    @property
    def prompt_rows(self) -> Tensor:
        """(B,) int64: the row of the frames' own pass that each row continues; the rows of a cache may have moved."""
        state = cache_state_of(self.past_key_values) if self.past_length else None
        return torch.arange(self.batch) if state is None else state.rows_of(self.batch)

    def on_host(self, name: str) -> Tensor | None:
        """Return one of the tensors of `read_by_host` on the CPU; None if the pass has none of that name."""
        if not self._host:
            self.read()
        return self._host.get(name)

    def read(self, others: Sequence[Tensor] = ()) -> list[Tensor]:
        """Read the tensors that the host needs in this pass, and `others`, in one copy; return the others on the CPU.

        Each copy from the device makes the host wait until the device has computed everything before it.
        """
        wanted = self.read_by_host()
        found = copy_to_host([*wanted.values(), *others])
        self._host.update(zip(wanted, found[: len(wanted)], strict=True))
        return found[len(wanted) :]

    def read_by_host(self) -> dict[str, Tensor]:
        """Return the tensors whose values the host needs to plan this pass, by name.

        These are token ids and labels, except in a decoding step, a two-dimensional attention mask, positions that may
        separate packed sequences, the compared tensors, and, in a pass with a cache, the sample of the frames by which
        they are recognised later.
        """
        found, mask = dict(self.compared_tensors), self.attention_mask
        names = () if self.is_decoding_step else ("input_ids", "labels", "shift_labels")
        found |= {name: x for name in names if (x := getattr(self, name)) is not None}
        if isinstance(mask, Tensor) and mask.dim() == 2:
            found["attention_mask"] = mask
        elif mask is None and self.detects_packing and self.text_position_ids is not None:
            found["position_ids"] = self.text_position_ids
        if self.frames is not None and self.use_cache:
            found["sample of frames"] = sampled_bits(self.frames)
        return found

    def check_shard(self, shard: FrameShard) -> None:
        """Raise ShapeError unless the tensors of frames have the same number of frames as the shard."""
        assert self.frames is not None
        local = len(shard)
        for shape in (tuple(tensor.shape) for tensor in (self.frames, *self.extras)):
            if shape[0] != local:
                raise ShapeError(
                    f"visual_shard: {shard} means {local} frames, {shape[0]} were passed, in a tensor of shape {shape}"
                )

    @functools.cached_property
    def positions(self) -> Tensor:
        """(..., B or 1, L), rotary positions; if none were given, they start at the length of the cache.

        The first use is before the decoder runs, which fills the cache.
        """
        if self.position_ids is not None:
            return self.position_ids
        return torch.arange(self.length, device=self.text.device)[None] + self.past_length

    @property
    def has_labels(self) -> bool:
        return self.labels is not None or self.shift_labels is not None

    def target_labels(self, ignore_index: int | None = None) -> Tensor:
        """Return (B, L) shifted labels, which were given, on the CPU. The last is `ignore_index` (None: -100)."""
        labels, targets = self.on_host("labels"), self.on_host("shift_labels")
        if targets is not None:
            return targets
        assert labels is not None
        return shifted(labels, ignore_index)


def as_compared_tensors(**values: Any) -> dict[str, Tensor]:
    """Return values (None, numbers, tensors, or lists of them) as tensors by name; "name 0", "name 1" ... of a list."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            found[f"length of {name}"] = torch.tensor(len(value))
        if isinstance(value, (list, tuple)) and not all(isinstance(x, int) for x in value):
            found |= as_compared_tensors(**{f"{name} {number}": x for number, x in enumerate(value)})
        elif value is not None:
            found[name] = torch.as_tensor(value)
    return found


_REMEDY = (
    "Every rank of the group must pass what it would pass to the unpatched model. transformers' Trainer gives each "
    "rank its "
    "own samples: use mllm_seqpar.SeqParTrainer instead, or SeqParMixin for a subclass"
)
_SAMPLED_WEIGHTS = 16
"""The number of values of each parameter that are compared."""
_KNOWN_ARGUMENTS = {*TransformersKwargs.__annotations__, "cache_position", "ignore_index", "logits_to_keep"}
_PACKED_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_KNOWN_ARGUMENTS |= {"return_dict", "token_type_ids"}  # tokenizers return token_type_ids for all models


def require_same_inputs(
    comm: Communicator,
    inputs: ForwardInputs,
    check: Callable[[], None],
    *,
    model: nn.Module | None = None,
    kwargs: Mapping[str, Any] | None = None,
    compare_weights: bool = False,
) -> None:
    """Raise on every rank of the group unless all ranks pass the same text, number of frames and pixels.

    Token ids, masks, positions and labels are compared by digests. Pixels are compared by a sample of them if every
    rank has all of them, and so are embeddings that replace token ids. Features may differ in their last bits between
    devices and are compared by shape.

    `check` is the check of the family; if it raises on one rank, the others raise an AgreementError. If `model` is
    given, its modes are compared, and with `compare_weights` also a sample of its weights and which of them are
    trained.
    """

    def validated() -> None:
        _check_frames(comm, inputs)
        check()

    if comm.size == 1:
        validated()
        inputs.read()
        return
    facts = functools.partial(_facts, comm, inputs, model, kwargs or {}, compare_weights)
    agree(comm, "forward pass", validated, lambda _: facts(), remedy=_REMEDY)


def _facts(
    comm: Communicator,
    inputs: ForwardInputs,
    model: nn.Module | None,
    kwargs: Mapping[str, Any],
    compare_weights: bool,
) -> dict[str, Any]:
    """Return what must be equal on all ranks, by name. All tensors are read from the device at once."""
    frames, mask, shard = inputs.frames, inputs.attention_mask, inputs.visual_shard
    num_items, logits_to_keep = (kwargs.get(name) for name in ("num_items_in_batch", "logits_to_keep"))
    all_have_pixels = frames is not None and not inputs.frames_are_features and shard is None and inputs.compare_frames
    compared: dict[str, Sequence[Any]] = {
        "embeddings": [sampled_bits(inputs.text)] if inputs.input_ids is None else [],
        "the attention mask": list(mask.values()) if isinstance(mask, Mapping) else [mask],  # one per kind of layer
        "position ids": [inputs.position_ids],
        "pixels": [sampled_bits(frames)] if all_have_pixels and frames is not None else [],
        "logits_to_keep": [logits_to_keep if isinstance(logits_to_keep, Tensor) else None],
        "weights": _sampled_weights(model) if compare_weights and model is not None else [],
    }
    given = {name: [x for x in tensors if x is not None] for name, tensors in compared.items()}
    number = torch.as_tensor(-1 if num_items is None else num_items)
    *read, number = inputs.read([*itertools.chain(*given.values()), number])
    on_host = iter(read)
    facts: dict[str, Any] = {
        f"digest of {name}": checksum(*itertools.islice(on_host, len(x))) for name, x in given.items()
    }
    moved_rows = inputs.prompt_rows if inputs.past_length else None
    positions = checksum(*(inputs.on_host(name) for name in inputs.compared_tensors), moved_rows)
    facts |= {
        "samples": inputs.batch,
        "text tokens": inputs.length,
        "frames": inputs.total_frames,
        "frames given by visual_shard": shard is not None,
        "layout of the frames": None if shard is None else shard.layout(comm.rank, comm.size),
        "values per frame": 0 if frames is None else math.prod(frames.shape[1:]),
        "kind of frames": "none" if frames is None else "features" if inputs.frames_are_features else "pixels",
        "cached tokens": inputs.past_length,
        "use_cache": inputs.use_cache,
        "grad mode": torch.is_grad_enabled(),
        "labels given": inputs.has_labels,
        "shift_labels given": inputs.shift_labels is not None,
        "attention mask given": mask is not None,
        "digest of token ids": checksum(inputs.on_host("input_ids")),
        "digest of labels": checksum(inputs.on_host("labels" if inputs.shift_labels is None else "shift_labels")),
        "digest of the positions of frames": positions,
        "num_items_in_batch": int(number),
    }
    if model is None:
        return facts
    device = inputs.text.device.type
    own = frames if shard is None else None  # a rank without frames passes any empty tensor
    tensors = (inputs.input_ids, inputs.inputs_embeds, inputs.labels, inputs.shift_labels, own)
    facts |= {name: x for name, x in kwargs.items() if isinstance(x, (bool, int, float, str))}
    facts |= {
        "shape of logits_to_keep": tuple(logits_to_keep.shape) if isinstance(logits_to_keep, Tensor) else None,
        "training mode": model.training,
        "autocast": torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        "dtypes of text, labels and frames": [x.dtype for x in tensors if x is not None],
    }
    if compare_weights:
        trained = "".join(str(int(p.requires_grad)) for p in model.parameters())
        facts["gradient checkpointing"] = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        facts["digest of requires_grad of the parameters"] = fingerprint(trained)
    return facts


def _sampled_weights(model: nn.Module) -> list[Tensor]:
    """Return the bits of some values of each parameter that every rank has whole, which FSDP does not shard."""
    whole = [p.detach().reshape(-1) for p in model.parameters() if not isinstance(p, DTensor) and not p.is_meta]
    return [x[:: max(1, x.numel() // _SAMPLED_WEIGHTS)].float().view(torch.int32) for x in whole if x.numel()]


def _check_frames(comm: Communicator, inputs: ForwardInputs) -> None:
    shard, frames = inputs.visual_shard, inputs.frames
    if inputs.pixels_and_features:
        raise ShapeError(f"pass either {' or '.join(inputs.frame_names)}, not both")
    if shard is None or (frames is None and inputs.past_length):  # `generate` passes it on when frames are cached
        return
    if not isinstance(shard, FrameShard):
        raise ShapeError(f"visual_shard: expected a FrameShard(start, stop, total), got {type(shard).__name__}")
    if shard.layout(comm.rank, comm.size) not in inputs.frame_layouts:
        own = [describe_spans(frame_spans(shard.total, comm.size, x)[comm.rank]) for x in inputs.frame_layouts]
        raise ShapeError(
            f"visual_shard: rank {comm.rank} of {comm.size} holds frames {own[0]} of {shard.total} (frame_range)"
            + "".join(f', or {zigzag} (frame_ranges with layout="zigzag")' for zigzag in own[1:])
            + f", but {shard} was given"
        )
    if frames is None:
        raise ShapeError(
            f"visual_shard: {shard} was given and none of {', '.join(inputs.frame_names)}; a rank without frames "
            "passes an empty tensor, for example of shape (0, 3, height, width)"
        )
    inputs.check_shard(shard)


def check_text(inputs: ForwardInputs) -> None:
    """Raise ShapeError unless text, positions and labels have valid shapes and dtypes."""
    dims = 2 if inputs.input_ids is not None else 3
    if inputs.text.dim() != dims:
        name = "input_ids" if dims == 2 else "inputs_embeds"
        raise ShapeError(f"{name}: has shape {tuple(inputs.text.shape)}; expected {dims} dimensions, samples first")
    shape, positions = (inputs.batch, inputs.length), inputs.text_position_ids
    if positions is not None and tuple(positions.shape) not in (shape, (1, inputs.length)):
        raise ShapeError(
            f"position_ids: has shape {tuple(positions.shape)}; expected {shape} or {(1, inputs.length)}, one for each "
            "token of this call"
        )
    for name in ("input_ids", "labels", "shift_labels"):
        tensor = getattr(inputs, name)
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            raise ShapeError(f"{name}: has dtype {tensor.dtype}; expected integers, such as torch.long")


def check_tokens(inputs: ForwardInputs, vocabulary: int) -> None:
    """Raise ShapeError unless all token ids are less than `vocabulary`.

    All ranks have the same ids, so all raise. The embedding of sharded text would raise on the rank of the token alone.
    """
    ids = inputs.on_host("input_ids")
    wrong = [] if ids is None else ids[(ids < 0) | (ids >= vocabulary)].tolist()
    if wrong:
        raise ShapeError(
            f"input_ids: {wrong[0]} is not a token of this model, whose tokens are 0 to {vocabulary - 1}; use the "
            "processor of this model, or call resize_token_embeddings before patch_model"
        )


def refuse_unknown_arguments(kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that nothing in the model reads, such as a misspelled name."""
    unknown = sorted(name for name, value in kwargs.items() if name not in _KNOWN_ARGUMENTS and value is not None)
    if unknown:
        raise ConfigError(
            f"forward: unknown argument {', '.join(unknown)}; the model would ignore it. Check the spelling, or leave "
            "it out"
        )


def refuse_packed_lengths(inputs: ForwardInputs, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for lengths of packed sequences that positions do not state too: nothing else reads them."""
    given = [name for name in _PACKED_LENGTHS if kwargs.get(name) is not None]
    stated = inputs.attention_mask is None and inputs.detects_packing and inputs.text_position_ids is not None
    if given and not stated:
        raise ConfigError(
            f"{', '.join(given)}: the lengths that FlashAttention's varlen kernels take are not read here; separate "
            "packed sequences by position_ids that begin at 0 with each of them (of Qwen2.5-VL and Qwen3-VL, the first "
            "of four components), without an attention mask and with use_cache=False, or pass them as rows of a batch"
        )


def refuse_unsupported_attention(config: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError if attention weights or non-causal attention are requested, here or in `config`."""
    weights = kwargs.get("output_attentions")
    if weights or (weights is None and getattr(config, "output_attentions", False)):
        raise ConfigError(
            "output_attentions=True: attention weights do not exist in distributed attention, which never computes a "
            "row's scores in one place; leave it out, or unpatch_model(model) to look at them"
        )
    causal = kwargs.get("is_causal")
    if not (getattr(config, "is_causal", True) if causal is None else causal):
        raise ConfigError(
            "is_causal=False: the text of a patched model is causal in every layer; leave it out, or "
            "unpatch_model(model) to let tokens attend to later tokens"
        )


def check_labels(inputs: ForwardInputs) -> None:
    """Raise ShapeError unless the labels have the shape of the text, as the loss that is computed here requires."""
    name = "labels" if inputs.shift_labels is None else "shift_labels"
    labels, shape = getattr(inputs, name), (inputs.batch, inputs.length)
    if labels is not None and tuple(labels.shape) != shape:
        raise ShapeError(f"{name}: has shape {tuple(labels.shape)}; expected {shape}, one for each token of this call")


def custom_loss(model: Any) -> Any:
    """Return the model's loss function if it is not the cross-entropy of tokens; None if it is."""
    function = getattr(model, "loss_function", ForCausalLMLoss)
    return None if function is ForCausalLMLoss else function


def refuse_custom_loss(model: Any) -> None:
    """Raise ConfigError if the model's loss is not the cross-entropy of tokens, which must then be computed here."""
    function = custom_loss(model)
    if function is not None:
        raise ConfigError(
            f"loss_function: {getattr(function, '__name__', function)} is the model's own; for text that is sharded "
            'over ranks, and with logits="none", only transformers\' causal language-modelling loss can be computed. '
            'Patch with self_attention="local" and another choice of logits, or leave the labels out and compute the '
            "loss from the logits"
        )


def refuse_reentrant_checkpointing(modules: Iterable[nn.Module]) -> None:
    """Raise ConfigError if one of the modules uses reentrant gradient checkpointing.

    It runs a backward pass per layer, and the first one frees the graph of the features that all layers share.
    """
    for module in modules:
        function = vars(module).get("_gradient_checkpointing_func")  # `getattr` is slow where there is none
        if function is None:
            continue
        keywords = function.keywords if isinstance(function, functools.partial) else {}
        if getattr(module, "gradient_checkpointing", False) and keywords.get("use_reentrant"):
            raise ConfigError(
                "gradient checkpointing with use_reentrant=True cannot share the visual features between layers; use "
                'model.gradient_checkpointing_enable({"use_reentrant": False}), which is the default, or '
                'TrainingArguments(gradient_checkpointing_kwargs={"use_reentrant": False})'
            )


def check_star(config: SeqParConfig, inputs: ForwardInputs) -> None:
    """Raise ConfigError if `self_attention="star"` is used outside of generation."""
    if config.self_attention != "star":
        return
    if torch.is_grad_enabled():
        raise ConfigError(
            'self_attention="star" is an approximation for inference and has no backward pass; generate with it, or '
            'call the model under torch.no_grad(). To train, patch with self_attention="ring", which is exact'
        )
    if not inputs.use_cache:
        raise ConfigError(
            'self_attention="star" reads a prompt into a cache, and this pass has none; pass use_cache=True (generate '
            'does). To evaluate without a cache, patch with self_attention="ring" or "local", which are exact'
        )
