"""The options of fine-tuning: those of transformers' `TrainingArguments`, and two dataclasses of this package."""

from dataclasses import dataclass, field, fields

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy, SchedulerType

from mllm_seqpar._compat import optional_import
from mllm_seqpar.cli.options import CommandOptions, option, parse_tile
from mllm_seqpar.config import CHOICES, SeqParConfig
from mllm_seqpar.data.chat import ON_BAD_MEDIA
from mllm_seqpar.data.decoding import DECODER_HELP, FRAME_STORE_HELP, THREADS_HELP, check_decoding
from mllm_seqpar.data.formats import DEFAULT_TEMPLATE, check_template
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.kernels.registry import kernel_by_name

SAVE_DTYPES = ("source", "float32", "bfloat16", "float16")
SELF_ATTENTION = tuple(name for name in CHOICES["self_attention"] if name != "star")
"""Star Attention has no backward pass."""


@dataclass
class FineTuningArguments(TrainingArguments):
    """`TrainingArguments` with other defaults, for fine-tuning large models on video."""

    _argument_group_name = "options of transformers.TrainingArguments"

    per_device_train_batch_size: int = option("samples of one forward pass of the ranks that share a sample", 1)
    per_device_eval_batch_size: int = option("samples of one forward pass of an evaluation", 1)
    num_train_epochs: float = option("passes over the data, unless --max_steps is given", 1.0)
    learning_rate: float = option("peak learning rate", 1e-5)
    lr_scheduler_type: SchedulerType | str = option("learning rate after the warmup", "cosine")
    warmup_steps: float = option("steps of linear warmup, or a fraction of all steps if below 1", 0.03)
    weight_decay: float = option("weight decay of matrices; vectors (norms, biases, gates) are not decayed", 0.01)
    adam_beta2: float = option("beta2 of AdamW", 0.95)
    logging_steps: float = option("steps between rows of the log", 1)
    logging_nan_inf_filter: bool = option("leave losses that are not finite out of the log", False)
    push_to_hub: bool = option("upload the final model to the Hugging Face Hub", False)
    hub_strategy: HubStrategy | str = option("when to upload", "end")
    save_total_limit: int | None = option("number of checkpoints to keep", 2)
    report_to: list[str] = field(
        default_factory=list, metadata={"help": "trackers of experiments, such as tensorboard wandb trackio"}
    )
    ddp_timeout: int = option("seconds to wait for a rank in a collective", 600)
    resume_from_checkpoint: str | None = option(
        "continue from a checkpoint: its path, or auto for the last complete one in --output_dir, if any", None
    )


@dataclass(kw_only=True)
class ModelAndData(CommandOptions):
    """The model, its trained parts, the data, and when to save."""

    _argument_group_name = "model and data"

    model: str | None = option("directory or Hub id of the model to start from, with its processor; required", None)
    data: str | None = option(
        "training data: JSONL, JSON, parquet, arrow, tar shards, or an id on the Hub; required", None
    )
    eval_data: str | None = option("evaluation data, in the same formats", None)
    media_root: str | None = option(
        "directory that relative paths of media start from; default: that of the data", None
    )
    template: str = option("text of multiple-choice questions, with {question} and {options}", DEFAULT_TEMPLATE)
    fps: float | None = option("frames per second to sample from each video; default: that of the data, else 1", None)
    max_frames: int | None = option("maximum number of frames per video, evenly spaced; default: no limit", None)
    features: str | None = option(
        "directory for the outputs of the frozen vision tower: written in the first epoch, and read later", None
    )
    decode_threads: int | None = option(THREADS_HELP, None)
    decoder: str = option(DECODER_HELP, "pyav")
    frame_store: str | None = option(FRAME_STORE_HELP, None)
    read_ahead_gib: float = option(
        "frames of the following samples that a rank reads ahead, in GiB of host memory", 4.0
    )
    max_length: int | None = option("maximum number of text tokens per sample; longer samples are refused", None)
    on_bad_media: str = option("fail, or skip: replace a sample with broken media by the next one", "fail")
    global_batch_size: int | None = option(
        "samples of one optimizer step over all ranks; sets --gradient_accumulation_steps", None
    )
    stop_after: int | None = option("save a checkpoint and stop after this step; the schedule is unchanged", None)
    save_minutes: float = option("save a checkpoint whenever this many minutes have passed; 0: never", 30.0)
    save_dtype: str = option(f"dtype of the final model: {', '.join(SAVE_DTYPES)}", "source")
    freeze: list[str] | None = option("parts to freeze: vision, projector, language, module paths, or patterns", None)
    train: list[str] | None = option("parts or patterns to train although --freeze matches them", None)
    use_peft: bool = option("train LoRA adapters instead of the weights", False)
    lora_r: int = option("rank of the adapters", 16)
    lora_alpha: int = option("the adapters are scaled by lora_alpha / lora_r", 32)
    lora_dropout: float = option("dropout on the input of the adapters", 0.05)
    lora_target_modules: list[str] | None = option("names of modules that get adapters; default: all-linear", None)
    lora_modules_to_save: list[str] | None = option(
        "names of modules whose weights are trained in addition to the adapters", None
    )
    load_in_4bit: bool = option("QLoRA: load the frozen weights in 4 bits; needs a GPU and bitsandbytes", False)

    def check(self) -> None:
        """Raise ConfigError for values that are not allowed or would have no effect."""
        for name in ("model", "data"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} is missing; --help lists the options")
        self._require_positive("fps", "max_frames", "max_length", "global_batch_size", "stop_after", "lora_r")
        self._require_positive("read_ahead_gib")
        check_decoding(self.decode_threads, self.decoder)
        self._require("save_minutes", self.save_minutes >= 0, "0 or more")
        self._require("on_bad_media", self.on_bad_media in ON_BAD_MEDIA, f"one of {', '.join(ON_BAD_MEDIA)}")
        self._require("save_dtype", self.save_dtype in SAVE_DTYPES, f"one of {', '.join(SAVE_DTYPES)}")
        check_template(self.template)
        self._require("lora_dropout", 0 <= self.lora_dropout < 1, "at least 0 and below 1")
        if not self.freeze:
            self._refuse_unused("train", "nothing is frozen; give --freeze, or leave it out")
        if self.use_peft:
            optional_import("peft", extra="peft", needed_for="--use_peft")
        if self.use_peft and self.load_in_4bit:
            if not torch.cuda.is_available():
                raise ConfigError(
                    "--load_in_4bit needs a GPU, and torch finds none; leave it out to train LoRA adapters"
                )
            optional_import("bitsandbytes", extra="qlora", needed_for="--load_in_4bit")
        if not self.use_peft:
            for item in fields(self):
                if item.name.startswith("lora_") or item.name == "load_in_4bit":
                    self._refuse_unused(item.name, "it is an option of adapters; give --use_peft")


@dataclass(kw_only=True)
class SequenceParallel(CommandOptions):
    """How a sample is divided over ranks; see `SeqParConfig`."""

    _argument_group_name = "sequence parallelism"

    shard_weights: bool = option("FSDP2: each rank holds a shard of the weights, gradients and optimizer states", False)
    sp: int | None = option(
        "ranks that share a sample; default: cp_size of the launch configuration's parallelism, else all ranks", None
    )
    strategy: str = option(f"cross-attention: {', '.join(CHOICES['strategy'])}", "lv-xattn")
    self_attention: str = option(f"self-attention of the text: {', '.join(SELF_ATTENTION)}", "ring")
    text_layout: str = option("how text tokens are sharded over ranks: zigzag, striped, contiguous", "zigzag")
    tile: str | None = option("mesh shape AxB of mesh (A * B = ranks) or of hybrid ulysses; default: automatic", None)
    cluster: str | None = option(
        "cluster file by which auto and mesh choose; by default, auto measures in the first pass, and mesh counts "
        "bytes",
        None,
    )
    mlp_chunk_size: int | None = option("text tokens per MLP chunk, recomputed in backward; default: all", None)
    vision_chunk_size: int | None = option("frames that the vision tower encodes at once", 32)
    kernel: str = option("block kernel, which computes attention", "auto")
    recompute_visual: bool = option("recompute K and V of visual tokens in backward instead of storing them", True)
    recompute_attention: bool = option("with --gradient_checkpointing, recompute attention too", False)
    visual_offload: str | None = option("cpu: keep the visual features in host memory", None)

    def config(self) -> SeqParConfig:
        """Return the options of `patch_model`; ConfigError if they contradict each other."""
        self._require_positive("sp")
        self._require("self_attention", self.self_attention in SELF_ATTENTION, f"one of {', '.join(SELF_ATTENTION)}")
        if self.kernel != "auto":
            kernel_by_name(self.kernel)
        values = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("sp", "shard_weights")
        }
        return SeqParConfig(**values | {"tile": parse_tile(self.tile)})


@dataclass(frozen=True)
class FineTuneOptions:
    """The options of a run."""

    training: FineTuningArguments
    run: ModelAndData
    parallel: SequenceParallel
    seqpar: SeqParConfig


KINDS = (ModelAndData, SequenceParallel, FineTuningArguments)
