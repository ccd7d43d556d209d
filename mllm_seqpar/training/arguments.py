"""The options of the fine-tuning script: one frozen dataclass, from which the command line is built."""

from collections.abc import Sequence
from dataclasses import dataclass

from mllm_seqpar.cli.launch import DEVICES
from mllm_seqpar.cli.options import CommandOptions, option, parse_options, parse_tile
from mllm_seqpar.config import CHOICES

SAVE_DTYPES = ("source", "float32", "bfloat16", "float16")
SCHEDULES = ("cosine", "linear", "constant")
SELF_ATTENTION = tuple(name for name in CHOICES["self_attention"] if name != "star")
"""Star Attention has no backward pass."""


@dataclass(frozen=True, kw_only=True)
class TrainArguments(CommandOptions):
    """The options of a run. `scripts/finetune.py --help` prints the same texts.

    --global-batch is the number of samples of one optimizer step for any number of ranks: the same command line trains
    the same model on 1 process and on 64.
    """

    model: str = option("directory of the model to start from, safetensors, with its processor")
    data: str = option("training data: JSONL, one chat per line")
    output: str = option("directory for metrics, checkpoints and the final model; shared by all nodes")
    eval_data: str | None = option("evaluation data, same format; loss only", None)

    sp: int | None = option("ranks that share a sample (sequence parallel degree); default: all ranks", None)
    strategy: str = option(f"cross-attention: {', '.join(CHOICES['strategy'])}", "lv-xattn")
    self_attention: str = option(f"self-attention of the text: {', '.join(SELF_ATTENTION)}", "ring")
    text_layout: str = option("how text tokens are sharded over ranks: zigzag, striped, contiguous", "zigzag")
    tile: str | None = option(
        "mesh shape AxB of mesh (A * B = ranks) or of hybrid ulysses; default: selected automatically", None
    )
    cluster: str | None = option(
        "cluster file for the choices of auto and mesh; default: auto measures in the first pass, mesh counts bytes",
        None,
    )
    vision_chunk_size: int = option("frames that the vision tower encodes at once", 32)
    mlp_chunk_size: int | None = option("text tokens per MLP chunk, recomputed in backward; default: all", None)
    kernel: str = option("block attention kernel", "auto")
    recompute_visual: bool = option("recompute K and V of visual tokens in backward instead of storing them", True)
    recompute_attention: bool = option("with --gradient-checkpointing, recompute attention too", False)

    steps: int | None = option("optimizer steps; default: those of --epochs", None)
    epochs: float = option("passes over the data if --steps is not given", 1.0)
    global_batch: int = option("samples of one optimizer step, over all ranks", 8)
    micro_batch: int = option("samples of one forward pass of one sequence parallel group", 1)
    stop_after: int | None = option("save a checkpoint and stop after this step; the schedule is unchanged", None)

    lr: float = option("peak learning rate", 1e-5)
    min_lr: float = option("learning rate at the end of the schedule, as a fraction of --lr", 0.0)
    schedule: str = option("learning rate after the warmup: cosine, linear, constant", "cosine")
    warmup: float = option("steps of linear warmup, or a fraction of all steps if below 1", 0.03)
    weight_decay: float = option("weight decay of matrices; vectors (norms, biases, gates) are not decayed", 0.01)
    beta1: float = option("beta1 of AdamW", 0.9)
    beta2: float = option("beta2 of AdamW", 0.95)
    eps: float = option("epsilon of AdamW", 1e-8)
    clip: float = option("maximum norm of all gradients; 0 disables clipping", 1.0)

    freeze: str = option("parts that do not train, comma-separated: vision, projector, language, or patterns", "")
    train: str = option("patterns of parameters that train although --freeze matches them, comma-separated", "")
    gradient_checkpointing: bool = option("recompute the activations of each layer in backward", False)

    fps: float | None = option("frames per second to sample from each video; default: that of the data", None)
    max_frames: int | None = option("maximum number of frames per video, evenly spaced; default: no limit", None)
    max_length: int | None = option("maximum number of text tokens per sample; longer samples are refused", None)

    eval_every: int = option("steps between evaluations; 0: only at the end", 0)
    save_every: int = option("steps between checkpoints; 0: only that of --stop-after", 0)
    keep: int = option("number of checkpoints to keep", 2)
    resume: str | None = option("continue from a checkpoint: auto (the latest in --output, if any) or its path", None)
    save_dtype: str = option("dtype of the final model: source (that of --model), float32, bfloat16, float16", "source")
    seed: int = option("seed of the data order and of all random numbers", 0)
    device: str = option("auto, cpu or cuda", "auto")
    timeout: float | None = option("seconds to wait for a rank in a collective; default: 600 on GPUs, 300 on CPU", None)
    progress: bool = option("progress bar on rank 0", True)

    def __post_init__(self) -> None:
        for name in ("steps", "stop_after", "sp", "max_frames", "max_length", "timeout", "fps"):
            self._require(name, getattr(self, name) is None or getattr(self, name) > 0, "more than 0")
        for name in ("global_batch", "micro_batch", "vision_chunk_size", "keep", "epochs", "lr", "eps"):
            self._require(name, getattr(self, name) > 0, "more than 0")
        for name in ("eval_every", "save_every", "warmup", "weight_decay", "clip"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        self._require("seed", 0 <= self.seed < 2**63, "0 or more, below 2**63")
        for name in ("beta1", "beta2"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        self._require("min_lr", 0 <= self.min_lr <= 1, "a fraction of --lr, from 0 to 1")
        self._require("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self._require("save_dtype", self.save_dtype in SAVE_DTYPES, f"one of {', '.join(SAVE_DTYPES)}")
        self._require("self_attention", self.self_attention in SELF_ATTENTION, f"one of {', '.join(SELF_ATTENTION)}")
        self._require("device", self.device in DEVICES, f"one of {', '.join(DEVICES)}")
        self.mesh_shape()
        self._refuse_unused_options()

    def _refuse_unused_options(self) -> None:
        if self.steps is not None:
            self._refuse_unused("epochs", "--steps sets the length of the run; give one of them")
            self._require("stop_after", (self.stop_after or 0) <= self.steps, f"at most --steps {self.steps}")
        if self.eval_data is None:
            self._refuse_unused("eval_every", "there is nothing to evaluate on; give --eval-data")
        if not self.save_every and self.stop_after is None:
            self._refuse_unused("keep", "no checkpoints are written; give --save-every or --stop-after")
        if self.schedule == "constant":
            self._refuse_unused("min_lr", "--schedule constant keeps --lr")
        if not self.freeze:
            self._refuse_unused("train", "nothing is frozen; give --freeze, or leave it out")

    def mesh_shape(self) -> tuple[int, int] | None:
        """Return --tile as two numbers."""
        return parse_tile(self.tile)


TRAJECTORY = frozenset(
    {"steps", "epochs", "global_batch", "seed", "lr", "min_lr", "schedule", "warmup", "weight_decay", "beta1", "beta2"}
    | {"eps", "clip", "freeze", "train", "fps", "max_frames", "max_length"}
)
"""The arguments that determine the training trajectory; a checkpoint can be resumed only with the same values."""


def parse(argv: Sequence[str]) -> TrainArguments:
    """Return the arguments in `argv` (without the program's name).

    Raises:
        ConfigError: on an unknown option or an invalid value.
    """
    return parse_options(
        TrainArguments,
        argv,
        prog="finetune.py",
        description="Fine-tune a cross-attention MLLM on video, sequence-parallel.",
    )
