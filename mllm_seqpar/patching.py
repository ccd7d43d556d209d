"""`patch_model` and `unpatch_model`: collect every site, check all, replace, report; and undo without a trace."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from .adapters import Adapter, find_adapter
from .agreement import agree_on_text, fingerprint
from .choosing import Chooser, chooser_for
from .comm import Group, as_communicator
from .comm.ending import release_gloo_at_exit
from .config import SeqParConfig
from .context import SeqParContext
from .errors import AdapterError, ConfigError
from .kernels.registry import kernel_by_name
from .log import get_logger

_log = get_logger(__name__)
_ATTRIBUTE = "_mllm_seqpar"
_ABSENT = object()
ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass
class Patch:
    """The changes made to one model instance, and how to undo them."""

    adapter: str
    context: SeqParContext
    _undo: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute on an instance (never on a class), remembering what the instance itself had there."""
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT), value))
        object.__setattr__(owner, name, value)

    def refuse_copies(self, model: nn.Module) -> None:
        """Makes copying or pickling `model`, and every module that was changed, an error.

        Copies would hold forwards that compute with the originals' weights.
        """
        for owner in {id(owner): owner for owner in (model, *(change[0] for change in self._undo))}.values():
            self.set(owner, "__reduce_ex__", _refuse_copy)

    def undo(self) -> None:
        """Restores every attribute, last change first.

        Raises:
            AdapterError: somebody has replaced one of the attributes since; nothing is changed then.
        """
        for owner, name, _, value in self._undo:
            if vars(owner).get(name, _ABSENT) is not value:
                raise AdapterError(
                    f"unpatch_model: {type(owner).__name__}.{name} was replaced by something else after patch_model; "
                    "undo that first (accelerate: unwrap_model(model, keep_fp32_wrapper=False))"
                )
        for owner, name, before, _ in reversed(self._undo):
            if before is _ABSENT:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, before)
        self._undo.clear()


def _refuse_copy(protocol: int) -> Any:
    raise AdapterError(
        "a patched model cannot be copied or pickled: what was patched in belongs to this instance and this process. "
        "Call unpatch_model(model) first and patch the copy anew, or save with save_pretrained or state_dict, which "
        "patching does not touch. PEFT's modules_to_save copies too: wrap the model first, then patch it"
    )


def patch_model(
    model: ModelT,
    strategy: str | None = None,
    *,
    group: Group = None,
    config: SeqParConfig | None = None,
    **options: Any,
) -> ModelT:
    """Makes this model instance sequence-parallel over `group`, in place, and returns it. Call it on every rank.

    Afterwards every rank passes the same inputs as to the unpatched model: text and frames are sharded inside, the
    loss, logits and generated tokens are the unpatched model's, and averaging each parameter's gradient over the group
    (what DDP and FSDP do) gives the unpatched gradient. State dict, saving and loading are untouched.

    Args:
        model: a model of a known family, or a wrapper (PEFT, DDP) of one; before or after `fully_shard`.
        strategy: how cross-attention is distributed; None: the config's, by default "lv-xattn".
        group: ProcessGroup, one-dimensional DeviceMesh, or None: the whole world (one process: a group of one).
        config: all options at once.
        **options: single fields of `SeqParConfig`, over those of `config`.

    Raises:
        ConfigError: an unknown option or value.
        AdapterError: no adapter for this model, or it is patched already.
        AgreementError: the ranks pass different options or models; on every rank.
    """
    comm = as_communicator(group)
    release_gloo_at_exit()
    found: list[tuple[Adapter, nn.Module, SeqParContext]] = []

    def describe() -> str:
        if not isinstance(model, nn.Module):
            raise AdapterError(f"patch_model: expected a model, got {type(model).__name__}")
        context = SeqParContext(comm, _chosen(strategy, config, options))
        context.config.check_ranks(comm.size)
        adapter, inner = find_adapter(model)
        if _ATTRIBUTE in vars(inner):
            before = vars(inner)[_ATTRIBUTE].context.config
            raise AdapterError(
                f"patch_model: this {type(inner).__name__} is patched already ({before}); call unpatch_model first to "
                "change its options"
            )
        adapter.check(inner, context)
        found.append((adapter, inner, context))
        return f"{adapter.name} {type(inner).__name__}, parameters {_shapes(inner):x}, {context.config}"

    agree_on_text(comm, "patch_model", describe)
    adapter, inner, context = found[0]
    context = replace(context, chooser=_chooser(context, inner))
    patch = Patch(adapter.name, context)
    try:
        adapter.install(inner, context, patch)
        patch.refuse_copies(inner)
    except BaseException:
        patch.undo()
        raise
    object.__setattr__(inner, _ATTRIBUTE, patch)
    _log.info(
        "%s is sequence-parallel over %d rank(s): cross-attention by %s, self-attention by %s (%s text)",
        type(inner).__name__,
        comm.size,
        context.config.strategy,
        context.config.self_attention,
        context.config.text_layout,
    )
    return model


def _chooser(context: SeqParContext, model: nn.Module) -> Chooser | None:
    parameter = next(model.parameters(), None)
    device, dtype = (torch.device("cpu"), torch.float32) if parameter is None else (parameter.device, parameter.dtype)
    return chooser_for(context.config, context.comm, device, dtype)


def _chosen(strategy: str | None, config: SeqParConfig | None, options: dict[str, Any]) -> SeqParConfig:
    if isinstance(strategy, SeqParConfig):
        raise ConfigError("strategy: got a SeqParConfig; pass it as config=...")
    if config is not None and not isinstance(config, SeqParConfig):
        raise ConfigError(f"config: expected a SeqParConfig, got {type(config).__name__}")
    unknown = sorted(set(options) - set(SeqParConfig.field_names()))
    if unknown:
        raise ConfigError(
            f"patch_model: unknown option {', '.join(unknown)}; the options are {', '.join(SeqParConfig.field_names())}"
        )
    if strategy is not None:
        options = {**options, "strategy": strategy}
    chosen = replace(config or SeqParConfig(), **options)
    if chosen.kernel != "auto":
        kernel_by_name(chosen.kernel)
    return chosen


def _shapes(model: nn.Module) -> int:
    """A number that two models share when their parameters have the same names, shapes and dtypes, and train alike."""
    return fingerprint(
        " ".join(f"{name}{tuple(p.shape)}{p.dtype}{p.requires_grad}" for name, p in model.named_parameters())
    )


def unpatch_model(model: ModelT) -> ModelT:
    """Undoes `patch_model` in place, without a trace, and returns the model.

    Raises:
        AdapterError: the model is not patched, or its forward was replaced by somebody else meanwhile.
    """
    for module in model.modules():
        patch = vars(module).get(_ATTRIBUTE)
        if patch is not None:
            patch.undo()
            object.__delattr__(module, _ATTRIBUTE)
            return model
    raise AdapterError(f"unpatch_model: this {type(model).__name__} is not patched")


def patch_of(model: nn.Module) -> Patch | None:
    """The patch of a model (or of what a wrapper holds), or None: its context, and with it the byte counter."""
    return next((vars(m)[_ATTRIBUTE] for m in model.modules() if _ATTRIBUTE in vars(m)), None)
