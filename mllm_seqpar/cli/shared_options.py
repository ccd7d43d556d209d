"""Groups of options that several commands share: which frames of a video are used, and how attention is distributed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mllm_seqpar.config import CHOICES, SeqParConfig
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.kernels import kernel_names
from mllm_seqpar.videos.decode_options import DECODERS, check_decoding
from mllm_seqpar.videos.frame_choice import FRAME_FIELDS, FrameChoice

from .options import CommandOptions, option, parse_tile


@dataclass(frozen=True, kw_only=True)
class FrameOptions(CommandOptions):
    """Which frames of a video are used, and how they are read."""

    _argument_group_name = "frames of videos"

    fps: float | None = option(
        "frames per second to sample from each video; default: that of the data, else 1", None, above=0
    )
    max_frames: int | None = option(
        "maximum number of frames per video, besides that of the data; default: no limit", None, least=1
    )
    decode_threads: int | None = option(
        "decoding threads per rank; default: the cores of its machine divided by the ranks on it", None, least=1
    )
    decoder: str = option("video decoder (torchcodec: pip install 'mllm-seqpar[torchcodec]')", "pyav", choices=DECODERS)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.frame_choice()
        except ConfigError as error:
            raise ConfigError(f"--{error}") from error
        check_decoding(self.decode_threads, self.decoder)

    def frame_choice(self) -> FrameChoice:
        """Return which frames the options state; those that the command does not have are not stated."""
        return FrameChoice(**{name: getattr(self, name, None) for name in FRAME_FIELDS})

    def decoding(self) -> dict[str, Any]:
        """Return how `VideoSource.open` and `ChatDataset` read the frames that they have planned."""
        return {"threads": self.decode_threads, "decoder": self.decoder}


@dataclass(frozen=True, kw_only=True)
class StoredFrameOptions(FrameOptions):
    """`FrameOptions` of a command that takes the same frames of each video in every run, so that they may be stored."""

    frame_store: str | None = option(
        "directory of frames that check-data --store wrote, which are read instead of the videos", None
    )

    def decoding(self) -> dict[str, Any]:
        """Return how `VideoSource.open` and `ChatDataset` read the frames that they have planned."""
        return super().decoding() | {"frame_store": self.frame_store}


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(CommandOptions):
    """How attention is distributed over ranks; the fields of `SeqParConfig` that a command has as options."""

    strategy: str = option("cross-attention; in answers, that of long prompts", "lv-xattn", choices=CHOICES["strategy"])
    self_attention: str = option(
        "self-attention of the text; star, for answers only, is approximate (docs/concepts/star.md)",
        "ring",
        choices=CHOICES["self_attention"],
    )
    tile: str | None = option(
        "mesh shape AxB of mesh (A * B = ranks) or of hybrid ulysses; default: selected automatically", None
    )
    mlp_chunk_size: int | None = option("text tokens per MLP chunk; default: all", None, least=1)
    kernel: str = option("block kernel, which computes attention", "auto", choices=("auto", *kernel_names()))
    shard_weights: bool = option("each rank holds a shard of the weights (FSDP2)", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config()

    def config(self) -> SeqParConfig:
        """Return the options of `patch_model`; ConfigError if they contradict each other."""
        names = [item.name for item in fields(SeqParConfig) if hasattr(self, item.name)]
        return SeqParConfig(**{name: getattr(self, name) for name in names} | {"tile": parse_tile(self.tile)})
