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
import itertools
import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import EvalLoopOutput

from mllm_seqpar._logging import get_logger
from mllm_seqpar.data.chat import ChatDataset
from mllm_seqpar.data.chat_family import chat_family
from mllm_seqpar.data.feature_store import TowerStore
from mllm_seqpar.errors import DataError, TransferError
from mllm_seqpar.integrations.accelerate.fsdp2 import reshard
from mllm_seqpar.patching import patch_of

from .batches import READ_AHEAD_BYTES, BatchReader, LoadedBatch, Restarted, reader_communicator
from .checkpoint_clock import CheckpointClock
from .resume import RunLayout
from .sample_order import SampleOrder, eval_order
from .stored_tower import ARGUMENT, StoredTower
from .terminal_log import TerminalLog
from .trainer import SeqParTrainer, frame_arguments_of, with_host_frames

_log = get_logger(__name__)


@dataclass(frozen=True)
class FineTuneData:
    """The processor, the data sets and the order of the samples of a run.

    Attributes:
        processor: that of the model.
        training, evaluation: the data sets; the second may be None.
        order: of the training samples.
        digest: of the training data.
        ahead_bytes: the most bytes of frames that a rank reads ahead.
        features: where the outputs of the frozen vision tower are stored; None computes them in every pass.
    """

    processor: Any
    training: ChatDataset
    evaluation: ChatDataset | None
    order: SampleOrder
    digest: str
    ahead_bytes: int = READ_AHEAD_BYTES
    features: TowerStore | None = None


class FineTuneTrainer(SeqParTrainer):
    """The trainer that the module describes. All ranks must create it at the same point, because it creates process
    groups.

    Args:
        data: what the run reads.
        save_minutes, stop_after: see `CheckpointClock`.
        **given: arguments of `SeqParTrainer`.
    """

    def __init__(self, *, data: FineTuneData, save_minutes: float, stop_after: int | None, **given: Any) -> None:
        self.data = data
        super().__init__(train_dataset=data.training, eval_dataset=data.evaluation, **given)
        # The thread that reads ahead, evaluation and the clock communicate at the same time.
        self._reading, self._evaluating, deciding = (reader_communicator(self.args.ddp_timeout) for _ in range(3))
        self._features = None
        if data.features is not None:
            self._features = StoredTower(data.features, chat_family(data.processor), self.model)
        self.model_accepts_loss_kwargs = True  # or Trainer divides the loss by the number of micro-batches once more
        self.clock = CheckpointClock(deciding, save_minutes, stop_after)
        self.add_callback(self.clock)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.add_callback(TerminalLog())

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the repository exists (see `export`)."""

    def _reader(self, dataset: ChatDataset, comm: Any) -> BatchReader:
        patch = patch_of(self.model)
        assert patch is not None
        return BatchReader(dataset, patch.context.comm, comm, self.data.ahead_bytes, self._features)

    @property
    def _sample_group(self) -> int:
        return self.accelerator.process_index // self.sequence_parallel_size

    def get_train_dataloader(self) -> DataLoader:
        reader, order = self._reader(self.data.training, self._reading), self.data.order
        epoch = Restarted(lambda: self._epoch(reader), order.steps_per_epoch * order.micro_batches)
        return DataLoader(epoch, batch_size=None, collate_fn=self._frames_on_host)

    def _epoch(self, reader: BatchReader) -> Generator[Any]:
        """Yield the arguments of forward for each micro-batch of the epoch that the run is in.

        Where a run resumes in the middle of an epoch, None stands for each micro-batch that `Trainer` skips, which is
        then not decoded.
        """
        order, start = self.data.order, self.state.global_step
        epoch, done = order.position(start)
        yield from [None] * (done * order.micro_batches)
        end = (epoch + 1) * order.steps_per_epoch
        passes = order.passes(self._sample_group, start, end)
        with closing(reader.read_all(passes, order.micro_batches)) as batches:
            for batch in batches:
                yield batch.arguments

    def _frames_on_host(self, arguments: Any) -> Any:
        return with_host_frames(arguments, frame_arguments_of(self.model))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        dataset: Any = self.data.evaluation if eval_dataset is None else eval_dataset
        groups = self.accelerator.num_processes // self.sequence_parallel_size
        passes = eval_order(len(dataset), self.args.per_device_eval_batch_size, groups, self._sample_group)
        reader = self._reader(dataset, self._evaluating)

        def begin() -> Generator[tuple[LoadedBatch, bool]]:
            with closing(reader.read_all(samples for samples, _ in passes)) as batches:
                for batch, (_, counts) in zip(batches, passes, strict=True):
                    yield batch, counts

        return Restarted(begin, len(passes))  # which `evaluation_loop` reads

    def num_examples(self, dataloader: DataLoader) -> int:
        return len(self.data.training)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list, Tensor]:
        """Return the micro-batches of a step and the number of their target tokens over all groups."""
        with self._throughput.data_wait():
            batches = list(itertools.islice(self._saving_at_errors(epoch_iterator), num_batches))
        targets = torch.stack([_targets(batch) for batch in batches]).sum()
        total = self.accelerator.reduce(targets.to(device), "sum")
        return batches, total // self.sequence_parallel_size

    def _saving_at_errors(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches; if `BatchReader` raises on all ranks, save a checkpoint first."""
        try:
            for batch in batches:  # noqa: UP028 - `yield from` would close the iterator of the epoch
                yield batch
        except TransferError:  # a rank has ended
            raise
        except Exception as error:
            self._save_and_raise(error)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the group's share of the loss of the step, times the number of groups, because it is averaged over
        groups."""
        with self._stored_tower(inputs) as arguments:
            outputs = model(**arguments)
        groups = self.accelerator.num_processes // self.sequence_parallel_size
        assert num_items_in_batch is not None
        loss = outputs.loss * (_targets(inputs) * groups / num_items_in_batch)
        if not loss.requires_grad:  # only the visual path trains, and no rank of the group has frames
            loss = loss.detach().requires_grad_()
        return (loss, outputs) if return_outputs else loss

    @contextlib.contextmanager
    def _stored_tower(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the arguments of forward; inside, the vision tower returns stored outputs if the batch has them."""
        arguments = dict(inputs)
        rows = arguments.pop(ARGUMENT, None)
        with contextlib.nullcontext() if self._features is None else self._features.running(rows):
            yield arguments

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
        total = torch.zeros(3, dtype=torch.float64, device=self.args.device)  # loss, targets, samples
        self.model.eval()
        with torch.no_grad(), self.compute_loss_context_manager():
            for batch, counts in self._saving_at_errors(dataloader):
                with self._stored_tower(self._prepare_inputs(self._frames_on_host(batch.arguments))) as arguments:
                    loss = self.model(**arguments).loss
                if counts:
                    targets = batch.chat.targets
                    total += torch.stack([loss.double() * targets, *total.new_tensor([targets, len(batch.samples)])])
                self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self.model.train()
        reshard(self.model)
        loss_sum, targets, samples = self.accelerator.reduce(total, "sum").tolist()
        metrics, count = {f"{metric_key_prefix}_loss": loss_sum / max(1.0, targets)}, round(samples)
        count //= self.sequence_parallel_size  # every rank of a group counts its samples
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


def _targets(inputs: dict[str, Any]) -> Tensor:
    return (inputs["labels"][:, 1:] != -100).sum()
