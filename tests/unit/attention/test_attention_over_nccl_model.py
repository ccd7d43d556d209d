"""Layer: one process. Every schedule over the model of NCCL, alone and beside the collectives of sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_decode_attention import assert_right, run_decoding
from torch import Tensor

from attention_cases import OVER_TRANSPORTS, Case, assert_exact, run_case, same_bits
from dense_attention import dense_attention
from mllm_seqpar.attention import lv_xattn, mesh_attention, ring_attention, ulysses_attention
from mllm_seqpar.attention.call_spec import CallSpec
from mllm_seqpar.comm import Pending
from mllm_seqpar.schedules import Schedule
from nccl_model import Deadlock, Mismatch, NcclCommunicator, ShardedParameters, run_nccl_model
from selections import slow_unless
from tolerances import EXACT, relative_error

TIMINGS: list[dict[str, Any]] = [
    {"timing": "late"},
    {"timing": "early"},
    {"timing": "random", "one_resource": True},
]


@pytest.mark.parametrize(
    ("sizes", "case"),
    slow_unless(lambda row: row[1].op in ("lv", "ulysses"), OVER_TRANSPORTS),
    ids=lambda value: f"{value.op}-{value.tile}-{value.mask}" if isinstance(value, Case) else str(value),
)
def test_schedules_are_exact_whenever_data_arrives(sizes: tuple[int, ...], case: Case) -> None:
    for n in sizes:
        first = run_nccl_model(n, run_case, case)
        assert_exact(case, first)
        for options in TIMINGS[1:]:
            assert same_bits(first, run_nccl_model(n, run_case, case, seed=n, **options))
    assert same_bits(first, run_nccl_model(n, run_case, replace(case, overlap=False)))


@pytest.mark.parametrize("rows", [1, 67])
def test_decoding_is_exact_whenever_data_arrives(rows: int) -> None:
    case = Case(op="decode", rows=rows, batch=2, mask="growing")
    for n in (2, 3, 4):
        for options in TIMINGS:
            assert_right(case, run_nccl_model(n, run_decoding, case, seed=n, **options))


class _Layer(torch.autograd.Function):
    """y = x W^T; backward: dx = dy W, with W gathered again, and dW = dy^T x, summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: int, parameters: ShardedParameters) -> Tensor:
        ctx.layer, ctx.parameters = layer, parameters
        ctx.save_for_backward(x)
        return x @ parameters.weight(layer, layer + 1).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        dx = dy @ ctx.parameters.weight(ctx.layer, ctx.layer - 1)
        ctx.parameters.reduce(ctx.layer, dy.flatten(0, 1).T @ x.flatten(0, 1))
        return dx, None, None


HEADS, DIM, LAYERS, ROWS, KEYS = 4, 3, 3, 6, 5
WIDTH = HEADS * DIM
ATTENTION: dict[str, Callable[..., Tensor]] = {
    "lv": lv_xattn,
    "ring": ring_attention,
    "mesh": mesh_attention,
    "ulysses": ulysses_attention,
}


def tensors(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (1, all rows, width), k and v in one (2, 1, H, all keys, D), and the weights (layers, width, width)."""
    generator = torch.Generator().manual_seed(n)
    shapes = (1, n * ROWS, WIDTH), (2, 1, HEADS, n * KEYS, DIM), (LAYERS, WIDTH, WIDTH)
    x, kv, weights = (torch.randn(*shape, generator=generator) for shape in shapes)
    return x, kv, weights * WIDTH**-0.5


def network(x: Tensor, project: Callable[[Tensor, int], Tensor], attend: Callable[[Tensor], Tensor]) -> Tensor:
    for layer in range(LAYERS):
        q = project(x, layer).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        x = x + attend(q).transpose(1, 2).flatten(2)
    return x


def sharded_step(
    world: NcclCommunicator,
    name: str,
    shared: bool = False,
    without_prefetch: tuple[int, ...] = (),
    groups: int = 1,
) -> dict[str, Tensor]:
    """One training step with attention on one communicator and parameters on another, or on the same (`shared`).

    With several groups, each computes attention among its own ranks, all from the same inputs.
    """
    n, first = world.size // groups, world.rank // (world.size // groups) * (world.size // groups)
    comm = world if groups == 1 else world.another(f"group {first}", range(first, first + n))
    x, kv, weights = tensors(n)
    rows, keys = (slice(comm.rank * size, (comm.rank + 1) * size) for size in (ROWS, KEYS))
    shards = [weight.chunk(world.size)[world.rank].clone() for weight in weights]
    prefetch = world.rank not in without_prefetch
    parameters = ShardedParameters(world if shared else world.another("fsdp"), shards, prefetch)
    x, kv = (t.clone().requires_grad_() for t in (x[:, rows], kv[..., keys, :]))
    y = network(x, lambda x, i: _Layer.apply(x, i, parameters), lambda q: ATTENTION[name](q, *kv.unbind(), group=comm))
    y.square().sum().backward()
    parameters.finish()
    return {
        "y": y.detach(),
        "dx": x.grad,
        "dkv": kv.grad,
        "dw": torch.stack([parameters.grads[i] for i in range(LAYERS)]),
    }


def assert_step_is_exact(found: list[dict[str, Tensor]], groups: int = 1) -> None:
    """Compare the results of each group, and the gradients of the weights, which are sums over groups."""
    dw = torch.cat([result["dw"] for result in found], dim=1) / groups
    if groups > 1:
        n = len(found) // groups
        for first in range(0, len(found), n):
            parts = zip(found[first : first + n], dw.chunk(n, dim=1), strict=True)
            assert_step_is_exact([result | {"dw": part} for result, part in parts])
        return
    x, kv, weights = (t.double().requires_grad_() for t in tensors(len(found)))
    y = network(x, lambda x, i: x @ weights[i].T, lambda q: dense_attention(q, *kv.unbind(), None, DIM**-0.5)[0])
    y.square().sum().backward()
    for name, exact, dim in (("y", y, 1), ("dx", x.grad, 1), ("dkv", kv.grad, 3), ("dw", weights.grad, 1)):
        whole = torch.cat([result[name] for result in found], dim=dim)
        assert relative_error(whole, exact) <= EXACT[torch.float32], name


@pytest.mark.parametrize(
    "name,n", slow_unless(lambda row: row[1] == 3, [("lv", 3), ("ring", 3), ("mesh", 4), ("ulysses", 4)])
)
def test_schedules_are_exact_beside_collectives_of_sharded_parameters(name: str, n: int) -> None:
    for options in TIMINGS:
        assert_step_is_exact(run_nccl_model(n, sharded_step, name, False, seed=n, **options))
    assert_step_is_exact(run_nccl_model(n, sharded_step, name, True, timing="random"))


def test_groups_of_ranks_are_exact_beside_parameters_that_all_ranks_shard() -> None:
    for name, options in zip(("lv", "ring", "ulysses"), TIMINGS, strict=True):
        assert_step_is_exact(run_nccl_model(4, sharded_step, name, False, (), 2, **options), 2)


@pytest.mark.parametrize("name", ["lv", "ring", "ulysses"])
def test_launch_order_that_differs_between_ranks_is_reported(name: str) -> None:
    """Rank 1 gathers parameters when it needs them, the others one layer ahead."""
    for timing in ("late", "early", "random"):
        options: dict[str, Any] = {"timing": timing}
        assert_step_is_exact(run_nccl_model(2, sharded_step, name, False, (1,), **options))
        with pytest.raises(Deadlock, match="rank 0 .* its queue is at all_gather 1 of communicator 'fsdp' .weight 1"):
            run_nccl_model(2, sharded_step, name, False, (1,), one_resource=True, **options)
        with pytest.raises((Deadlock, Mismatch), match="weight 1"):
            run_nccl_model(2, sharded_step, name, True, (1,), **options)


class WaitsLate(NcclCommunicator):
    """Returns exchanges whose `wait` comes one exchange too late."""

    late: Pending | None = None

    def exchange(self, sends: Any, recvs: Any) -> Pending:
        if self.late is not None:
            self.late.wait()
        self.late = super().exchange(sends, recvs)
        return _NoWait()


class _NoWait(Pending):
    def wait(self) -> None:
        pass


class NeverWaits(NcclCommunicator):
    def exchange(self, sends: Any, recvs: Any) -> Pending:
        super().exchange(sends, recvs)
        return _NoWait()


MUTATED = [Case(op="lv", rows=24), Case(op="ring", rows=24), Case(op="mesh", rows=24, tile=(2, 2))]


@pytest.mark.parametrize("communicator", [WaitsLate, NeverWaits])
@pytest.mark.parametrize("case", MUTATED, ids=lambda case: case.op)
def test_executor_that_does_not_wait_for_data_is_found(case: Case, communicator: type[NcclCommunicator]) -> None:
    with pytest.raises(AssertionError):
        assert_exact(case, run_nccl_model(4, run_case, case, communicator=communicator))


@pytest.mark.parametrize("case", MUTATED, ids=lambda case: case.op)
def test_shard_that_is_released_a_step_early_is_found(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = CallSpec._filled_in

    def early(self: CallSpec, *args: Any) -> Schedule:
        steps = plan(self, *args)
        released = [*(step.released for step in steps[1:]), ()]
        return tuple(replace(step, released=r) for step, r in zip(steps, released, strict=True))

    monkeypatch.setattr(CallSpec, "_filled_in", early)
    with pytest.raises((AssertionError, KeyError)):
        assert_exact(case, run_nccl_model(4, run_case, case))
