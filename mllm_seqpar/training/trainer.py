"""transformers' Trainer for models that run sequence-parallel: one sample on several ranks, exact loss and gradients.

The layout is accelerate's device mesh: `cp` ranks in a row share each sample, the rest is data parallel, and FSDP2
shards parameters over all of them. What changes against `Trainer`, and nothing else does:

- The model is patched over the `cp` axis; accelerate's own context parallelism stays off.
- The loss. `Trainer` divides by the tokens of the whole step and multiplies by the number of processes, because
  gradients are averaged over them. The ranks of one group all report their group's loss, and the average of their
  gradients is the group's gradient (`patch_model`, contract 3), so the factor is the number of groups.
- Evaluation gathers each sample once, and whole logits where the caller wants them; its loss is that of one process
  with the same `per_device_eval_batch_size`.
- FSDP2 works on CPU, where accelerate would silently give DDP, and `save_model` writes a whole model from shards.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer

from mllm_seqpar._compat import PARALLELISM_ON_CPU
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.integrations.accelerate.context_parallel import keep_out_context_parallelism
from mllm_seqpar.integrations.accelerate.cpu import (
    enable_fsdp2_on_cpu,
    set_parallelism_on_cpu,
    without_launched_parallelism,
)
from mllm_seqpar.integrations.accelerate.launch import reshard, set_fsdp_units
from mllm_seqpar.patching import patch_model, patch_of
from mllm_seqpar.patching.registry import find_adapter

from .evaluation import counting_stream, gather_once, without_fillers
from .export import export_model


class SeqParTrainer(Trainer):
    """`transformers.Trainer`, with samples that several ranks share.

    Args:
        *args, **kwargs: those of `Trainer`. `per_device_train_batch_size` is the batch of one group of ranks.
        sequence_parallel_size: ranks that share a sample. None: accelerate's `cp_size` (of
            `TrainingArguments.parallelism_config` or of the launch config), else the group that the model is patched
            for, else all ranks.
        seqpar: how the model is patched, unless it is patched already over such a group; None: the defaults.

    Raises:
        ConfigError: degrees that contradict each other, or do not divide the number of processes.
    """

    model: Any
    optimizer: Any

    def __init__(
        self,
        *args: Any,
        sequence_parallel_size: int | None = None,
        seqpar: SeqParConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self._asked_degree = sequence_parallel_size
        model = kwargs.get("model", args[0] if args else None)
        if model is None or kwargs.get("model_init") is not None:
            raise ConfigError("SeqParTrainer: pass model=...; model_init, which makes models later, is not supported")
        if sequence_parallel_size is not None and type(sequence_parallel_size) is not int:
            raise ConfigError(
                f"SeqParTrainer: sequence_parallel_size={sequence_parallel_size!r} is no number of ranks; pass an int"
            )
        self._patched_degree = _patched_degree(model, seqpar)
        _refuse_liger(kwargs.get("args", args[1] if len(args) > 1 else None))
        super().__init__(*args, **kwargs)
        if not self.args.average_tokens_across_devices:
            raise ConfigError(
                "SeqParTrainer: average_tokens_across_devices=False divides by the tokens of one rank's batches over "
                "the ranks that share them, in some versions rounded; leave it out, and the loss is exact"
            )
        self._refuse_where_ranks_share_samples()
        if self._patched_degree is None:
            patch_model(self.model, group=self._group(), config=seqpar)
        set_fsdp_units(self.accelerator, find_adapter(self.model)[1])

    def _refuse_where_ranks_share_samples(self) -> None:
        """Raises ConfigError for arguments of `Trainer` that work on each rank by itself."""
        if self.sequence_parallel_size > 1 and self.args.neftune_noise_alpha:
            raise ConfigError(
                f"SeqParTrainer: neftune_noise_alpha={self.args.neftune_noise_alpha} scales the noise by the tokens "
                "that a rank has, which are a part of the text; leave it out"
            )
        if self.args.world_size > 1 and self.args.auto_find_batch_size:
            raise ConfigError(
                "SeqParTrainer: auto_find_batch_size=True begins again on the rank that ran out of memory alone, and "
                "the others would wait for it; set per_device_train_batch_size"
            )

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share a sample."""
        return self.get_cp_size()

    def create_accelerator_and_postprocess(self) -> None:
        """As `Trainer`'s, with the device mesh of the layout, and without accelerate's own context parallelism."""
        parallelism, cpu = self._parallelism(), self.args.device.type == "cpu"
        self.args.parallelism_config = None if cpu and PARALLELISM_ON_CPU.applies() else parallelism
        with without_launched_parallelism(cpu):
            super().create_accelerator_and_postprocess()
        if cpu and dist.is_initialized():
            if _launched_for_fsdp2():
                enable_fsdp2_on_cpu(self.accelerator)
                self.is_fsdp_enabled = True
            if parallelism is not None and PARALLELISM_ON_CPU.applies():
                set_parallelism_on_cpu(self.accelerator, parallelism)
        keep_out_context_parallelism(self.accelerator)
        if self.accelerator.dispatch_batches:
            raise ConfigError(
                "SeqParTrainer: dispatch_batches=True lets rank 0 read for all and cuts its batches by the number of "
                "processes, so that the ranks of a group would get different samples; leave it out"
            )
        # None means True for datasets without a length: every rank reads those for itself too.
        self.accelerator.dataloader_config.dispatch_batches = False
        once = functools.partial(gather_once, self.accelerator, self.accelerator.gather_for_metrics)
        self.accelerator.gather_for_metrics = once
        self.gather_function = functools.partial(once, use_gather_object=self.args.eval_use_gather_object)

    def _parallelism(self) -> Any:
        from accelerate.parallelism_config import ParallelismConfig

        world = self.args.world_size
        degree, given = self._degree(world), self._given_parallelism()
        if world == 1:
            return None
        if given is not None:
            if given.data_parallel_size * given.cp_size != world:
                raise ConfigError(
                    f"SeqParTrainer: accelerate's parallelism config has dp_replicate_size={given.dp_replicate_size}, "
                    f"dp_shard_size={given.dp_shard_size}, cp_size={given.cp_size}, tp_size={given.tp_size}, sp_size="
                    f"{given.sp_size}; the first three must multiply to the {world} processes, the others be 1"
                )
            return given
        return ParallelismConfig(cp_size=degree, dp_shard_size=world // degree)

    def _given_parallelism(self) -> Any:
        """What the arguments or the launch config say, when they say more than sizes of one."""
        from accelerate.parallelism_config import ParallelismConfig

        given = self.args.parallelism_config
        if given is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
            given = ParallelismConfig()
        return given if given is not None and given.total_size > 1 else None

    def _degree(self, world: int) -> int:
        given = self._given_parallelism()
        wanted = {
            "sequence_parallel_size": self._asked_degree,
            "cp_size of accelerate's parallelism config": None if given is None else given.cp_size,
            "the group that the model is patched for": self._patched_degree,
        }
        said = {name: size for name, size in wanted.items() if size is not None}
        if len(set(said.values())) > 1:
            told = ", ".join(f"{name} is {size}" for name, size in said.items())
            raise ConfigError(f"SeqParTrainer: {told}; they must be the same number, or be left out")
        degree = next(iter(said.values()), world)
        if degree < 1 or world % degree:
            raise ConfigError(
                f"SeqParTrainer: {degree} ranks to a sample do not divide {world} processes; use a divisor of {world}"
            )
        return degree

    def _group(self) -> Any:
        mesh = self.accelerator.torch_device_mesh
        if mesh is None:
            return None
        if "cp" in (mesh.mesh_dim_names or ()):
            return mesh["cp"]
        return dist.new_subgroups(1)[0]  # a degree of one on several processes: data parallel only

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Nothing: the patched model deals text and frames itself."""
        return contextlib.nullcontext, inputs

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of the group's batch; averaging its gradients over all ranks gives the step's gradient."""
        if self.compute_loss_func is not None or self.label_smoother is not None:
            raise ConfigError(
                "SeqParTrainer: compute_loss_func and label_smoothing_factor compute the loss from logits, of which a "
                "rank has only its own tokens'; leave them out"
            )
        if not self.model.training:
            # Each group's own mean. Over several groups Trainer divides by all their tokens, those of samples that it
            # drops afterwards too, because they only fill up the last batch.
            num_items_in_batch = None
        result = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if num_items_in_batch is None:
            return result
        loss, outputs = result if return_outputs else (result, None)
        loss = loss / self.sequence_parallel_size  # Trainer multiplied by the processes, not by the groups
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """As `Trainer`'s; with whole logits on every rank, when logits are wanted; fillers take no part in the loss."""
        inputs = without_fillers(self.accelerator, self.sequence_parallel_size, inputs)
        takes_rows = "logits_to_keep" in inspect.signature(find_adapter(model)[1].forward).parameters
        if not prediction_loss_only and takes_rows:
            text = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
            inputs = {**inputs, "logits_to_keep": torch.arange(text.shape[1])}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer`'s, also before any training; parameters that FSDP2 left gathered are shards again afterwards."""
        if self.accelerator.is_fsdp2 and not self.accelerator._models:  # sharded together with an optimizer only
            self.create_optimizer()
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped = self.model
        with counting_stream(dataloader):
            result = super().evaluation_loop(dataloader, *args, **kwargs)
        reshard(self.model)
        return result

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As `Trainer`'s, which adds up all ranks: this rank's part of what the group computes."""
        return super().floating_point_ops(inputs) // self.sequence_parallel_size

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        seen = self.state.num_input_tokens_seen - before  # on all ranks: by each rank of a group the same ones
        self.state.num_input_tokens_seen = before + seen // self.sequence_parallel_size

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_fsdp_enabled and self.optimizer is not None:
            complete_state(getattr(self.optimizer, "optimizer", self.optimizer))
        super()._save_optimizer_and_scheduler(output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A directory that `from_pretrained` of the unpatched model reads, also from sharded parameters."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        whole = plugin is None or "FULL_STATE_DICT" in str(plugin.state_dict_type)
        if _internal_call and output_dir is not None:
            # Trainer asks each rank whether the best checkpoint exists, right after this. With sharded weights nothing
            # is written yet: some ranks would take an older checkpoint for the best, and load shards of that.
            Path(output_dir).mkdir(parents=True, exist_ok=True)
        if _internal_call or not self.is_fsdp_enabled or whole:
            super().save_model(output_dir, _internal_call)
            return
        reshard(self.model)
        folder = Path(output_dir or str(self.args.output_dir))
        export_model(self.accelerator.unwrap_model(self.model), self.processing_class, folder)


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives parameters that never had a gradient the state that the optimizer would begin with.

    accelerate loads a sharded checkpoint into a state that is complete, and fails on one that lacks parameters: those
    of a vision tower's last layer, for example, which models that read an earlier one never use.
    """
    known = next((p for group in optimizer.param_groups for p in group["params"] if optimizer.state.get(p)), None)
    if known is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                optimizer.state[parameter] = {
                    name: _begun(value, like=parameter if getattr(value, "shape", None) == known.shape else value)
                    for name, value in optimizer.state[known].items()
                }


def _begun(value: Any, like: Any) -> Any:
    return torch.zeros_like(like) if isinstance(value, Tensor) else value


def _launched_for_fsdp2() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and os.environ.get("FSDP_VERSION") == "2"


def _refuse_liger(args: Any) -> None:
    if getattr(args, "use_liger_kernel", False):
        raise ConfigError(
            "SeqParTrainer: use_liger_kernel=True replaces the forward that patch_model makes sequence-parallel; leave "
            "it out (block kernels: SeqParConfig(kernel=...))"
        )


def _patched_degree(model: nn.Module, seqpar: SeqParConfig | None) -> int | None:
    """The size of the group that a model is patched for, or None when it is not.

    Raises:
        ConfigError: it is patched with other options than `seqpar`, which would be ignored.
    """
    patch = patch_of(find_adapter(model)[1])
    if patch is not None and seqpar is not None and seqpar != patch.context.config:
        raise ConfigError(
            f"SeqParTrainer: seqpar={seqpar!r} would be ignored: the model is patched already, with "
            f"{patch.context.config}; leave seqpar out, or call unpatch_model(model) first"
        )
    return None if patch is None else patch.context.comm.size
