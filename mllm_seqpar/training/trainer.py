"""transformers' Trainer for sequence-parallel models: several ranks share a sample, and loss and gradients are exact.

The ranks form accelerate's device mesh: the ranks along `cp` share each sample, the remaining axes are data parallel,
and FSDP2 shards parameters over all of them. `SeqParTrainer` changes the following, and nothing else, of `Trainer`:

- The model is patched over the `cp` axis, and accelerate's own context parallelism is disabled.
- The loss. `Trainer` divides by the tokens of the whole step and multiplies by the number of processes, because
  gradients are averaged over the processes. The ranks of one group all report their group's loss, and the average of
  their gradients is the group's gradient (`patch_model`), so the factor must be the number of groups.
- Evaluation gathers each sample once, and full logits if the caller wants logits. Its loss equals that of one process
  with the same `per_device_eval_batch_size`.
- FSDP2 works on CPU, where accelerate would silently use DDP, and `save_model` writes an unsharded model.
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
from mllm_seqpar.integrations.accelerate.context_parallel import disable_context_parallelism
from mllm_seqpar.integrations.accelerate.fsdp2 import (
    enable_fsdp2_on_cpu,
    launched_with_fsdp2,
    reshard,
    set_fsdp_units,
    set_parallelism_on_cpu,
    without_launched_parallelism,
)
from mllm_seqpar.patching import patch_model, patch_of
from mllm_seqpar.patching.registry import find_adapter

from .evaluation import count_streamed_samples, gather_once, mask_duplicate_samples
from .export import export_model


class SeqParTrainer(Trainer):
    """`transformers.Trainer` whose samples are shared by several ranks.

    Args:
        *args, **kwargs: those of `Trainer`. `per_device_train_batch_size` is the batch size of one group of ranks.
        sequence_parallel_size: number of ranks that share a sample. None: accelerate's `cp_size` (of
            `TrainingArguments.parallelism_config` or of the launch config), else the size of the group that the model
            is patched for, else all ranks.
        seqpar: how to patch the model, unless it is already patched over such a group; None for the defaults.

    Raises:
        ConfigError: if degrees contradict each other or do not divide the number of processes.
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
        self._requested_degree = sequence_parallel_size
        model = kwargs.get("model", args[0] if args else None)
        if model is None or kwargs.get("model_init") is not None:
            raise ConfigError("SeqParTrainer: pass model=...; model_init, which creates models later, is not supported")
        if sequence_parallel_size is not None and type(sequence_parallel_size) is not int:
            raise ConfigError(
                f"SeqParTrainer: sequence_parallel_size={sequence_parallel_size!r} is not an int; pass an int"
            )
        self._patched_degree = _patched_degree(model, seqpar)
        if getattr(kwargs.get("args", args[1] if len(args) > 1 else None), "use_liger_kernel", False):
            raise ConfigError(
                "SeqParTrainer: use_liger_kernel=True replaces the forward that patch_model makes sequence-parallel; "
                "leave it out (block kernels: SeqParConfig(kernel=...))"
            )
        super().__init__(*args, **kwargs)
        self._check_arguments()
        if self._patched_degree is None:
            patch_model(self.model, group=self._group(), config=seqpar)
        set_fsdp_units(self.accelerator, find_adapter(self.model)[1])

    def _check_arguments(self) -> None:
        """Raise ConfigError for arguments of `Trainer` that act on each rank separately."""
        if not self.args.average_tokens_across_devices:
            raise ConfigError(
                "SeqParTrainer: average_tokens_across_devices=False divides by the tokens of one rank's batches over "
                "the ranks that share them, in some versions rounded; leave it out, and the loss is exact"
            )
        if self.sequence_parallel_size > 1 and self.args.neftune_noise_alpha:
            raise ConfigError(
                f"SeqParTrainer: neftune_noise_alpha={self.args.neftune_noise_alpha} scales the noise by the number of "
                "tokens on a rank, which is only a shard of the text; leave it out"
            )
        if self.args.world_size > 1 and self.args.auto_find_batch_size:
            raise ConfigError(
                "SeqParTrainer: auto_find_batch_size=True restarts only the rank that ran out of memory, and the "
                "others would wait for it; set per_device_train_batch_size"
            )

    @property
    def sequence_parallel_size(self) -> int:
        """The number of ranks that share a sample."""
        return self.get_cp_size()

    def create_accelerator_and_postprocess(self) -> None:
        parallelism, cpu = self._parallelism(), self.args.device.type == "cpu"
        self.args.parallelism_config = None if cpu and PARALLELISM_ON_CPU.applies() else parallelism
        with without_launched_parallelism(cpu):
            super().create_accelerator_and_postprocess()
        if cpu and dist.is_initialized():
            if launched_with_fsdp2():
                enable_fsdp2_on_cpu(self.accelerator)
                self.is_fsdp_enabled = True
            if parallelism is not None and PARALLELISM_ON_CPU.applies():
                set_parallelism_on_cpu(self.accelerator, parallelism)
        disable_context_parallelism(self.accelerator)
        if self.accelerator.dispatch_batches:
            raise ConfigError(
                "SeqParTrainer: dispatch_batches=True lets rank 0 read for all ranks and splits its batches by the "
                "number of processes, so that the ranks of a group would get different samples; leave it out"
            )
        # The default None means True for datasets without a length, but every rank must read those itself too.
        self.accelerator.dataloader_config.dispatch_batches = False
        gather = functools.partial(gather_once, self.accelerator, self.accelerator.gather_for_metrics)
        self.accelerator.gather_for_metrics = gather
        self.gather_function = functools.partial(gather, use_gather_object=self.args.eval_use_gather_object)

    def _parallelism(self) -> Any:
        """Return the `ParallelismConfig` of this run, or None on one process."""
        from accelerate.parallelism_config import ParallelismConfig

        world = self.args.world_size
        given = self.args.parallelism_config
        if given is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
            given = ParallelismConfig()
        if given is not None and given.total_size == 1:
            given = None
        degree = self._degree(world, given)
        if world == 1:
            return None
        if given is None:
            return ParallelismConfig(cp_size=degree, dp_shard_size=world // degree)
        if given.data_parallel_size * given.cp_size != world:
            raise ConfigError(
                f"SeqParTrainer: accelerate's parallelism config has dp_replicate_size={given.dp_replicate_size}, "
                f"dp_shard_size={given.dp_shard_size}, cp_size={given.cp_size}, tp_size={given.tp_size}, sp_size="
                f"{given.sp_size}; the first three must multiply to the {world} processes, the others be 1"
            )
        return given

    def _degree(self, world: int, parallelism: Any) -> int:
        sources = {
            "sequence_parallel_size": self._requested_degree,
            "cp_size of accelerate's parallelism config": None if parallelism is None else parallelism.cp_size,
            "the group that the model is patched for": self._patched_degree,
        }
        sizes = {name: size for name, size in sources.items() if size is not None}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} is {size}" for name, size in sizes.items())
            raise ConfigError(f"SeqParTrainer: {listed}; they must be the same number, or be left out")
        degree = next(iter(sizes.values()), world)
        if degree < 1 or world % degree:
            raise ConfigError(
                f"SeqParTrainer: {degree} ranks per sample do not divide {world} processes; use a divisor of {world}"
            )
        return degree

    def _group(self) -> Any:
        mesh = self.accelerator.torch_device_mesh
        if mesh is None:
            return None
        if "cp" in (mesh.mesh_dim_names or ()):
            return mesh["cp"]
        return dist.new_subgroups(1)[0]  # a degree of one on several processes is pure data parallelism

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Leave the inputs unchanged: the patched model shards text and frames itself."""
        return contextlib.nullcontext, inputs

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of the group's batch; its gradients averaged over all ranks are the step's gradient."""
        if self.compute_loss_func is not None or self.label_smoother is not None:
            raise ConfigError(
                "SeqParTrainer: compute_loss_func and label_smoothing_factor compute the loss from logits, but each "
                "rank has the logits of its text shard only; leave them out"
            )
        if not self.model.training:
            # Use each group's own mean. Over several groups Trainer would divide by the tokens of all samples, although
            # it later drops the duplicates that complete the last batch.
            num_items_in_batch = None
        result = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if num_items_in_batch is None:
            return result
        loss, outputs = result if return_outputs else (result, None)
        loss = loss / self.sequence_parallel_size  # Trainer multiplied by the number of processes, not of groups
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Exclude duplicate samples from the loss, and return full logits on every rank if logits are wanted."""
        inputs = mask_duplicate_samples(self.accelerator, self.sequence_parallel_size, inputs)
        takes_logits_to_keep = "logits_to_keep" in inspect.signature(find_adapter(model)[1].forward).parameters
        if not prediction_loss_only and takes_logits_to_keep:
            text = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
            inputs = {**inputs, "logits_to_keep": torch.arange(text.shape[1])}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, also before any training, and reshard the parameters that FSDP2 left gathered."""
        if self.accelerator.is_fsdp2 and not self.accelerator._models:  # accelerate shards only with an optimizer
            self.create_optimizer()
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped = self.model
        with count_streamed_samples(dataloader):
            result = super().evaluation_loop(dataloader, *args, **kwargs)
        reshard(self.model)
        return result

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return this rank's part of the group's operations: `Trainer` sums the number over all ranks."""
        return super().floating_point_ops(inputs) // self.sequence_parallel_size

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        added = self.state.num_input_tokens_seen - before  # over all ranks; a group's ranks count the same tokens
        self.state.num_input_tokens_seen = before + added // self.sequence_parallel_size

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_fsdp_enabled and self.optimizer is not None:
            complete_state(getattr(self.optimizer, "optimizer", self.optimizer))
        super()._save_optimizer_and_scheduler(output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a directory that `from_pretrained` of the unpatched model reads, also if parameters are sharded."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        full_state_dict = plugin is None or "FULL_STATE_DICT" in str(plugin.state_dict_type)
        if _internal_call and output_dir is not None:
            # Next, Trainer checks on each rank whether the best checkpoint exists. With sharded weights nothing is
            # written yet: without the directory, some ranks would load shards of an older checkpoint.
            Path(output_dir).mkdir(parents=True, exist_ok=True)
        if _internal_call or not self.is_fsdp_enabled or full_state_dict:
            super().save_model(output_dir, _internal_call)
            return
        reshard(self.model)
        directory = Path(output_dir or str(self.args.output_dir))
        export_model(self.accelerator.unwrap_model(self.model), self.processing_class, directory)


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the initial optimizer state of parameters that never had a gradient.

    accelerate loads a sharded checkpoint into a complete state and fails if parameters are missing. The last layer of a
    vision tower never has a gradient, for example, if the model reads an earlier layer.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    example = next((p for p in parameters if optimizer.state.get(p)), None)
    if example is None:
        return
    for parameter in parameters:
        if parameter.requires_grad and not optimizer.state.get(parameter):
            optimizer.state[parameter] = {
                name: torch.zeros_like(parameter if value.shape == example.shape else value)
                if isinstance(value, Tensor)
                else value
                for name, value in optimizer.state[example].items()
            }


def _patched_degree(model: nn.Module, seqpar: SeqParConfig | None) -> int | None:
    """Return the size of the group that `model` is patched for, or None if it is not patched.

    Raises:
        ConfigError: if it is patched with other options than `seqpar`, which would be ignored.
    """
    patch = patch_of(find_adapter(model)[1])
    if patch is not None and seqpar is not None and seqpar != patch.context.config:
        raise ConfigError(
            f"SeqParTrainer: seqpar={seqpar!r} would be ignored: the model is patched already, with "
            f"{patch.context.config}; leave seqpar out, or call unpatch_model(model) first"
        )
    return None if patch is None else patch.context.comm.size
