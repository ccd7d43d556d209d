"""A fine-tuning run from its command line to the final model.

Order matters: everything that can be wrong on one rank only (arguments, files, data) is tried and then agreed upon by
all ranks, before the first collective that a failed rank would leave the others waiting in. Then: load, patch, shard,
resume, train.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mllm_seqpar._logging import get_logger
from mllm_seqpar.cli.failure import first_line
from mllm_seqpar.cli.memory import peak_memory, reset_peak_memory
from mllm_seqpar.cli.progress import progress_bar
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.comm.agreement import attempt, check_collectively, raise_on_all_ranks
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.data.chat_family import chat_family
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.integrations.accelerate.launch import Layout, make_layout, reshard, shard_model, start_accelerator
from mllm_seqpar.kernels.registry import kernel_by_name
from mllm_seqpar.models.loading import load_model, load_processor, model_digest
from mllm_seqpar.patching import patch_model

from . import checkpoint as checkpoints
from .arguments import TRAJECTORY, TrainArguments, parse
from .data_loader import ShardedDataLoader, open_data_loader
from .export import export_dtype, export_model
from .learning_rate import learning_rate, warmup_steps
from .metrics import MetricsFile
from .parameters import choose_parameters, parameter_groups
from .sample_order import TrainOrder, eval_order
from .step import evaluate, train_step

_log = get_logger(__name__)


@dataclass
class TrainingRun:
    """Everything that one process of a run holds."""

    args: TrainArguments
    layout: Layout
    device: torch.device
    output: Path
    model: nn.Module
    processor: Any
    optimizer: torch.optim.Optimizer
    feed: ShardedDataLoader
    eval_feed: ShardedDataLoader | None
    order: TrainOrder
    steps: int
    conditions: dict[str, Any]
    resume: Path | None


def fine_tune(argv: Sequence[str]) -> None:
    """Trains as the command line says; see `TrainArguments`. Every rank calls it.

    Raises:
        SeqParError: bad arguments, files, data; ranks that do not agree.
    """
    run = prepare(argv)
    step = 0
    if run.resume is not None:
        step = checkpoints.read_progress(run.resume, run.conditions).step
        checkpoints.load_checkpoint(run.resume, run.model, run.optimizer)
        _log.info("continuing from %s", run.resume)
    last = train(run, step)
    if last < run.steps:
        _log.info("stopped after step %d of %d, as --stop-after says; continue with --resume auto", last, run.steps)
        return
    reshard(run.model)
    export_model(run.model, run.processor, run.output / "model", export_dtype(run.args.save_dtype, run.args.model))
    _log.info("the final model is in %s", run.output / "model")


def prepare(argv: Sequence[str]) -> TrainingRun:
    """Everything before the first step, agreed upon by all ranks."""
    args, problem = attempt(lambda: _arguments(argv))
    accelerator = start_accelerator(args.device, args.timeout) if args else start_accelerator()
    comm = as_communicator()
    raise_on_all_ranks(comm, "arguments", problem, asdict(args) if args else {})
    assert args is not None  # or all ranks have raised
    layout = make_layout(args.sp, accelerator.device.type)
    torch.manual_seed(args.seed)

    processor, feed, eval_feed, order, resume, facts = check_collectively(
        comm, "data", lambda: _open_data(args, layout), lambda opened: opened[-1]
    )
    model = check_collectively(comm, "model", lambda: _load(args, processor))
    # One rank to a sample is patched too: K and V of the frames are then recomputed, not kept.
    check_collectively(comm, "patch", lambda: patch_model(model, group=layout.sp_group, config=_seqpar_config(args)))
    optimizer = torch.optim.AdamW(
        parameter_groups(model.named_parameters(), args.weight_decay),
        lr=args.lr,
        betas=(args.beta1, args.beta2),
        eps=args.eps,
    )
    model, optimizer = shard_model(accelerator, model, optimizer)
    steps = args.steps or max(1, round(args.epochs * order.steps_per_epoch))
    conditions = {name: getattr(args, name) for name in sorted(TRAJECTORY)}
    if args.stop_after is not None and args.stop_after > steps:
        raise ConfigError(f"--stop-after {args.stop_after}: the run has {steps} steps; give at most as many")
    if accelerator.mixed_precision != "no":
        conditions["mixed_precision"] = accelerator.mixed_precision
    conditions |= {"data": facts["training data"], "model's weights": facts["model's weights"]}
    _log.info(
        "%d data parallel x %d sequence parallel ranks, %s; %d steps of %d samples, %d forward passes each",
        layout.dp, layout.sp, args.strategy,
        steps, order.global_batch, order.micro_batches,
    )  # fmt: skip
    return TrainingRun(
        args, layout, accelerator.device, Path(args.output), model, processor, optimizer, feed, eval_feed, order, steps,
        conditions, resume,
    )  # fmt: skip


def _arguments(argv: Sequence[str]) -> TrainArguments:
    args = parse(argv)
    _seqpar_config(args)
    if args.kernel != "auto":
        kernel_by_name(args.kernel)
    return args


def _seqpar_config(args: TrainArguments) -> SeqParConfig:
    return SeqParConfig(
        strategy=args.strategy,
        self_attention=args.self_attention,
        text_layout=args.text_layout,
        tile=args.tile_shape(),
        cluster=args.cluster,
        mlp_chunk_size=args.mlp_chunk_size,
        vision_chunk_size=args.vision_chunk_size,
        kernel=args.kernel,
        recompute_visual=args.recompute_visual,
    )


def _open_data(args: TrainArguments, layout: Layout):
    """What can fail on one rank only; the last item is what all ranks must have in common."""
    output = Path(args.output)
    processor = load_processor(args.model)
    feed = open_data_loader(args.data, processor, args, layout)
    eval_feed = open_data_loader(args.eval_data, processor, args, layout) if args.eval_data else None
    order = TrainOrder(
        samples=len(feed),
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        dp=layout.dp,
        seed=args.seed,
    )
    if args.resume is None and checkpoints.list_checkpoints(output):
        raise ConfigError(
            f"--output {output} has checkpoints of another run: continue it with --resume auto, or use another"
        )
    resume = checkpoints.find_checkpoint(args.resume, output)
    facts = {"training data": feed.digest, "evaluation data": eval_feed and eval_feed.digest, "checkpoint": resume}
    facts["model's weights"] = model_digest(args.model)  # frozen ones come from there when a run is resumed
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be made ({first_line(error)})") from error
    return processor, feed, eval_feed, order, resume, facts


def _load(args: TrainArguments, processor: Any) -> nn.Module:
    model = load_model(args.model)
    chat_family(processor).check(model)
    choose_parameters(model, args.freeze, args.train)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model.train()


def train(run: TrainingRun, start: int) -> int:
    """Optimizer steps `start` ... until all, or --stop-after, are done; returns how many are done in all."""
    args = run.args
    stop = min(run.steps, args.stop_after or run.steps)
    main = run.layout.rank == 0
    metrics = MetricsFile(run.output / "metrics.jsonl" if main else None, keep=start)
    bar = progress_bar(run.steps, "step", "training", done=start) if main and args.progress else None
    warmup = warmup_steps(args.warmup, run.steps)
    for step in range(start, stop):
        rate = learning_rate(
            step, steps=run.steps, peak=args.lr, floor=args.min_lr, warmup=warmup, schedule=args.schedule
        )
        row = _one_step(run, step, rate)
        metrics.write(row)
        done = step + 1
        if bar:
            bar.update()
            bar.set_postfix(
                loss=f"{row['loss']:.4f}", norm=f"{row['grad_norm']:.3f}", frames=row["frames"], refresh=False
            )
        if run.eval_feed and (done == run.steps or (args.eval_every and done % args.eval_every == 0)):
            metrics.write(_evaluate(run, done))
        if (args.save_every and done % args.save_every == 0) or (done == stop and done == args.stop_after):
            _save(run, done)
    if bar:
        bar.close()
    return max(start, stop)


def _one_step(run: TrainingRun, step: int, rate: float) -> dict[str, Any]:
    begun = time.perf_counter()
    reset_peak_memory(run.device)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    batches = [run.feed.batch(samples) for samples in run.order.step(step, run.layout.group_index)]
    result = train_step(run.model, run.optimizer, batches, run.layout, run.args.clip, run.device)
    return {
        "step": step + 1,
        "epoch": run.order.position(step)[0],
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": rate,
        "tokens": result.tokens,
        "targets": result.targets,
        "frames": result.frames,
        "seconds": round(time.perf_counter() - begun, 4),
        "peak_memory_mib": peak_memory(run.device),
    }


def _evaluate(run: TrainingRun, step: int) -> dict[str, Any]:
    assert run.eval_feed is not None
    begun = time.perf_counter()
    passes = eval_order(len(run.eval_feed), run.args.micro_batch, run.layout.dp, run.layout.group_index)
    loss, targets = evaluate(
        run.model, ((run.eval_feed.batch(own), counts) for own, counts in passes), run.layout, run.device
    )
    _log.info("step %d: evaluation loss %.4f over %d tokens", step, loss, targets)
    return {"step": step, "eval_loss": loss, "targets": targets, "seconds": round(time.perf_counter() - begun, 4)}


def _save(run: TrainingRun, step: int) -> None:
    reshard(run.model)
    epoch, batch = run.order.position(step)
    progress = checkpoints.Progress(
        step=step, epoch=epoch, batch=batch, dp=run.layout.dp, sp=run.layout.sp, conditions=run.conditions
    )
    path = checkpoints.save_checkpoint(run.output, progress, run.model, run.optimizer, run.args.keep)
    _log.info("saved %s", path)
