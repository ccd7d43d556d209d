"""The sizes of a cross-attention MLLM that its cost depends on, and its parameter counts.

A model is a language model, cross-attention layers inside or between its decoder layers, and a source of visual
features: a vision tower, with an optional resampler (a Perceiver) or linear projector. Parameter counts leave out
norms, biases, gates and position embeddings, which are about a thousandth. Norms of visual tokens are described all the
same, because what they save for backward is not negligible (see `memory`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.families import family_specs

from .files import build, read_yaml


class _Sizes:
    """Validates fields by type: integers have a minimum, strings a set of choices."""

    may_be_zero: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            name, value = field.name, getattr(self, field.name)
            if name in self.choices:
                valid, allowed = value in self.choices[name], f"choose one of {', '.join(self.choices[name])}"
            elif str(field.type) == "bool":
                valid, allowed = isinstance(value, bool), "expected true or false"
            else:
                least = 0 if name in self.may_be_zero else 1
                valid = isinstance(value, int) and not isinstance(value, bool) and value >= least
                allowed = f"expected a whole number, {least} or more"
            if not valid:
                raise ConfigError(f"{name} is {value!r}; {allowed}")


@dataclass(frozen=True, kw_only=True)
class TextSizes(_Sizes):
    """The language model; `layers` does not count cross-attention layers that replace a decoder layer.

    Attributes:
        mlp_matrices: 3 for gated MLPs, 2 for others.
        norm: what its norms save, see `CrossAttentionSizes.key_norm`.
    """

    choices: ClassVar[dict[str, tuple[str, ...]]] = {"norm": ("float32", "mixed")}

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_inner: int
    mlp_matrices: int
    vocabulary: int
    tied_embeddings: bool = False
    norm: str = "float32"

    @property
    def attention_parameters(self) -> int:
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        return self.mlp_matrices * self.hidden * self.mlp_inner


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSizes(_Sizes):
    """Cross-attention, whose K and V are projected from visual features of `visual_dim` channels.

    Attributes:
        own_queries: whether it has its own q and o projections (mPLUG-Owl3 shares those of self-attention).
        mlp_inner, mlp_matrices: its own MLP; 0 for none.
        features_norm: whether each layer normalizes the features before it projects them (mPLUG-Owl3).
        key_norm: how each head of K is normalized: "none"; "float32": in a float32 copy (Llama 3.2); "mixed": in its
            own dtype, times a factor from a float32 copy (IDEFICS). Both save their copies for backward.
        gate: "per_head" if a linear layer on each head of the text's attention output gates the visual output
            (mPLUG-Owl3-7B-240728), or "none"; the cost of other gates is negligible.
        earlier_frames: whether text attends to earlier frames only (mPLUG-Owl3, Llama 3.2).
    """

    may_be_zero: ClassVar[tuple[str, ...]] = ("mlp_inner", "mlp_matrices")
    choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "key_norm": ("none", "float32", "mixed"),
        "gate": ("none", "per_head"),
    }

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    visual_dim: int
    own_queries: bool = True
    mlp_inner: int = 0
    mlp_matrices: int = 0
    features_norm: bool = False
    key_norm: str = "none"
    gate: str = "none"
    earlier_frames: bool = False


@dataclass(frozen=True, kw_only=True)
class VisionSizes(_Sizes):
    """The vision tower.

    Attributes:
        tokens: tokens per frame that its layers compute.
        keys: visual tokens per frame that cross-attention receives.
        outputs_held: layer outputs that are alive at once: 1; 2 with the embeddings (IDEFICS); all (Llama 3.2).
        tiles: image tiles per frame, which `tokens` and `keys` include; the tiles of a frame attend to each other under
            a mask (Llama 3.2).
    """

    width: int
    layers: int
    heads: int
    mlp_inner: int
    tokens: int
    keys: int
    outputs_held: int = 1
    tiles: int = 1

    @property
    def parameters(self) -> int:
        return self.layers * (4 * self.width**2 + 2 * self.width * self.mlp_inner)


@dataclass(frozen=True, kw_only=True)
class ResamplerSizes(_Sizes):
    """A Perceiver: latents attend to a frame's patches and to themselves.

    `code` names the implementation. "flamingo" and "idefics" compute the same, but save different tensors for backward.
    """

    may_be_zero: ClassVar[tuple[str, ...]] = ("mlp_inner",)
    choices: ClassVar[dict[str, tuple[str, ...]]] = {"code": ("flamingo", "idefics")}

    layers: int
    heads: int
    head_dim: int
    mlp_inner: int
    code: str = "flamingo"


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A cross-attention MLLM.

    Attributes:
        projector: channels of the linear layers behind the tower: (in, out) for one layer, (in, inner, out) for two
            with an activation function between them; None for no projector.
    """

    name: str
    text: TextSizes
    cross: CrossAttentionSizes
    vision: VisionSizes
    resampler: ResamplerSizes | None = None
    projector: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, part in (("text", self.text), ("cross", self.cross)):
            if part.heads % part.kv_heads:
                raise ConfigError(f"{name}: {part.kv_heads} kv_heads do not divide {part.heads} heads")

    @property
    def cross_parameters(self) -> int:
        hidden, cross = self.text.hidden, self.cross
        return (
            2 * cross.visual_dim * cross.kv_heads * cross.head_dim
            + (2 * hidden * cross.heads * cross.head_dim if cross.own_queries else 0)
            + cross.mlp_matrices * hidden * cross.mlp_inner
            + (cross.head_dim**2 if cross.gate == "per_head" else 0)
        )

    @property
    def connector_parameters(self) -> int:
        return self._connector(1, 0)

    @property
    def connector_work(self) -> int:
        """Multiply-adds of resampler and projector for one frame: parameters times tokens."""
        return self._connector(self.vision.keys, self.vision.tokens)

    def _connector(self, latents: int, patches: int) -> int:
        work, r = latents * sum(a * b for a, b in pairwise(self.projector or ())), self.resampler
        if r:  # K and V are projected from latents and patches
            attention = (4 * latents + 2 * patches) * r.heads * r.head_dim
            work += r.layers * self.vision.width * (attention + latents * 2 * r.mlp_inner)
        return work

    @property
    def parameters(self) -> int:
        text = self.text
        embeddings = text.vocabulary * text.hidden * (1 if text.tied_embeddings else 2)  # tied: no separate head
        return (
            text.layers * (text.attention_parameters + text.mlp_parameters)
            + embeddings
            + self.cross.layers * self.cross_parameters
            + self.vision.parameters
            + self.connector_parameters
        )

    @property
    def largest_layer(self) -> int:
        """The most parameters that FSDP2 gathers at once: those of a layer, or the embeddings."""
        text = self.text
        layer = text.attention_parameters + text.mlp_parameters
        return max(layer, self.cross_parameters, text.vocabulary * text.hidden)


_SECTIONS = {"text": TextSizes, "cross": CrossAttentionSizes, "vision": VisionSizes, "resampler": ResamplerSizes}


def read_model(path: str | Path) -> ModelSizes:
    """Read a model file (YAML, the sections of `ModelSizes`), a Hugging Face model directory, or its `config.json`.

    Raise ConfigError if there is no such file or its contents are invalid.
    """
    path = Path(path)
    if path.is_dir() or path.suffix == ".json":
        return _read_hf_config(path)
    sections, origin = read_yaml(path, "model"), str(path)
    for name, cls in _SECTIONS.items():
        if name not in sections or (name == "resampler" and sections[name] is None):
            continue
        if not isinstance(sections[name], dict):
            raise ConfigError(f"{origin}: {name} is {sections[name]!r}; expected fields, `name: value`")
        sections[name] = build(cls, sections[name], f"{origin}, {name}")
    projector = sections.get("projector")
    if projector is not None:
        valid = isinstance(projector, list) and all(type(x) is int and x > 0 for x in projector)
        if not valid or len(projector) not in (2, 3):
            raise ConfigError(f"{origin}: projector is {projector!r}; expected [in, out] or [in, inner, out] channels")
        sections["projector"] = tuple(projector)
    return build(ModelSizes, sections, origin)


def _read_hf_config(path: Path) -> ModelSizes:
    """Return the sizes of a model directory, or of its `config.json`; raise ConfigError if they cannot be read.

    The file is read as JSON, so that planning needs no model library. Each family translates its own configuration, in
    `patches/<family>/planner.py`.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"model: there is no {file}; pass a model directory, its config.json or a model file")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"model: {file} is not JSON: {error}") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    family = next((spec for spec in family_specs() if model_type in spec.model_types), None)
    if family is None:
        known = ", ".join(sorted(name for spec in family_specs() for name in spec.model_types))
        raise ConfigError(f"model: {file} has model_type {model_type!r}; known model types: {known}")
    try:
        return family.module("planner").model_sizes(config, file.resolve().parent.name)
    except KeyError as error:
        raise ConfigError(f"model: {file} lacks {error}, which a {model_type} model needs") from error
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"model: {file} has values that a {model_type} model cannot have: {error}") from error
