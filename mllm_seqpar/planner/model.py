"""The sizes of a cross-attention MLLM that its cost depends on, and the parameters they make.

A model is a language model, cross-attention in some of its layers or between them, and what makes visual features of
pictures: a vision tower, perhaps a resampler (a Perceiver) or a linear projector. Norms, biases, gates and position
embeddings are left out: they are a thousandth of it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .files import build, read_yaml


class _Sizes:
    """Checks that all fields are whole numbers, above 0 unless they may be 0."""

    may_be_zero: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if str(field.type) != "int":
                continue
            least = 0 if field.name in self.may_be_zero else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{field.name} is {value!r}; give a whole number, {least} or more")


@dataclass(frozen=True, kw_only=True)
class Text(_Sizes):
    """The language model: decoder layers with self-attention (those with cross-attention in its place not counted).

    `mlp_matrices`: 3 for gated MLPs, 2 for plain ones.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_inner: int
    mlp_matrices: int
    vocabulary: int
    tied_embeddings: bool = False

    @property
    def attention_parameters(self) -> int:
        """q, k, v and o of one layer."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Of one layer."""
        return self.mlp_matrices * self.hidden * self.mlp_inner

    @property
    def embedding_parameters(self) -> int:
        """Input embeddings, and the head unless it is the same."""
        return self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)


@dataclass(frozen=True, kw_only=True)
class Cross(_Sizes):
    """Cross-attention: K and V are projected from features of `visual_dim` channels.

    `own_queries`: it has q and o projections of its own (mPLUG-Owl3 shares self-attention's). `mlp_inner`: of an MLP of
    its own behind it; 0: none.
    """

    may_be_zero = ("mlp_inner", "mlp_matrices")

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    visual_dim: int
    own_queries: bool = True
    mlp_inner: int = 0
    mlp_matrices: int = 0


@dataclass(frozen=True, kw_only=True)
class Vision(_Sizes):
    """The vision tower; `tokens`: patches that it computes for one frame; `keys`: what a frame has in the end."""

    width: int
    layers: int
    heads: int
    mlp_inner: int
    tokens: int
    keys: int

    @property
    def parameters(self) -> int:
        """Of its layers."""
        return self.layers * (4 * self.width**2 + 2 * self.width * self.mlp_inner)


@dataclass(frozen=True, kw_only=True)
class Resampler(_Sizes):
    """A Perceiver: latents that attend to a frame's patches and to themselves."""

    may_be_zero = ("mlp_inner",)

    layers: int
    heads: int
    head_dim: int
    mlp_inner: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """A cross-attention MLLM. `projector`: (in, out) channels of a linear layer behind the tower, or none."""

    name: str
    text: Text
    cross: Cross
    vision: Vision
    resampler: Resampler | None = None
    projector: tuple[int, int] | None = None

    @property
    def cross_parameters(self) -> int:
        """Of one cross-attention layer, its own MLP included."""
        hidden, cross = self.text.hidden, self.cross
        return (
            2 * cross.visual_dim * cross.kv_heads * cross.head_dim
            + (2 * hidden * cross.heads * cross.head_dim if cross.own_queries else 0)
            + cross.mlp_matrices * hidden * cross.mlp_inner
        )

    @property
    def connector_parameters(self) -> int:
        """Of resampler and projector."""
        found = self.projector[0] * self.projector[1] if self.projector else 0
        if self.resampler:
            width, r = self.vision.width, self.resampler
            found += r.layers * (4 * width * r.heads * r.head_dim + 2 * width * r.mlp_inner)
        return found

    @property
    def language_parameters(self) -> int:
        """Of the language model, without cross-attention."""
        text = self.text
        return text.layers * (text.attention_parameters + text.mlp_parameters) + text.embedding_parameters

    @property
    def parameters(self) -> int:
        """Of everything."""
        return (
            self.language_parameters
            + self.cross.layers * self.cross_parameters
            + self.vision.parameters
            + self.connector_parameters
        )

    @property
    def largest_layer(self) -> int:
        """Parameters that FSDP2 gathers at once, at most: a decoder layer, or the embeddings."""
        text = self.text
        layer = text.attention_parameters + text.mlp_parameters
        return max(layer, self.cross_parameters, text.vocabulary * text.hidden)


def model_from(values: dict[str, Any], origin: str) -> Model:
    """A Model from the sections of a model file.

    Raises:
        ConfigError: sections or fields that are missing, unknown or bad.
    """
    sections: dict[str, Any] = dict(values)
    for name, cls in (("text", Text), ("cross", Cross), ("vision", Vision), ("resampler", Resampler)):
        if sections.get(name) is None:
            continue
        if not isinstance(sections[name], dict):
            raise ConfigError(f"{origin}: {name} is {sections[name]!r}; it must hold fields")
        sections[name] = build(cls, sections[name], f"{origin}, {name}")
    projector = sections.get("projector")
    if projector is not None:
        if not (isinstance(projector, list) and len(projector) == 2 and all(type(x) is int for x in projector)):
            raise ConfigError(f"{origin}: projector is {projector!r}; give [in, out] channels")
        sections["projector"] = tuple(projector)
    model = build(Model, sections, origin)
    for what, heads, kv_heads in (
        ("text", model.text.heads, model.text.kv_heads),
        ("cross", model.cross.heads, model.cross.kv_heads),
    ):
        if heads % kv_heads:
            raise ConfigError(f"{origin}, {what}: {kv_heads} kv_heads do not divide {heads} heads")
    return model


def read_model(path: str | Path) -> Model:
    """A model file (YAML, the sections of `Model`), a directory with a `config.json`, or such a file.

    Raises:
        ConfigError: no such file, or one that says something else.
    """
    path = Path(path)
    if path.is_dir() or path.suffix == ".json":
        from .hf_config import read_hf_config

        return read_hf_config(path)
    return model_from(read_yaml(path, "model"), str(path))
