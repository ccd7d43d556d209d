"""`patch_model` and `unpatch_model`: collect every site, check all of them, replace, report; and restore everything."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from mllm_seqpar._compat import check_versions
from mllm_seqpar._logging import get_logger
from mllm_seqpar.comm import Group, ProcessGroupCommunicator, transfer_communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.comm.backends import require_transferable
from mllm_seqpar.comm.gloo_exit import release_gloo_at_exit
from mllm_seqpar.config import SeqParConfig
from mllm_seqpar.digests import fingerprint
from mllm_seqpar.errors import AdapterError, ConfigError
from mllm_seqpar.fsdp_units import refuse_other_sharding
from mllm_seqpar.kernels.registry import kernel_by_name
from mllm_seqpar.runtime.context import SeqParContext

from .changes import Patch
from .registry import Adapter, find_adapter

_log = get_logger(__name__)
_ATTRIBUTE = "_mllm_seqpar"
ModelT = TypeVar("ModelT", bound=nn.Module)


def patch_model(
    model: ModelT,
    strategy: str | None = None,
    *,
    group: Group = None,
    config: SeqParConfig | None = None,
    **options: Any,
) -> ModelT:
    """Make a model instance sequence-parallel over a group of ranks, in place.

    Call this function on every rank of the group with the same model and the same options. Afterwards, call the model
    as before: every rank passes the inputs that it would pass to the unpatched model, and the patched model shards text
    and frames itself.

    - The loss, the logits and the tokens of `generate` equal those of the unpatched model on every rank.
    - The average of each parameter's gradient over the group equals the unpatched gradient. DDP and FSDP average
      gradients by default, so no scaling is needed.
    - `state_dict`, `save_pretrained` and `from_pretrained` behave as before. No other model changes.

    Args:
        model: a model of a supported family, or a wrapper (PEFT, DDP) that contains one. It may be patched before or
            after `fully_shard`.
        strategy: the strategy for cross-attention. None takes it from `config`; the default is "lv-xattn".
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for all ranks. If a launcher started several
            processes, initialise the process group first; a single process needs none. "self" is a group of this
            process only, for processes that work independently of each other. Transfers run on a process group of
            their own with the same ranks, which stays for the next call; `mllm_seqpar.comm.destroy` closes it.
        config: all options in one object.
        **options: single fields of `SeqParConfig`. They take precedence over `config`.

    Returns:
        The same `model` object.

    Raises:
        ConfigError: an option or its value is unknown, an installed package is too old, a launcher started several
            processes and there is no process group, or the model is on a GPU from which the group cannot transfer.
        AdapterError: no adapter supports the model, or the model is patched already.
        AgreementError: the ranks passed different models or options. It is raised on every rank.
        TransferError: a rank of the group does not call this function, or the ranks cannot connect.

    Example::

        model = patch_model(AutoModelForImageTextToText.from_pretrained(path), strategy="lv-xattn")
        loss = model(**inputs, labels=labels).loss
        loss.backward()
    """
    comm = transfer_communicator(group)
    release_gloo_at_exit()
    if isinstance(comm, ProcessGroupCommunicator) and comm.uses_nccl and comm.rank == 0:
        from mllm_seqpar.comm.nccl_settings import warn_about_settings

        warn_about_settings()

    def check() -> tuple[Adapter, nn.Module, SeqParContext]:
        check_versions()
        assumed_alone = group is None and not dist.is_initialized()
        context = SeqParContext(comm, _resolve_config(strategy, config, options), assumed_alone=assumed_alone)
        context.config.check_ranks(comm.size)
        adapter, inner = find_adapter(model)
        mixes_ranks = comm.size > 1 or getattr(adapter, "has_cross_attention", True)
        refuse_other_sharding(model, tensor_parallel=not mixes_ranks)
        if (patched := vars(inner).get(_ATTRIBUTE)) is not None:
            raise AdapterError(
                f"patch_model: this {type(inner).__name__} is patched already; to change its options, call "
                f"unpatch_model first. It is patched with {patched.context.config}"
            )
        adapter.check(inner, context)
        require_transferable(comm, inner, moves_later=True)
        return adapter, inner, context

    adapter, inner, context = agree(comm, "patch_model", check, _common_facts)
    _ = comm.nodes  # gathered here, once, rather than by the first layer
    if context.config.cluster is not None or "auto" in (context.config.strategy, context.config.self_attention):
        from mllm_seqpar.planner.auto import selector_for  # not at the top: the core does not depend on the planner

        context = replace(context, selector=selector_for(context.config, comm))
    patch = Patch(adapter.name, context)

    def install() -> None:
        adapter.install(inner, context, patch)
        patch.finish(inner)

    try:
        agree(comm, "patch_model", install)
    except BaseException:
        patch.undo()
        raise
    object.__setattr__(inner, _ATTRIBUTE, patch)
    used = patch.context.config
    first = comm.rank == 0 and (not dist.is_initialized() or dist.get_rank() == 0)
    _log.log(  # WARNING on several ranks, as Python shows nothing below it by default
        logging.WARNING if first and comm.size > 1 else logging.INFO,
        "%s is sequence-parallel over %s: %sself-attention by %s (%s text)",
        type(inner).__name__,
        "1 rank" if comm.size == 1 else f"{comm.size} ranks",
        f"cross-attention by {used.strategy}, " if getattr(adapter, "has_cross_attention", True) else "",
        used.self_attention,
        used.text_layout,
    )
    return model


def unpatch_model(model: ModelT) -> ModelT:
    """Undo `patch_model` in place and return the model, which is then as it was before.

    It may be called on one rank only. The process group of the transfers therefore stays open, for the next
    `patch_model`; `mllm_seqpar.comm.destroy` closes it.

    Raises:
        AdapterError: the model is not patched, or something else has replaced a patched attribute since.
    """
    for module in model.modules():
        patch = vars(module).get(_ATTRIBUTE)
        if patch is not None:
            patch.undo()
            object.__delattr__(module, _ATTRIBUTE)
            patch.context.comm.kept.buffers.clear()
            return model
    raise AdapterError(f"unpatch_model: this {type(model).__name__} is not patched; call patch_model first")


def patch_of(model: nn.Module) -> Patch | None:
    """Return the patch of `model` or of a module within it, or None; it has the configuration and the byte counter."""
    return next((vars(m)[_ATTRIBUTE] for m in model.modules() if _ATTRIBUTE in vars(m)), None)


def _resolve_config(strategy: str | None, config: SeqParConfig | None, options: dict[str, Any]) -> SeqParConfig:
    if isinstance(strategy, SeqParConfig):
        raise ConfigError("strategy: got a SeqParConfig, expected a string; pass the config as config=...")
    if config is not None and not isinstance(config, SeqParConfig):
        raise ConfigError(f"config: expected a SeqParConfig, got {type(config).__name__}")
    unknown = sorted(set(options) - set(SeqParConfig.field_names()))
    if unknown:
        raise ConfigError(
            f"patch_model: unknown option {', '.join(unknown)}; the options are {', '.join(SeqParConfig.field_names())}"
        )
    if strategy is not None:
        options = {**options, "strategy": strategy}
    resolved = replace(config or SeqParConfig(), **options)
    if resolved.kernel != "auto":
        kernel_by_name(resolved.kernel)
    return resolved


def _common_facts(checked: tuple[Adapter, nn.Module, SeqParContext]) -> dict[str, object]:
    """Return what all ranks must have in common."""
    adapter, inner, context = checked
    parameters = [f"{name}{tuple(p.shape)}{p.dtype}{p.requires_grad}" for name, p in inner.named_parameters()]
    facts = {"model": f"{adapter.name} {type(inner).__name__}", "parameters": f"{fingerprint(' '.join(parameters)):x}"}
    return facts | vars(context.config)
