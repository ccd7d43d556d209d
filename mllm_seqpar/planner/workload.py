"""What is planned for: one training step, or one forward pass, of a model on a video and a text."""

from __future__ import annotations

from dataclasses import dataclass

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.schedules.bytes_sent import Problem

from .call_overheads import Visual
from .model import ModelSizes

TRAINED = ("all", "no-vision", "connector", "none")
SELF_ATTENTION = ("ring", "mesh", "ulysses", "local", "auto")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A step of `model` over `gpus` ranks that share one batch.

    Attributes:
        model: its sizes.
        frames, text: frames, and text tokens, of one batch item.
        gpus: ranks; parameters are sharded over them too (FSDP2).
        batch: items.
        trained: "all"; "no-vision": all but the vision tower; "connector": cross-attention and what follows the tower;
            "none": forward only.
        self_attention: of the text: "ring", "mesh", "ulysses", "local" (every rank computes all text), or "auto" (the
            cheapest of the first three).
        recompute: K and V of frames are projected again in backward.
        checkpointing: decoder layers, and those of a trained vision tower, are computed again in backward.
        mlp_chunk_size: tokens that MLPs compute at once, again in backward, where a rank has more; None: all.
        vision_chunk_size: frames that the vision tower encodes at once; None: all of a rank's.
        content_tiles: tiles of a frame that have content, where the model has several; the text sees no others, and
            None means all.
        overlap: transfers under computation.
        element: bytes of an activation's element (bf16: 2).
        parameter: bytes of a stored parameter and of its gradient (float32 masters: 4).
        optimizer: bytes of optimizer state per trained parameter (AdamW in float32: 8).

    Raises:
        ConfigError: numbers that make no step.
    """

    model: ModelSizes
    frames: int
    text: int
    gpus: int
    batch: int = 1
    trained: str = "no-vision"
    self_attention: str = "ring"
    recompute: bool = True
    checkpointing: bool = False
    mlp_chunk_size: int | None = None
    vision_chunk_size: int | None = 32
    content_tiles: int | None = None
    overlap: bool = True
    element: int = 2
    parameter: int = 4
    optimizer: int = 8

    def __post_init__(self) -> None:
        for name in ("frames", "text", "gpus", "batch"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}: {value!r} is not a number of {name}; give 1 or more")
        for name, least in (("element", 1), ("parameter", 1), ("optimizer", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name}: {value!r} is not a number of bytes; give {least} or more")
        if self.element not in (1, 2, 4, 8):
            raise ConfigError(f"element: no floating-point number has {self.element} bytes; give 1, 2, 4 or 8")
        for name, counted in (("mlp_chunk_size", "tokens"), ("vision_chunk_size", "frames")):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}: {value!r} is not a number of {counted}; give 1 or more")
        tiles = self.model.vision.tiles
        if self.content_tiles is not None and not (
            type(self.content_tiles) is int and 1 <= self.content_tiles <= tiles
        ):
            raise ConfigError(
                f"content_tiles: {self.content_tiles!r} is not a number of tiles that a frame of {self.model.name} can "
                f"have; give 1 to {tiles}"
            )
        if self.trained not in TRAINED:
            raise ConfigError(f"trained: {self.trained!r} is unknown; choose one of {', '.join(TRAINED)}")
        if self.self_attention not in SELF_ATTENTION:
            raise ConfigError(
                f"self_attention: {self.self_attention!r} cannot be planned; choose one of {', '.join(SELF_ATTENTION)}"
            )

    @property
    def training(self) -> bool:
        """Whether there is a backward pass."""
        return self.trained != "none"

    @property
    def rows(self) -> int:
        """Text tokens of each rank, padded to equal shares; all of them where text is not dealt."""
        return self.text if self.self_attention == "local" else -(-self.text // self.gpus)

    @property
    def mlp_rows(self) -> int:
        """Tokens that an MLP computes at once."""
        tokens = self.batch * self.rows
        return tokens if self.mlp_chunk_size is None else min(tokens, self.mlp_chunk_size)

    @property
    def chunked(self) -> bool:
        """Whether MLPs go in chunks: with no more tokens than a chunk has, they are computed as ever."""
        return self.mlp_rows < self.batch * self.rows

    @property
    def visible(self) -> float:
        """Share of the visual keys that the text sees: empty tiles are projected and sent, and masked."""
        return 1.0 if self.content_tiles is None else self.content_tiles / self.model.vision.tiles

    @property
    def local_frames(self) -> int:
        """Frames of the rank with most, of all batch items."""
        return -(-self.frames // self.gpus) * self.batch

    @property
    def keys(self) -> int:
        """Visual tokens of that rank, of one batch item: all ranks are planned with as many."""
        return -(-self.frames // self.gpus) * self.model.vision.keys

    @property
    def cross_problem(self) -> Problem:
        """One cross-attention call."""
        cross = self.model.cross
        return Problem(
            rows=-(-self.text // self.gpus),
            keys=(self.keys,) * self.gpus,
            heads=cross.heads,
            kv_heads=cross.kv_heads,
            dim=cross.head_dim,
            batch=self.batch,
            key_batch=self.batch,
            element=self.element,
        )

    @property
    def text_problem(self) -> Problem:
        """One self-attention call."""
        text = self.model.text
        ranks = 1 if self.self_attention == "local" else self.gpus
        return Problem(
            rows=self.rows,
            keys=(self.rows,) * ranks,
            heads=text.heads,
            kv_heads=text.kv_heads,
            dim=text.head_dim,
            batch=self.batch,
            key_batch=self.batch,
            element=self.element,
        )

    @property
    def visual(self) -> Visual:
        """Where cross-attention's keys come from."""
        cross = self.model.cross
        trained = self.trained == "all" or (self.training and self.model.connector_parameters > 0)
        return Visual(dim=cross.visual_dim, layers=cross.layers, recompute=self.recompute, trained=trained)

    @property
    def language_trained(self) -> bool:
        """Whether the language model's own parameters get gradients."""
        return self.trained in ("all", "no-vision")

    @property
    def trained_parameters(self) -> int:
        """How many parameters get gradients."""
        model = self.model
        connector = model.connector_parameters + model.cross.layers * model.cross_parameters
        return {
            "all": model.parameters,
            "no-vision": model.parameters - model.vision.parameters,
            "connector": connector,
            "none": 0,
        }[self.trained]
