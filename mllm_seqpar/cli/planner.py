"""The command `mllm-seqpar plan`: estimates a step for each strategy, without a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner.cluster import read_cluster
from mllm_seqpar.planner.descriptions import known_files
from mllm_seqpar.planner.model_sizes import ModelSizes, read_model
from mllm_seqpar.planner.plan import make_plan
from mllm_seqpar.planner.workload import BASE_BYTES, SELF_ATTENTION, TARGETS, TRAINED, Workload
from mllm_seqpar.schedules.mesh_shapes import STRATEGIES

from .options import CommandOptions, option, parse_options
from .outputs import require_writable
from .plan_report import as_json, as_text, draw_plan


@dataclass(frozen=True, kw_only=True)
class PlanOptions(CommandOptions):
    """The options of `mllm-seqpar plan`; `Workload` checks their values."""

    model: str = option("a model directory with its config.json, a model file, or one of " + known_files("model"))
    cluster: str = option("a cluster file, or one of " + known_files("cluster"))
    frames: int = option("frames of one video", least=1)
    text: int = option(
        "tokens of one text, one placeholder per frame included; of a decoder-only model without the visual tokens",
        least=1,
    )
    gpus: int = option("GPUs that share one batch, whole nodes if there are several", least=1)
    frame_tokens: str | None = option(
        "visual tokens of a frame of MOSS-VL or Qwen-VL (of two images of a video), or its size; of unequal frames, "
        "how many have which, such as 3000:640x360,600:1920x1080; default: 640x360",
        None,
    )
    batch: int = option("videos with their texts", Workload.batch, least=1)
    samples: int | None = option("samples of the data set: print the hours and GPU-hours of a run", None, least=1)
    epochs: float = option("with --samples: how often each is used", Workload.epochs, above=0)
    trained: str = option(
        "trained parameters: no-vision: all but the vision tower; language: all but the tower and what follows it; "
        "connector: cross-attention and what follows the tower; all; or none: forward only",
        Workload.trained,
        choices=TRAINED,
    )
    lora_r: int | None = option(
        "train LoRA adapters of this rank only; the weights of the model are frozen", None, least=1
    )
    lora_target: tuple[str, ...] = option(
        "layers with adapters; connector: what follows the vision tower", Workload.lora_target, choices=TARGETS
    )
    base_parameter: float | None = option(
        "with --lora_r: bytes per frozen weight; 0.5: 4-bit weights, as QLoRA; default: as --element",
        None,
        choices=BASE_BYTES,
    )
    strategy: tuple[str, ...] = option("strategies to compare; default: all", (), choices=STRATEGIES)
    self_attention: str | None = option(
        "default: ring; of a decoder-only model auto, which compares ring, mesh and ulysses",
        None,
        choices=SELF_ATTENTION,
    )
    keep_visual: bool = option("save K and V of frames instead of recomputing them", False)
    gradient_checkpointing: bool = option(
        "recompute decoder layers, and those of a trained vision tower, in backward", False
    )
    recompute_attention: bool = option(
        "with --gradient_checkpointing: compute attention again instead of keeping its results", False
    )
    mlp_chunk_size: int | None = option("tokens per MLP chunk; default: all", None, least=1)
    vision_chunk_size: int = option("frames that the vision tower encodes at once", Workload.vision_chunk_size, least=1)
    content_tiles: int | None = option(
        "image tiles of a frame with content, if the model pads images to several (Llama 3.2: 1 at 224 pixels, "
        "2 at 360p and 480p, 4 from 720p); text does not attend to empty ones; default: all",
        None,
        least=1,
    )
    visual_offload: str | None = option(
        "cpu: the visual features stay in host memory, with lv-xattn (patch_model's visual_offload)",
        None,
        choices=("cpu",),
    )
    overlap: bool = option("compute while transfers run", True)
    element: int = option("bytes per element of an activation; 2: bf16", Workload.element, choices=(1, 2, 4, 8))
    parameter: int | None = option(
        "bytes per stored parameter, and per gradient; default: 4, or as --element if nothing is trained", None, least=1
    )
    optimizer: int = option("bytes of optimizer state per parameter; 8: AdamW", Workload.optimizer, least=0)
    decode_per_frame: float = option(
        "frames of a video that are decoded for each frame that is used, as check-data prints",
        Workload.decode_per_frame,
        least=0,
    )
    json: bool = option("print JSON, in seconds and bytes", False)
    answer: int = option(
        "with --trained none, decoder-only models: tokens of an answer that are generated after the prompt",
        Workload.answer,
        least=0,
    )
    shard_weights: bool = option(
        "with --answer: the GPUs share the weights, as in ask --shard_weights; default: each GPU has all of them", False
    )
    timeline: str | None = option(
        "draw one attention layer of the best strategy with matplotlib; the suffix chooses the format", None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("optimizer", "gradient_checkpointing", "keep_visual") if self.trained == "none" else ():
            self._refuse_unused(name, "with --trained none there is no backward pass; pass another --trained")
        if not self.gradient_checkpointing:
            self._refuse_unused("recompute_attention", "it belongs to --gradient_checkpointing")
        if self.samples is None:
            self._refuse_unused("epochs", "it belongs to --samples")


def _frame_tokens(model: ModelSizes, text: str, frames: int) -> int | tuple[int, ...]:
    """Return the number of tokens of a frame that `--frame_tokens` gives, or of each frame."""

    def tokens_of(size: str) -> int:
        numbers = [int(part) if part.isdecimal() else 0 for part in size.split("x")]
        if len(numbers) > 2 or min(numbers) < 1:
            raise ConfigError(f"--frame_tokens {size}: expected a number of tokens, or a size such as 1280x720")
        return numbers[0] if len(numbers) == 1 else model.tokens_of_image(numbers[1], numbers[0])

    if ":" not in text:
        return tokens_of(text)
    total, tokens = 0, list[int]()
    for part in text.split(","):
        count, _, size = part.partition(":")
        if not count.isdecimal() or not size:
            raise ConfigError(f"--frame_tokens {text}: {part!r} is not a number of frames with their size or tokens")
        total += int(count)
        tokens += [tokens_of(size)] * -(-int(count) // model.vision.temporal_patch)
    if total != frames:
        raise ConfigError(f"--frame_tokens {text}: these are {total} frames, and --frames is {frames}")
    return tuple(tokens)


def plan(argv: Sequence[str]) -> int:
    """Print the plan for the options in `argv`; return 0, or 1 if nothing fits."""
    args = parse_options(
        PlanOptions,
        argv,
        prog="mllm-seqpar plan",
        description="Estimate times, bytes and memory of one step for each strategy, without a GPU.\n"
        "The exit status is 1 if none fits.",
        example="mllm-seqpar plan --model mplug-owl3-7b --frames 4096 --text 8192 --gpus 16 --cluster a100-80g-4x4",
    )
    model = read_model(args.model)
    if model.decoder_only and args.strategy:
        raise ConfigError(
            f"--strategy: {model.name} has no cross-attention, which it is for; leave it out, and pass "
            "--self_attention for the whole sequence"
        )
    if args.frames > args.text > 0 and not model.decoder_only:
        raise ConfigError(
            f"--text {args.text}: {args.frames} frames need the same number of placeholders in the text; give at least "
            f"{args.frames}, plus the tokens of question and answer"
        )
    same = {item.name for item in fields(PlanOptions)} & {item.name for item in fields(Workload)} - {"model"}
    stated: dict[str, Any] = {name: getattr(args, name) for name in same}
    if args.frame_tokens is not None:
        stated["frame_tokens"] = _frame_tokens(model, args.frame_tokens, args.frames)
    if args.self_attention is None:
        stated["self_attention"] = "auto" if model.decoder_only else "ring"
    if args.parameter is None:
        stated["parameter"] = args.element if args.trained == "none" else Workload.parameter
    workload = Workload(
        model=model, recompute=not args.keep_visual, checkpointing=args.gradient_checkpointing, **stated
    )
    cluster = read_cluster(args.cluster)
    node = cluster.gpus_per_node
    if args.gpus > node and args.gpus % node:
        whole = args.gpus // node * node
        raise ConfigError(
            f"--gpus {args.gpus}: a node of {cluster.name} has {node} GPUs, and ranks are started on whole nodes; give "
            f"{whole} or {whole + node}, or at most {node} for a part of one node"
        )
    result = make_plan(workload, cluster, args.strategy or STRATEGIES)
    if args.timeline:
        require_writable("timeline", args.timeline)
        draw_plan(result, args.timeline)
    sys.stdout.write((json.dumps(as_json(result), indent=2) if args.json else as_text(result)) + "\n")
    return 0 if result.best.fits else 1
