"""The checks before a forward pass: each rank validates its arguments, and all ranks compare their inputs.

A decoding step of one token only validates the arguments that it has besides the token.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import TransformersKwargs

from mllm_seqpar.comm import Communicator
from mllm_seqpar.comm.agreement import agree, by_rank
from mllm_seqpar.digests import checksum, fingerprint, sampled_bits
from mllm_seqpar.errors import AgreementError, ConfigError, ShapeError
from mllm_seqpar.runtime.text import select_logit_rows
from mllm_seqpar.sharding import APPENDED, FRAME_LAYOUTS, FrameShard, FrameSizes, describe_spans

from .inputs import ForwardInputs

InputsT = TypeVar("InputsT", bound=ForwardInputs)

_PASS = "forward pass"
_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
"""The dtypes that frames may have, by the number that ranks exchange."""
_LAYOUTS = (APPENDED, *FRAME_LAYOUTS)
_REMEDY = (
    "Every rank of the group must pass what it would pass to the unpatched model. transformers' Trainer gives each "
    "rank its own samples: use mllm_seqpar.SeqParTrainer instead, or SeqParMixin for a subclass"
)
_SAMPLED_WEIGHTS = 16
"""The number of values of each parameter that are compared."""
_KNOWN_ARGUMENTS = {*TransformersKwargs.__annotations__, "cache_position", "ignore_index", "logits_to_keep"}
_KNOWN_ARGUMENTS |= {"return_dict", "token_type_ids"}  # tokenizers return token_type_ids for all models
_PACKED_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def require_same_inputs(
    comm: Communicator,
    inputs: InputsT,
    check: Callable[[], None],
    *,
    model: nn.Module | None = None,
    kwargs: Mapping[str, Any] | None = None,
    weights: Sequence[Tensor] = (),
) -> InputsT:
    """Return the inputs that all ranks of the group agree on; raise on every rank unless they pass the same text,
    number of frames and pixels.

    Token ids, masks, positions and labels are compared by digests. Pixels are compared by a sample of them if every
    rank has all of them, and so are embeddings that replace token ids. Features may differ in their last bits between
    devices and are compared by shape and dtype.

    `check` validates the inputs of this rank; if it raises on one rank, the others raise an AgreementError. If `model`
    is given, its modes are compared, and of its `weights`, if they are given, a sample and which of them are trained.
    """
    if comm.size == 1:
        check()
        inputs.read()
        return inputs
    facts = functools.partial(_facts, inputs, model, kwargs or {}, weights)

    def kind_of_frames(_: None) -> tuple[int, bool, int]:
        """Return the number of the dtype of this rank's frames, or -1 without any, whether they require gradients, and
        the layouts that the caller's shard may have, a bit for each."""
        frames, shard, bits = inputs.frames, inputs.visual_shard, 0
        if isinstance(shard, FrameShard) and frames is not None:
            bits = sum(1 << _LAYOUTS.index(x) for x in shard.layouts(comm.rank, comm.size, inputs.sizes))
        if frames is None or not frames.shape[0]:
            return -1, False, bits
        return _DTYPES.index(frames.dtype), frames.requires_grad, bits

    _, kinds = agree(comm, _PASS, check, facts, numbers=kind_of_frames, remedy=_REMEDY)
    if (frames := inputs.frames) is None:
        return inputs
    layout = None
    if inputs.visual_shard is not None:
        by_rank_layouts = [[x for place, x in enumerate(_LAYOUTS) if bits >> place & 1] for _, _, bits in kinds]
        layout = next((x for x in _LAYOUTS if all([x in layouts for layouts in by_rank_layouts])), None)
        if layout is None:
            named = by_rank([" or ".join(layouts) for layouts in by_rank_layouts])
            raise AgreementError(f"{_PASS}: the ranks differ in layout of the frames: {named}. {_REMEDY}")
    # Under autocast, layers take features in the dtype that the caller passes, and ranks may send them to each other.
    dtypes = {number for number, _, _ in kinds} - {-1}
    if len(dtypes) > 1:
        named = by_rank([None if number < 0 else str(_DTYPES[number]) for number, _, _ in kinds])
        raise AgreementError(f"{_PASS}: the ranks differ in dtype of frames: {named}. {_REMEDY}")
    if dtypes:
        if not frames.shape[0]:
            frames = frames.to(_DTYPES[dtypes.pop()])
        # If the frames of one rank require gradients, all ranks take part in backward; an empty tensor alone asks for
        # none. The caller's tensor is not changed.
        requires_grad = any([requires_grad for _, requires_grad, _ in kinds])
        if frames.requires_grad != requires_grad:
            frames = frames.detach().requires_grad_(requires_grad)
    return inputs.changed(frames=frames, shard_layout=layout)


def _facts(
    inputs: ForwardInputs, model: nn.Module | None, kwargs: Mapping[str, Any], weights: Sequence[Tensor], _: None
) -> dict[str, Any]:
    """Return what must be equal on all ranks, by name; of tensors digests. All are read from the device at once."""
    frames, mask, whole = inputs.frames, inputs.attention_mask, inputs.visual_shard is None
    num_items, logits_to_keep = kwargs.get("num_items_in_batch"), kwargs.get("logits_to_keep")
    masks = [*mask.values()] if isinstance(mask, Mapping) else [mask]  # a mapping has one per kind of layer
    compared: dict[str, list[Tensor]] = {
        "embeddings": [sampled_bits(inputs.tokens)] if inputs.input_ids is None else [],
        "the attention mask": [x for x in masks if x is not None],
        "position ids": [] if inputs.position_ids is None else [inputs.position_ids],
        "pixels": [sampled_bits(frames)] if frames is not None and inputs.compares_values_of_frames else [],
        "logits_to_keep": [logits_to_keep] if isinstance(logits_to_keep, Tensor) else [],
        # Every rank has the values of weights that FSDP does not shard.
        "weights": [
            sampled_bits(x, _SAMPLED_WEIGHTS)
            for x in weights
            if not isinstance(x, DTensor) and not x.is_meta and x.numel() > 0
        ],
    }
    number = torch.as_tensor(-1 if num_items is None else num_items)
    *read, number = inputs.read([*itertools.chain(*compared.values()), number])
    on_host = iter(read)
    facts: dict[str, Any] = {}
    for name, tensors in compared.items():
        facts[f"digest of {name}"] = checksum(*itertools.islice(on_host, len(tensors)))
    labels = "labels" if inputs.shift_labels is None else "shift_labels"
    moved_rows = inputs.prompt_rows if inputs.past_length else None
    facts |= {
        "samples": inputs.batch,
        "text tokens": inputs.length,
        "frames": inputs.total_frames,
        "units of frames": inputs.sizes.fact,
        "rows of frames": frames.shape[0] if frames is not None and whole else None,
        "frames given by visual_shard": not whole,
        "values per frame": 0 if frames is None else math.prod(frames.shape[1:]),
        "kind of frames": "none" if frames is None else "features" if inputs.frames_are_features else "pixels",
        "cached tokens": inputs.past_length,
        "use_cache": inputs.use_cache,
        "grad mode": torch.is_grad_enabled(),
        "labels given": inputs.has_labels,
        "shift_labels given": inputs.shift_labels is not None,
        "attention mask given": mask is not None,
        "digest of token ids": checksum(inputs.on_host("input_ids")),
        "digest of labels": checksum(inputs.on_host(labels)),
        "digest of the positions of frames": checksum(*map(inputs.on_host, inputs.compared_tensors), moved_rows),
        "num_items_in_batch": int(number),
    }
    return facts if model is None else facts | _modes(inputs, model, kwargs, weights)


def _modes(
    inputs: ForwardInputs, model: nn.Module, kwargs: Mapping[str, Any], weights: Sequence[Tensor]
) -> dict[str, Any]:
    """Return the modes in which the model and torch compute a pass, and the options of the call."""
    device, logits_to_keep = inputs.tokens.device.type, kwargs.get("logits_to_keep")
    frames = inputs.frames if inputs.visual_shard is None else None  # a rank without frames passes any empty tensor
    tensors = inputs.input_ids, inputs.inputs_embeds, inputs.labels, inputs.shift_labels, frames
    modes: dict[str, Any] = {name: x for name, x in kwargs.items() if isinstance(x, (bool, int, float, str))}
    modes |= {
        "shape of logits_to_keep": tuple(logits_to_keep.shape) if isinstance(logits_to_keep, Tensor) else None,
        "training mode": model.training,
        "autocast": torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        "dtypes of text, labels and frames": [x.dtype for x in tensors if x is not None],
    }
    if weights:
        # `getattr` is slow where there is none.
        modes["gradient checkpointing"] = any(vars(m).get("gradient_checkpointing", False) for m in model.modules())
        trained = "".join(str(int(x.requires_grad)) for x in weights)
        modes["digest of requires_grad of the parameters"] = fingerprint(trained)
    return modes


def check_frames(inputs: ForwardInputs, comm: Communicator, arguments: Sequence[str]) -> None:
    """Raise ShapeError unless frames are given in one form, by one of the `arguments` of the model's forward, and those
    of `visual_shard` are of this rank."""
    shard, frames = inputs.visual_shard, inputs.frames
    if inputs.pixels_and_features:
        raise ShapeError(f"pass either {' or '.join(arguments)}, not both")
    if shard is None or (frames is None and inputs.past_length):  # `generate` passes it on when frames are cached
        return
    if not isinstance(shard, FrameShard):
        raise ShapeError(f"visual_shard: expected a FrameShard(start, stop, total), got {type(shard).__name__}")
    sizes = FrameSizes(shard.total) if frames is None else inputs.sizes
    if not {*shard.layouts(comm.rank, comm.size, sizes)} & {*inputs.frame_layouts, APPENDED}:
        own = [describe_spans(sizes.spans(comm.size, x)[comm.rank]) for x in inputs.frame_layouts]
        raise ShapeError(
            f"visual_shard: rank {comm.rank} of {comm.size} holds frames {own[0]} of {shard.total} (frame_range)"
            + "".join(f', or {zigzag} (frame_ranges with layout="zigzag")' for zigzag in own[1:])
            + f", but {shard} was given"
        )
    if frames is None:
        raise ShapeError(
            f"visual_shard: {shard} was given and none of {', '.join(arguments)}; a rank without frames "
            "passes an empty tensor, for example of shape (0, 3, height, width)"
        )
    inputs.check_shard(shard)


def check_text(inputs: ForwardInputs) -> None:
    """Raise ShapeError unless text, positions and labels have valid shapes and dtypes."""
    if (inputs.input_ids is None) == (inputs.inputs_embeds is None):
        raise ShapeError("pass either input_ids or inputs_embeds")
    dims = 2 if inputs.input_ids is not None else 3
    if inputs.tokens.dim() != dims:
        name = "input_ids" if dims == 2 else "inputs_embeds"
        raise ShapeError(f"{name}: has shape {tuple(inputs.tokens.shape)}; expected {dims} dimensions, samples first")
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


def check_tokens(inputs: ForwardInputs, embedding: nn.Module) -> None:
    """Raise ShapeError for token ids beyond the tables in `embedding`; without any table, check nothing.

    All ranks have the same ids, so all raise. The embedding of sharded text would raise on the rank of the token alone.
    """
    original: Any = getattr(embedding, "original_module", embedding)  # beside it, PEFT's modules_to_save has copies
    tables = [module for module in original.modules() if isinstance(module, nn.Embedding)]
    vocabulary, ids = sum(table.weight.shape[0] for table in tables), inputs.on_host("input_ids")
    if not vocabulary:
        return
    wrong = [] if ids is None else ids[(ids < 0) | (ids >= vocabulary)].tolist()
    if wrong:
        raise ShapeError(
            f"input_ids: {wrong[0]} is not a token of this model, whose tokens are 0 to {vocabulary - 1}; use the "
            "processor of this model, or call resize_token_embeddings before patch_model"
        )


def check_arguments(inputs: ForwardInputs, kwargs: Mapping[str, Any], configs: Iterable[Any]) -> None:
    """Raise ConfigError for further arguments of a forward that are unknown or not supported, here or in a config."""
    unknown = sorted(name for name in kwargs.keys() - _KNOWN_ARGUMENTS if kwargs[name] is not None)
    if unknown:
        raise ConfigError(
            f"forward: unknown argument {', '.join(unknown)}; the model would ignore it. Check the spelling, or leave "
            "it out"
        )
    packed = [name for name in _PACKED_LENGTHS if kwargs.get(name) is not None]
    # Nothing reads the lengths; positions that separate sequences state them too.
    stated = inputs.attention_mask is None and inputs.detects_packing and inputs.text_position_ids is not None
    if packed and not stated:
        raise ConfigError(
            f"{', '.join(packed)}: the lengths that FlashAttention's varlen kernels take are not read here; separate "
            "packed sequences by position_ids that begin at 0 with each of them (of Qwen2.5-VL and Qwen3-VL, the first "
            "of four components), without an attention mask and with use_cache=False, or pass them as rows of a batch"
        )
    weights, causal = kwargs.get("output_attentions"), kwargs.get("is_causal")
    for config in configs:
        if weights or (weights is None and getattr(config, "output_attentions", False)):
            raise ConfigError(
                "output_attentions=True: attention weights do not exist in distributed attention, which never computes "
                "a row's scores in one place; leave it out, or unpatch_model(model) to look at them"
            )
        if not (getattr(config, "is_causal", True) if causal is None else causal):
            raise ConfigError(
                "is_causal=False: the text of a patched model is causal in every layer; leave it out, or "
                "unpatch_model(model) to let tokens attend to later tokens"
            )


def refuse_trained_cache(cache: Any) -> None:
    """Raise ConfigError if K and V of a cache require gradients, as those of PEFT's prefix tuning do."""
    stored = [getattr(layer, "keys", None) for layer in getattr(cache, "layers", ())]
    if any(isinstance(keys, Tensor) and keys.requires_grad for keys in stored):
        raise ConfigError(
            "prefix tuning: keys and values that require gradients were passed as a cache, and a pass that continues a "
            "cache has no backward pass through frames that are sharded over ranks. Train other adapters (LoRA, prompt "
            "tuning), or let one process compute each sample (sequence_parallel_size=1)"
        )


def custom_loss(model: Any) -> Any:
    """Return the model's loss function if it is not the cross-entropy of tokens; None if it is."""
    function = getattr(model, "loss_function", ForCausalLMLoss)
    return None if function is ForCausalLMLoss else function


def check_computed_loss(model: Any, inputs: ForwardInputs, logits_to_keep: int | Tensor) -> None:
    """Raise unless the loss can be computed here: ConfigError if the model's loss is not the cross-entropy of tokens,
    and ShapeError if the labels have neither the shape of the text nor that of the rows of `logits_to_keep`."""
    function = custom_loss(model)
    if function is not None:
        raise ConfigError(
            f"loss_function: {getattr(function, '__name__', function)} is the model's own; for text that is sharded "
            'over ranks, and with logits="none", only transformers\' causal language-modelling loss can be computed. '
            'Patch with self_attention="local" and another choice of logits, or leave the labels out and compute the '
            "loss from the logits"
        )
    name = "labels" if inputs.shift_labels is None else "shift_labels"
    labels, shape = inputs.given_labels, (inputs.batch, inputs.length)
    if tuple(labels.shape) == shape:
        return
    kept = tuple(select_logit_rows(torch.empty(*shape, 1), logits_to_keep).shape[:-1])
    if tuple(labels.shape) != kept:
        of_rows = "" if kept == shape else f", or {kept}, one for each row of logits_to_keep"
        raise ShapeError(
            f"{name}: has shape {tuple(labels.shape)}; expected {shape}, one for each token of this call{of_rows}"
        )


def refuse_reentrant_checkpointing(modules: Iterable[nn.Module]) -> None:
    """Raise ConfigError if one of the modules uses reentrant gradient checkpointing.

    It runs a backward pass per layer, and the first one frees the graph of the features that all layers share.
    """
    for module in modules:
        function = vars(module).get("_gradient_checkpointing_func")  # `getattr` is slow where there is none
        if function is None:
            continue
        keywords = function.keywords if isinstance(function, functools.partial) else {"use_reentrant": False}
        # torch's default is True, and PEFT's `prepare_model_for_kbit_training` passes {}.
        if getattr(module, "gradient_checkpointing", False) and keywords.get("use_reentrant") in (True, None):
            raise ConfigError(
                "gradient checkpointing with use_reentrant=True cannot share the visual features between layers; use "
                'model.gradient_checkpointing_enable({"use_reentrant": False}), which is the default, or '
                'TrainingArguments(gradient_checkpointing_kwargs={"use_reentrant": False})'
            )


def check_star(inputs: ForwardInputs) -> None:
    """Raise ConfigError if `self_attention="star"` is used outside of generation."""
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
