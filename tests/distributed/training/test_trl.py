"""Layer: gloo ranks. TRL's SFTTrainer and DPOTrainer with SeqParMixin train as they train the unpatched model alone.

The scripts are TRL's usual ones, with chats, a processor and images or videos, on all families.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from family_directories import MAKERS, family_folder, take_samples_without_images
from mllm_seqpar import SeqParConfig, SeqParDataCollator, SeqParMixin, patch_model
from mllm_seqpar.errors import AdapterError, ConfigError
from mllm_seqpar.models.loading import load_model, load_processor
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ImageProcessor, MPlugOwl3Processor
from mllm_seqpar.patching import patch_of
from ranks import ranks
from tiny_models.mplug_owl3 import tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl: pip install 'mllm-seqpar[trl]'"),
]
ENVIRONMENT = {"CI": "1"}  # TRL sends no telemetry
SETTINGS: dict[str, Any] = {"use_cpu": True, "bf16": False, "seed": 0, "logging_steps": 1, "report_to": []}
SETTINGS |= {"save_strategy": "no", "disable_tqdm": True, "max_steps": 2, "per_device_train_batch_size": 2}
SETTINGS |= {"learning_rate": 1e-3, "adam_epsilon": 1e-4, "max_length": None}
COMPARED = ("loss", "grad_norm", "eval_loss", "entropy", "eval_entropy", "mean_token_accuracy", "num_tokens")
COMPARED += ("rewards/margins", "logps/chosen", "logits/rejected")
FAMILIES = ("mplug_owl3", *MAKERS)
QWENS = tuple(family for family in FAMILIES if family.startswith("qwen"))


def chat(question: Any, *answers: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, *({"role": "assistant", "content": text} for text in answers)]


def rows(kind: str, media: str, root: Path) -> list[dict[str, Any]]:
    """Return four samples in TRL's formats, of which one has several media and one none."""
    pictures = [Image.open(root / f"{number}.png").convert("RGB") for number in range(3)]
    shown = [[pictures[0]], [pictures[1], pictures[2]], [], [pictures[2]]]
    samples: list[dict[str, Any]] = []
    for number, (question, answer) in enumerate(
        (("What is it?", "A dot."), ("Which?", "No"), ("Hi", "Hello!"), ("", "x"))
    ):
        if kind == "dpo":
            chosen, rejected = chat("", answer)[1:], chat("", "Nothing at all.")[1:]
            samples.append({"prompt": chat(question or "?"), "chosen": chosen, "rejected": rejected})
        else:
            samples.append({"messages": chat(question or "?", answer)})
        if media == "images":
            samples[-1]["images"] = shown[number]
        elif media == "videos":
            part = [{"type": "video", "path": str(root / "clip.mp4"), "num_frames": 2 + number}]
            samples[-1]["messages"][0]["content"] = [*part, {"type": "text", "text": question or "?"}]
            samples[-1]["messages"][1]["content"] = [{"type": "text", "text": answer}]
            samples[-1]["images"] = []
    return samples


def train(
    rank: int,
    world: int,
    root: Path,
    output: Path,
    family: str,
    kind: str,
    *,
    media: str = "images",
    lora: bool = False,
    collator: bool = False,
    mixin: bool = False,
    patched: bool = False,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Train with the trainer of TRL, or with the mixin, and return the log."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    trainer, config = (DPOTrainer, DPOConfig) if kind == "dpo" else (SFTTrainer, SFTConfig)
    processor, model = load_processor(str(root / family)), load_model(str(root / family))
    if family == "mllama" and not collator:
        take_samples_without_images(processor)
    if patched:
        patch_model(model)
    arguments: dict[str, Any] = {"data_collator": SeqParDataCollator(processor)} if collator else {}
    if lora:  # the reference of DPO is then the model without adapters
        from peft import LoraConfig

        arguments["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    elif kind == "dpo":
        arguments["ref_model"] = load_model(str(root / family))
        with torch.no_grad():  # another model, so that the first rewards are not zero
            arguments["ref_model"].get_output_embeddings().weight.mul_(1.5)
    if mixin:
        trainer = type("SeqParTRL", (SeqParMixin, trainer), {})
        arguments["seqpar"] = SeqParConfig()
    torch.manual_seed(0)
    data = Dataset.from_list(rows(kind, media, root))
    run: Any = trainer(
        model=model,
        args=config(output_dir=str(output), **SETTINGS | settings),
        train_dataset=data,
        eval_dataset=data.select([0, 1]) if "eval_strategy" in settings else None,
        processing_class=processor,
        **arguments,
    )
    run.train()
    used = [run.model, *([run.ref_model] if "ref_model" in arguments else [])]
    assert all((patch_of(model) is not None) is mixin for model in used) or patched
    return run.state.log_history


@pytest.fixture(scope="module")
def root() -> Path:
    """Return the directory with a model of each family and the media."""
    found = family_folder()
    tiny_model().save_pretrained(found / "mplug_owl3")
    MPlugOwl3Processor(MPlugOwl3ImageProcessor(image_size=28), tiny_tokenizer()).save_pretrained(found / "mplug_owl3")
    return found


EVALUATION = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "max_steps": 3}
EVALUATION |= {"eval_strategy": "steps", "per_device_eval_batch_size": 1, "num_train_epochs": 2}
CASES = [
    *((family, kind, {"collator": True}) for family in FAMILIES for kind in ("sft", "dpo")),
    *((family, "sft", {"collator": True, "media": "videos"}) for family in FAMILIES),
    *((family, "sft", {}) for family in ("mplug_owl3", "mllama", "moss_vl", "video_mllama", *QWENS)),
    *(("mplug_owl3", kind, {"media": "none"}) for kind in ("sft", "dpo")),
    *((family, "dpo", {"collator": True, "lora": True}) for family in ("mplug_owl3", *QWENS)),
    *((family, kind, {"media": "none"}) for family in QWENS for kind in ("sft", "dpo")),
    *((family, "sft", {"collator": True, "gradient_checkpointing": True}) for family in QWENS),
    ("mplug_owl3", "sft", {"assistant_only_loss": True}),
    ("mplug_owl3", "sft", {"assistant_only_loss": True, "media": "none"}),
    *(("mllama", kind, {"collator": True} | EVALUATION) for kind in ("sft", "dpo")),
    ("mllama", "dpo", {"collator": True, "lora": True} | EVALUATION),
]


@pytest.mark.parametrize(("family", "kind", "given"), CASES)
def test_chats_train_on_two_ranks_as_on_one_process(
    root: Path, tmp_path: Path, family: str, kind: str, given: dict[str, Any]
) -> None:
    one = ranks(1, ENVIRONMENT).run(train, root, tmp_path, family, kind, **given)[0]
    two = ranks(2, ENVIRONMENT).run(train, root, tmp_path, family, kind, mixin=True, **given)[0]
    assert len([row for row in one if "loss" in row]) == given.get("max_steps", 2) and len(one) == len(two)
    assert ("eval_strategy" in given) is any("eval_loss" in row for row in one)
    for row, expected in zip(two, one, strict=True):
        for name in set(COMPARED) & set(expected):
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), (name, row, expected)
    assert two[0]["frames_per_second"] > 0 or given.get("media") == "none"


def test_answers_only_are_the_same_targets_for_both_collators(root: Path, tmp_path: Path) -> None:
    logs = [
        ranks(1, ENVIRONMENT).run(train, root, tmp_path, "mplug_owl3", "sft", **given)[0]
        for given in ({"assistant_only_loss": True}, {"collator": True})
    ]
    assert logs[0][0]["loss"] == pytest.approx(logs[1][0]["loss"], rel=1e-6)


def test_trl_without_the_mixin_is_refused_on_several_ranks(root: Path, tmp_path: Path) -> None:
    errors = ranks(2, ENVIRONMENT).errors(train, root, tmp_path, "mllama", "sft", collator=True, patched=True)
    assert all(isinstance(e, AdapterError) and "of TRL did, use mllm_seqpar.SeqParMixin" in str(e) for e in errors)


@pytest.mark.parametrize(
    ("family", "kind", "given", "message"),
    [
        ("mplug_owl3", "dpo", {}, r"DataCollatorForVisionPreference joins .* pass data_collator=SeqParData"),
        ("idefics", "sft", {}, "needs a processor with a chat template and input_ids, unlike IdeficsProc"),
        ("mplug_owl3", "sft", {"packing": True}, "Packing is not supported for vision datasets"),
        ("mllama", "sft", {"patched": True}, "TRL's SFTTrainer would replace the patched forward"),
        ("mplug_owl3", "dpo", {"precompute_ref_log_probs": True, "media": "none"}, "runs the reference model before"),
    ],
)
def test_what_trl_would_compute_wrongly_is_refused(
    root: Path, tmp_path: Path, family: str, kind: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):  # of which ConfigError is one
        train(0, 1, root, tmp_path, family, kind, mixin=True, **given)


def test_other_trainers_and_another_order_of_classes_are_refused() -> None:
    from trl import DPOTrainer, RewardTrainer, SFTTrainer

    with pytest.raises(ConfigError, match="TRL's RewardTrainer is not supported.* SFTTrainer and DPOTrainer"):
        type("Reward", (SeqParMixin, RewardTrainer), {})(model=tiny_model())
    for trainer in (SFTTrainer, DPOTrainer):
        with pytest.raises(TypeError, match="name SeqParMixin before the trainer"):
            type("Reversed", (trainer, SeqParMixin), {})
