"""Layer: gloo ranks. SeqParTrainer trains as transformers' Trainer trains the unpatched model in one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from launch import launch_environment
from mllm_seqpar import SeqParMixin, SeqParTrainer, patch_model
from mllm_seqpar.errors import AgreementError, ConfigError, DataError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration
from ranks import ranks
from ranks_worker import reset_global_state
from tiny_models.mplug_owl3 import IMAGE_TOKEN, tiny_frames, tiny_model, tiny_text

FSDP2 = "configs/fsdp2_cpu_4.yaml"
FSDP2_WITH_CP = "configs/fsdp2_cp_cpu_4.yaml"
SETTINGS: dict[str, Any] = {"use_cpu": True, "seed": 0, "logging_steps": 1, "report_to": [], "disable_tqdm": True}
SETTINGS |= {"learning_rate": 1e-3, "adam_epsilon": 1e-4, "max_grad_norm": 1.0, "gradient_accumulation_steps": 2}
SETTINGS |= {"save_strategy": "no", "remove_unused_columns": False}
SETTINGS |= {"include_num_input_tokens_seen": "non_padding"}
Log = list[dict[str, Any]]


def samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Texts of 8 to 15 tokens with 0 to 4 frames each; from 2 to all but one of the tokens are targets."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rows = []
    for number in range(count):
        frames, length = draw(0, 5), draw(8, 16)
        ids = tiny_text(frames, length=length, seed=100 * seed + number)[0]
        labels = ids.clone()
        labels[: draw(1, length - 2)] = -100
        rows.append({"ids": ids, "labels": labels, "frames": tiny_frames(frames, seed=7 * number)})
    return rows


class Stream(torch.utils.data.IterableDataset):
    """Samples in order, without a length."""

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.rows)


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    """A padded batch, with the frames of all samples in one list."""
    padded = {
        key: nn.utils.rnn.pad_sequence([row[key] for row in rows], batch_first=True, padding_value=fill)
        for key, fill in (("ids", 0), ("labels", -100))
    }
    lengths = torch.tensor([len(row["ids"]) for row in rows])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    frames = torch.cat([row["frames"] for row in rows])
    assert int((padded["ids"] == IMAGE_TOKEN).sum()) == frames.shape[0]
    batch = {"input_ids": padded["ids"], "labels": padded["labels"], "attention_mask": mask}
    return batch | ({"pixel_values": frames} if len(frames) else {})


def make_model(lora: bool, frozen: bool) -> nn.Module:
    model = tiny_model("per_head")
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_kv_proj"], init_lora_weights=False))
    if frozen:
        model.vision_model.requires_grad_(False)
        model.language_model.requires_grad_(False)
        for number in model.config.hyper_layers:
            model.language_model.model.layers[number - 1].self_attn.requires_grad_(True)
    return model


def accuracy(prediction: Any) -> dict[str, float]:
    """The number of correct tokens, of samples and of target tokens."""
    logits, labels = prediction.predictions, prediction.label_ids
    targets = labels[:, 1:] != -100
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:]) & targets
    return {"right": float(right.sum()), "samples": float(len(labels)), "targets": float(targets.sum())}


def train(
    rank: int,
    world: int,
    output: Path,
    kind: str,
    *,
    lora: bool = False,
    frozen: bool = False,
    patched: bool = False,
    stream: bool = False,
    evaluate_first: bool = False,
    degree: int | None = None,
    resume: str | bool | None = None,
    **settings: Any,
) -> tuple[Log, dict[str, int]]:
    """Train with Trainer ("plain") or SeqParTrainer, save the model, and return the log and what the tests check."""
    if stream and kind == "plain":  # otherwise Trainer would split the list of all frames like a batch
        settings["accelerator_config"] = {"dispatch_batches": False}
    # 6, 3 and 5 samples: a last batch that is full, that is partial, and that one group has no sample of
    evaluated: dict[str, Any] = {str(count): samples(count, seed=2) for count in (6, 3, 5)}
    if stream and kind == "seqpar":  # plain Trainer needs datasets with a length
        evaluated = {name: Stream(data) for name, data in evaluated.items()}
    model = make_model(lora, frozen)
    common: dict[str, Any] = {
        "model": patch_model(model) if patched else model,
        "args": TrainingArguments(output_dir=str(output), **SETTINGS | settings),
        "data_collator": collate,
        "train_dataset": Stream(samples(48, seed=1)) if stream else samples(48, seed=1),
        "eval_dataset": evaluated,
        "compute_metrics": accuracy,
    }
    trainer = Trainer(**common) if kind == "plain" else SeqParTrainer(**common, sequence_parallel_size=degree)
    log = [trainer.evaluate()] if evaluate_first else []
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(output / "model"))
    hooks = sum(len(module._forward_pre_hooks) for name, module in trainer.model.named_modules() if "self_attn" in name)
    sharded = sum(type(p).__name__ == "DTensor" for p in trainer.model.parameters())
    facts = {"self_attn_hooks": hooks, "sharded": sharded, "degree": trainer.get_cp_size()}
    return log + trainer.state.log_history, facts


def train_in_one_process(output: Path, kind: str = "plain", **given: Any) -> Log:
    log, _ = train(0, 1, output, kind, **given)
    reset_global_state()
    return log


def train_on(world: int, output: Path, config: str | None, **given: Any) -> tuple[Log, dict[str, int]]:
    """Train with SeqParTrainer on `world` ranks, under the variables of an accelerate configuration."""
    env = {} if config is None else launch_environment(config)
    return ranks(world, env).run(train, output, "seqpar", **given)[0]


def assert_same_trajectory(log: Log, expected: Log, *names: str) -> None:
    steps, expected_steps = ([row for row in rows if "loss" in row] for rows in (log, expected))
    assert [row["step"] for row in steps] == [row["step"] for row in expected_steps]
    for row, reference in zip(steps, expected_steps, strict=True):
        for name in ("loss", "grad_norm", *names):
            assert row[name] == pytest.approx(reference[name], rel=1e-4), (name, row, reference)


def assert_same_evaluation(log: Log, expected: Log) -> None:
    for prefix in ("eval_6_", "eval_3_", "eval_5_"):
        row, reference = (next(row for row in rows if f"{prefix}loss" in row) for rows in (log, expected))
        assert row[f"{prefix}loss"] == pytest.approx(reference[f"{prefix}loss"], rel=1e-4), prefix
        for name in ("samples", "targets", "right"):  # each sample counts once, and logits are complete
            assert row[prefix + name] == reference[prefix + name], (prefix, name)


def test_one_process_trains_as_trainer_does(tmp_path: Path) -> None:
    """Trainer itself can train a patched model too, if no other rank shares its samples."""
    given = {"max_steps": 2, "per_device_train_batch_size": 4}
    expected = train_in_one_process(tmp_path / "plain", **given)
    for kind, patched in (("plain", True), ("seqpar", False)):
        log = train_in_one_process(tmp_path / f"{kind}-{patched}", kind, **given, patched=patched)
        assert_same_trajectory(log, expected, "num_input_tokens_seen")


def test_damaged_checkpoint_is_an_error_that_names_its_file(tmp_path: Path) -> None:
    given = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 4}
    train_in_one_process(tmp_path, "seqpar", **given)
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text('{"global_')
    for resume in (str(tmp_path / "checkpoint-1"), True):
        with pytest.raises(DataError, match=r"checkpoint-1/trainer_state.json: this file of the checkpoint cannot be"):
            train_in_one_process(tmp_path, "seqpar", **given, resume=resume)
        reset_global_state()


@pytest.mark.slow
def test_two_groups_of_two_train_and_evaluate_and_one_group_resumes_as_one_process(tmp_path: Path) -> None:
    evaluation = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    evaluation |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_3_loss"}
    evaluation |= {"per_device_eval_batch_size": 2}
    expected = train_in_one_process(tmp_path / "one", per_device_train_batch_size=4, max_steps=4, **evaluation)
    given = {"per_device_train_batch_size": 2, "degree": 2, "max_steps": 4}
    log, facts = train_on(4, tmp_path / "four", FSDP2, **given, **evaluation)
    assert_same_trajectory(log, expected, "learning_rate", "num_input_tokens_seen")
    assert_same_evaluation(log, expected)
    measured = ["tokens_per_second", "frames_per_second", "exposed_communication_seconds"]
    measured += [f"peak_memory_mib/rank_{rank}" for rank in range(4)]
    assert all(row[name] > 0 for row in log if "loss" in row for name in measured), log
    assert facts["self_attn_hooks"] == 0, "accelerate's context parallelism is active"
    assert facts["sharded"] == len(list(tiny_model("per_head").parameters()))
    trained = MPlugOwl3ForConditionalGeneration.from_pretrained(tmp_path / "four" / "model").state_dict()
    for name, weight in load_file(tmp_path / "one" / "model" / "model.safetensors").items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-3, atol=1e-5)

    given["per_device_train_batch_size"] = 4  # one group reads what two groups read before
    on_two, _ = train_on(2, tmp_path / "two", FSDP2, **given, resume=str(tmp_path / "four" / "checkpoint-2"))
    later, expected = ([row for row in rows if row["step"] > 2] for rows in (on_two, expected))
    assert_same_trajectory(later, expected)


@pytest.mark.slow
def test_degree_from_the_launch_config_with_lora_checkpointing_and_streams(tmp_path: Path) -> None:
    given = {"lora": True, "gradient_checkpointing": True, "max_steps": 3, "stream": True}
    given |= {"evaluate_first": True, "per_device_eval_batch_size": 2}
    expected = train_in_one_process(tmp_path / "one", **given, per_device_train_batch_size=4)
    log, facts = train_on(4, tmp_path / "four", FSDP2_WITH_CP, **given, per_device_train_batch_size=2)
    assert_same_trajectory(log, expected)
    assert_same_evaluation(log, expected)
    assert facts["degree"] == 2 and facts["self_attn_hooks"] == 0


@pytest.mark.slow
def test_ddp_with_mostly_frozen_parameters(tmp_path: Path) -> None:
    given = {"frozen": True, "max_steps": 3, "per_device_train_batch_size": 4}
    expected = train_in_one_process(tmp_path / "one", **given)
    log, _ = train_on(3, tmp_path / "three", None, **given)
    assert_same_trajectory(log, expected, "num_input_tokens_seen")
    assert log[-1]["total_flos"] == expected[-1]["total_flos"] > 0


@pytest.mark.slow
def test_plain_trainer_on_several_ranks_is_refused_because_samples_differ(tmp_path: Path) -> None:
    errors = ranks(2).errors(train, tmp_path, "plain", max_steps=1, patched=True)
    for error in errors:
        assert isinstance(error, AgreementError) and "the ranks differ in" in str(error), error
        assert "use mllm_seqpar.SeqParTrainer instead" in str(error)


def count_tokens(prediction: Any) -> dict[str, float]:
    tokens = prediction.predictions
    return {"samples": float(len(tokens)), "tokens": float(tokens[tokens >= 0].sum())}


class SeqParSeq2SeqTrainer(SeqParMixin, Seq2SeqTrainer): ...


def evaluate_by_generating(
    rank: int, world: int, output: Path, trainer_class: type[Trainer], metrics: Any, **parallel: Any
) -> dict[str, float]:
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(output), **SETTINGS, predict_with_generate=True, per_device_eval_batch_size=1
    )
    model = tiny_model("per_head")
    model.generation_config.max_new_tokens = 3
    trainer = trainer_class(
        **{"model": model, "args": arguments, "data_collator": collate, "compute_metrics": metrics},
        eval_dataset=samples(3, seed=2),
        **parallel,
    )
    return trainer.evaluate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plain", "sharded", "metrics"),
    [(Seq2SeqTrainer, SeqParSeq2SeqTrainer, count_tokens), (Trainer, SeqParTrainer, accuracy)],
    ids=["generated", "logits"],  # Trainer ignores predict_with_generate
)
def test_predictions_of_each_sample_count_once(
    tmp_path: Path, plain: type[Trainer], sharded: type[Trainer], metrics: Any
) -> None:
    expected = evaluate_by_generating(0, 1, tmp_path, plain, metrics)
    reset_global_state()
    for found in ranks(4).run(evaluate_by_generating, tmp_path, sharded, metrics, sequence_parallel_size=2):
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
        names = {"eval_samples", "eval_tokens", "eval_targets", "eval_right"} & expected.keys()
        assert len(names) >= 2 and {name: found[name] for name in names} == {name: expected[name] for name in names}


@pytest.mark.slow
def test_a_launch_config_for_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    errors = ranks(2, launch_environment(FSDP2_WITH_CP)).errors(train, tmp_path, "seqpar")
    message = "dp_shard_size=2, cp_size=2, tp_size=1, sp_size=1; the product of the first three must be 2"
    assert all(isinstance(e, ConfigError) and message in str(e) for e in errors), errors
