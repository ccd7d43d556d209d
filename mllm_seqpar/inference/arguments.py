"""What the inference script can be told: one frozen dataclass, from which the command line is made."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from ..config import SeqParConfig
from ..errors import ConfigError
from ..kernels import available_kernels
from .answering import Sampling
from .keeping import SAMPLING
from .launching import DEVICES
from .model import DTYPES

DEFAULT_FPS = 1.0


def _option(default: Any, text: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": text, **extra})


@dataclass(frozen=True, kw_only=True)
class InferArguments:
    """Everything that decides a run. `scripts/infer_long_video.py --help` prints the same texts."""

    model: str = field(metadata={"help": "directory of the model, safetensors, with its processor"})
    video: str | None = _option(None, "the video file", kind=str)
    question: tuple[str, ...] = _option(
        (), "what to ask; may be given several times, later ones reuse the encoded video", kind=str, action="append"
    )

    fps: float | None = _option(
        None, f"frames a second to take of the video (default: {DEFAULT_FPS:g}, without --num-frames)", kind=float
    )
    num_frames: int | None = _option(None, "in place of --fps: this many frames, evenly spaced", kind=int)
    max_frames: int | None = _option(None, "where --fps gives more: this many, evenly spaced", kind=int)
    encode_batch: int = _option(8, "frames that a rank reads and encodes at once", kind=int)
    save_features: str | None = _option(None, "directory to keep the encoded video in", kind=str)
    features: str | None = _option(
        None, "directory with an encoded video, written by any number of ranks; then --video is not needed", kind=str
    )

    max_new_tokens: int = _option(256, "longest answer", kind=int)
    temperature: float = _option(0.0, "0 takes the most likely token each time, above 0 draws", kind=float)
    top_p: float = _option(1.0, "draw among the most likely tokens of this probability together", kind=float)
    seed: int = _option(0, "of the draws", kind=int)

    strategy: str = _option("lv-xattn", "cross-attention: lv-xattn, ring", kind=str)
    kernel: str = _option("auto", "block attention kernel", kind=str)
    shard_weights: bool = _option(
        False, "shard the weights over the ranks too, for models that fill a device", kind=bool
    )
    dtype: str = _option("auto", f"of the model: {', '.join(DTYPES)} (auto: the checkpoint's)", kind=str)
    device: str = _option("auto", f"one of {', '.join(DEVICES)}", kind=str)
    timeout: float | None = _option(
        None, "seconds until a silent rank is given up (default: 600 on GPUs, 300 on CPU)", kind=float
    )
    report: str | None = _option(None, "file for answers, tokens, times and memory as JSON", kind=str)
    progress: bool = _option(True, "progress bar on rank 0", kind=bool)

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

    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed
        )

    def seqpar_config(self) -> SeqParConfig:
        """How the model is patched."""
        return SeqParConfig(strategy=self.strategy, kernel=self.kernel)

    def frame_options(self) -> dict[str, Any]:
        """The options that choose frames, as given; see `keeping.SAMPLING`."""
        return {name: getattr(self, name) for name in SAMPLING}

    def frames_of_video(self) -> dict[str, Any]:
        """The same with the default in place."""
        options = self.frame_options()
        if self.fps is None and self.num_frames is None:
            options["fps"] = DEFAULT_FPS
        return options

    def _require(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise ConfigError(f"--{name.replace('_', '-')}: {getattr(self, name)!r} is not allowed; give {allowed}")


class _Parser(argparse.ArgumentParser):
    """Reports through an exception: under a launcher every rank parses, and one line is enough."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the options")


def parser() -> argparse.ArgumentParser:
    """The command line of `InferArguments`: underscores become dashes, a bool has a --no- form."""
    made = _Parser(
        prog="infer_long_video.py",
        description="Ask about a long video, its frames shared by all ranks.",
        argument_default=argparse.SUPPRESS,  # the dataclass has the defaults
    )
    for item in fields(InferArguments):
        flag, text = "--" + item.name.replace("_", "-"), item.metadata["help"].replace("%", "%%")
        kind, action = item.metadata.get("kind", str), item.metadata.get("action", "store")
        if kind is bool:
            made.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
            continue
        required = item.default is dataclasses.MISSING
        shown = "" if required or item.default in (None, ()) else f" (default: {item.default})"
        made.add_argument(
            flag, type=kind, action=action, required=required, help=text + shown, metavar=item.name.upper()
        )
    return made


def parse(argv: Sequence[str]) -> InferArguments:
    """The arguments in `argv` (without the program's name).

    Raises:
        ConfigError: an unknown option, a value of the wrong type or out of its range, nothing to ask or to ask about.
    """
    values = vars(parser().parse_args(argv))
    return InferArguments(**values | {"question": tuple(values.get("question", ()))})
