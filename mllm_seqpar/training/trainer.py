"""transformers' Trainer for sequence-parallel models: several ranks share a sample, and loss and gradients are exact.

The ranks form accelerate's device mesh: the ranks along `cp` share each sample, the remaining axes are data parallel,
and FSDP2 shards parameters over all of them. Each method below changes one thing of `Trainer`, as its docstring says.
Besides, the model is patched over the `cp` axis, and frames stay in host memory until a rank's vision tower needs them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer
from transformers.trainer_utils import get_last_checkpoint

from mllm_seqpar._compat import PARALLELISM_ON_CPU, prepared_models
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.errors import ConfigError, LengthError
from mllm_seqpar.integrations.accelerate import (
    disable_context_parallelism,
    enable_fsdp2_on_cpu,
    forget_preparation,
    launched_with_fsdp2,
    require_sharded,
    reshard,
    set_fsdp_units,
    set_parallelism_on_cpu,
    without_launched_parallelism,
)
from mllm_seqpar.integrations.transformers.checks import custom_loss
from mllm_seqpar.models.loading import context_length, load_clean, tensor_names
from mllm_seqpar.patching import patch_model, patch_of
from mllm_seqpar.patching.changes import Patch
from mllm_seqpar.patching.registry import find_adapter
from mllm_seqpar.sharding import HostFrames

from .checkpoints import FILE, RunLayout, checkpoint_step
from .export import export_model
from .run_log import Throughput
from .trainer_arguments import find_parallelism, refuse_unsupported
from .trl import refuse_collator, remove_fused_head, trl_trainer, use_token_scores

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class SeqParMixin(_Base):
    """Makes a subclass of `transformers.Trainer` share each sample among several ranks.

    List it before the trainer: ``class SeqParSFTTrainer(SeqParMixin, SFTTrainer)``. TRL's `SFTTrainer` and `DPOTrainer`
    are supported; DPO's reference model is patched over the same group. Other trainers of TRL are refused. Your own
    subclass is exact if its loss is the one that the model returns.

    Args:
        *args, **kwargs: those of the trainer. `per_device_train_batch_size` is the batch size of one group of ranks.
        sequence_parallel_size: number of ranks that share a sample. None: accelerate's `cp_size` (of
            `TrainingArguments.parallelism_config` or of the launch config), else the size of the group that the model
            is patched for, else all ranks.
        seqpar: how to patch the model, unless it is already patched over such a group; None for
            the defaults, with `logits="none"` unless the trainer is one of TRL, or the model has a loss of its own.

    Raises:
        ConfigError: if degrees contradict each other or do not divide the number of processes, or for arguments,
            trainers and launch configs that are not supported, such as DeepSpeed.
    """

    model: Any
    optimizer: Any
    ref_model: Any
    _throughput: Throughput

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(SeqParMixin):
            raise TypeError(f"{cls.__name__}: name SeqParMixin before the trainer; otherwise it has no effect")

    def __init__(
        self,
        *args: Any,
        sequence_parallel_size: int | None = None,
        seqpar: SeqParConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self._trl = trl_trainer(type(self))
        model = kwargs.get("model", args[0] if args else None)
        if model is None:
            raise ConfigError("SeqParTrainer: pass model=...; model_init, which creates models later, is not supported")
        self._degrees = sequence_parallel_size, patched_degree(model, seqpar)
        if self._trl is not None and any(patch_of(x) for x in (*args, *kwargs.values()) if isinstance(x, nn.Module)):
            raise ConfigError(
                f"SeqParMixin: a model is patched already, and TRL's {self._trl} would replace the patched forward; "
                "pass models unpatched, and the options as seqpar=SeqParConfig(...)"
            )
        super().__init__(*args, **kwargs)
        if self._trl is not None:
            refuse_collator(self.data_collator, self.processing_class)
        mesh, group = self.accelerator.torch_device_mesh, None
        if mesh is not None:  # without the axis cp, a degree of one on several processes is pure data parallelism
            group = mesh["cp"] if "cp" in (mesh.mesh_dim_names or ()) else dist.new_subgroups(1)[0]
        self._patch(self.model, group, seqpar)
        if getattr(self, "ref_model", None) is not None:
            self._patch(self.ref_model, group, seqpar, self.accelerator.autocast)
        self._throughput = Throughput(_patch_of(self.model), self.args.device)
        family, inner = find_adapter(self.model)
        set_fsdp_units(self.accelerator, inner)
        self._frame_arguments: tuple[str, ...] = getattr(family, "frame_arguments", ())
        if self._trl is None:  # whose trainers change the frames of a batch
            context = context_length(getattr(inner, "config", None))
            collate = functools.partial(_collate_on_host, self.data_collator, self._frame_arguments, context)
            self.data_collator: Any = collate

    def _patch(self, model: nn.Module, group: Any, seqpar: SeqParConfig | None, autocast: Any = None) -> None:
        inner = find_adapter(model)[1]
        if self._trl is not None:
            remove_fused_head(inner)
        if patch_of(inner) is None:
            needs_logits = self._trl is not None or custom_loss(inner) is not None
            defaults = SeqParConfig(logits="auto" if needs_logits else "none")
            patch_model(model, group=group, config=seqpar or defaults)
        if self._trl is not None:
            use_token_scores(inner, _patch_of(inner), autocast or contextlib.nullcontext)

    @property
    def sequence_parallel_size(self) -> int:
        """The number of ranks that share a sample."""
        return self.get_cp_size()

    def create_accelerator_and_postprocess(self) -> None:
        parallelism = find_parallelism(self.args, *self._degrees)
        refuse_unsupported(self.args, 1 if parallelism is None else parallelism.cp_size)
        cpu = self.args.device.type == "cpu"
        self.args.parallelism_config = None if cpu and PARALLELISM_ON_CPU.applies() else parallelism
        if self.args.ddp_find_unused_parameters is None:
            # Trainer does not look for them under gradient checkpointing, but towers have unused parts.
            self.args.ddp_find_unused_parameters = True
        with without_launched_parallelism(cpu):
            super().create_accelerator_and_postprocess()
        if cpu and dist.is_initialized():
            if launched_with_fsdp2():
                enable_fsdp2_on_cpu(self.accelerator)
                self.is_fsdp_enabled = True
            if parallelism is not None and PARALLELISM_ON_CPU.applies():
                set_parallelism_on_cpu(self.accelerator, parallelism)
        disable_context_parallelism(self.accelerator)
        # The default None means True for datasets without a length, but every rank must read those itself too.
        self.accelerator.dataloader_config.dispatch_batches = False
        if self.sequence_parallel_size > 1:
            self.gather_function = self.accelerator.gather_for_metrics = self._gather_once

    def _gather_once(self, data: Any) -> Any:
        """Gather tensors as `gather_for_metrics` does, but from one rank of each group, whose samples are the same."""
        from accelerate.utils import recursively_apply

        state = self.accelerator.gradient_state

        def select(gathered: Tensor) -> Tensor:
            rows = gathered.unflatten(0, (self.accelerator.num_processes, -1))[:: self.sequence_parallel_size]
            rows = rows.flatten(0, 1)
            return rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows

        return recursively_apply(select, self.accelerator.gather(data))

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Wrap the model, also if it has been evaluated before, or trained by another trainer."""
        if self.model_wrapped is self.model and not self.is_fsdp_enabled:
            forget_preparation(self.accelerator, self.model)
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.accelerator.is_fsdp2:
            require_sharded(self.model)
        return prepared

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
        """Return the loss of the group's batch; its gradients averaged over all ranks are the step's gradient.

        With dp groups of sp ranks, N target tokens in the step, and the sum S of the losses of the tokens of a group,

            loss of the step     sum of S / N over groups
            loss of each rank    dp S / N

        because gradients are averaged over all dp sp ranks, and the average over the ranks of one group is the gradient
        of its loss (`patch_model`). `Trainer` returns dp sp S / N, so this method divides by sp.
        """
        if callable(self.compute_loss_func) or self.label_smoother is not None:
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
        if num_items_in_batch is None or getattr(self, "loss_is_scaled_for_ga", None) is False:
            return result
        loss, outputs = result if return_outputs else (result, None)
        loss = loss / self.sequence_parallel_size
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        with self._throughput.step(inputs):
            return super().training_step(model, inputs, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        with self._throughput.data_wait():
            return super().get_batch_samples(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        with self._throughput.pause():
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, beside the loss of training, the speed, the exposed communication and the memory of the ranks."""
        if {"loss", "learning_rate"} <= logs.keys():
            logs = logs | self._throughput.report(self.accelerator, self.sequence_parallel_size)
        super().log(logs, start_time)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; all ranks first agree on whether this run can continue the checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(str(self.args.output_dir)) or True  # `Trainer` raises
        if not isinstance(resume_from_checkpoint, bool | None):
            checkpoint = Path(resume_from_checkpoint)

            def check() -> None:
                checkpoint_step(checkpoint)
                self._layout().require_resumable(checkpoint)

            # A rank may find another directory, or a damaged file, and the others would wait for it in the first step.
            agree(as_communicator(), "resume_from_checkpoint", check)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._load_renamed(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_renamed(Path(str(self.state.best_model_checkpoint))):
            super()._load_best_model()

    def _load_renamed(self, checkpoint: Path) -> bool:
        """Load the weights of a checkpoint in which they have other names than in the model; return whether they do.

        transformers saves Llama 3.2 Vision and Qwen2.5-VL under the names of their published checkpoints. `Trainer`
        would find none of the model's weights there, and continue with those that the model has.
        """
        model, files = self.model, sorted(checkpoint.glob("model*.safetensors"))
        if self.is_fsdp_enabled or not isinstance(model, PreTrainedModel) or not files:
            return False
        if tensor_names(files) <= model.state_dict().keys():
            return False
        dtype = functools.reduce(torch.promote_types, {p.dtype for p in model.parameters()})
        loaded, _ = load_clean(type(model).from_pretrained, checkpoint, str(checkpoint), dtype=dtype)
        model.load_state_dict(loaded.state_dict())
        return True

    def _layout(self) -> RunLayout:
        groups = self.args.world_size // self.sequence_parallel_size
        samples = groups * self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return RunLayout(samples=samples, fsdp=bool(self.is_fsdp_enabled))

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Exclude duplicate samples from the loss, and return full logits on every rank if logits are wanted."""
        state, labels = self.accelerator.gradient_state, inputs.get("labels")
        if labels is not None and state.end_of_dataloader and state.remainder > 0:
            # accelerate repeats samples to complete the last batch over the groups, and drops the duplicate rows when
            # it gathers. The loss is one number per batch, from which it cannot drop them, unless all are duplicates.
            rows = labels.shape[0]
            real = state.remainder - self.accelerator.process_index // self.sequence_parallel_size * rows
            if 0 < real < rows:
                duplicate = torch.arange(rows, device=labels.device)[:, None] >= real
                inputs = {**inputs, "labels": labels.masked_fill(duplicate, -100)}
        inner = find_adapter(model)[1]
        # Seq2SeqTrainer may generate predictions, by the same inputs, and returns tokens.
        generates = isinstance(self, Seq2SeqTrainer) and self.args.predict_with_generate
        if not prediction_loss_only and not generates:
            mode = _patch_of(inner).context.config.logits
            if "logits_to_keep" in inspect.signature(inner.forward).parameters:
                text = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
                inputs = {**inputs, "logits_to_keep": torch.arange(text.shape[1])}
            elif mode == "none" or (mode != "full" and self.sequence_parallel_size > 1):
                raise ConfigError(
                    f"SeqParTrainer: predictions need the logits of whole samples, which {type(inner).__name__} "
                    'returns with seqpar=SeqParConfig(logits="full"); pass it, or prediction_loss_only=True'
                )
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, also before any training, and reshard the parameters that FSDP2 left gathered."""
        # accelerate shards only with an optimizer
        if self.accelerator.is_fsdp2 and not prepared_models(self.accelerator):
            self.create_optimizer()
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped = self.model
        count_streamed_samples(dataloader)
        if self.sequence_parallel_size > 1 and self.gather_function == self.accelerator.gather:  # of Seq2SeqTrainer
            self.gather_function = self._gather_once
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

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint; its layout, which is written last, shows that it is complete."""
        reshard(self.model)
        checkpoint = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            (checkpoint / FILE).unlink(missing_ok=True)  # of an earlier checkpoint after this step
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._layout().write(checkpoint)

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


def count_streamed_samples(loader: Any) -> None:
    """Make `loader`, if it reads a stream, set the number of samples in its last round that are not duplicates.

    accelerate sets it only for datasets with a length.

    Raises:
        ConfigError: worker processes read the stream, where the samples cannot be counted.
    """
    from accelerate.data_loader import IterableDatasetShard

    shard = getattr(loader, "dataset", None)
    if not isinstance(shard, IterableDatasetShard) or shard.drop_last:
        return
    if loader.num_workers:
        raise ConfigError(
            f"SeqParTrainer: dataloader_num_workers={loader.num_workers} and an evaluation set that is a stream, over "
            f"{shard.num_processes} groups of ranks: duplicates in the last batch could not be counted; use 0 workers, "
            "or a dataset with a length"
        )
    shard.dataset = _CountedStream(shard.dataset, loader)


class _CountedStream(IterableDataset):
    """Yields the samples of a stream, and then sets how many of the loader's last round are not duplicates."""

    def __init__(self, stream: Any, loader: Any) -> None:
        self._stream, self._loader = stream, loader
        shard = loader.dataset
        self._round = shard.batch_size * (1 if shard.split_batches else shard.num_processes)

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for sample in self._stream:
            count += 1
            yield sample
        self._loader.remainder = count % self._round

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # accelerate reads set_epoch and generator


class SeqParTrainer(SeqParMixin, Trainer):
    """A `transformers.Trainer` that shares each sample among several ranks; see `SeqParMixin`."""


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


def _patch_of(model: nn.Module) -> Patch:
    patch = patch_of(model)
    assert patch is not None
    return patch


def patched_degree(model: Any, seqpar: SeqParConfig | None) -> int | None:
    """Return the size of the group that `model` is patched for, or None if it is not patched.

    Raises:
        ConfigError: it is patched with other options than `seqpar`, which would be ignored.
    """
    patch = None if isinstance(model, str) else patch_of(find_adapter(model)[1])  # TRL loads a model by its name
    if patch is None:
        return None
    if seqpar is not None and seqpar != patch.context.config:
        raise ConfigError(
            f"SeqParTrainer: seqpar={seqpar!r} would be ignored: the model is patched already, with "
            f"{patch.context.config}; leave seqpar out, or call unpatch_model(model) first"
        )
    return patch.context.comm.size


def _collate_on_host(collate: Any, names: Sequence[str], context: int | None, samples: Any) -> Any:
    """Return the batch of a data collator with `HostFrames`, so that `Trainer` does not move all frames.

    Raises:
        LengthError: a sample has more tokens than the model's context.
    """
    batch = collate(samples)
    if context is None or not isinstance(batch, Mapping):
        return with_host_frames(batch, names)
    length, positions, mask = 0, batch.get("position_ids"), batch.get("attention_mask")
    text = next((x for name in ("input_ids", "lang_x", "inputs_embeds") if (x := batch.get(name)) is not None), None)
    if isinstance(positions, Tensor) and positions.numel():  # several samples may be packed into a row
        length = int(positions.max()) + 1
    elif isinstance(mask, Tensor) and mask.dim() == 2 and mask.numel():
        length = int(mask.count_nonzero(1).max())
    elif isinstance(text, Tensor) and text.dim() > 1:
        length = text.shape[1]
    if length > context:
        raise LengthError(
            f"a sample of the batch has {length} tokens, placeholders of frames included, more than the {context} of "
            "the model's context; use fewer frames, or truncate the text"
        )
    return with_host_frames(batch, names)


def with_host_frames(batch: Any, names: Sequence[str]) -> Any:
    """Return the batch with `HostFrames` for the tensors with these names."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: HostFrames(x) if name in names and isinstance(x, Tensor) else x for name, x in batch.items()}
