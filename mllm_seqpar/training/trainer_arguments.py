"""The arguments of `SeqParTrainer`: what is refused, and how the processes form groups that share a sample."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainingArguments

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.integrations.accelerate import refuse_fsdp1_config


def refuse_unsupported(args: TrainingArguments, degree: int) -> None:
    """Raise ConfigError for arguments that would act differently on the ranks of a group, or be ignored.

    Args:
        args: of the trainer.
        degree: number of ranks that share a sample.
    """
    refuse_fsdp1_config("SeqParTrainer")
    refused = [
        (
            args.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true",
            "DeepSpeed (ZeRO) is not supported: it replaces the averaging of gradients and the saving of weights, and "
            "nothing here verifies either. Use FSDP2 (distributed_type: FSDP, fsdp_version: 2), which shards "
            "parameters, gradients and optimizer states, too",
        ),
        (
            args.fsdp and args.device.type == "cpu",
            f"fsdp={args.fsdp!r} has no effect on CPU, where accelerate replicates the weights; launch with a "
            "configuration such as configs/fsdp2_cpu_2.yaml (finetune: --shard_weights)",
        ),
        (
            args.use_liger_kernel,
            "use_liger_kernel=True replaces the forward that patch_model makes sequence-parallel; leave it out (block "
            'kernels: SeqParConfig(kernel=...); memory of logits: SeqParConfig(logits="none"))',
        ),
        (
            getattr(args, "precompute_ref_log_probs", False),
            "precompute_ref_log_probs=True runs the reference model before it is patched, with all frames on each "
            "rank; leave it out",
        ),
        (
            args.accelerator_config.dispatch_batches,
            "dispatch_batches=True lets rank 0 read for all ranks and splits its batches by the number of processes, "
            "so that the ranks of a group would get different samples; leave it out",
        ),
        (
            not args.average_tokens_across_devices,
            "average_tokens_across_devices=False divides by the tokens of one rank's batches over the ranks that share "
            "them, in some versions rounded; leave it out, and the loss is exact",
        ),
        (
            degree > 1 and args.neftune_noise_alpha,
            f"neftune_noise_alpha={args.neftune_noise_alpha} scales the noise by the number of tokens on a rank, which "
            "is only a shard of the text; leave it out",
        ),
        (
            args.world_size > 1 and args.auto_find_batch_size,
            "auto_find_batch_size=True restarts only the rank that ran out of memory, and the others would wait for "
            "it; set per_device_train_batch_size",
        ),
    ]
    for applies, message in refused:
        if applies:
            raise ConfigError(f"SeqParTrainer: {message}")


def find_parallelism(args: TrainingArguments, requested: int | None, patched: int | None) -> Any:
    """Return the `ParallelismConfig` of this run, or None on one process.

    Args:
        args: of the trainer.
        requested: the number of ranks per sample that the user asks for, or None.
        patched: the size of the group that the model is patched for, or None.
    """
    from accelerate.parallelism_config import ParallelismConfig

    world = args.world_size
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if world < launched:
        raise ConfigError(
            f"SeqParTrainer: a launcher started {launched} processes, but TrainingArguments set up {world} on "
            f"{args.device}, so each process would train alone. To train on CPUs, pass use_cpu=True "
            "(--use_cpu); else find out why torch finds no GPU"
        )
    config = args.parallelism_config
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        config = ParallelismConfig()
    if config is not None and config.total_size == 1:
        config = None
    if config is not None and config.cp_size == 1 and requested is not None and requested > 1:
        if config.dp_shard_size % requested:
            raise ConfigError(
                f"SeqParTrainer: {requested} ranks per sample, but accelerate's parallelism config shards one copy of "
                f"the parameters over dp_shard_size={config.dp_shard_size} ranks, which must be a multiple of them; "
                "change one of the two numbers, or leave parallelism_config out"
            )
        # The ranks that share a sample are consecutive in the group of ranks that share the parameters.
        sizes = {
            "dp_shard_size": config.dp_shard_size // requested,
            "cp_size": requested,
            "tp_size": config.tp_size,
        }
        copies, config = config.dp_replicate_size, ParallelismConfig(dp_replicate_size=1, **sizes)
        # accelerate 1.15 refuses copies with dp_shard_size=1, but here parameters are sharded over dp_shard and cp.
        config.dp_replicate_size = config._sizes["dp_replicate"] = copies
    degree = _degree(world, config, requested, patched)
    if world == 1:
        return None
    if config is None:
        # Sizes that are not passed would come from the variables of a launch configuration.
        return ParallelismConfig(cp_size=degree, dp_shard_size=world // degree, dp_replicate_size=1, tp_size=1)
    if config.data_parallel_size * config.cp_size != world:
        raise ConfigError(
            f"SeqParTrainer: accelerate's parallelism config has dp_replicate_size={config.dp_replicate_size}, "
            f"dp_shard_size={config.dp_shard_size}, cp_size={config.cp_size}, tp_size={config.tp_size}, sp_size="
            f"{config.sp_size}; the product of the first three must be {world}, the number of "
            "processes, and the others must be 1"
        )
    return config


def _degree(world: int, parallelism: Any, requested: int | None, patched: int | None) -> int:
    sources = {
        "sequence_parallel_size": requested,
        "cp_size of accelerate's parallelism config": None if parallelism is None else parallelism.cp_size,
        "the group that the model is patched for": patched,
    }
    sizes = {name: size for name, size in sources.items() if size is not None}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} is {size}" for name, size in sizes.items())
        raise ConfigError(f"SeqParTrainer: {listed}; they must be the same number, or be left out")
    degree = next(iter(sizes.values()), world)
    if degree < 1 or world % degree:
        if world == 1 < degree:
            raise ConfigError(
                f"SeqParTrainer: {degree} ranks per sample need {degree} processes, or a multiple, and there is one; "
                f"start them with a launcher, or for finetune with --num_processes {degree}"
            )
        raise ConfigError(
            f"SeqParTrainer: {degree} ranks per sample do not divide {world} processes; use a divisor of {world} "
            "(finetune: --sp), or another number of processes"
        )
    return degree
