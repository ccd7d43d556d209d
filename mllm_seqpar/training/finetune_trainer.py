"""The trainer of fine-tuning: `SeqParTrainer` with a fixed order of samples that do not fit on one rank.

It changes the following of `SeqParTrainer`:

- Batches come from `BatchReader`: each rank decodes only its own frames, the order does not depend on the number of
  processes, and bad media are replaced or raised on all ranks. `Trainer` counts the tokens of a step before its first
  forward pass, so the frames of all micro-batches of a step are in host memory, and those that are read ahead.
- The loss is the mean over the target tokens of the step for every family: `Trainer` counts tokens only if a model's
  forward takes `num_items_in_batch`. The loss of an evaluation is the mean over its target tokens, for any batch size.
- A loss or gradient that is not finite is an error before the parameters are updated.
- Before an error that all ranks raise in the same step, they save a checkpoint.
- A run that stops early keeps the checkpoint at which it stopped, even if another one is best.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import EvalLoopOutput

from mllm_seqpar._logging import get_logger
from mllm_seqpar.chats.batch import ChatBatch
from mllm_seqpar.chats.chat_family import chat_family
from mllm_seqpar.chats.data_set import ChatDataset
from mllm_seqpar.chats.store import TowerStore
from mllm_seqpar.comm import as_communicator
from mllm_seqpar.errors import DataError, NonFiniteLogitsError, TransferError, writing
from mllm_seqpar.integrations.accelerate import reshard
from mllm_seqpar.patching import patch_of

from .arguments import FineTuneOptions
from .batches import BatchReader, SampleOrder
from .checkpoints import CheckpointClock, RunLayout
from .run_log import TerminalLog
from .stored_tower import ARGUMENT, TowerReplay
from .trainer import SeqParTrainer, with_host_frames

_log = get_logger(__name__)


@dataclass(frozen=True)
class FineTuneData:
    """The data sets of a run, the order of its samples and its stored features."""

    training: ChatDataset
    evaluation: ChatDataset | None
    order: SampleOrder
    digest: str  # of the training data
    features: TowerStore | None = None  # for the outputs of the frozen vision tower; None computes them in every pass


class FineTuneTrainer(SeqParTrainer):
    """The trainer that the module describes. All ranks must create it at the same point, because it creates process
    groups."""

    has_begun = False
    """Whether the first step has begun."""

    def __init__(self, model: nn.Module, data: FineTuneData, options: FineTuneOptions) -> None:
        self.data, self.options = data, options
        super().__init__(
            model=model,
            args=options.training,
            train_dataset=data.training,
            eval_dataset=data.evaluation,
            sequence_parallel_size=options.parallel.sp,
            seqpar=options.seqpar,
        )
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        limit = timedelta(seconds=self.args.ddp_timeout)
        # of the host's messages, for which a rank does not wait for its GPU
        self._host = as_communicator(dist.new_group(backend="gloo", timeout=limit) if distributed else "self")
        self._features = None
        if data.features is not None:
            self._features = TowerReplay(data.features, chat_family(data.training.processor), self.model)
        self.model_accepts_loss_kwargs = True  # or Trainer divides the loss by the number of micro-batches once more
        self.clock = CheckpointClock(self._host, options.run.save_minutes, options.run.stop_after)
        self.add_callback(self.clock)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.add_callback(TerminalLog())

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the repository exists (see `export`)."""

    @property
    def _group_index(self) -> int:
        return self.accelerator.process_index // self.sequence_parallel_size

    def _reader(self, dataset: ChatDataset) -> BatchReader:
        patch = patch_of(self.model)
        assert patch is not None
        ahead_bytes = int(self.options.run.read_ahead_gib * 2**30)
        return BatchReader(dataset, patch.context.comm, self._host, ahead_bytes, self._features)

    def _read(self, reader: BatchReader, passes: Iterable[Sequence[int]], ahead: int = 1) -> Iterator[ChatBatch]:
        """Yield the passes as micro-batches; if the reader raises on all ranks, save a checkpoint first."""
        try:
            with closing(reader.read_all(passes, ahead)) as batches:
                yield from batches
        except TransferError:  # a rank has ended
            raise
        except Exception as error:
            self._save_and_raise(error)

    def get_train_dataloader(self) -> DataLoader:
        reader, order = self._reader(self.data.training), self.data.order

        def epoch() -> Generator[Any]:
            """Yield the arguments of forward for each micro-batch of the epoch that the run is in.

            Where a run resumes in the middle of an epoch, None stands for each micro-batch that `Trainer` skips, which
            is then not decoded.
            """
            start = self.state.global_step
            done = start % order.steps_per_epoch
            yield from [None] * (done * order.micro_batches)
            passes = order.passes(self._group_index, start, start - done + order.steps_per_epoch)
            yield from map(attrgetter("arguments"), self._read(reader, passes, order.micro_batches))

        stream = _Stream(epoch, order.steps_per_epoch * order.micro_batches)
        frames_on_host = partial(with_host_frames, names=self._frame_arguments)
        return DataLoader(stream, batch_size=None, collate_fn=frames_on_host)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return the data and the samples of this group's passes, for `evaluation_loop`, which reads them itself.

        All groups have the same number of passes; the last one of some groups may be empty.
        """
        dataset: Any = self.data.evaluation if eval_dataset is None else eval_dataset
        size, samples = self.args.per_device_eval_batch_size, range(len(dataset))
        starts = range(self._group_index * size, len(dataset) + self._group_index * size, self.data.order.dp * size)
        return DataLoader(dataset, batch_sampler=[list(samples[start : start + size]) for start in starts])

    def num_examples(self, dataloader: DataLoader) -> int:
        return len(self.data.training)

    def _get_num_items_in_batch(self, batch_samples: list, device: Any) -> Tensor:
        """Return the number of target tokens of a step over all groups."""
        targets = torch.stack([_targets(batch) for batch in batch_samples]).sum()
        return self.accelerator.reduce(targets.to(device), "sum") // self.sequence_parallel_size

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.has_begun = True
        return super().training_step(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return dp S / N, as `SeqParTrainer.compute_loss` does; S is the model's mean over targets, times targets."""
        outputs = self._forward(model, inputs)
        assert num_items_in_batch is not None
        loss = outputs.loss * (_targets(inputs) * self.data.order.dp / num_items_in_batch)
        if not loss.requires_grad:  # only the visual path trains, and no rank of the group has frames
            loss = loss.detach().requires_grad_()
        return (loss, outputs) if return_outputs else loss

    def _forward(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Run the model; its vision tower returns stored outputs if the batch has them."""
        arguments = dict(inputs)
        rows = arguments.pop(ARGUMENT, None)
        with contextlib.nullcontext() if self._features is None else self._features.running(rows):
            return model(**arguments)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        if not math.isfinite(float(norm)):
            self._save_and_raise(
                DataError(
                    f"step {self.state.global_step + 1}: the gradient norm is {float(norm)}, so the parameters were "
                    "not updated; lower --learning_rate or look at the data of this step"
                )
            )
        return norm

    def _save_and_raise(self, error: Exception) -> NoReturn:
        """Save what all ranks have after the last complete step, then raise an error that every rank raises here."""
        if self.is_in_train and self.state.global_step != self.clock.saved_step:
            self.optimizer.zero_grad()
            self._save_checkpoint(self.model, trial=None)
            _log.warning("saved checkpoint-%d before stopping at an error", self.state.global_step)
        raise error

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        remedy = "free some space, and continue the last complete one with --resume_from_checkpoint auto"
        with writing(self.args.output_dir, f"checkpoint-{self.state.global_step}", remedy):
            super()._save_checkpoint(model, trial)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters with weight decay: matrices, but not norms, biases and gates."""
        return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return the mean loss over all target tokens of the evaluation data."""
        self.callback_handler.eval_dataloader = dataloader
        passes: Any = dataloader.batch_sampler
        # Under FSDP all ranks join every forward pass, so a group without samples repeats one, which does not count.
        batches = self._read(self._reader(dataloader.dataset), [samples or [0] for samples in passes])  # type: ignore[arg-type]
        total = torch.zeros(3, dtype=torch.float64, device=self.args.device)  # loss, targets, samples
        self.model.eval()
        with torch.no_grad(), self.compute_loss_context_manager():
            for samples, batch in zip(passes, batches, strict=True):
                inputs = self._prepare_inputs(with_host_frames(batch.arguments, self._frame_arguments))
                loss = self._forward(self.model, inputs).loss
                if samples:
                    targets = batch.targets
                    total += torch.stack([loss.double() * targets, *total.new_tensor([targets, len(samples)])])
                self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self.model.train()
        reshard(self.model)
        loss_sum, targets, count = self.accelerator.reduce(total, "sum").tolist()
        if not math.isfinite(loss_sum):
            self._save_and_raise(
                NonFiniteLogitsError(
                    f"the loss of the evaluation after step {self.state.global_step} is {loss_sum}, because logits of "
                    "the model are not finite; look at the evaluation data, or evaluate without --bf16_full_eval"
                )
            )
        metrics = {f"{metric_key_prefix}_loss": loss_sum / max(1.0, targets)}
        # Every rank of a group counts its samples.
        count = round(count) // self.sequence_parallel_size
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=count)

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether to save with save_strategy=best: also if the clock has requested it."""
        return super()._determine_best_metric(*args, **kwargs) or self.control.should_save

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.clock.stops:  # otherwise Trainer deletes all checkpoints but the best, if save_total_limit is 1
            self.args.load_best_model_at_end, self.args.save_total_limit = False, None
        return super()._finalize_training(*args, **kwargs)

    def _layout(self) -> RunLayout:
        return replace(super()._layout(), data=f"{self.data.digest}/{self.data.order.seed}")


class _Stream(IterableDataset[Any]):
    """What `begin` yields, for a `DataLoader` with `batch_size=None`; `length` items from the first one on."""

    def __init__(self, begin: Callable[[], Iterator[Any]], length: int) -> None:
        self._begin, self._length = begin, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


def _targets(inputs: dict[str, Any]) -> Tensor:
    return (inputs["labels"][:, 1:] != -100).sum()
