"""The options of `ask`, `chat` and `serve`: frozen dataclasses, from which the command lines are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from mllm_seqpar.chats.multiple_choice import DEFAULT_TEMPLATE, check_template
from mllm_seqpar.cli.launch import DEVICES, DTYPES, LONGEST_TIMEOUT
from mllm_seqpar.cli.options import option, parse_options
from mllm_seqpar.cli.shared_options import FrameOptions, StoredFrameOptions, StrategyOptions
from mllm_seqpar.errors import ConfigError

from .generation import Sampling

SEED: dict[str, Any] = {"text": "seed of the sampling", "default": 0, "least": 0, "below": 2**63}
TIMEOUT: dict[str, Any] = {"default": None, "above": 0, "most": LONGEST_TIMEOUT}

_OF_A_DATA_SET = ("output", "choices", "template", "media_root", "sp")
_OF_A_QUESTION = (
    "max_new_tokens",
    "temperature",
    "strategy",
    "self_attention",
    "tile",
    "mlp_chunk_size",
    "kernel",
    "evidence",
    "evidence_html",
)
_OF_VIDEOS = ("video", "start", "end", "question", "features", "save_features", "report", "evidence_html")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(StrategyOptions, FrameOptions):
    """The options that `ask`, `chat` and `serve` share: the model, the frames of a video, answers, and strategies."""

    model: str = option("directory or Hub id of the model, with its processor")
    num_frames: int | None = option("number of frames, evenly spaced, instead of --fps", None, least=1)
    encode_batch: int = option("frames that a rank reads and encodes at once", 8, least=1)
    max_new_tokens: int = option("maximum length of an answer", 256, least=1)
    temperature: float = option("0 always takes the most likely token; values above 0 sample", 0.0, least=0)
    top_p: float = option(
        "sample from the most likely tokens whose probabilities sum to this value", 1.0, above=0, most=1
    )
    dtype: str = option("dtype of the model (auto: that of the checkpoint)", "auto", choices=DTYPES)
    device: str = option("auto: cuda if this node has a GPU for each process", "auto", choices=DEVICES)
    timeout: float | None = option(
        "seconds to wait for a rank in a collective (default: 600 on GPUs, 300 on CPU)", **TIMEOUT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_frames is not None:
            self._refuse_unused("max_frames", "--num_frames sets the number; give one of them")
        try:
            self.sampling()
        except ConfigError as error:
            raise ConfigError(f"--{error}") from error

    def sampling(self) -> Sampling:
        """Return the sampling of an answer."""
        given = {item.name: getattr(self, item.name) for item in fields(Sampling) if hasattr(self, item.name)}
        return Sampling(**given)

    def _require_sampling(self) -> None:
        """Refuse options of sampling without it, where nothing but the options decides how tokens are chosen."""
        for name in ("top_p", "seed") if self.temperature == 0 else ():
            self._refuse_unused(name, "without --temperature above 0 no token is sampled")

    def encoding(self) -> dict[str, Any]:
        """Return how `encode` and `Conversation` encode frames."""
        return {"batch": self.encode_batch, "on_host": getattr(self, "visual_offload", None) is not None}


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(ModelOptions):
    """The options of a run: besides `ModelOptions`, the seed, features in host memory, and groups of ranks."""

    seed: int = option(**SEED)
    visual_offload: str | None = option(
        "cpu: keep the encoded video, and K and V of its frames, in host memory; what --features names stays in its "
        "file; default: on the device",
        None,
        choices=("cpu",),
    )
    sp: int | None = option(
        "with --questions: ranks that share each video (default: all); the videos are distributed over the groups",
        None,
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class AskOptions(InferenceOptions, StoredFrameOptions):
    """The options of a run. `mllm-seqpar ask --help` prints the same texts."""

    video: tuple[str, ...] = option("a video file, or a directory of videos; may be repeated", ())
    start: float | None = option("use the clip of the video that begins at this time, in seconds", None, least=0)
    end: float | None = option("use the clip of the video that ends before this time, in seconds", None, above=0)
    question: tuple[str, ...] = option("the question; may be repeated, a video is encoded once", ())
    save_features: str | None = option(
        "directory to store the encoded video in; of several videos, each gets a directory of its own in it", None
    )
    features: str | None = option(
        "directory with encoded videos, written by any number of ranks; then --video is not needed", None
    )
    report: str | None = option("JSON file for answers, tokens, times and memory", None)
    evidence: int = option(
        "print this many moments of the video that an answer attends to most; with --questions, write them beside each "
        "answer",
        0,
        least=0,
    )
    evidence_html: str | None = option(
        "HTML page that shows, token by token, which frames an answer attends to; with several videos, one page for "
        "each",
        None,
    )

    questions: str | None = option(
        "data set of questions: JSONL, JSON, parquet, arrow, tar shards, or an id on the Hub", None
    )
    output: str | None = option(
        "JSONL file for the answers to --questions; a run that stopped is resumed from it", None
    )
    choices: bool = option("choose among the options of each question by the likelihood of their letters", False)
    template: str = option("text of multiple-choice questions, with {question} and {options}", DEFAULT_TEMPLATE)
    media_root: str | None = option(
        "directory that relative paths in --questions start from; default: that of its file", None
    )
    progress: bool = option("progress bar on rank 0", True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_sampling()
        if self.questions is None:
            self._check_videos()
        else:
            self._check_data_set()

    def _check_videos(self) -> None:
        for name in _OF_A_DATA_SET:
            self._refuse_unused(name, "it belongs to --questions")
        stored = self.features is not None
        if not self.video and not stored:
            raise ConfigError(
                "no video to ask about: give --video FILE, --features DIR of an encoded video, or --questions FILE"
            )
        if stored and self.save_features is not None:
            raise ConfigError(
                "--features and --save_features: features that are on disk are not written again; give one of them"
            )
        if stored and len(self.video) > 1:
            raise ConfigError("--features and several --video: give --features alone, or one video to compare with")
        if not self.question and self.save_features is None:
            raise ConfigError('nothing to do: give --question "...", or --save_features DIR to encode only')
        if any(not question.strip() for question in self.question):
            raise ConfigError("--question: the question is empty; give a text")
        for name in _OF_A_QUESTION if not self.question else ():
            self._refuse_unused(name, "there is no question; give --question, or leave it out")
        self._require("report", self.report != "", "a file")

    def _check_data_set(self) -> None:
        for name in _OF_VIDEOS:
            self._refuse_unused(name, "--questions names the videos, and --output the answers")
        if not self.output:
            raise ConfigError("--questions needs --output FILE, the JSONL file of the answers")
        check_template(self.template)
        for name in ("max_new_tokens", "temperature", "evidence") if self.choices else ():
            self._refuse_unused(name, "--choices generates no text")


@dataclass(frozen=True, kw_only=True)
class ServingOptions(ModelOptions):
    """The options that `chat` and `serve` share: besides `ModelOptions`, the ranks to start, and other defaults."""

    num_processes: int | None = option(
        "ranks to start on this machine (default: one for each GPU, or 1 without any); leave it out under a launcher",
        None,
        least=1,
    )
    max_new_tokens: int = option("maximum length of an answer", 512, least=1)
    timeout: float | None = option(
        "seconds to wait for a rank in a collective (default: 600 on GPUs, 300 on CPU); waiting for you has no limit",
        **TIMEOUT,
    )


def parse(argv: Sequence[str]) -> AskOptions:
    """Return the arguments in `argv` (without the program's name); raise ConfigError if they are invalid."""
    return parse_options(
        AskOptions,
        argv,
        prog="mllm-seqpar ask",
        description="Ask about long videos whose frames are sharded over all ranks.\n"
        "The exit status is 1 if some questions or videos have no answer, and 2 if none has.",
        example='mllm-seqpar ask --num_processes 4 --model DIR --video movie.mp4 --question "Who opens the door?"\n'
        "  mllm-seqpar ask --num_processes 4 --model DIR --questions questions.jsonl --output answers.jsonl --choices",
        ranks=True,
    )
