"""Results of attention that activation checkpointing reuses instead of computing them again.

A layer under `torch.utils.checkpoint` (use_reentrant=False) runs once in forward and once more in backward, which
recomputes the tensors that the layer saves. The backward pass of attention needs only (o, lse) of its forward pass, so
these are kept, and the recomputation computes neither attention blocks, nor K and V of visual features, nor transfers
(DistFlashAttn, arXiv 2310.03294, "rematerialization-aware gradient checkpointing").

torch runs a checkpointed region (one call of a checkpointed function) inside a pair of default hooks for saved tensors,
one pair in forward and another in recomputation. Both refer to the region's frame, an object that lives as long as the
autograd graph of the call and counts the tensors that were saved. Results are stored on the frame, under the count at
the time of the call: torch itself matches saved tensors by that count. Repeated calls of a layer, several forward
passes before a backward pass, and repeated backward passes, therefore all get their own results, and results are freed
with the graph, whether or not backward runs.

For example, a layer saves two tensors, calls attention, which saves three, and saves one more:

    forward         save, save      once at position 2: computes (o, lse), keeps them    save, save, save    save
    recomputation   save, save      once at position 2: returns what was kept            save, save, save    save

The position is `len(frame.weak_holders)` in forward, and `frame.recomp_counter` in recomputation.

Hooks and frame are internal to torch (their names are the same from 2.11 to 2.15). If they are not recognised, results
are computed again, which is exact but slower. This also holds for

- regions with a `context_fn`, such as selective checkpointing, from which the operators within attention are hidden
  (`without_stored_operators`);
- calls inside further hooks for saved tensors within the region, such as `save_on_cpu`;
- regions inside other regions, in the recomputation of the outer one; their own recomputation finds the results;
- results that were changed in place after the call.

All of these must be the same on all ranks, because the ranks must agree on whether there are transfers. They are
properties of the model's code, except torch's debug mode of checkpointing, which has a `context_fn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

Results = tuple[Tensor, ...]

count_dispatch_modes = torch._C._len_torch_dispatch_stack
"""Return how many modes see operators, among them selective checkpointing; most passes have none."""

_HOOKS_MODULE = "torch.utils.checkpoint"
_ATTRIBUTE = "_mllm_seqpar_kept_results"


class Region(NamedTuple):
    """The checkpointed region that runs at present.

    Attributes:
        kept: results by (number of tensors saved before, name), with their version counters.
        position: the number of tensors that the region has saved so far.
        recomputes: whether this is the region's recomputation.
        replays_rng: whether the recomputation draws the same random numbers as the forward pass.
    """

    kept: dict[tuple[int, str], tuple[Results, list[int]]]
    position: int
    recomputes: bool
    replays_rng: bool

    def once(self, compute: Callable[[], Results], name: str) -> Results:
        """Return `compute()`, and keep it; in the recomputation, return what it returned in the forward pass.

        Args:
            compute: returns tensors.
            name: distinguishes calls between which the region saves no tensor for backward.
        """
        key = self.position, name
        if self.recomputes:
            results, versions = self.kept.get(key, ((), []))
            if results and versions == [x._version for x in results]:
                return tuple(x.detach() for x in results)
            return compute()
        results = compute()
        # Detached: the outputs themselves will refer to the graph, and the graph to the frame.
        kept = tuple(x.detach() for x in results)
        self.kept[key] = kept, [x._version for x in kept]
        return results


def running_region() -> Region | None:
    """Return the checkpointed region that runs, or None if results are not kept."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = getattr(hooks[0], "__wrapped__", hooks[0]) if hooks else None  # decorated from 2.13 on
    if not isinstance(pack, FunctionType) or pack.__module__ != _HOOKS_MODULE:
        return None
    try:
        recomputes = "frame" not in pack.__code__.co_freevars
        if recomputes:
            frame = _variable(pack, "target_frame_ref")()
            position = frame.recomp_counter[_variable(pack, "gid")]
        else:
            frame = _variable(pack, "frame")
            position = len(frame.weak_holders)
        if type(_variable(frame.recompute_fn, "recompute_context")) is not nullcontext:
            return None
        kept = vars(frame).setdefault(_ATTRIBUTE, {})
        return Region(kept, position, recomputes, _variable(frame.recompute_fn, "preserve_rng_state"))
    except (AttributeError, TypeError, ValueError):  # another version of torch
        return None


@contextmanager
def without_stored_operators() -> Iterator[None]:
    """Hide operators from selective checkpointing, which would store the results of some and return them again.

    Attention changes such results in place. torch does not notice this if an alias is changed, such as what
    `torch.matmul` returns of a result of `aten.bmm`, and the recomputation would begin with the changed values.
    """
    modes = _get_current_dispatch_mode_stack()
    # Subclasses, such as that of xformers, return stored results too.
    others = [m for m in modes if all(kind.__module__ != _HOOKS_MODULE for kind in type(m).__mro__)]
    if len(others) == len(modes):
        yield
        return
    for _ in modes:
        _pop_mode()
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in modes:
            _push_mode(mode)


def _variable(function: FunctionType, name: str) -> Any:
    """Return a variable of an enclosing function that `function` refers to; raise ValueError if there is none."""
    cells = function.__closure__ or ()
    return cells[function.__code__.co_freevars.index(name)].cell_contents
