"""Loading a model and its processor from a directory, and checking that the weights exactly match the model.

A directory may hold adapters of PEFT, such as those of `mllm-seqpar finetune --use_peft`. They are merged into the base
model that they name.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mllm_seqpar._compat import model_class_of, optional_import
from mllm_seqpar.errors import ConfigError, DataError, SeqParError, first_line, library_fault

from .auto_classes import NATIVE_MODELS, NativeModel
from .hub import local_directory

ADAPTER_CONFIG = "adapter_config.json"
_PROCESSOR = ("processor_config.json", "preprocessor_config.json")
"""Files of which a directory with a processor has one; transformers 5 may write all of it into the first."""

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Files of which a directory has one, by the kinds of tokenizers."""

_SHOWN = 4


def load_model(
    path: str, dtype: torch.dtype | str = torch.float32, device_map: str | None = None, **more: Any
) -> nn.Module:
    """Load the model of a directory that `save_pretrained` wrote, or of a published checkpoint.

    The directory of an adapter gives its base model with the adapter merged into it.

    Args:
        path: the directory, or USER/NAME on the Hub (see `hub.local_directory`).
        dtype: dtype of the parameters; "auto" is the checkpoint's. Training needs float32: optimizers need master
            weights, and FSDP casts for computation.
        device_map: "meta" validates names and shapes without reading the weights.
        **more: further arguments of `from_pretrained`, such as `quantization_config`.

    Raises:
        ConfigError: there is no model, it cannot be read, or its type is unknown.
        DataError: the weights of the checkpoint do not exactly match the model.
    """
    folder = Path(local_directory(path))
    if device_map is not None or more:
        refuse_adapter(folder, "only a whole model can be loaded in this way")
    base = _base_of_adapter(folder)
    if base is not None:
        return merge_adapter(load_model(str(base), dtype), folder).eval()
    config, cls = model_class(folder)
    options: dict[str, Any] = more if device_map is None else {"device_map": device_map, **more}

    def load(**options: Any) -> nn.Module:
        return load_clean(cls.from_pretrained, folder, f"--model {folder}", config=config, **options)[0]

    with _reading(folder, RuntimeError):
        if not options and _sizes_differ(folder, cls, config):
            load(dtype=dtype, device_map="meta")  # compares names and shapes before anything is built or read
        return load(dtype=dtype, **options)


def context_length(config: Any) -> int | None:
    """Return the context length of a model in tokens, by its config; None if that does not state it.

    Every placeholder of a frame or visual token counts.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None and config is not None:
        longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return longest


def _sizes_differ(folder: Path, cls: Any, config: Any) -> bool:
    """Return whether the safetensors files of a directory state other sizes than a model has, by their headers."""
    from safetensors import safe_open

    stored = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            stored += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 (no mapping)
    if not stored:
        return False
    try:
        with torch.device("meta"):
            model = cls(copy.deepcopy(config))
    except Exception:  # noqa: BLE001 - of a class that computes while it is built; loading reports what is wrong
        return False
    sizes = {id(x): x.numel() for x in model.state_dict(keep_vars=True).values()}
    return stored != sum(sizes.values())


def model_class(folder: Path) -> tuple[Any, Any]:
    """Return the config of a model directory, and the class that transformers registers for it.

    Raises:
        ConfigError: there is no config, it cannot be read, or its type is unknown.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    path = _require_config(folder)
    native = _native_model(folder)
    with _reading(folder, ValueError):
        if native is not None:
            return native.named(native.config).from_pretrained(path), native.named(native.model)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    autos = (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModel)
    cls = next((registered for auto in autos if (registered := model_class_of(auto, config)) is not None), None)
    if cls is None:
        raise ConfigError(f"--model {path}: no model class is registered for {type(config).__name__}")
    return config, cls


def _native_model(folder: Path) -> NativeModel | None:
    """Return the native model whose class config.json names under the `model_type` of another model; else None."""
    try:
        stated = json.loads((folder / "config.json").read_text())
        kind, names = stated.get("model_type"), stated.get("architectures") or ()
    except (ValueError, AttributeError):
        return None  # transformers says what is wrong with it
    models = [native for native in NATIVE_MODELS.values() if native.published_as == kind and native.model in names]
    return models[0] if models and kind is not None else None


def load_config(path: str) -> Any:
    """Return the config of a model directory, or of an adapter's base model; ConfigError as in `model_class`."""
    return model_class(model_directories(path)[-1])[0]


def load_processor(path: str) -> Any:
    """Load the processor of a model directory, or of an adapter's base model; raise ConfigError if it has none."""
    from transformers import AutoProcessor

    folders = model_directories(path)
    _require_config(folders[-1])
    folder = next((folder for folder in folders if any((folder / name).is_file() for name in _PROCESSOR)), folders[0])
    stated = folder / _PROCESSOR[0]
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
    lacks = [] if has_tokenizer else [f"a tokenizer ({', '.join(_TOKENIZERS)})"]
    if not (folder / _PROCESSOR[1]).is_file() and not (stated.is_file() and "image_processor" in stated.read_text()):
        lacks.append(f"the preprocessing of images ({_PROCESSOR[1]}, or image_processor in {_PROCESSOR[0]})")
    if lacks:
        raise ConfigError(
            f"--model {folder}: it has no files of {' and of '.join(lacks)}; copy them from the model that it was "
            "trained from, because a checkpoint of a training may lack them"
        )
    native = _native_model(folders[-1])
    with _reading(folder, ValueError, ImportError, what="no processor can be loaded"):
        processor = AutoProcessor if native is None else native.named(native.processor)
        return processor.from_pretrained(str(folder), trust_remote_code=False)


def load_clean(
    from_pretrained: Any,
    path: str | os.PathLike[str] | None,
    what: str = "",
    *,
    expected: str = "",
    ignored: str = "$^",
    **options: Any,
) -> tuple[Any, Mapping[str, Any]]:
    """Load a model and return it with its loading report; raise unless the weights exactly match the model.

    Args:
        from_pretrained: a model class's method, called with `path` and `options`.
        path: the checkpoint; None for a `state_dict` among the options.
        what: the checkpoint's name in error messages; `expected` is the model's, by default the class of the result.
        ignored: a regular expression for names of unexpected tensors that are allowed.

    Raises:
        ConfigError: `ignore_mismatched_sizes` is True.
        DataError: weights are missing, unexpected or of another shape.
    """
    from transformers import PreTrainedModel

    refuse_ignored_sizes(options)
    path = None if path is None else os.fspath(path)
    options["output_loading_info"] = True
    if getattr(from_pretrained, "__func__", None) is PreTrainedModel.from_pretrained.__func__:
        # Reports all wrong shapes instead of raising an error about the first. An override checks the shapes itself.
        options["ignore_mismatched_sizes"] = True
    loaded = from_pretrained(path, **options)
    model, report = loaded if isinstance(loaded, tuple) else (loaded, {})
    unexpected = [name for name in report.get("unexpected_keys") or () if not re.search(ignored, name)]
    what = what or ("state_dict" if path is None else path)
    require_clean({**report, "unexpected_keys": unexpected}, what, expected=expected or type(model).__name__)
    return model, report


def refuse_ignored_sizes(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if `ignore_mismatched_sizes` is among the options of `from_pretrained` and is True."""
    if options.get("ignore_mismatched_sizes"):
        raise ConfigError(
            "ignore_mismatched_sizes is True, which would leave weights at random values: leave it out, and use "
            "resize_token_embeddings after loading for another vocabulary"
        )


def tensor_names(files: Iterable[Path]) -> set[str]:
    """Return the names of the tensors in safetensors files."""
    from safetensors import safe_open

    names = set[str]()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return names


def require_clean(report: Mapping[str, Any], what: str, *, expected: str = "") -> None:
    """Raise DataError if loading left weights out, found unexpected weights, or found other shapes.

    transformers initialises missing weights randomly and drops unexpected ones, both with a warning only. `report` is
    what `from_pretrained(..., output_loading_info=True)` reported, or a part of it; the message begins with `what`.
    """
    found = []
    shapes = [
        f"{name}: {tuple(stored)} in the checkpoint, {tuple(needed)} in the model"
        for name, stored, needed in report.get("mismatched_keys") or ()
    ]
    for text, names in (
        ("it lacks", sorted(set(map(str, report.get("missing_keys") or ())))),
        ("the model does not have", sorted(set(map(str, report.get("unexpected_keys") or ())))),
        ("other shapes have", sorted(shapes)),
        ("loading failed for", [str(x) for key in ("error_msgs", "conversion_errors") for x in report.get(key) or ()]),
    ):
        if names:
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            found.append(f"{text} {len(names)} {'tensor' if len(names) == 1 else 'tensors'} ({shown})")
    if found:
        raise DataError(
            f"{what}: the checkpoint's weights are not the model's: {'; '.join(found)}. Expected exactly the weights "
            f"of {expected or 'the model that its config.json describes'}: check that the checkpoint is complete and "
            "that config.json belongs to it"
        )


def _base_of_adapter(folder: Path) -> Path | None:
    """Return the directory of the base model of an adapter; None if `folder` holds no adapter.

    Raises:
        ConfigError: the base model is not there, or `folder` holds a whole model too.
    """
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return None
    if [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        raise ConfigError(
            f"--model {folder}: it holds a whole model and an adapter ({ADAPTER_CONFIG}); move one of them to another "
            "directory"
        )
    try:
        config = json.loads(file.read_text())
        name, revision = config.get("base_model_name_or_path"), config.get("revision")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"--model {folder}: {ADAPTER_CONFIG} cannot be read: {error}") from error
    local = revision is None or Path(name or "").exists()
    base = Path(local_directory((name or "") if local else f"{name}@{revision}"))
    if not name or not (base / "config.json").is_file():
        raise ConfigError(
            f"--model {folder}: it holds an adapter, and its base model {name!r} is not a model directory here; write "
            f"the directory of the base model into {ADAPTER_CONFIG}, as base_model_name_or_path"
        )
    return base


def add_adapters(model: nn.Module, config: Any) -> Any:
    """Return the model that `peft.get_peft_model` creates from a model and a configuration of adapters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # PEFT 0.21, transformers 5.17
        return _import_peft().get_peft_model(model, config)


def refuse_adapter(folder: Path, reason: str) -> None:
    """Raise ConfigError if `folder` holds an adapter."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"--model {folder}: it holds an adapter, and {reason}; merge it with its base model first: "
            f"mllm-seqpar convert --model {folder} --output MERGED"
        )


def _import_peft() -> Any:
    return optional_import("peft", extra="peft", needed_for="a model with adapters")


def merge_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """Return the base model with the adapter in `folder` added to its weights.

    Raises:
        ConfigError: PEFT is not installed, or cannot read or merge the adapter.
        DataError: the tensors in the file do not exactly match the adapter.
    """
    peft = _import_peft()
    of_peft = (ValueError, TypeError, AttributeError, RuntimeError)
    with _reading(folder, *of_peft, what="the adapter cannot be merged into its base model"):
        config = peft.PeftConfig.from_pretrained(str(folder))
        stored = peft.load_peft_weights(str(folder), device="cpu")
        adapted = add_adapters(model, config)
        expected = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        report = {"missing_keys": expected.keys() - stored.keys(), "unexpected_keys": stored.keys() - expected.keys()}
        require_clean(report, f"--model {folder}", expected=f"the adapter that {ADAPTER_CONFIG} describes")
        peft.set_peft_model_state_dict(adapted, stored)
        return adapted.merge_and_unload()


def layer_classes(model: nn.Module) -> list[str]:
    """Return the class names of the layers that are sharded as units: the model's `_no_split_modules`.

    transformers collects that list from the classes of all parts. It may name classes of which this model has no
    instance (the text half of SigLIP), which accelerate would refuse; they are left out.
    """
    present = {type(module).__name__ for module in model.modules()}
    return sorted(present & set(getattr(model, "_no_split_modules", None) or ()))


@contextmanager
def _reading(folder: Path, *kinds: type[Exception], what: str = "") -> Iterator[None]:
    """Raise ConfigError for what the file system, safetensors or transformers raise inside the context.

    `kinds` are further errors, whichever code raises them; `what` says what cannot be done.
    """
    from safetensors import SafetensorError, safe_open

    try:
        yield
    except SeqParError as error:
        if not isinstance(error, ConfigError) or str(folder) in str(error):
            raise
        raise ConfigError(f"--model {folder}: {error}") from error  # of the class of a native config
    except Exception as error:
        if not isinstance(error, (OSError, SafetensorError, *kinds)) and library_fault(error) is None:
            raise
        for file in sorted(folder.glob("*.safetensors")):  # one of them may be damaged
            try:
                with safe_open(file, framework="pt"):
                    pass
            except (OSError, SafetensorError) as fault:
                raise ConfigError(
                    f"--model {folder}: {file.name} ({file.stat().st_size:,} bytes) is not a complete safetensors file "
                    f"({first_line(fault)}); download or copy it again"
                ) from error
        if (said := library_fault(error)) is not None:
            what = what or "the model that its config.json describes cannot be loaded"
        raise ConfigError(": ".join(filter(None, (f"--model {folder}", what, said or first_line(error))))) from error


def model_directories(path: str) -> list[Path]:
    """Return the directory of a model; if it holds an adapter, followed by the directory of its base model."""
    folder = Path(local_directory(path))
    base = _base_of_adapter(folder)
    return [folder] if base is None else [folder, base]


def _require_config(folder: Path) -> str:
    """Return the path of a model directory; raise ConfigError if it is not one."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {folder}: no config.json there; give a directory that save_pretrained wrote")
    return str(folder)
