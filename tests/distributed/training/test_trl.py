"""Layer: gloo ranks. TRL's SFTTrainer and DPOTrainer with SeqParMixin train as they train the unpatched model alone."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mllm_seqpar import SeqParConfig, SeqParMixin, patch_model
from mllm_seqpar.errors import AdapterError, ConfigError
from mllm_seqpar.patching import patch_of
from ranks import ranks
from tiny_models.mllama import Case, inputs_of, tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl: pip install 'mllm-seqpar[trl]'"),
]
ENVIRONMENT = {"CI": "1"}  # TRL sends no telemetry
SETTINGS: dict[str, Any] = {"use_cpu": True, "bf16": False, "seed": 0, "logging_steps": 1, "report_to": []}
SETTINGS |= {"save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False, "max_steps": 3}
SETTINGS |= {"learning_rate": 1e-3, "adam_epsilon": 1e-4, "gradient_accumulation_steps": 2}
SETTINGS |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "eval_strategy": "steps"}
Batch = dict[str, Tensor]


def batches(preference: bool) -> list[Batch]:
    """Batches of two samples each; with `preference` the second is a rejected answer to the first."""
    model, rows = tiny_model(), []
    for number in range(6):
        tiles = ((2,), (2,)) if preference else ((3, 1), (2,))
        batch = inputs_of(Case(frames=tiles, length=14 + number, padding="right"), model)
        if preference:
            labels = batch.pop("labels")
            batch["completion_mask"] = (labels != -100).long()
        rows.append(batch)
    return rows


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def train(rank: int, world: int, output: Path, kind: str, seqpar: bool, **given: Any) -> list[dict[str, Any]]:
    """Train three steps with the trainer of TRL, or with the mixin, and return the log."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    class UnpreparedDPOTrainer(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset  # the numbers of batches

    trainer, config = (UnpreparedDPOTrainer, DPOConfig) if kind == "dpo" else (SFTTrainer, SFTConfig)
    settings = dict(SETTINGS) | ({} if kind == "dpo" else {"dataset_kwargs": {"skip_prepare_dataset": True}})
    arguments: dict[str, Any] = {"ref_model": tiny_model(seed=1)} if kind == "dpo" else {}
    if given.pop("lora", False):  # the reference is then the model without adapters
        from peft import LoraConfig

        arguments = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)}
    if seqpar:
        trainer = type("SeqParTRL", (SeqParMixin, trainer), {})
        arguments["seqpar"] = SeqParConfig()
    model = given.pop("model", None) or tiny_model()
    if given.pop("patched", False):
        patch_model(model)
    prepared, data = batches(kind == "dpo"), Dataset.from_dict({"number": list(range(6))})
    run = trainer(
        model=model,
        args=config(output_dir=str(output), **settings | given),
        data_collator=lambda rows: dict(prepared[rows[0]["number"]]),
        train_dataset=data,
        eval_dataset=data.select([0, 1]),
        processing_class=tokenizer(),
        **arguments,
    )
    run.train()
    used = [run.model, *([run.ref_model] if arguments.get("ref_model") else [])]
    assert all((patch_of(model) is not None) is seqpar for model in used) or world == 1
    return run.state.log_history


def assert_same_log(log: list[dict[str, Any]], expected: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    assert len(log) == len(expected)
    for row, reference in zip(log, expected, strict=True):
        shared = [name for name in names if name in reference]
        assert shared or "train_runtime" in reference, reference
        for name in shared:
            assert row[name] == pytest.approx(reference[name], rel=1e-4, abs=1e-5), (name, row, reference)


SFT = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss", "eval_entropy")
DPO = ("loss", "grad_norm", "rewards/margins", "logps/chosen", "logits/rejected", "entropy", "num_tokens", "eval_loss")


@pytest.mark.parametrize(("kind", "names", "lora"), [("sft", SFT, False), ("dpo", DPO, False), ("dpo", DPO, True)])
def test_two_ranks_train_as_trl_trains_the_unpatched_model(
    tmp_path: Path, kind: str, names: tuple[str, ...], lora: bool
) -> None:
    expected = ranks(1, ENVIRONMENT).run(train, tmp_path / "one", kind, False, lora=lora)[0]
    log = ranks(2, ENVIRONMENT).run(train, tmp_path / "two", kind, True, lora=lora)[0]
    assert_same_log(log, expected, names)
    assert log[0]["frames_per_second"] > 0


def test_trl_without_the_mixin_is_refused_on_several_ranks(tmp_path: Path) -> None:
    errors = ranks(2, ENVIRONMENT).errors(train, tmp_path, "sft", False, patched=True)
    assert all(isinstance(e, AdapterError) and "of TRL did, use mllm_seqpar.SeqParMixin" in str(e) for e in errors)


def test_what_trl_would_undo_is_refused(tmp_path: Path) -> None:
    from trl import DPOTrainer, RewardTrainer, SFTTrainer

    with pytest.raises(ConfigError, match="TRL's SFTTrainer would replace the patched forward"):
        train(0, 1, tmp_path, "sft", True, patched=True)
    with pytest.raises(ConfigError, match="precompute_ref_log_probs=True runs the reference model before"):
        train(0, 1, tmp_path, "dpo", True, precompute_ref_log_probs=True)
    with pytest.raises(ConfigError, match="TRL's RewardTrainer is not supported.* SFTTrainer and DPOTrainer"):
        type("Reward", (SeqParMixin, RewardTrainer), {})(model=tiny_model())
    for trainer in (SFTTrainer, DPOTrainer):
        with pytest.raises(TypeError, match="name SeqParMixin before the trainer"):
            type("Reversed", (trainer, SeqParMixin), {})
