"""The workload of a plan: one training step, or one forward pass, of a model on a video and a text.

With LoRA, adapters on linear layers are trained, and the weights of the model are frozen. An adapter of rank r on a
linear layer from n to m channels has r (n + m) parameters. It computes on the same tokens as the layer, forward and in
backward for both gradients. Frozen weights have no gradient, no optimizer state, and no FLOPs for their gradient, but
the gradient passes through them to earlier layers. Left out: dropout on the input of an adapter, and copies of inputs
that an adapter in another dtype makes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.runtime.strategy_selector import VisualProjection
from mllm_seqpar.schedules.bytes_sent import Problem
from mllm_seqpar.schedules.mesh_shapes import TEXT_STRATEGIES

from .descriptions import Description, number, one_of
from .model_sizes import LinearLayers, ModelSizes

FLOAT32 = 4
TRAINED = ("all", "no-vision", "language", "connector", "none")
SELF_ATTENTION = (*TEXT_STRATEGIES, "local", "auto")
TARGETS = ("attention", "mlp", "cross", "connector")
"""attention and mlp of the decoder layers; cross-attention layers; the connector, which is what follows the tower."""

BASE_BYTES = (0.5, 1, 2, 4, 8)
"""Bytes of a frozen weight; 0.5 is a 4-bit weight of QLoRA, without its scales (0.06 bytes, or less if quantised)."""


@dataclass(frozen=True, kw_only=True)
class Workload(Description):
    """A step of `model` on `gpus` ranks that share one batch.

    The fields are options of `mllm-seqpar plan`, whose --help describes them. These have other names there, or more to
    say:

    Attributes:
        frames: images of the video of one sample, of which `VisionSizes.temporal_patch` make a frame of the model.
        frame_tokens: visual tokens of each frame of the model, a sequence or a tensor; one number for all, or None for
            those of `model`. If they differ, the frames are balanced over the ranks by them.
        gpus: the number of ranks; FSDP2 shards the parameters over them too.
        trained: with "language", features can be computed beforehand.
        self_attention: "local": every rank computes all text; "auto": the fastest of ring, mesh and ulysses.
        recompute: whether backward projects K and V of the frames again; without `--keep_visual`.
        checkpointing: `--gradient_checkpointing`.
        overlap: whether transfers run under computation; without `--no_overlap`.
        shard_weights: a forward pass or step without `answer` shards the weights in any case.
        base_parameter: with LoRA, bytes of a frozen weight; None: as `element`.
    """

    model: ModelSizes
    frames: int = number("a number of frames")
    frame_tokens: tuple[int, ...] | None = None
    text: int = number("a number of tokens")
    gpus: int
    batch: int = 1
    trained: str = one_of(TRAINED, "no-vision")
    self_attention: str = one_of(SELF_ATTENTION, "ring")
    recompute: bool = True
    checkpointing: bool = False
    recompute_attention: bool = False
    mlp_chunk_size: int | None = number("a number of tokens", None)
    vision_chunk_size: int | None = number("a number of frames", 32)
    content_tiles: int | None = number("a number of tiles", None)
    visual_offload: str | None = one_of((None, "cpu"), None)
    overlap: bool = True
    element: int = one_of((1, 2, 4, 8), 2)
    parameter: int = number("a number of bytes", 4)
    optimizer: int = number("a number of bytes", 8, least=0)
    lora_r: int | None = number("a rank of adapters", None)
    lora_target: tuple[str, ...] = ("attention", "mlp", "cross")
    base_parameter: float | None = one_of((None, *BASE_BYTES), None)
    decode_per_frame: float = number("a number of frames", 30.0, least=0)
    answer: int = number("a number of tokens", 0, least=0)
    shard_weights: bool = False
    samples: int | None = number("a number of samples", None)
    epochs: float = number("a number of epochs", 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frame_tokens is not None:
            self._read_frame_tokens()
        model, tiles = self.model, self.model.vision.tiles
        if self.content_tiles is not None and self.content_tiles > tiles:
            raise ConfigError(f"content_tiles is {self.content_tiles}; a frame of {model.name} has {tiles}")
        if self.visual_offload and not self.recompute:
            raise ConfigError('visual_offload="cpu" projects K and V again in backward; do not keep them')
        if model.decoder_only and (self.visual_offload or not self.recompute):
            raise ConfigError(
                f"{'visual_offload' if self.visual_offload else 'recompute=False'}: {model.name} has no "
                "cross-attention, whose features and K and V this is about; leave it out"
            )
        if self.answer and (self.training or not model.decoder_only):
            why = f"with trained={self.trained!r} nothing is generated; pass trained='none'"
            if not model.decoder_only:
                why = f"generation is planned for decoder-only models, and {model.name} has cross-attention"
            raise ConfigError(f"answer: {why}, or leave answer out")
        if self.shard_weights and not self.answer:
            raise ConfigError("shard_weights: has no effect without answer, because a step shards the weights anyway")
        if self.lora_r is None and self.base_parameter is not None:
            raise ConfigError("base_parameter: has no effect without lora_r; pass both, or neither")
        if self.lora_r is not None:
            target, known = self.lora_target, ", ".join(TARGETS)
            if unknown := [name for name in target if name not in TARGETS]:
                raise ConfigError(f"lora_target: {unknown[0]!r} is unknown; choose from {known}")
            if not target or len(set(target)) < len(target):
                raise ConfigError(f"lora_target: {list(target)!r}; name one or more of {known}, each once")
            if self.trained != "no-vision":
                raise ConfigError(
                    f"trained: {self.trained!r} has no effect with lora_r, which trains adapters only; leave trained "
                    "out, and name their layers by lora_target"
                )

    def _read_frame_tokens(self) -> None:
        """Set `frame_tokens`, None if all frames have as many, and the (mean) visual tokens of a frame of the model."""
        stated: Any = self.frame_tokens
        tokens, frames = (stated,) if isinstance(stated, int) else tuple(map(int, stated)), self.encoded_frames
        if len(tokens) != frames and not isinstance(stated, int):
            raise ConfigError(f"frame_tokens: {len(tokens)} numbers for {frames} frames; give one for each frame")
        model, same = self.model, len(set(tokens)) == 1
        if not same or tokens[0] != model.vision.keys:
            model.with_frame_tokens(min(tokens))  # raises
            object.__setattr__(self, "model", model.with_frame_tokens(-(-sum(tokens) // len(tokens))))
        object.__setattr__(self, "frame_tokens", None if same else tokens)

    @property
    def training(self) -> bool:
        return self.trained != "none"

    @property
    def steps(self) -> int:
        """The number of steps over the data set, the last one of an epoch with fewer samples."""
        return 0 if self.samples is None else ceil(ceil(self.samples / self.batch) * self.epochs)

    @property
    def encoded_frames(self) -> int:
        """Frames of one sample, as the tower encodes them: `VisionSizes.temporal_patch` images each."""
        return -(-self.frames // self.model.vision.temporal_patch)

    @property
    def local_frames(self) -> int:
        """Frames of all samples on the rank that has the most frames."""
        if self.frame_tokens is None:
            return -(-self.encoded_frames // self.gpus) * self.batch
        return max(map(len, self._tokens_by_rank)) * self.batch

    @property
    def local_keys(self) -> int:
        """Visual tokens of all samples on the rank that has the most."""
        if self.frame_tokens is None:
            return self.local_frames * self.model.vision.keys
        return max(map(sum, self._tokens_by_rank)) * self.batch

    @property
    def visual_tokens(self) -> int:
        """Visual tokens of one sample."""
        if self.frame_tokens is None:
            return self.encoded_frames * self.model.vision.keys
        return sum(self.frame_tokens)

    @cached_property
    def _tokens_by_rank(self) -> list[list[int]]:
        """The visual tokens of each frame of one sample, if they differ, by rank, as the model shards them."""
        from mllm_seqpar.sharding import FrameSizes  # imports torch, which plans of equal frames do not need

        tokens, layout = self.frame_tokens or (), "zigzag" if self.model.cross.earlier_frames else "contiguous"
        by_rank = FrameSizes(len(tokens), tokens).spans(self.gpus, layout)
        return [[count for start, stop in spans for count in tokens[start:stop]] for spans in by_rank]

    def sum_over_frames(self, value: Callable[[int], int], at_once: int | None = None) -> int:
        """Return the sum of `value` of a frame's tokens in the vision tower over the frames of a rank, of all samples;
        over the largest ones if the tower encodes a number of frames at once. The rank is the one with the most."""
        vision, frames = self.model.vision, self.local_frames
        if self.frame_tokens is None:
            return value(vision.tokens) * min(frames, at_once or frames)
        by_rank = (sorted(counts * self.batch, reverse=True)[:at_once] for counts in self._tokens_by_rank)
        return max(sum(value((count - vision.separators) * vision.merged) for count in counts) for counts in by_rank)

    @property
    def features_bytes(self) -> int:
        """Bytes of the visual features of a rank's frames, without their gradient."""
        return self.local_keys * self.model.cross.visual_dim * self.element

    @property
    def embedding_width(self) -> int:
        """Channels of a visual token of a decoder-only model, those of deepstack included."""
        return (1 + self.model.vision.deepstack) * self.model.text.hidden

    @property
    def weights_sharded(self) -> bool:
        """Whether FSDP2 shards the weights."""
        return self.gpus > 1 and (self.shard_weights or not self.answer)

    @property
    def text_ranks(self) -> int:
        """The ranks that share the text; 1 if every rank computes all of it."""
        return 1 if self.self_attention == "local" else self.gpus

    @property
    def rows(self) -> int:
        """Tokens of one sample that the decoder layers of each rank compute, padding included.

        In a decoder-only model, these are also the visual ones.
        """
        visual = self.visual_tokens if self.model.decoder_only else 0
        return -(-(self.text + visual) // self.text_ranks)

    @property
    def tokens(self) -> int:
        return self.batch * self.rows

    @property
    def mlp_tokens(self) -> int:
        """Tokens that an MLP computes at once: all of them if a rank has no more than one chunk."""
        return self.tokens if self.mlp_chunk_size is None else min(self.tokens, self.mlp_chunk_size)

    @property
    def chunked(self) -> bool:
        return self.mlp_tokens < self.tokens

    @property
    def scored_tokens(self) -> int:
        """Tokens of a rank whose logits are computed.

        In training, only the text is counted, because visual tokens have no target (`logits="none"`, as in finetune).
        """
        if self.training:
            return min(self.tokens, self.batch * self.text)
        return self.batch if self.answer else self.tokens

    @property
    def cache_bytes(self) -> int:
        """Bytes of the K and V of a rank at the end of an answer."""
        text, tokens = self.model.text, self.tokens + self.batch * -(-self.answer // self.text_ranks)
        return 2 * text.layers * tokens * text.kv_heads * text.head_dim * self.element

    def visible(self, part: str) -> float:
        """Return the fraction of visible entries of each block of the attention of a part.

        A causal mask halves self-attention. In cross-attention, empty tiles are projected and sent, but masked. Where
        text attends to earlier frames only, the placeholders of the frames attend to half of them, and zigzag frames
        balance the load. A text shorter than the number of frames does not count its placeholders.
        """
        if part == "self-attention":
            return 0.5
        content = 1.0 if self.content_tiles is None else self.content_tiles / self.model.vision.tiles
        placeholders = self.frames if self.model.cross.earlier_frames and self.frames <= self.text else 0
        hidden = 0.5
        if self.frame_tokens is not None:  # of the keys, in the mean over the placeholders
            before = pairwise(accumulate(self.frame_tokens, initial=0))
            hidden = 1 - sum(map(sum, before)) / (2 * self.visual_tokens * len(self.frame_tokens))
        return content * (1 - hidden * placeholders / self.text)

    @property
    def compared(self) -> str:
        """The part of a step that strategies are compared for."""
        return "self-attention" if self.model.decoder_only else "cross-attention"

    def problem(self, part: str) -> Problem:
        """Return one call of the attention of a part; every rank has as many keys as the rank with the most keys."""
        if part == "self-attention":
            sizes: Any = self.model.text
            rows = keys = self.rows
            ranks = self.text_ranks
        else:
            sizes, rows, ranks = self.model.cross, -(-self.text // self.gpus), self.gpus
            keys = self.local_keys // self.batch
        return Problem(
            rows=rows,
            keys=(keys,) * ranks,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            dim=sizes.head_dim,
            batch=self.batch,
            key_batch=self.batch,
            element=self.element,
            direct_element=self.element,
        )

    @property
    def visual(self) -> VisualProjection:
        """The projection of K and V of cross-attention."""
        return VisualProjection(
            dim=self.model.cross.visual_dim,
            layers=self.model.cross.layers,
            recompute=self.recompute,
            trained=self.trains_features,
            weights_trained=self.lora_r is None,
        )

    @property
    def trains_features(self) -> bool:
        """Whether the features have a gradient: the tower is trained, or a connector behind it."""
        if self.lora_r is not None:
            return "connector" in self.lora_target
        connector = self.model.parameters_of("connector") > 0
        return self.trained == "all" or (connector and self.trained in ("no-vision", "connector"))

    @property
    def language_trained(self) -> bool:
        """Whether the weights of the decoder layers have gradients."""
        return self.lora_r is None and self.trained in ("all", "no-vision", "language")

    def adapter_parameters(self, one: LinearLayers) -> int:
        """Return the parameters of the adapters on linear layers, which are the multiply-adds of a token."""
        if self.lora_r is None or one.target not in self.lora_target:
            return 0
        return self.lora_r * one.layers * sum(inputs + outputs for inputs, outputs in one.channels)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of all frozen weights beside adapters. Embeddings and the head are not quantised."""
        stored = self.element if self.base_parameter is None else self.base_parameter
        embeddings = self.model.text.embeddings
        return int((self.model.parameters - embeddings) * stored + embeddings * max(stored, self.element))

    @property
    def trained_parameters(self) -> int:
        model = self.model
        if self.lora_r is not None:
            return sum(map(self.adapter_parameters, model.linear))
        without_vision = model.parameters - model.vision.parameters
        return {
            "all": model.parameters,
            "no-vision": without_vision,
            "language": without_vision - model.parameters_of("connector"),
            "connector": model.parameters_of("connector", "cross"),
            "none": 0,
        }[self.trained]
