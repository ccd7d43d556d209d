"""The sizes of a cross-attention MLLM that its cost depends on, and the parameters they make.

A model is a language model, cross-attention in some of its layers or between them, and what makes visual features of
pictures: a vision tower, perhaps a resampler (a Perceiver) or a linear projector. Norms, biases, gates and position
embeddings are left out of the parameters: they are a thousandth of them. Norms of visual tokens are named all the same,
for what they keep for backward is not (`memory`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from mllm_seqpar.errors import ConfigError

from .files import build, read_yaml


class _Sizes:
    """Checks that numbers are whole, above 0 unless they may be 0, and that other fields are what they may be."""

    may_be_zero: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if str(field.type) == "bool":
                if not isinstance(value, bool):
                    raise ConfigError(f"{field.name} is {value!r}; give true or false")
            elif str(field.type) == "str":
                if value not in self.choices[field.name]:
                    raise ConfigError(f"{field.name} is {value!r}; give one of {', '.join(self.choices[field.name])}")
            else:
                least = 0 if field.name in self.may_be_zero else 1
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    raise ConfigError(f"{field.name} is {value!r}; give a whole number, {least} or more")


@dataclass(frozen=True, kw_only=True)
class TextSizes(_Sizes):
    """The language model: decoder layers with self-attention (those with cross-attention in its place not counted).

    `mlp_matrices`: 3 for gated MLPs, 2 for plain ones. `norm`: as `CrossAttentionSizes.key_norm`.
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
class CrossAttentionSizes(_Sizes):
    """Cross-attention: K and V are projected from features of `visual_dim` channels.

    Attributes:
        layers, heads, kv_heads, head_dim, visual_dim: sizes.
        own_queries: it has q and o projections of its own (mPLUG-Owl3 shares self-attention's).
        mlp_inner, mlp_matrices: of an MLP of its own behind it; 0: none.
        features_norm: each layer normalises the features before it projects them (mPLUG-Owl3).
        key_norm: how K is normalised, head by head: "none"; "float32": in a float32 copy of it (Llama 3.2); "mixed":
            as it is, times a factor from a float32 copy (IDEFICS). Both copies are kept for backward.
        gate: "per_head" if the share of the visual part is a linear layer of each head of the text's attention output
            (mPLUG-Owl3-7B-240728), or "none"; other gates cost next to nothing.
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


@dataclass(frozen=True, kw_only=True)
class VisionSizes(_Sizes):
    """The vision tower.

    Attributes:
        width, layers, heads, mlp_inner: sizes.
        tokens: patches that it computes for one frame.
        keys: what a frame has in the end.
        outputs_held: outputs of its layers that are alive at the same time: the last one, the embeddings as well
            (IDEFICS), all of them (Llama 3.2).
        tiles: that `tokens` and `keys` consist of; those of one frame attend to each other, by a mask (Llama 3.2).
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
        """Of its layers."""
        return self.layers * (4 * self.width**2 + 2 * self.width * self.mlp_inner)


@dataclass(frozen=True, kw_only=True)
class ResamplerSizes(_Sizes):
    """A Perceiver: latents that attend to a frame's patches and to themselves.

    `code`: "flamingo" or "idefics", whose it is: the same sums, but they keep different things for backward.
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

    `projector`: the channels from layer to layer of the linear layers behind the tower, (in, out) of one layer or (in,
    inner, out) of two with an activation function between them; or none.
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
        """Of one cross-attention layer, its own MLP included."""
        hidden, cross = self.text.hidden, self.cross
        return (
            2 * cross.visual_dim * cross.kv_heads * cross.head_dim
            + (2 * hidden * cross.heads * cross.head_dim if cross.own_queries else 0)
            + cross.mlp_matrices * hidden * cross.mlp_inner
            + (cross.head_dim**2 if cross.gate == "per_head" else 0)
        )

    @property
    def projector_parameters(self) -> int:
        """Return the number of weights of the projector."""
        return sum(a * b for a, b in pairwise(self.projector or ()))

    @property
    def connector_parameters(self) -> int:
        """Of resampler and projector."""
        found = self.projector_parameters
        if self.resampler:
            width, r = self.vision.width, self.resampler
            found += r.layers * (4 * width * r.heads * r.head_dim + 2 * width * r.mlp_inner)
        return found

    @property
    def connector_work(self) -> int:
        """Parameters of resampler and projector times the tokens of one frame that each of them sees."""
        latents, width = self.vision.keys, self.vision.width
        found = latents * self.projector_parameters
        if self.resampler:  # its keys are of latents and patches
            r, tokens = self.resampler, 4 * latents + 2 * self.vision.tokens
            found += r.layers * width * (tokens * r.heads * r.head_dim + latents * 2 * r.mlp_inner)
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


def model_from(values: dict[str, Any], origin: str) -> ModelSizes:
    """A Model from the sections of a model file.

    Raises:
        ConfigError: sections or fields that are missing, unknown or bad.
    """
    sections: dict[str, Any] = dict(values)
    for name, cls in (
        ("text", TextSizes),
        ("cross", CrossAttentionSizes),
        ("vision", VisionSizes),
        ("resampler", ResamplerSizes),
    ):
        if name not in sections or (name == "resampler" and sections[name] is None):
            continue
        if not isinstance(sections[name], dict):
            raise ConfigError(f"{origin}: {name} is {sections[name]!r}; it must hold fields")
        sections[name] = build(cls, sections[name], f"{origin}, {name}")
    projector = sections.get("projector")
    if projector is not None:
        whole = isinstance(projector, list) and all(type(x) is int and x > 0 for x in projector)
        if not whole or len(projector) not in (2, 3):
            raise ConfigError(f"{origin}: projector is {projector!r}; give [in, out] or [in, inner, out] channels")
        sections["projector"] = tuple(projector)
    return build(ModelSizes, sections, origin)


def read_model(path: str | Path) -> ModelSizes:
    """A model file (YAML, the sections of `ModelSizes`), a directory with a `config.json`, or such a file.

    Raises:
        ConfigError: no such file, or one that says something else.
    """
    path = Path(path)
    if path.is_dir() or path.suffix == ".json":
        from .hf_config import read_hf_config

        return read_hf_config(path)
    return model_from(read_yaml(path, "model"), str(path))
