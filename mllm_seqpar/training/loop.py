"""A fine-tuning run from its command line to the final model.

Steps that can fail on one rank only (arguments, files, data) run first, and all ranks agree on their result before the
next collective. Then the run loads, patches and shards the model, resumes if asked to, and trains.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mllm_seqpar._logging import get_logger
from mllm_seqpar.cli.program_exit import first_line
from mllm_seqpar.cli.progress import peak_memory, progress_bar, reset_peak_memory
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.comm.agreement import attempt, check_collectively, raise_on_all_ranks
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.data.chat_family import chat_family
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.integrations.accelerate.fsdp2 import allocate, receives_weights, reshard, shard_model
from mllm_seqpar.kernels.registry import kernel_by_name
from mllm_seqpar.models.loading import load_model, load_processor, model_digest
from mllm_seqpar.patching import patch_model

from . import checkpoint as checkpoints
from .arguments import TRAJECTORY, TrainArguments, parse
from .data_loader import ShardedDataLoader, open_data_loader
from .export import export_dtype, export_model
from .learning_rate import learning_rate, warmup_steps
from .metrics import MetricsFile
from .parallel_dims import ParallelDims, make_parallel_dims, start_accelerator
from .parameters import choose_parameters, parameter_groups
from .sample_order import SampleOrder, eval_order
from .step import evaluate, train_step

_log = get_logger(__name__)


@dataclass
class TrainingRun:
    """The state of one process of a run."""

    args: TrainArguments
    dims: ParallelDims
    device: torch.device
    output: Path
    model: nn.Module
    processor: Any
    optimizer: torch.optim.Optimizer
    loader: ShardedDataLoader
    eval_loader: ShardedDataLoader | None
    order: SampleOrder
    steps: int
    conditions: dict[str, Any]
    resume: Path | None


def fine_tune(argv: Sequence[str]) -> None:
    """Train as the command line `argv` says; see `TrainArguments`. Every rank calls this.

    Raises:
        SeqParError: on invalid arguments, files or data, or if the ranks disagree.
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
    """Do everything that precedes the first step; all ranks agree on each part."""
    args, problem = attempt(lambda: _arguments(argv))
    accelerator = start_accelerator(args.device, args.timeout) if args else start_accelerator()
    comm = as_communicator()
    raise_on_all_ranks(comm, "arguments", problem, asdict(args) if args else {})
    assert args is not None  # otherwise all ranks have raised
    dims = make_parallel_dims(args.sp, accelerator.device.type)
    torch.manual_seed(args.seed)

    processor, loader, eval_loader, order, resume, facts = check_collectively(
        comm, "data", lambda: _open_data(args, dims), lambda opened: opened[-1]
    )
    if args.save_every or args.stop_after is not None:
        checkpoints.require_shared_directory(comm, Path(args.output))
    model = check_collectively(comm, "model", lambda: _load(args, processor, receives_weights(accelerator)))
    # The model is patched for one rank per sample too: K and V of the frames are then recomputed, not stored.
    check_collectively(comm, "patch", lambda: patch_model(model, group=dims.sp_group, config=_seqpar_config(args)))
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
        dims.dp, dims.sp, args.strategy,
        steps, order.global_batch, order.micro_batches,
    )  # fmt: skip
    return TrainingRun(
        args, dims, accelerator.device, Path(args.output), model, processor, optimizer, loader, eval_loader, order,
        steps, conditions, resume,
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
        tile=args.mesh_shape(),
        cluster=args.cluster,
        mlp_chunk_size=args.mlp_chunk_size,
        vision_chunk_size=args.vision_chunk_size,
        kernel=args.kernel,
        recompute_visual=args.recompute_visual,
        recompute_attention=args.recompute_attention,
    )


def _open_data(args: TrainArguments, dims: ParallelDims):
    """Open what can fail on one rank only; the last item holds the facts that all ranks must have in common."""
    output = Path(args.output)
    processor = load_processor(args.model)
    loader = open_data_loader(args.data, processor, args, dims)
    eval_loader = open_data_loader(args.eval_data, processor, args, dims) if args.eval_data else None
    order = SampleOrder(
        samples=len(loader),
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        dp=dims.dp,
        seed=args.seed,
    )
    if args.resume is None and checkpoints.list_checkpoints(output):
        raise ConfigError(f"--output {output} has checkpoints of another run: use --resume auto, or another directory")
    resume = checkpoints.find_checkpoint(args.resume, output)
    facts: dict[str, Any] = {"training data": loader.digest, "evaluation data": eval_loader and eval_loader.digest}
    facts |= {"checkpoint": resume, "model's weights": model_digest(args.model)}  # a checkpoint has no frozen weights
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be created ({first_line(error)})") from error
    return processor, loader, eval_loader, order, resume, facts


def _load(args: TrainArguments, processor: Any, receives_weights: bool) -> nn.Module:
    model = allocate(load_model(args.model, device_map="meta")) if receives_weights else load_model(args.model)
    chat_family(processor).check(model)
    choose_parameters(model, args.freeze, args.train)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model.train()


def train(run: TrainingRun, start: int) -> int:
    """Run optimizer steps from `start` until the end or --stop-after; return the number of completed steps."""
    args = run.args
    stop = min(run.steps, args.stop_after or run.steps)
    main = run.dims.rank == 0
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
        if run.eval_loader and (done == run.steps or (args.eval_every and done % args.eval_every == 0)):
            metrics.write(_evaluate(run, done))
        if (args.save_every and done % args.save_every == 0) or (done == stop and done == args.stop_after):
            _save(run, done)
    if bar:
        bar.close()
    return max(start, stop)


def _one_step(run: TrainingRun, step: int, rate: float) -> dict[str, Any]:
    begin = time.perf_counter()
    reset_peak_memory(run.device)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    batches = [run.loader.batch(samples) for samples in run.order.step(step, run.dims.group_index)]
    result = train_step(run.model, run.optimizer, batches, run.dims, run.args.clip, run.device)
    return {
        "step": step + 1,
        "epoch": run.order.position(step)[0],
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": rate,
        "tokens": result.tokens,
        "targets": result.targets,
        "frames": result.frames,
        "seconds": round(time.perf_counter() - begin, 4),
        "peak_memory_mib": peak_memory(run.device),
    }


def _evaluate(run: TrainingRun, step: int) -> dict[str, Any]:
    assert run.eval_loader is not None
    begin = time.perf_counter()
    passes = eval_order(len(run.eval_loader), run.args.micro_batch, run.dims.dp, run.dims.group_index)
    loss, targets = evaluate(
        run.model, ((run.eval_loader.batch(samples), counts) for samples, counts in passes), run.dims, run.device
    )
    _log.info("step %d: evaluation loss %.4f over %d tokens", step, loss, targets)
    return {"step": step, "eval_loss": loss, "targets": targets, "seconds": round(time.perf_counter() - begin, 4)}


def _save(run: TrainingRun, step: int) -> None:
    reshard(run.model)
    epoch, batch = run.order.position(step)
    progress = checkpoints.Progress(
        step=step, epoch=epoch, batch=batch, dp=run.dims.dp, sp=run.dims.sp, conditions=run.conditions
    )
    path = checkpoints.save_checkpoint(run.output, progress, run.model, run.optimizer, run.args.keep)
    _log.info("saved %s", path)
