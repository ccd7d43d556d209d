"""The command `mllm-seqpar plan`: estimates a step for each strategy, without a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner.cluster import read_cluster
from mllm_seqpar.planner.descriptions import find_file, known_files
from mllm_seqpar.planner.model_sizes import ModelSizes, read_model
from mllm_seqpar.planner.plan import make_plan
from mllm_seqpar.planner.workload import BASE_BYTES, SELF_ATTENTION, TARGETS, TRAINED, Workload
from mllm_seqpar.schedules.mesh_shapes import STRATEGIES

from .options import Parser
from .plan_report import as_json, as_text, draw_plan

EXAMPLE = "mllm-seqpar plan --model mplug-owl3-7b --frames 4096 --text 8192 --gpus 16 --cluster a100-80g-4x4"


def _parser() -> Parser:
    plan = Parser(
        prog="mllm-seqpar plan",
        description="Estimate times, bytes and memory of one step for each strategy, without a GPU.\n"
        "The exit status is 1 if none fits.",
        example=EXAMPLE,
    )
    models = "a model directory with its config.json, a model file, or one of " + known_files("model")
    plan.add_argument("--model", required=True, help=models)
    plan.add_argument("--cluster", required=True, help="a cluster file, or one of " + known_files("cluster"))
    plan.add_argument("--frames", type=int, required=True, help="frames of one video")
    text = "visual tokens of a frame of Qwen-VL (two images of a video), or its size, as 1280x720; default: 640x360"
    plan.add_argument("--frame_tokens", metavar="TOKENS", help=text)
    text = "tokens of one text, one placeholder per frame included; of a decoder-only model without the visual tokens"
    plan.add_argument("--text", type=int, required=True, help=text)
    plan.add_argument("--gpus", type=int, required=True, help="GPUs that share one batch")
    plan.add_argument("--batch", type=int, default=1, help="videos with their texts; default: 1")
    text = "samples of the data set: print the hours and GPU-hours of a run"
    plan.add_argument("--samples", type=int, help=text)
    plan.add_argument("--epochs", type=float, help="with --samples: how often each is used; default: 1")
    text = (
        "trained parameters: all but the vision tower (default); language: all but the tower and what follows it; "
        "connector: cross-attention and what follows the tower; all; or none: forward only"
    )
    plan.add_argument("--trained", choices=TRAINED, default="no-vision", help=text)
    text = "train LoRA adapters of this rank only; the weights of the model are frozen"
    plan.add_argument("--lora_r", type=int, metavar="RANK", help=text)
    text = "layers with adapters; connector: what follows the vision tower; default: attention mlp cross"
    plan.add_argument("--lora_target", nargs="+", choices=TARGETS, default=Workload.lora_target, help=text)
    text = "with --lora_r: bytes per frozen weight; 0.5: 4-bit weights, as QLoRA; default: as --element"
    plan.add_argument("--base_parameter", type=float, choices=BASE_BYTES, help=text)
    text = "strategies to compare; default: all"
    plan.add_argument("--strategy", nargs="+", choices=STRATEGIES, help=text)
    text = "default: ring; of a decoder-only model auto, which compares ring, mesh and ulysses"
    plan.add_argument("--self_attention", choices=SELF_ATTENTION, help=text)
    plan.add_argument("--keep_visual", action="store_true", help="save K and V of frames instead of recomputing them")
    text = "recompute decoder layers, and those of a trained vision tower, in backward"
    plan.add_argument("--gradient_checkpointing", action="store_true", help=text)
    text = "with --gradient_checkpointing: compute attention again instead of keeping its results"
    plan.add_argument("--recompute_attention", action="store_true", help=text)
    plan.add_argument("--mlp_chunk_size", type=int, metavar="TOKENS", help="tokens per MLP chunk; default: all")
    chunk = Workload.vision_chunk_size
    text = f"frames that the vision tower encodes at once; default: {chunk}"
    plan.add_argument("--vision_chunk_size", type=int, metavar="FRAMES", default=chunk, help=text)
    text = (
        "image tiles of a frame with content, if the model pads images to several (Llama 3.2: 1 at 224 pixels, "
        "2 at 360p and 480p, 4 from 720p); text does not attend to empty ones; default: all"
    )
    plan.add_argument("--content_tiles", type=int, metavar="TILES", help=text)
    text = "cpu: the visual features stay in host memory, with lv-xattn (patch_model's visual_offload)"
    plan.add_argument("--visual_offload", choices=["cpu"], help=text)
    plan.add_argument("--no_overlap", action="store_true", help="wait for transfers before computing")
    plan.add_argument("--element", type=int, default=2, help="bytes per element of an activation; default: 2, bf16")
    text = "bytes per stored parameter, and per gradient; default: 4, or as --element if nothing is trained"
    plan.add_argument("--parameter", type=int, help=text)
    plan.add_argument("--optimizer", type=int, help="bytes of optimizer state per parameter; default: 8, AdamW")
    text = "frames of a video that are decoded for each frame that is used, as check-data prints; default: 30"
    plan.add_argument("--decode_per_frame", type=float, metavar="FRAMES", default=30.0, help=text)
    plan.add_argument("--json", action="store_true", help="print JSON, in seconds and bytes")
    text = "with --trained none, decoder-only models: tokens of an answer that are generated after the prompt"
    plan.add_argument("--answer", type=int, metavar="TOKENS", default=0, help=text)
    text = "with --answer: the GPUs share the weights, as in ask --shard_weights; default: each GPU has all of them"
    plan.add_argument("--shard_weights", action="store_true", help=text)
    text = "draw one attention layer of the best strategy with matplotlib; the suffix chooses the format"
    plan.add_argument("--timeline", metavar="FILE", help=text)
    return plan


def _frame_tokens(model: ModelSizes, text: str) -> int:
    """Return the number of tokens of a frame that `text` gives as a number or as a size in pixels, WIDTHxHEIGHT."""
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split("x")]
    if len(numbers) > 2 or min(numbers) < 1:
        raise ConfigError(f"--frame_tokens {text}: expected a number of tokens, or a size such as 1280x720")
    return numbers[0] if len(numbers) == 1 else model.tokens_of_image(numbers[1], numbers[0])


def plan(argv: Sequence[str]) -> int:
    """Print the plan for the options in `argv`; return 0, or 1 if nothing fits.

    Raises:
        SeqParError: on invalid options.
    """
    args = _parser().parse_args(argv)
    training = args.trained != "none"
    unused = [name for name in ("optimizer", "gradient_checkpointing", "keep_visual") if getattr(args, name)]
    if unused and not training:
        raise ConfigError(
            f"--{unused[0]}: would have no effect, because with --trained none there is no backward pass; leave it "
            "out, or pass another --trained"
        )
    if args.recompute_attention and not args.gradient_checkpointing:
        raise ConfigError(
            "--recompute_attention: has no effect without --gradient_checkpointing; pass both, or neither"
        )
    if args.epochs is not None and args.samples is None:
        raise ConfigError("--epochs: has no effect without --samples; pass both, or neither")
    model = read_model(find_file("model", args.model))
    if args.frame_tokens is not None:
        model = model.with_frame_tokens(_frame_tokens(model, args.frame_tokens))
    if model.decoder_only and args.strategy:
        raise ConfigError(
            f"--strategy: {model.name} has no cross-attention, which it is for; leave it out, and pass "
            "--self_attention for the whole sequence"
        )
    if args.self_attention is None:
        args.self_attention = "auto" if model.decoder_only else "ring"
    if args.frames > args.text > 0 and not model.decoder_only:
        raise ConfigError(
            f"--text {args.text}: {args.frames} frames need the same number of placeholders in the text; give at least "
            f"{args.frames}, plus the tokens of question and answer"
        )
    names = "frames text gpus batch trained self_attention element mlp_chunk_size vision_chunk_size content_tiles "
    names += "visual_offload lora_r base_parameter decode_per_frame answer shard_weights samples"
    workload = Workload(
        model=model,
        **{name: getattr(args, name) for name in names.split()},
        recompute=not args.keep_visual,
        checkpointing=args.gradient_checkpointing,
        recompute_attention=args.recompute_attention,
        lora_target=tuple(args.lora_target),
        overlap=not args.no_overlap,
        epochs=Workload.epochs if args.epochs is None else args.epochs,
        parameter=(4 if training else args.element) if args.parameter is None else args.parameter,
        optimizer=Workload.optimizer if args.optimizer is None else args.optimizer,
    )
    result = make_plan(workload, read_cluster(args.cluster), args.strategy or STRATEGIES)
    if args.timeline:
        draw_plan(result, args.timeline)
    sys.stdout.write((json.dumps(as_json(result), indent=2) if args.json else as_text(result)) + "\n")
    return 0 if result.best.fits else 1
