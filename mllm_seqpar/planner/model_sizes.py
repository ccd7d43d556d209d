"""The sizes of an MLLM that its cost depends on, and its parameter counts.

A model is a language model, cross-attention layers inside or between its decoder layers, and a source of visual
features: a vision tower, with an optional resampler (a Perceiver) or linear projector. A decoder-only model has no
cross-attention layers: the visual features are embeddings of tokens in the text. Parameter counts leave out
norms, biases, gates and position embeddings, which are about a thousandth. Norms of visual tokens are described all the
same, because what they save for backward is not negligible (see `memory`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isqrt
from pathlib import Path
from typing import NamedTuple

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.families import built_in_sizes

from .descriptions import Description, find_file, number, one_of, read_yaml


@dataclass(frozen=True, kw_only=True)
class LayerSizes(Description):
    """Layers of one kind, with attention and an MLP.

    Attributes:
        mlp_inner, mlp_matrices: width of the MLP, and 3 linear layers if it is gated, else 2; 0 for no MLP.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_inner: int
    mlp_matrices: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.kv_heads} kv_heads do not divide {self.heads} heads")


@dataclass(frozen=True, kw_only=True)
class TextSizes(LayerSizes):
    """The language model; `layers` does not count cross-attention layers that replace a decoder layer.

    Attributes:
        norm: what its norms save, see `CrossAttentionSizes.key_norm`.
        head_norm: whether each head of Q and K is normalized in a float32 copy (Qwen3).
    """

    hidden: int
    vocabulary: int
    tied_embeddings: bool = False
    norm: str = one_of(("float32", "mixed"), "float32")
    head_norm: bool = False

    @property
    def embeddings(self) -> int:
        """Parameters of the embeddings, and of the head unless it is tied to them."""
        return self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSizes(LayerSizes):
    """Cross-attention, whose K and V are projected from visual features of `visual_dim` channels.

    Attributes:
        own_queries: whether it has its own q and o projections (mPLUG-Owl3 shares those of self-attention).
        features_norm: whether each layer normalizes the features before it projects them (mPLUG-Owl3).
        key_norm: how each head of K is normalized: "none"; "float32": in a float32 copy (Llama 3.2); "mixed": in its
            own dtype, times a factor from a float32 copy (IDEFICS). Both save their copies for backward.
        gate: "per_head" if a linear layer on each head of the text's attention output gates the visual output
            (mPLUG-Owl3-7B-240728), or "none"; the cost of other gates is negligible.
        earlier_frames: whether text attends to earlier frames only (mPLUG-Owl3, Llama 3.2).
    """

    visual_dim: int
    layers: int = number(least=0)
    own_queries: bool = True
    mlp_inner: int = number(default=0, least=0)
    mlp_matrices: int = number(default=0, least=0)
    features_norm: bool = False
    key_norm: str = one_of(("none", "float32", "mixed"), "none")
    gate: str = one_of(("none", "per_head"), "none")
    earlier_frames: bool = False


NO_CROSS_ATTENTION = CrossAttentionSizes(layers=0, heads=1, kv_heads=1, head_dim=1, visual_dim=1)
"""Of decoder-only models; the sizes of a layer do not matter."""


@dataclass(frozen=True, kw_only=True)
class VisionSizes(Description):
    """The vision tower.

    A frame is what it encodes at once without attending to anything else: `temporal_patch` images of a video.

    Attributes:
        tokens: tokens per frame that its layers compute.
        keys: visual tokens per frame that cross-attention receives, or that are tokens of the text.
        separators: how many of the keys follow the patches of a frame. The keys of a model that has any depend on the
            size of its images (MOSS-VL).
        outputs_held: layer outputs that are alive at once: 1; 2 with the embeddings (IDEFICS); all (Llama 3.2).
        tiles: image tiles per frame, which `tokens` and `keys` include; the tiles of a frame attend to each other under
            a mask (Llama 3.2).
        temporal_patch: images of a video in one frame: 2 in the temporal patches of Qwen-VL.
        patch: pixels of a token along height and width.
        mlp_matrices: 3 for gated MLPs, 2 for others.
        norm: "layer", or "float32" for RMS norms that compute in float32.
        rotary: whether Q, K and V are one projection, and Q and K are rotated in float32.
        window: tokens of a window; all layers but `full_layers` attend inside windows. 0 for none.
        deepstack: further features of each visual token, each from a layer of its own, through a projector of its own.
    """

    width: int
    layers: int
    heads: int
    mlp_inner: int
    tokens: int
    keys: int
    outputs_held: int = 1
    tiles: int = 1
    temporal_patch: int = 1
    patch: int = 14
    mlp_matrices: int = 2
    norm: str = one_of(("layer", "float32"), "layer")
    rotary: bool = False
    window: int = number(default=0, least=0)
    full_layers: int = number(default=0, least=0)
    deepstack: int = number(default=0, least=0)
    separators: int = number(default=0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.full_layers > self.layers:
            raise ConfigError(f"{self.full_layers} full_layers are more than {self.layers} layers")

    @property
    def merged(self) -> int:
        """Tokens of the tower in a visual token."""
        return self.tokens // (self.keys - self.separators)

    @property
    def parameters(self) -> int:
        return self.layers * (4 * self.width**2 + self.mlp_matrices * self.width * self.mlp_inner)


@dataclass(frozen=True, kw_only=True)
class ResamplerSizes(Description):
    """A Perceiver: latents attend to a frame's patches and to themselves.

    `code` names the implementation. "flamingo" and "idefics" compute the same, but save different tensors for backward.
    """

    layers: int
    heads: int
    head_dim: int
    mlp_inner: int = number(least=0)
    code: str = one_of(("flamingo", "idefics"), "flamingo")


class LinearLayers(NamedTuple):
    """Linear layers of all equal layers of one kind."""

    target: str  # what adapters name them by: attention, mlp, cross, or connector (behind the tower)
    part: str  # of a step
    layers: int
    channels: tuple[tuple[int, int], ...]  # (input, output) of each linear layer of one of them
    visual: bool = False  # computed on visual tokens, `VisionSizes.keys` to a frame, instead of text tokens

    @property
    def parameters(self) -> int:
        return self.layers * sum(inputs * outputs for inputs, outputs in self.channels)


@dataclass(frozen=True, kw_only=True)
class ModelSizes(Description):
    """A cross-attention MLLM, or a decoder-only one, without cross-attention layers.

    Attributes:
        projector: channels of the linear layers behind the tower: (in, out) for one layer, (in, inner, out) for two
            with an activation function between them; None for no projector. If images of other sizes have other
            numbers of visual tokens, the projector joins the tokens of the tower to these, and has a norm before it.
    """

    name: str
    text: TextSizes
    vision: VisionSizes
    cross: CrossAttentionSizes = NO_CROSS_ATTENTION
    resampler: ResamplerSizes | None = None
    projector: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        channels = self.projector
        sizes = isinstance(channels, tuple) and all(type(x) is int and x > 0 for x in channels)
        if channels is not None and not (sizes and len(channels) in (2, 3)):
            raise ConfigError(f"projector is {channels!r}; expected [in, out] or [in, inner, out] channels")

    @property
    def decoder_only(self) -> bool:
        """Whether the visual tokens are tokens of the text."""
        return self.cross.layers == 0

    @property
    def keys_vary(self) -> bool:
        """Whether the number of visual tokens of a frame depends on the size of its images."""
        return self.decoder_only or self.vision.separators > 0

    def with_frame_tokens(self, count: int) -> ModelSizes:
        """Return the model with `count` visual tokens per frame, as images of another size have.

        Raise ConfigError if the model encodes all images in one size.
        """
        if not self.keys_vary:
            raise ConfigError(
                f"frame_tokens: a frame of {self.name} always has {self.vision.keys} visual tokens; leave it out"
            )
        if count <= self.vision.separators:
            raise ConfigError(f"frame_tokens: {count} is not above the {self.vision.separators} separators of a frame")
        tokens = (count - self.vision.separators) * self.vision.merged
        return replace(self, vision=replace(self.vision, tokens=tokens, keys=count))

    def tokens_of_image(self, height: int, width: int) -> int:
        """Return the visual tokens of an image whose sides are rounded to whole tokens (`keys_vary`)."""
        side = self.vision.patch * isqrt(self.vision.merged)
        return max(1, round(height / side)) * max(1, round(width / side)) + self.vision.separators

    @cached_property
    def linear(self) -> tuple[LinearLayers, ...]:
        """The linear layers, without those of the tower and the head."""
        text, cross, resampler, width = self.text, self.cross, self.resampler, self.text.hidden
        q, kv = (width, text.heads * text.head_dim), (width, text.kv_heads * text.head_dim)
        queries = ((width, cross.heads * cross.head_dim),) * (2 if cross.own_queries else 0)
        keys = ((cross.visual_dim, cross.kv_heads * cross.head_dim),) * 2
        connector = tuple(pairwise(self.projector or ())) * (1 + self.vision.deepstack)
        if resampler:
            inner = ((self.vision.width, resampler.mlp_inner),) * (2 if resampler.mlp_inner else 0)
            attention = ((self.vision.width, resampler.heads * resampler.head_dim),) * 4
            connector += (attention + inner) * resampler.layers
        every = (
            LinearLayers("attention", "self-attention", text.layers, (q, kv, kv, q[::-1])),
            LinearLayers("mlp", "MLP", text.layers, ((width, text.mlp_inner),) * text.mlp_matrices),
            LinearLayers("cross", "cross-attention", cross.layers, queries),
            LinearLayers("cross", "MLP", cross.layers, ((width, cross.mlp_inner),) * cross.mlp_matrices),
            LinearLayers("cross", "cross-attention", cross.layers, keys, visual=True),
            LinearLayers("connector", "vision tower", 1, connector, visual=True),
        )
        return tuple(one for one in every if one.layers and one.channels)

    def parameters_of(self, *targets: str) -> int:
        """Return the parameters of all layers that adapters name so, and of the gates of cross-attention layers."""
        gates = self.cross.layers * self.cross.head_dim**2 if self.cross.gate == "per_head" else 0
        linear = sum(one.parameters for one in self.linear if one.target in targets)
        return linear + (gates if "cross" in targets else 0)

    @property
    def parameters(self) -> int:
        layers = self.parameters_of("attention", "mlp", "cross", "connector")
        return layers + self.text.embeddings + self.vision.parameters


def read_model(name: str | Path) -> ModelSizes:
    """Read a model file (YAML, the sections of `ModelSizes`), given its path or the name of one in configs/models; or a
    Hugging Face model directory, or its `config.json`.

    A file that is missing or invalid raises ConfigError. A `config.json` is read as JSON, so that planning needs no
    model library. Each family translates its own configuration, by `Family.sizes`.
    """
    path = find_file("model", str(name))
    if path.is_file() and path.suffix != ".json":
        return ModelSizes.build(read_yaml(path, "model"), str(path))
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"model: there is no {file}; pass a model directory, its config.json or a model file")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"model: {file} is not JSON: {error}") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    named = model_type if isinstance(model_type, str) else ""
    families = dict(built_in_sizes())
    if named not in families:
        from mllm_seqpar.patching.registry import external_adapters  # classes, whose modules import torch

        for adapter in external_adapters().values():
            families |= getattr(adapter, "sizes", {})
    if named not in families:
        known = ", ".join(sorted(families))
        raise ConfigError(f"model: {file} has model_type {model_type!r}; known model types: {known}")
    try:
        sizes: ModelSizes = families[named](config, file.resolve().parent.name)
        return sizes
    except KeyError as error:
        raise ConfigError(f"model: {file} lacks {error}, which a {model_type} model needs") from error
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"model: {file} has values that a {model_type} model cannot have: {error}") from error
