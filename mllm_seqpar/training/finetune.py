"""`mllm-seqpar finetune`: a run from its command line to the final model, on `SeqParTrainer`.

    accelerate launch --config_file configs/fsdp2_cpu_2.yaml -m mllm_seqpar finetune \\
        --model DIR --data train.jsonl --output_dir runs/first --sp 2 --fps 1

Steps that can fail on one rank only (arguments, files, data) run first, and all ranks agree on their result before the
next collective. Then the model is loaded, and the trainer patches and shards it.
"""

import logging
import math
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from mllm_seqpar._logging import get_logger
from mllm_seqpar.chats.chat_family import chat_family
from mllm_seqpar.chats.data_set import ChatDataset
from mllm_seqpar.chats.store import TowerStore
from mllm_seqpar.cli.launch import require_rendezvous, use_cuda
from mllm_seqpar.cli.outputs import require_writable_directory
from mllm_seqpar.cli.program_exit import library_errors
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.comm.agreement import agree, attempt
from mllm_seqpar.comm.nccl_settings import order_launches
from mllm_seqpar.errors import ConfigError, NonFiniteLogitsError, writing
from mllm_seqpar.integrations.accelerate import reshard, send_buffers, shard_weights_by_fsdp2
from mllm_seqpar.models.digests import model_digest, model_fingerprint
from mllm_seqpar.models.hub import local_directory
from mllm_seqpar.models.loading import context_length, load_config, load_processor, refuse_adapter
from mllm_seqpar.patching.registry import find_adapter

from .arguments import FineTuneOptions, make_options, read_options
from .batches import SampleOrder
from .checkpoints import checkpoint_step, find_checkpoint, require_shared_directory
from .export import create_repository, export_dtype, export_model, model_card, run_on_rank_0, upload
from .finetune_trainer import FineTuneData, FineTuneTrainer
from .model import load_for_training
from .run_log import write_figure
from .trainer_arguments import find_parallelism

_LAUNCH_SETTINGS = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_", "FSDP_", "PARALLELISM_CONFIG_")
"""The variables by which `accelerate launch` passes its configuration to the ranks begin with these."""

_log = get_logger(__name__)


def main(argv: Sequence[str]) -> int:
    """Fine-tune with the command line `argv` (without the program's name); return the exit status.

    The status is 128 + N if signal N stopped the run after a checkpoint.
    """
    from transformers.utils.logging import disable_progress_bar

    logger = logging.getLogger("mllm_seqpar")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)
    if os.environ.get("RANK", "0") != "0":
        disable_progress_bar()  # only rank 0 shows the progress of loading
    return fine_tune(argv)


def fine_tune(argv: Sequence[str]) -> int:
    """Train and export the model; return the exit status. Every rank calls this.

    Raises:
        SeqParError: on invalid arguments, files or data, or if the ranks disagree.
    """
    values, problem = attempt(lambda: read_options(argv))
    with shard_weights_by_fsdp2((values or {}).get("shard_weights", False)):
        with library_errors("the training cannot be prepared"):
            trainer, checkpoint = prepare(values, problem)
        try:
            with library_errors("the training cannot begin", lambda: trainer.has_begun):
                trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            trainer.clock.restore_signals()
        trainer.clock.raise_late_signal()
        _save_log(trainer)
        return _finish(trainer)


def _finish(trainer: FineTuneTrainer) -> int:
    """Evaluate and export a model that is trained; return the exit status."""
    options, state = trainer.options, trainer.state
    if trainer.clock.stops:
        _log.info(
            "stopped after step %d of %d; continue with --resume_from_checkpoint auto",
            state.global_step,
            state.max_steps,
        )
        return 128 + trainer.clock.signal if trainer.clock.signal else 0
    problem = None
    if options.run.eval_data and str(options.training.eval_strategy.value) == "no":
        try:
            trainer.evaluate()
        except NonFiniteLogitsError as error:  # on all ranks; the model is written all the same
            problem = error
        _save_log(trainer)
    output = Path(options.training.output_dir) / "model"
    reshard(trainer.model)
    model = trainer.accelerator.unwrap_model(trainer.model)
    # Adapters keep their dtype: float32, as they were trained.
    dtype = None if options.run.use_peft else export_dtype(options.run.save_dtype, str(options.run.model))
    card = model_card(options, state.log_history, len(trainer.data.training), state.global_step)
    export_model(model, trainer.data.training.processor, output, dtype, card)
    _log.info("the final %s in %s", "adapters are" if options.run.use_peft else "model is", output)
    if options.training.push_to_hub:
        run_on_rank_0(as_communicator(), lambda: _log.info("uploaded: %s", upload(options.training, output)))
    if problem is not None:
        raise problem
    return 0


def _save_log(trainer: FineTuneTrainer) -> None:
    """Write trainer_state.json, with the log of all steps, and its figure."""
    with writing(trainer.args.output_dir, "the log", "free some space; the checkpoints are complete"):
        trainer.save_state()
        if trainer.is_world_process_zero():
            write_figure(trainer.state.log_history, Path(str(trainer.args.output_dir)))


def prepare(values: dict[str, Any] | None, problem: Exception | None) -> tuple[FineTuneTrainer, Path | None]:
    """Prepare the run up to its first step; all ranks agree on the result of each part.

    Args:
        values: what `read_options` returned on this rank, or None.
        problem: what it raised, or None.

    Returns:
        The trainer, and the checkpoint to continue from.
    """
    from accelerate import PartialState

    given = values or {}
    # On CPUs: --use_cpu, the launch configuration, or fewer GPUs than processes on this node.
    cpu = bool(given.get("use_cpu")) or not use_cuda("auto")
    order_launches()
    # `TrainingArguments` would start the process group on CPUs without a time limit.
    PartialState(cpu=cpu, timeout=timedelta(seconds=given.get("ddp_timeout", 600)))
    require_rendezvous()
    comm = as_communicator()
    settings = {name: value for name, value in os.environ.items() if name.startswith(_LAUNCH_SETTINGS)}
    # Ranks with other options would build other models, and wait for each other in different collectives.
    options = agree(comm, "arguments", lambda: _options(given, cpu), lambda _: given | settings, error=problem)
    data, checkpoint, _ = agree(comm, "data", lambda: _open_data(options), lambda opened: opened[-1])
    require_shared_directory(comm, Path(options.training.output_dir))
    options.training.gradient_accumulation_steps = data.order.micro_batches  # --global_batch_size may state them
    if options.training.push_to_hub:
        names = agree(comm, "hub", lambda: create_repository(options.training) if comm.rank == 0 else "")
        options.training.hub_model_id = names
    model = agree(comm, "model", lambda: load_for_training(options, data.training.processor))
    send_buffers(model)
    options.training.use_cache = bool(getattr(getattr(model, "config", None), "use_cache", True))  # keep it unchanged
    trainer = FineTuneTrainer(model, data, options)
    _log.info("%s", _summary(trainer, checkpoint))
    return trainer, checkpoint


def _options(values: dict[str, Any], cpu: bool) -> FineTuneOptions:
    """Return the options of the run; refuse a launch configuration for GPUs without a GPU for each process."""
    requested = values["use_cpu"] or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    if cpu and not requested and os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16":
        raise ConfigError(
            "the launch configuration is for GPUs (mixed_precision: bf16), and torch finds "
            f"{torch.cuda.device_count()} on this node for {os.environ.get('LOCAL_WORLD_SIZE', '1')} processes; "
            "start one process for each GPU, find out why torch finds no more, or pass --use_cpu to train on the CPU"
        )
    return make_options(values | {"use_cpu": cpu})


def _open_data(options: FineTuneOptions) -> tuple[FineTuneData, Path | None, dict[str, Any]]:
    """Open everything that can fail on a single rank; the last item holds the facts that must be equal on all ranks."""
    run, args = options.run, options.training
    refuse_adapter(Path(local_directory(str(run.model))), "training starts from a whole model")
    processor = load_processor(str(run.model))
    sampling: dict[str, Any] = {name: getattr(run, name) for name in ("max_length", "media_root", "template")}
    sampling["context"] = context_length(load_config(str(run.model)))
    sampling |= {"fps": options.frames.fps, "max_frames": options.frames.max_frames, **options.frames.decoding()}
    training = ChatDataset(str(run.data), processor, on_bad_media=run.on_bad_media, **sampling)
    evaluation = ChatDataset(run.eval_data, processor, **sampling) if run.eval_data else None
    parallelism = find_parallelism(args, options.parallel.sp, None)
    groups = args.world_size // (1 if parallelism is None else parallelism.cp_size)
    passes = groups * args.per_device_train_batch_size
    order = SampleOrder(
        samples=len(training),
        global_batch=run.global_batch_size or passes * args.gradient_accumulation_steps,
        micro_batch=args.per_device_train_batch_size,
        dp=groups,
        seed=args.seed if args.data_seed is None else args.data_seed,
    )
    checkpoint = find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    done = 0 if checkpoint is None else checkpoint_step(checkpoint)
    last = last_step(args, order)
    if run.stop_after is not None and not done < run.stop_after <= last:
        raise ConfigError(f"--stop_after {run.stop_after}: the steps of this run are {done + 1} to {last}; give one")
    store = None
    if run.features is not None:
        if not (Path(run.features) / TowerStore.INDEX).exists():  # a store that is complete is only read
            require_writable_directory("features", run.features)
        bf16 = args.bf16 or os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
        settings = {
            "model": model_fingerprint(str(run.model), chat_family(processor).tower_weights),
            "fps": options.frames.fps,
            "max_frames": options.frames.max_frames,
            "precision": ("bf16" if bf16 else "that of the weights") + (", in 4 bits" if run.load_in_4bit else ""),
        }
        store = TowerStore(run.features, settings)  # it refuses contents that this run would not compute
    data = FineTuneData(training, evaluation, order, training.content_digest(), store)
    facts = {"training data": data.digest, "evaluation data": evaluation and evaluation.content_digest()}
    return data, checkpoint, facts | {"checkpoint": checkpoint, "model's weights": model_digest(str(run.model))}


def last_step(args: TrainingArguments, order: SampleOrder) -> int:
    """Return the number of steps of the schedule."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * order.steps_per_epoch)


def _summary(trainer: FineTuneTrainer, checkpoint: Path | None) -> str:
    """Return the block that precedes the first step; `checkpoint` is the one that the run continues from."""
    options, order = trainer.options, trainer.data.order
    args, run, seqpar = options.training, options.run, options.seqpar
    count: Any = getattr(trainer.model, "get_nb_trainable_parameters", None)  # PEFT's: 4 bits as before packing
    sizes = [(x.numel(), x.requires_grad) for x in trainer.model.parameters()]
    trained, every = count() if count else (sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes))
    if args.device.type != "cpu":
        device = torch.cuda.get_device_name(args.device)
    else:
        device = "on the CPU" if torch.cuda.device_count() else "on the CPU: torch finds no GPU"
    if args.world_size == 1:
        weights = "whole, on one rank"
    elif trainer.is_fsdp_enabled:
        weights = f"sharded over {args.world_size} ranks (FSDP2)"
    else:
        weights = "replicated on each rank (DDP); --shard_weights shards them"
    rows = {
        "model": f"{type(find_adapter(trainer.model)[1]).__name__} from {run.model}",
        "trainable": f"{trained:,} of {every:,} parameters ({100 * trained / every:.3g}%)"
        + (f", LoRA of rank {run.lora_r}" if run.use_peft else ""),
        "data": f"{run.data}, {len(trainer.data.training):,} samples",
        "evaluation": f"{run.eval_data}, {len(trainer.data.evaluation):,} samples" if trainer.data.evaluation else None,
        "steps": f"{last_step(args, order):,}, {order.steps_per_epoch:,} an epoch",
        "global batch": f"{order.global_batch} samples, in {order.micro_batches} forward passes of each rank",
        "ranks": f"{order.dp} data parallel x {trainer.sequence_parallel_size} sequence parallel ranks, {device}",
        "weights": weights,
        "attention": f"{seqpar.strategy}; of the text {seqpar.self_attention}, {seqpar.text_layout}",
        "time": "estimated in each row (ETA), from the second step on",
        "output": str(args.output_dir),
        "continues": checkpoint,
    }
    width = max(map(len, rows)) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in rows.items() if text is not None)
