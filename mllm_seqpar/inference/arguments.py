"""What the inference script can be told: one frozen dataclass, from which the command line is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mllm_seqpar.cli.devices import DEVICES
from mllm_seqpar.cli.options import CommandOptions, option, parse_options, tile_shape
from mllm_seqpar.config import CHOICES, SeqParConfig
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.kernels import available_kernels

from .feature_files import SAMPLING
from .generation import Sampling
from .model import DTYPES

DEFAULT_FPS = 1.0


@dataclass(frozen=True, kw_only=True)
class InferArguments(CommandOptions):
    """Everything that decides a run. `scripts/infer_long_video.py --help` prints the same texts."""

    model: str = option("directory of the model, safetensors, with its processor")
    video: str | None = option("the video file", None)
    question: tuple[str, ...] = option(
        "what to ask; may be given several times, later ones reuse the encoded video", ()
    )

    fps: float | None = option(
        f"frames a second to take of the video (default: {DEFAULT_FPS:g}, without --num-frames)", None
    )
    num_frames: int | None = option("in place of --fps: this many frames, evenly spaced", None)
    max_frames: int | None = option("where --fps gives more: this many, evenly spaced", None)
    encode_batch: int = option("frames that a rank reads and encodes at once", 8)
    save_features: str | None = option("directory to keep the encoded video in", None)
    features: str | None = option(
        "directory with an encoded video, written by any number of ranks; then --video is not needed", None
    )

    max_new_tokens: int = option("longest answer", 256)
    temperature: float = option("0 takes the most likely token each time, above 0 draws", 0.0)
    top_p: float = option("draw among the most likely tokens of this probability together", 1.0)
    seed: int = option("of the draws", 0)

    strategy: str = option(f"cross-attention of long prompts: {', '.join(CHOICES['strategy'])}", "lv-xattn")
    self_attention: str = option(
        f"of long prompts' text: {', '.join(CHOICES['self_attention'])}; star is approximate (docs/star.md)", "ring"
    )
    tile: str | None = option("tile of mesh (AxB = ranks) or of hybrid ulysses, as AxB; default: chosen", None)
    mlp_chunk_size: int | None = option("text tokens that MLPs compute at once; default: all", None)
    kernel: str = option("block attention kernel", "auto")
    shard_weights: bool = option("shard the weights over the ranks too, for models that fill a device", False)
    dtype: str = option(f"of the model: {', '.join(DTYPES)} (auto: the checkpoint's)", "auto")
    device: str = option(f"one of {', '.join(DEVICES)}", "auto")
    timeout: float | None = option("seconds until a silent rank is given up (default: 600 on GPUs, 300 on CPU)", None)
    report: str | None = option("file for answers, tokens, times and memory as JSON", None)
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
            raise ConfigError("no video to ask about: give --video FILE, or --features DIR of one that is encoded")
        if self.features is not None and self.save_features is not None:
            raise ConfigError("--features and --save-features: features that are on disk are not written again")
        if not self.question and self.save_features is None:
            raise ConfigError('nothing to do: give --question "...", or --save-features DIR to encode only')
        if any(not question.strip() for question in self.question):
            raise ConfigError("--question: an empty one; write what you want to know")
        if self.kernel not in ("auto", *available_kernels()):
            raise ConfigError(f"--kernel: {self.kernel!r} is unknown; choose auto, {', '.join(available_kernels())}")
        self.sampling()
        self.seqpar_config()
        self._refuse_idle_options()

    def _refuse_idle_options(self) -> None:
        self._require("temperature", True, "a finite number")
        self._require("seed", 0 <= self.seed < 2**63, "0 or more, below 2**63")
        if self.temperature == 0:
            for name in ("top_p", "seed"):
                self._refuse_idle(name, "without --temperature above 0 nothing is drawn")
        if self.num_frames is not None:
            self._refuse_idle("max_frames", "--num-frames says how many; give one of them")
        if not self.question:
            for name in ("temperature", "strategy", "self_attention", "tile", "mlp_chunk_size", "kernel"):
                self._refuse_idle(name, "nothing is asked; give --question, or leave it out")
        if self.report is not None:
            self._require("report", bool(self.report), "a file")

    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed
        )

    def seqpar_config(self) -> SeqParConfig:
        """How the model is patched."""
        return SeqParConfig(
            strategy=self.strategy,
            self_attention=self.self_attention,
            tile=tile_shape(self.tile),
            mlp_chunk_size=self.mlp_chunk_size,
            kernel=self.kernel,
        )

    def frame_options(self) -> dict[str, Any]:
        """The options that choose frames, as given; see `keeping.SAMPLING`."""
        return {name: getattr(self, name) for name in SAMPLING}

    def frames_of_video(self) -> dict[str, Any]:
        """The same with the default in place."""
        options = self.frame_options()
        if self.fps is None and self.num_frames is None:
            options["fps"] = DEFAULT_FPS
        return options


def parse(argv: Sequence[str]) -> InferArguments:
    """The arguments in `argv` (without the program's name).

    Raises:
        ConfigError: an unknown option, a value of the wrong type or out of its range, nothing to ask or to ask about.
    """
    return parse_options(
        InferArguments,
        argv,
        prog="infer_long_video.py",
        description="Ask about a long video, its frames shared by all ranks.",
    )
