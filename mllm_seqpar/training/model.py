"""The model of a run: how it is loaded, which parameters train, and its adapters."""

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from mllm_seqpar._logging import get_logger
from mllm_seqpar.chats.chat_family import chat_family
from mllm_seqpar.errors import ConfigError, first_line
from mllm_seqpar.integrations.accelerate import allocate, receives_weights
from mllm_seqpar.models.loading import add_adapters, load_model
from mllm_seqpar.patching.registry import find_adapter

from .arguments import FineTuneOptions, ModelAndData

_log = get_logger(__name__)

Parts = Mapping[str, Sequence[str]]
"""Names of the parts of a model, each with its module paths (`Family.parts`)."""


def load_for_training(options: FineTuneOptions, processor: Any) -> nn.Module:
    """Return the model of a run with its frozen parts and adapters; without weights on a rank that receives them."""
    run = options.run
    if run.load_in_4bit:
        from transformers import BitsAndBytesConfig

        # FSDP shards tensors of one dtype, so the packed weights take the dtype of the others.
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=torch.bfloat16,
        )
        device = f"cuda:{torch.cuda.current_device()}"
        model = load_model(str(run.model), torch.bfloat16, device, quantization_config=quantization)
    elif receives_weights():
        model = allocate(load_model(str(run.model), device_map="meta"))
    else:
        model = load_model(str(run.model))
    chat_family(processor).check(model)
    parts = getattr(find_adapter(model)[0], "parts", {})
    frozen = choose_parameters(model, run.freeze or (), run.train or (), parts)
    if run.use_peft:
        model = _with_adapters(model, run, frozen, options.training.seed)
    return model.train()


def _with_adapters(model: Any, run: ModelAndData, frozen: Sequence[str], seed: int) -> nn.Module:
    """Return the model with LoRA adapters, none of them inside the frozen parts."""
    import peft

    torch.manual_seed(seed)  # all ranks initialise the same adapters
    targets = run.lora_target_modules or ["all-linear"]
    config = peft.LoraConfig(
        r=run.lora_r,
        lora_alpha=run.lora_alpha,
        lora_dropout=run.lora_dropout,
        target_modules=targets[0] if len(targets) == 1 else targets,  # one may be a regular expression
        exclude_modules=sorted({name.rpartition(".")[0] for name in frozen}) or None,
        modules_to_save=run.lora_modules_to_save,
    )
    paths = [f".{path}" for path, _ in model.named_modules()]
    for name in run.lora_modules_to_save or ():
        if not any(path.endswith(f".{name}") for path in paths):
            raise ConfigError(f"--lora_modules_to_save {name}: no module of {type(model).__name__} has this name")
    try:
        adapted = add_adapters(model, config)
    except ValueError as error:
        raise ConfigError(f"--lora_target_modules {' '.join(targets)}: {first_line(error)}") from error
    base = str(run.model)  # an absolute path, so that the adapters can be loaded from any directory
    adapted.peft_config["default"].base_model_name_or_path = os.path.abspath(base) if os.path.exists(base) else base
    return adapted


def choose_parameters(model: nn.Module, freeze: Sequence[str], train: Sequence[str], parts: Parts) -> list[str]:
    """Set `requires_grad` to False for parameters that `freeze` names and `train` does not, and to True for all others.

    Args:
        model: as loaded, before it is sharded.
        freeze: names of `parts`, module paths, or patterns of parameter names with * and ?.
        train: the same; takes precedence over `freeze`.
        parts: of this model.

    Returns:
        The names of the frozen parameters.

    Raises:
        ConfigError: if a name matches nothing, or no parameter is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen, trained = _matched(model, names, freeze, parts, "--freeze"), _matched(model, names, train, parts, "--train")
    if trained and not trained & frozen:
        raise ConfigError(f"--train {' '.join(train)}: --freeze {' '.join(freeze)} covers none of these; leave it out")
    frozen -= trained
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if len(frozen) == len(names):
        raise ConfigError(
            f"--freeze {' '.join(freeze)}: nothing is left to train; freeze less or name parts with --train"
        )
    if frozen:
        _log.info("%d of %d parameter tensors are frozen", len(frozen), len(names))
    return sorted(frozen)


def _matched(model: nn.Module, names: list[str], selection: Sequence[str], parts: Parts, flag: str) -> set[str]:
    matched: set[str] = set()
    for item in (part.strip() for entry in selection for part in entry.split(",")):
        paths = parts.get(item, (item,))  # of modules, or of single parameters
        of_item = {name for name in names if name in paths or name.startswith(tuple(path + "." for path in paths))}
        of_item |= {name for name in names if fnmatchcase(name, item)}
        if not of_item:
            children = ", ".join(name for name, _ in model.named_children())
            choices = ", ".join([*parts, f"a module path (below {children})"])
            raise ConfigError(
                f"{flag} {item!r}: no parameter of {type(model).__name__} matches; give {choices} or a pattern such as "
                "'*.gate'"
            )
        matched |= of_item
    return matched
