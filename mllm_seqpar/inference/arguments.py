"""The options of the inference script: one frozen dataclass, from which the command line is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from mllm_seqpar.cli.launch import DEVICES
from mllm_seqpar.cli.options import CommandOptions, option, parse_options, parse_tile
from mllm_seqpar.config import CHOICES, SeqParConfig
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.kernels import available_kernels

from .generation import Sampling
from .model_loading import DTYPES
from .stored_features import FRAME_OPTIONS

DEFAULT_FPS = 1.0
SAME_OPTIONS = ("strategy", "self_attention", "mlp_chunk_size", "kernel", "visual_offload")
"""Options that `SeqParConfig` has under the same name."""


@dataclass(frozen=True, kw_only=True)
class InferArguments(CommandOptions):
    """The options of a run. `scripts/infer_long_video.py --help` prints the same texts."""

    model: str = option("directory of the model, safetensors, with its processor")
    video: str | None = option("the video file", None)
    question: tuple[str, ...] = option("the question; may be repeated, the video is encoded once", ())

    fps: float | None = option(
        f"frames per second to sample from the video (default: {DEFAULT_FPS:g}, without --num-frames)", None
    )
    num_frames: int | None = option("instead of --fps: this many frames, evenly spaced", None)
    max_frames: int | None = option("if --fps gives more frames: this many, evenly spaced", None)
    encode_batch: int = option("frames that a rank reads and encodes at once", 8)
    save_features: str | None = option("directory to store the encoded video in", None)
    features: str | None = option(
        "directory with an encoded video, written by any number of ranks; then --video is not needed", None
    )

    max_new_tokens: int = option("maximum length of an answer", 256)
    temperature: float = option("0 takes the most likely token each time, above 0 samples", 0.0)
    top_p: float = option("sample from the most likely tokens whose probabilities sum to this value", 1.0)
    seed: int = option("seed of the sampling", 0)

    strategy: str = option(f"cross-attention of long prompts: {', '.join(CHOICES['strategy'])}", "lv-xattn")
    self_attention: str = option(
        f"self-attention of long prompts: {', '.join(CHOICES['self_attention'])}; "
        "star is approximate (docs/concepts/star.md)",
        "ring",
    )
    tile: str | None = option(
        "mesh shape AxB of mesh (A * B = ranks) or of hybrid ulysses; default: selected automatically", None
    )
    mlp_chunk_size: int | None = option("text tokens per MLP chunk; default: all", None)
    visual_offload: str | None = option(
        "cpu: keep the encoded video, and K and V of its frames, in host memory; what --features names stays in its "
        "file; default: on the device",
        None,
    )
    kernel: str = option("block attention kernel", "auto")
    shard_weights: bool = option("shard the weights over the ranks too, for models that do not fit on a device", False)
    dtype: str = option(f"dtype of the model: {', '.join(DTYPES)} (auto: that of the checkpoint)", "auto")
    device: str = option(f"one of {', '.join(DEVICES)}", "auto")
    timeout: float | None = option(
        "seconds to wait for a rank in a collective (default: 600 on GPUs, 300 on CPU)", None
    )
    report: str | None = option("JSON file for answers, tokens, times and memory", None)
    evidence: int = option("print this many moments of the video that an answer attends to most", 0)
    evidence_html: str | None = option("HTML page that shows, token by token, where in the video an answer looks", None)
    progress: bool = option("progress bar on rank 0", True)

    def __post_init__(self) -> None:
        for name in ("fps", "num_frames", "max_frames", "encode_batch", "timeout"):
            value = getattr(self, name)
            self._require(name, value is None or value > 0, "more than 0")
        self._require("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        self._require("device", self.device in DEVICES, f"one of {', '.join(DEVICES)}")
        if self.fps is not None and self.num_frames is not None:
            raise ConfigError(f"--fps {self.fps:g} and --num-frames {self.num_frames}: give one of them")
        if self.video is None and self.features is None:
            raise ConfigError("no video to ask about: give --video FILE, or --features DIR of an encoded video")
        if self.features is not None and self.save_features is not None:
            raise ConfigError("--features and --save-features: features that are on disk are not written again")
        if not self.question and self.save_features is None:
            raise ConfigError('nothing to do: give --question "...", or --save-features DIR to encode only')
        if any(not question.strip() for question in self.question):
            raise ConfigError("--question: the question is empty; give a text")
        if self.kernel not in ("auto", *available_kernels()):
            raise ConfigError(f"--kernel: {self.kernel!r} is unknown; choose auto, {', '.join(available_kernels())}")
        self.sampling()
        self.seqpar_config()
        self._require("temperature", True, "a finite number")
        self._require("seed", 0 <= self.seed < 2**63, "0 or more, below 2**63")
        if self.temperature == 0:
            for name in ("top_p", "seed"):
                self._refuse_unused(name, "without --temperature above 0 no token is sampled")
        if self.num_frames is not None:
            self._refuse_unused("max_frames", "--num-frames sets the number; give one of them")
        if not self.question:
            for name in ("temperature", "strategy", "self_attention", "tile", "mlp_chunk_size", "kernel"):
                self._refuse_unused(name, "there is no question; give --question, or leave it out")
        self._require("evidence", self.evidence >= 0, "0 or more")
        if not self.question:
            for name in ("evidence", "evidence_html"):
                self._refuse_unused(name, "there is no question; give --question, or leave it out")
        if self.report is not None:
            self._require("report", bool(self.report), "a file")

    def sampling(self) -> Sampling:
        return Sampling(**{item.name: getattr(self, item.name) for item in fields(Sampling)})

    def seqpar_config(self) -> SeqParConfig:
        same = {name: getattr(self, name) for name in SAME_OPTIONS}
        return SeqParConfig(tile=parse_tile(self.tile), **same)

    def frame_options(self, default_fps: float | None = None) -> dict[str, Any]:
        """Return the values of `FRAME_OPTIONS`, with `default_fps` if neither fps nor num_frames is given."""
        options = {name: getattr(self, name) for name in FRAME_OPTIONS}
        if self.fps is None and self.num_frames is None:
            options["fps"] = default_fps
        return options


def parse(argv: Sequence[str]) -> InferArguments:
    """Return the arguments in `argv` (without the program's name); raise ConfigError if they are invalid."""
    description = "Ask about a long video whose frames are sharded over all ranks."
    return parse_options(InferArguments, argv, prog="infer_long_video.py", description=description)
