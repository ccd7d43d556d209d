"""Small random models of the real class of each family, and batches for them.

Tests, benchmarks and the checks on GPUs use them: `tiny_model("idefics")` has the smallest useful sizes,
`tiny_model("idefics", Sizes(...))` has others. Each family has a module here, named as its entry in
`FAMILIES` (`patches/__init__.py`), with these names:

- `Case`: a `TinyCase` with the fields that only this family has.
- `tiny_model(**overrides)`: a model in eval mode. No weight has a value that could hide a mistake, such as a gate of 0.
- `arguments_of(sizes)`: the overrides for given `Sizes`; families with cross-attention only.
- `inputs_of(case, model)`: the arguments of the unpatched model's forward.
- `local_frames(inputs, group, layout)`: the same arguments for a rank that passes only its frame shard.
- `shard_units(model)`: the modules that FSDP2 shards as units.
- `LORA_TARGETS`: the projections that LoRA adapts, as PEFT's `target_modules`.

Optional: `unpatched_forward(model, inputs)` and `unpatched_generate(model, **inputs)`, where the unpatched model fails
and its result can be computed in another way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor

from mllm_seqpar import FrameShard
from mllm_seqpar.sharding import take_spans

SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a model with cross-attention, under the same names for all families."""

    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int  # of families whose language model has grouped queries
    cross_layers: tuple[int, ...]  # the layers with cross-attention, from 0, at equal distances
    vocabulary: int = 1024
    image: int = 28  # height and width of an image in pixels; a patch has 14
    tower_width: int = 32  # OpenFlamingo's tower is one linear map
    tower_mlp: int = 48
    tower_layers: int = 1
    tower_heads: int = 4
    cross_heads: int | None = None  # of families whose cross-attention has its own; None: its usual ones
    cross_head_dim: int | None = None
    resampler_heads: int = 4  # of IDEFICS' resampler
    resampler_head_dim: int = 8

    @property
    def interval(self) -> int:
        """How many layers lie from one with cross-attention to the next."""
        return self.layers // len(self.cross_layers)

    @property
    def text(self) -> dict[str, int]:
        """The fields that the configurations of most language models have."""
        widths = {"hidden_size": self.width, "intermediate_size": self.mlp, "num_hidden_layers": self.layers}
        return widths | {
            "num_attention_heads": self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32768,
        }

    @property
    def tower(self) -> dict[str, int]:
        """The fields that the configurations of most vision towers have."""
        image = {"image_size": self.image, "patch_size": 14}
        return image | {"intermediate_size": self.tower_mlp, "num_hidden_layers": self.tower_layers}


def tiny_model(family: str, sizes: Sizes | None = None, **overrides: Any) -> Any:
    """Return a model of a family, in eval mode; without `sizes`, the smallest one.

    `overrides` are further arguments of `tiny_model` of the family's module.
    """
    module = import_module(f"{__name__}.{family}")
    return module.tiny_model(**(module.arguments_of(sizes) if sizes else {}) | overrides)


def random_model(
    model_class: Any,
    config: Any,
    rules: Mapping[str, tuple[float, float]],
    seed: int,
    attn_implementation: str = "sdpa",
) -> Any:
    """Return a model of transformers in eval mode, with weights drawn by `set_weights`."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    model.set_attn_implementation(attn_implementation)
    return set_weights(model, rules, seed)


def set_weights(model: Any, rules: Mapping[str, tuple[float, float]], seed: int = 0) -> Any:
    """Draw all weights from normal distributions, and return the model.

    `rules` has means and standard deviations by pattern of names; the first that matches counts. Other weights have
    mean 0 and the standard deviation fan_in ** -0.5.
    """
    device = next(model.parameters()).device
    generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            matching = (rule for pattern, rule in rules.items() if re.search(pattern, name))
            mean, deviation = next(matching, (0.0, weight.shape[1:].numel() ** -0.5))
            weight.copy_(mean + deviation * torch.randn(weight.shape, generator=generator, device=device))
    return model


@dataclass(frozen=True)
class TinyCase:
    """One batch of a tiny model, and how the model is built and patched."""

    frames: tuple[Any, ...] = (3,)  # the number of each sample; a family may give each entry more structure
    length: int = 11  # tokens of each row, padding included
    padding: str | None = None  # "left" or "right"; sample i has 2 * i padding tokens
    labels: str | None = "usual"  # or "shifted" (`shift_labels`), "few" (the last two tokens), "every row"
    features: str | None = None  # which encoded form replaces the pixels
    embeds: bool = False  # whether `inputs_embeds` replaces `input_ids`
    local_frames: bool = False  # whether each rank passes only its frame shard, with `visual_shard`
    frame_layout: str = "contiguous"  # of these shards
    wants_grad: tuple[str, ...] = ()  # the inputs whose gradients are compared
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further ones of forward
    model: Mapping[str, Any] = field(default_factory=dict)  # arguments of `tiny_model`
    options: Mapping[str, Any] = field(default_factory=dict)  # of `patch_model`
    train: bool = False
    double: bool = False  # whether model and inputs are float64, for a gradient whose terms cancel

    def with_options(self, **options: Any) -> Self:
        return replace(self, options={**self.options, **options})

    def with_model(self, **overrides: Any) -> Self:
        return replace(self, model={**self.model, **overrides})

    def model_overrides(self) -> dict[str, Any]:
        return dict(self.model)

    def real(self) -> Tensor | None:
        """Return which tokens are not padding, (B, L) bool, or None without padding."""
        if self.padding is None:
            return None
        real = torch.ones(len(self.frames), self.length, dtype=torch.bool)
        for sample in range(1, len(self.frames)):
            real[sample, : 2 * sample] = False
        return real if self.padding == "left" else real.flip(1)

    def targets(self, ids: Tensor, ignored: Tensor | None = None) -> dict[str, Tensor]:
        """Return `labels` or `shift_labels` for these token ids; `ignored` (B, L) bool marks further non-targets."""
        if self.labels is None:
            return {}
        if self.labels == "every row":
            return {"shift_labels": ids.clone()}
        labels, real = ids.clone(), self.real()
        labels[:, : -2 if self.labels == "few" else min(2, self.length - 2)] = -100
        if ignored is not None:
            labels[ignored] = -100
        if real is not None:
            labels[~real] = -100
        if self.labels == "shifted":
            return {"shift_labels": torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()}
        return {"labels": labels}

    def prepared(self, inputs: dict[str, Any], model: Any) -> dict[str, Any]:
        if self.embeds:
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
        for name in self.wants_grad:
            inputs[name].requires_grad_()
        return inputs


def frame_shard(inputs: dict[str, Any], frames: Mapping[str, Tensor], group: Any, layout: str) -> dict[str, Any]:
    """Return `inputs` with this rank's rows of `frames`, tensors with one row a frame, and their `visual_shard`."""
    total = next(iter(frames.values())).shape[0]
    shard = FrameShard.of(total, group, layout)
    shards = {name: take_spans(x, shard.spans) for name, x in frames.items()}
    return inputs | shards | {"visual_shard": shard}
