"""The options that `chat` and `serve` share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mllm_seqpar.cli.launch import DEVICES
from mllm_seqpar.cli.options import CommandOptions, option, parse_tile
from mllm_seqpar.config import CHOICES, SeqParConfig
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.inference.arguments import DEFAULT_FPS
from mllm_seqpar.inference.generation import Sampling
from mllm_seqpar.inference.model_loading import DTYPES
from mllm_seqpar.kernels import available_kernels


@dataclass(frozen=True, kw_only=True)
class ModelOptions(CommandOptions):
    """The model, its ranks, the frames of a video, and the defaults of an answer."""

    model: str = option("directory or Hub id of the model, with its processor")
    num_processes: int | None = option(
        "ranks to start on this machine (default: one for each GPU, or 1 without any); leave it out under a launcher",
        None,
    )

    fps: float | None = option(
        f"frames per second to sample from a video (default: {DEFAULT_FPS:g}, without --num_frames)", None
    )
    num_frames: int | None = option("instead of --fps: this many frames, evenly spaced", None)
    max_frames: int | None = option("if --fps gives more frames: this many, evenly spaced", None)
    encode_batch: int = option("frames that a rank reads and encodes at once", 8)

    max_new_tokens: int = option("maximum length of an answer", 512)
    temperature: float = option("0 takes the most likely token each time, above 0 samples", 0.0)
    top_p: float = option("sample from the most likely tokens whose probabilities sum to this value", 1.0)

    strategy: str = option(f"cross-attention of long prompts: {', '.join(CHOICES['strategy'])}", "lv-xattn")
    self_attention: str = option(f"self-attention of long prompts: {', '.join(CHOICES['self_attention'])}", "ring")
    tile: str | None = option("mesh shape AxB of mesh or of hybrid ulysses; default: selected automatically", None)
    mlp_chunk_size: int | None = option("text tokens per MLP chunk; default: all", None)
    kernel: str = option("block kernel, which computes attention", "auto")
    shard_weights: bool = option("shard the weights over the ranks too, for models that do not fit on a device", False)
    dtype: str = option(f"dtype of the model: {', '.join(DTYPES)} (auto: that of the checkpoint)", "auto")
    device: str = option(f"one of {', '.join(DEVICES)}", "auto")
    timeout: float | None = option(
        "seconds to wait for a rank in a collective (default: 600 on GPUs, 300 on CPU); waiting for you has no limit",
        None,
    )

    def __post_init__(self) -> None:
        for name in ("num_processes", "fps", "num_frames", "max_frames", "encode_batch", "timeout"):
            value = getattr(self, name)
            self._require(name, value is None or value > 0, "more than 0")
        self._require("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        self._require("device", self.device in DEVICES, f"one of {', '.join(DEVICES)}")
        self._require("temperature", True, "a finite number")
        if self.fps is not None and self.num_frames is not None:
            raise ConfigError(f"--fps {self.fps:g} and --num_frames {self.num_frames}: give one of them")
        if self.num_frames is not None:
            self._refuse_unused("max_frames", "--num_frames sets the number; give one of them")
        if self.kernel not in ("auto", *available_kernels()):
            raise ConfigError(f"--kernel: {self.kernel!r} is unknown; choose auto, {', '.join(available_kernels())}")
        self.sampling()
        self.seqpar_config()

    def sampling(self, **changes: Any) -> Sampling:
        values = {item.name: getattr(self, item.name) for item in fields(Sampling) if hasattr(self, item.name)}
        return Sampling(**(values | changes))

    def seqpar_config(self) -> SeqParConfig:
        same = {name: getattr(self, name) for name in ("strategy", "self_attention", "mlp_chunk_size", "kernel")}
        return SeqParConfig(tile=parse_tile(self.tile), **same)

    def frame_options(self) -> dict[str, Any]:
        """Return the sampling of a video for which the user states none."""
        options = {name: getattr(self, name) for name in ("fps", "num_frames", "max_frames")}
        if self.fps is None and self.num_frames is None:
            options["fps"] = DEFAULT_FPS
        return options
