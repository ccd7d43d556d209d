"""Layer: one process. SeqParTrainer refuses arguments that cannot work, and accepts a patched model."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import send_to_device
from torch.distributed.utils import _to_kwargs
from torch.utils.data import ChainDataset, DataLoader
from transformers import Trainer, TrainingArguments
from transformers.utils import find_labels

from mllm_seqpar import HostFrames, SeqParConfig, SeqParMixin, SeqParTrainer, patch_model
from mllm_seqpar.errors import ConfigError, LengthError
from mllm_seqpar.integrations.accelerate import disable_context_parallelism
from mllm_seqpar.patching import patch_of
from mllm_seqpar.training.trainer import count_streamed_samples
from mllm_seqpar.training.trainer_arguments import find_parallelism
from model_copies import tiny_model
from tiny_models.mplug_owl3 import tiny_frames, tiny_text


def training_arguments(output: Path, **given: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(output), use_cpu=True, report_to=[], **given)


def trainer(tmp_path: Path, model: Any = None, args: Any = (), **given: Any) -> SeqParTrainer:
    return SeqParTrainer(
        model=model or tiny_model("per_head"), args=training_arguments(tmp_path, **dict(args)), **given
    )


@pytest.mark.parametrize(
    ("given", "environment", "message"),
    [
        ({"sequence_parallel_size": 2}, {}, "2 ranks per sample need 2 processes, .* --num_processes 2"),
        ({"args": {"average_tokens_across_devices": False}}, {}, "average_tokens_across_devices=False divides"),
        ({"args": {"accelerator_config": {"dispatch_batches": True}}}, {}, "dispatch_batches=True lets rank 0 read"),
        ({"args": {"fsdp": True}}, {}, "fsdp=True has no effect on CPU, .* launch with a configuration such as"),
        ({"args": {"use_liger_kernel": True}}, {}, "use_liger_kernel=True replaces the forward"),
        # Without use_cpu=True and without a GPU, TrainingArguments makes each process a world of one.
        ({}, {"WORLD_SIZE": "2"}, r"started 2 processes, but TrainingArguments set up 1 .*pass use_cpu=True"),
        ({}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "the launch configuration has fsdp_version: 1 "),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, r"FSDP1.*fsdp_version: 2"),  # accelerate's default is 1
        ({}, {"ACCELERATE_USE_DEEPSPEED": "true"}, r"DeepSpeed \(ZeRO\) is not supported.* Use FSDP2"),
    ],
)
def test_arguments_and_launches_that_cannot_work_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    options = dict(given)
    arguments = training_arguments(tmp_path, **options.pop("args", {}))
    for name, value in environment.items():  # which TrainingArguments would read
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        SeqParTrainer(model=tiny_model("per_head"), args=arguments, **options)


def test_frames_of_a_batch_stay_in_host_memory(tmp_path: Path) -> None:
    """What `Trainer`, accelerate and DDP do with a batch moves tensors, and leaves `HostFrames` as they are."""
    frames, ids = tiny_frames(2), tiny_text(2)
    made = trainer(tmp_path, data_collator=lambda rows: {"pixel_values": frames, "input_ids": ids, "rows": rows})
    batch = made.data_collator([1])
    held = batch["pixel_values"]
    assert isinstance(held, HostFrames) and held.tensor is frames and batch["input_ids"] is ids and batch["rows"] == [1]
    assert made._prepare_inputs(batch)["pixel_values"] is held
    moved = send_to_device(batch, torch.device("meta"))
    assert moved["pixel_values"] is held and moved["input_ids"].is_meta
    (_,), (moved,) = _to_kwargs((), batch, torch.device("meta"), False)
    assert moved["pixel_values"] is held and moved["input_ids"].is_meta
    model = made.model.eval()
    held_loss, loss = (model(input_ids=ids, labels=ids, pixel_values=x).loss for x in (held, frames))
    assert held_loss == loss


def test_a_mixin_named_after_its_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match="name SeqParMixin before the trainer"):
        type("Reversed", (Trainer, SeqParMixin), {})


def test_trainer_finds_one_label_name_so_that_evaluation_has_a_loss() -> None:
    model = tiny_model("per_head")
    assert find_labels(type(model)) == ["labels"]
    assert [name for name in inspect.signature(patch_model(model).forward).parameters if "label" in name] == ["labels"]


def test_patched_model_decides_degree_and_options(tmp_path: Path) -> None:
    model = patch_model(tiny_model("per_head"), "ring")
    assert trainer(tmp_path, model).sequence_parallel_size == 1
    with pytest.raises(ConfigError, match="sequence_parallel_size is 2, the group that the model is patched for is 1"):
        trainer(tmp_path, model, sequence_parallel_size=2)
    with pytest.raises(ConfigError, match="seqpar=.*'mesh'.* would be ignored: the model is patched already"):
        trainer(tmp_path, model, seqpar=SeqParConfig(strategy="mesh"))


def test_missing_model_and_losses_from_logits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pass model="):
        SeqParTrainer(args=training_arguments(tmp_path))
    smoothing = trainer(tmp_path, args={"label_smoothing_factor": 0.1})
    with pytest.raises(ConfigError, match="label_smoothing_factor compute the loss from logits"):
        smoothing.compute_loss(smoothing.model, {})


def test_logits_are_left_out_unless_the_caller_says_otherwise(tmp_path: Path) -> None:
    for given, expected in ((None, "none"), (SeqParConfig(), "auto")):
        patch = patch_of(trainer(tmp_path, tiny_model("per_head"), seqpar=given).model)
        assert patch is not None and patch.context.config.logits == expected
    own = tiny_model("per_head")
    own.loss_function = lambda logits, **_: logits.mean()
    loss = trainer(tmp_path, own).model(tiny_text(1), tiny_frames(1), labels=tiny_text(1)).loss
    assert loss.item() == pytest.approx(tiny_model("per_head")(tiny_text(1), tiny_frames(1)).logits.mean().item())


def test_a_stream_read_by_workers_and_an_accelerate_without_prepare_cp_are_refused() -> None:
    with pytest.raises(ConfigError, match="no Accelerator._prepare_cp"):
        disable_context_parallelism(object())
    shard = IterableDatasetShard(ChainDataset([]), batch_size=2, num_processes=2)
    loader = DataLoader(shard, batch_size=2, num_workers=3)
    with pytest.raises(ConfigError, match="workers=3 and .* over 2 groups"), count_streamed_samples(loader):
        pass


def test_ranks_that_share_a_sample_are_taken_from_those_that_share_parameters() -> None:
    """HSDP: the launch configuration says how parameters are sharded, the program how samples are."""
    given = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
    args: Any = SimpleNamespace(world_size=8, device="cpu", parallelism_config=given)
    found = find_parallelism(args, 2, None)
    assert (found.dp_replicate_size, found.dp_shard_size, found.cp_size) == (2, 2, 2)
    found = find_parallelism(args, 4, None)
    assert found._get_mesh() == (("dp_replicate", "cp"), (2, 4)) and found.total_size == 8
    assert find_parallelism(args, None, None).cp_size == 1
    with pytest.raises(ConfigError, match="8 ranks per sample, but .* over dp_shard_size=4 ranks"):
        find_parallelism(args, 8, None)


def test_batch_longer_than_the_context_of_the_model_is_refused(tmp_path: Path) -> None:
    model = tiny_model("per_head")
    model.config.max_position_embeddings = 6
    collate = trainer(tmp_path, model=model, data_collator=lambda batch: batch).data_collator
    ids, mask = torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long)
    mask[:, 6:] = 0  # padding does not count
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}
    for batch in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:, :6]}, packed):
        assert collate(batch).keys() == batch.keys()
    for batch in (
        {"input_ids": ids, "attention_mask": mask | 1},
        {"input_ids": ids},
        {"inputs_embeds": mask[..., None]},
    ):
        with pytest.raises(LengthError, match="has 8 tokens, .* more than the 6 of the model's context"):
            collate(batch)
