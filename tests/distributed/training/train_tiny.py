"""Train a tiny mPLUG-Owl3 with transformers' Trainer or SeqParTrainer, on the ranks of the worker pool or as a script.

train_tiny.py OUTPUT {plain|seqpar} '{"name of a field of TrainingArguments or one of OPTIONS": value, ...}'
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from mllm_seqpar import SeqParConfig, SeqParTrainer, patch_model  # noqa: E402
from mllm_seqpar.patches.mplug_owl3.testing import IMAGE_TOKEN, tiny_frames, tiny_model, tiny_text  # noqa: E402

SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-4,
    "max_grad_norm": 1.0,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "seed": 0,
    "label_names": ["labels"],
    "remove_unused_columns": False,
    "gradient_accumulation_steps": 2,
    "include_num_input_tokens_seen": "non_padding",
}


OPTIONS = ("lora", "frozen", "patched", "stream", "evaluate", "degree", "resume")
"""The options besides TrainingArguments; `evaluate` is "before" or "after" training."""


class Samples(torch.utils.data.Dataset):
    """Texts of 8 to 15 tokens with 0 to 4 frames each; from 2 to all but one of the tokens are targets."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for number in range(count):
            frames = int(torch.randint(0, 5, (), generator=generator))
            length = int(torch.randint(8, 16, (), generator=generator))
            ids = tiny_text(frames, length=length, seed=100 * seed + number)[0]
            labels = ids.clone()
            labels[: int(torch.randint(1, length - 2, (), generator=generator))] = -100
            self.rows.append({"ids": ids, "labels": labels, "frames": tiny_frames(frames, seed=7 * number)})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


class Stream(torch.utils.data.IterableDataset):
    """The same samples in order, without a length."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.samples.rows)


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    """A padded batch, with the frames of all samples in one list."""
    length = max(row["ids"].shape[0] for row in rows)
    batch: dict[str, Any] = {}
    for name, key, fill in (("input_ids", "ids", 0), ("labels", "labels", -100)):
        padded = [nn.functional.pad(row[key], (0, length - row[key].shape[0]), value=fill) for row in rows]
        batch[name] = torch.stack(padded)
    batch["attention_mask"] = torch.stack([(torch.arange(length) < row["ids"].shape[0]).long() for row in rows])
    frames = torch.cat([row["frames"] for row in rows])
    if frames.shape[0]:
        batch["pixel_values"] = frames
    assert int((batch["input_ids"] == IMAGE_TOKEN).sum()) == frames.shape[0]
    return batch


class LogWriter(TrainerCallback):
    """Writes every log of rank 0 as a JSON line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step} | logs) + "\n")


def make_model(options: dict[str, Any]) -> nn.Module:
    model = tiny_model("per_head")
    if options["lora"]:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_kv_proj"], init_lora_weights=False))
    if options["frozen"]:
        model.vision_model.requires_grad_(False)
        model.language_model.requires_grad_(False)
        for number in model.config.hyper_layers:
            model.language_model.model.layers[number - 1].self_attn.requires_grad_(True)
    return patch_model(model) if options["patched"] else model


def accuracy(prediction: Any) -> dict[str, float]:
    """The number of correct tokens, of samples and of target tokens."""
    logits, labels = prediction.predictions, prediction.label_ids
    targets = labels[:, 1:] != -100
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:]) & targets
    return {"right": float(right.sum()), "samples": float(len(labels)), "targets": float(targets.sum())}


def train(output: Path, kind: str, given: dict[str, Any]) -> None:
    """Train; write `log.jsonl`, `facts.json` and `model` to `output`."""
    options = {name: given.get(name) for name in OPTIONS}
    settings = {**SETTINGS, **{name: value for name, value in given.items() if name not in OPTIONS}}
    if options["stream"] and kind == "plain":  # otherwise Trainer would split the list of all frames like a batch
        settings["accelerator_config"] = {"dispatch_batches": False}
    samples = Samples(48, seed=1)
    # 10, 7 and 5 samples: a last batch that is full, that is partial, and that one group has no sample of
    evaluated: dict[str, Any] = {str(count): Samples(count, seed=2) for count in (10, 7, 5)}
    if options["stream"] and kind == "seqpar":  # plain Trainer needs datasets with a length
        evaluated = {name: Stream(data) for name, data in evaluated.items()}
    common: dict[str, Any] = {
        "model": make_model(options),
        "args": TrainingArguments(output_dir=str(output), **settings),
        "data_collator": collate,
        "train_dataset": Stream(samples) if options["stream"] else samples,
        "eval_dataset": evaluated,
        "callbacks": [LogWriter(output / "log.jsonl")],
        "compute_metrics": accuracy if options["evaluate"] else None,
    }
    output.mkdir(parents=True, exist_ok=True)
    if kind == "plain":
        trainer = Trainer(**common)
    else:
        trainer = SeqParTrainer(**common, sequence_parallel_size=options["degree"], seqpar=SeqParConfig())
    if options["evaluate"] == "before":
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=options["resume"])
    if options["evaluate"] == "after":
        trainer.evaluate()
    hooks = sum(len(module._forward_pre_hooks) for name, module in trainer.model.named_modules() if "self_attn" in name)
    sharded = sum(type(p).__name__ == "DTensor" for p in trainer.model.parameters())
    if trainer.is_world_process_zero():
        facts = {"self_attn_hooks": hooks, "sharded": sharded, "degree": trainer.get_cp_size()}
        (output / "facts.json").write_text(json.dumps(facts))
    trainer.save_model(str(output / "model"))


def train_on_rank(rank: int, world: int, output: Path, kind: str, given: dict[str, Any]) -> None:
    train(output, kind, given)


def log_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
