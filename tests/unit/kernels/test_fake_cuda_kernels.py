"""Layer: one process, no GPU. The CUDA kernels on torch's real operators, with tensors without data (`fake_cuda`).

The schemas and meta kernels of the installed torch reject wrong arguments and give the shapes, strides, dtypes and
devices of a GPU. Each kernel runs forward and backward on each kind of block that it supports, and must not make the
host wait. The packages of FlashAttention are emulated behind the arguments that their releases declare.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import emulated_cuda
import pytest
import torch
from torch.nn.attention import _fa3, _fa4, _registry

from fake_cuda import HostSynchronisation, fake_cuda
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.kernels import FinalRows, KernelRate, choose_kernel, kernel_by_name, torch_cuda
from mllm_seqpar.kernels.base import accumulator
from mllm_seqpar.masks import Intervals
from selections import slow_unless

BLOCKS = {
    "plain": {},
    "grouped": {"heads": 8},
    "causal": {"rows": 33, "keys": 33, "causal": True},
    "causal grouped": {"heads": 8, "rows": 33, "keys": 33, "causal": True},
    "masked": {"heads": 8, "masked": True},
    "masked in parts": {"keys": 140, "masked": True},
    "one row": {"heads": 8, "rows": 1},
    "one row, causal": {"rows": 1, "keys": 1, "causal": True},
    "no rows": {"rows": 0},
    "no keys": {"keys": 0},
    "float32": {"dtype": torch.float32},
    "float32 masked": {"dtype": torch.float32, "masked": True},
    "float16, slices": {"dtype": torch.float16, "sliced": True},
}
TORCH = ["blocked_matmul", "cuda_flash", "cuda_cudnn", "triton_intervals", "cuda_efficient"]


def run(kernel, *, heads=2, groups=2, rows=20, keys=70, dtype=torch.bfloat16, causal=False, masked=False, sliced=False):
    """Run one block forward and backward, and check everything but the values; return False if it is not supported."""

    def tensor(h, length):
        x = torch.empty(2, length + 3, h, 64, device="cuda", dtype=dtype)[:, 3:].transpose(1, 2)
        return x[..., :32] if sliced else x

    q, do, k, v = tensor(heads, rows), tensor(heads, rows), tensor(groups, keys), tensor(groups, keys)
    intervals = Intervals.causal(rows) if causal and rows > 1 else None
    if masked:
        low, high = torch.randint(0, keys, (2, 2, rows)).sort(0).values
        intervals = Intervals(low, high + 1, keys)
    if kernel.unsupported_reason(q, k, intervals) is not None:
        return False
    options = {"scale": 0.1, "intervals": intervals}
    o, lse = kernel.forward(q, k, v, **options)
    assert (o.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32) and lse.is_contiguous()
    merged = torch.empty(q.shape, device="cuda"), torch.empty(q.shape[:3], device="cuda")
    finals = (o, lse, do), (*merged, do), (None, lse, do, lse)
    gradients = [kernel.backward(FinalRows(q, *final), k, v, **options) for final in finals]
    for dq, dk, dv in gradients:
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    for x in (o, lse, *(x for grads in gradients for x in grads)):
        assert x.device == q.device and x.dtype in (dtype, accumulator(dtype))
    return True


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "cuda_efficient", TORCH))
def test_operators_of_torch_accept_every_supported_block(name, monkeypatch):
    monkeypatch.setattr(torch_cuda.CudaKernel, "mask_keys", 128)
    kernel = kernel_by_name(name)
    with fake_cuda():
        supported = [kind for kind, options in BLOCKS.items() if run(kernel, **options)]
    missing = {kind for kind in BLOCKS if "masked" in kind or "float32" in kind}
    if name in ("blocked_matmul", "cuda_efficient", "triton_intervals"):
        missing = set()
    elif name == "cuda_cudnn":
        missing.add("one row, causal")  # with a single key
    expected = BLOCKS.keys() - missing
    assert set(supported) == set(expected)


@pytest.mark.parametrize(
    "release", slow_unless(lambda release: release in ("2.8", "3, 2.8.3", "4.0.0b27"), emulated_cuda.PACKAGES)
)
def test_packages_accept_every_supported_block(release):
    with fake_cuda(), emulated_cuda.installed(release):
        kernel = kernel_by_name(emulated_cuda.PACKAGES[release][0])
        supported = {kind for kind, options in BLOCKS.items() if run(kernel, **options)}
    assert supported == {kind for kind in BLOCKS if "masked" not in kind and "float32" not in kind}


@contextmanager
def activated(name):
    """Emulate `activate_flash_attention_impl(name)`; torch's Python functions replace the flash operators."""
    module, prefix = {"FA3": (_fa3, "_fa3"), "FA4": (_fa4, "_fa4")}[name]
    forward = f"{prefix}_scaled_dot_product_flash_attention_forward_impl{'_default' if name == 'FA3' else ''}"
    operators = SimpleNamespace(
        _scaled_dot_product_flash_attention=getattr(module, forward),
        _scaled_dot_product_flash_attention_backward=getattr(
            module, f"{prefix}_scaled_dot_product_flash_attention_backward_impl"
        ),
    )
    package = emulated_cuda.FLASH_ATTN_4["4.0.0b10"]  # torch 2.13 expects two results
    with ExitStack() as stack:
        for owner, attribute, value in (
            (_registry, "_FLASH_ATTENTION_ACTIVE", (name, None)),
            (torch_cuda, "_aten", operators),
            (torch.cuda, "is_available", lambda: True),
            (_fa4, "_FA4_MODULE_PATH", "flash_attn.cute.interface"),
            (_fa4, "_fa4_import_module", lambda path: package),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        if name == "FA3":
            stack.enter_context(emulated_cuda.flash_attn_3("3, 2.8.3"))
            for attribute, operator in (("_FA3_CUDA_FWD", "fwd"), ("_FA3_CUDA_BWD", "bwd")):
                function = getattr(torch.ops.flash_attn_3, operator)
                stack.enter_context(mock.patch.object(_fa3, attribute, function))
        module._get_device_major.cache_clear()
        stack.callback(module._get_device_major.cache_clear)
        yield


@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_implementations_activated_in_torch_accept_every_supported_block(name):
    with fake_cuda(), activated(name):
        kernel = kernel_by_name("cuda_flash")
        supported = {kind for kind, options in BLOCKS.items() if run(kernel, **options)}
    assert supported == {kind for kind in BLOCKS if "masked" not in kind and "float32" not in kind}


def chosen(capability, *releases, active=None, dim=64, **options):
    """Return the kernel that "auto" takes on a GPU with these packages, and the reason."""
    with fake_cuda(capability), emulated_cuda.installed(*releases), ExitStack() as stack:
        stack.enter_context(mock.patch.object(_registry, "_FLASH_ATTENTION_ACTIVE", active and (active, None)))
        x = torch.empty(1, 2, options.pop("rows", 16), dim, device="cuda", dtype=options.pop("dtype", torch.bfloat16))
        row = torch.arange(x.shape[2])[None]
        intervals = Intervals(row - 2, row, x.shape[2]) if options.pop("masked", False) else None
        kernel, reason = choose_kernel(options.pop("name", "auto"), x, x, intervals)
    return kernel.name, reason


@pytest.mark.parametrize(
    ("name", "capability", "releases", "options"),
    [
        ("cuda_flash", (9, 0), (), {}),
        ("flash_attn", (9, 0), ("2.8",), {}),
        ("flash_attn_4", (9, 0), ("2.8", "4.0.0b27"), {}),
        ("flash_attn_3", (9, 0), ("2.8", "3, 2.8.3", "4.0.0b27"), {}),
        ("cuda_flash", (9, 0), ("2.8", "3, 2.8.3"), {"active": "FA4"}),
        ("flash_attn_4", (10, 0), ("2.8", "3, 2.8.3", "4.0.0b27"), {}),
        ("flash_attn", (10, 0), ("2.8", "4.0.0b27"), {"dim": 192}),
        ("flash_attn", (10, 0), ("2.8",), {"active": "FA3"}),
        ("flash_attn", (8, 0), ("2.8", "3, 2.8.3", "4.0.0b27"), {}),
        ("triton_intervals", (9, 0), ("3, 2.8.3", "4.0.0b27"), {"masked": True, "active": "FA3"}),
        ("triton_intervals", (8, 0), (), {"masked": True, "dtype": torch.float32}),
        ("cuda_efficient", (7, 5), (), {"masked": True, "dtype": torch.float16}),
        ("cuda_cudnn", (9, 0), ("2.8",), {"rows": 128}),
        ("cuda_cudnn", (9, 0), ("2.8", "4.0.0b27"), {"rows": 128, "dim": 128}),
        ("flash_attn_3", (9, 0), ("2.8", "3, 2.8.3"), {"rows": 128, "dim": 128}),
        ("cuda_cudnn", (10, 0), ("2.8",), {"rows": 128}),
        ("cuda_flash", (8, 0), (), {"rows": 128}),
        ("cuda_flash", (9, 0), (), {"rows": 127}),
        ("cuda_efficient", (9, 0), ("3, 2.8.3", "4.0.0b27"), {"dtype": torch.float32}),
    ],
)
def test_auto_takes_the_fastest_kernel_that_can_compute_the_block(name, capability, releases, options):
    assert chosen(capability, *releases, **options)[0] == name


RATES = (
    KernelRate("cuda_cudnn", 64, False, 1e12, 1e12),
    KernelRate("cuda_cudnn", 128, False, 9e12, 9e12),
    KernelRate("cuda_flash", 64, False, 5e12, 5e12),
    KernelRate("cuda_flash", 128, False, 5e12, 5e12),
    KernelRate("cuda_efficient", 64, True, 2e12, 2e12),
    KernelRate("triton_intervals", 64, True, 9e12, 1e11),
)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cuda_flash", {"dim": 64}),
        ("cuda_flash", {"dim": 32}),
        ("cuda_cudnn", {"dim": 72}),
        ("cuda_cudnn", {"dim": 256}),  # not measured: the order without rates
        ("cuda_flash", {"dim": 128, "rows": 127}),
        ("cuda_efficient", {"masked": True}),
        ("triton_intervals", {"masked": True, "dim": 128}),
        ("cuda_efficient", {"dtype": torch.float32}),  # neither of the measured kernels takes it
    ],
)
def test_measured_rates_replace_the_order(name, options):
    for capability in ((9, 0), (12, 0)):
        if options.get("dim") == 256 and capability == (12, 0):
            name = "cuda_flash"  # cuDNN takes this head dim on Hopper only
        assert chosen(capability, **{"rows": 128, "name": RATES} | options)[0] == name
    assert chosen((9, 0), rows=128, dim=128, name=RATES, active="FA3")[0] == "cuda_flash"


def test_reason_names_what_is_missing_or_activated():
    reason = chosen((9, 0), "2.8")[1]
    assert reason.startswith("flash_attn: flash_attn_3 is not installed") and "flash_attn_4 is not installed" in reason
    assert chosen((9, 0), active="FA3")[1] == "cuda_flash (FA3, activated in torch): first choice"
    assert "runs FA3, activated in torch, which needs compute capability 9.x" in chosen((10, 0), active="FA3")[1]
    assert "runs 'other', activated in torch" in chosen((9, 0), active="other")[1]


def test_errors_name_the_limit():
    for message, arguments in {
        "flash_attn_3.* needs compute capability 9.x": ((8, 0), "3, 2.8.3"),
        "flash_attn_3.* is not installed": ((9, 0),),
        "flash_attn_4.* is not installed": ((10, 0),),
        "flash_attn_4.* needs compute capability 9.x or 10.x, got 12.0": ((12, 0), "4.0.0b27"),
    }.items():
        with pytest.raises(ConfigError, match=message):
            chosen(*arguments, name=message.split(".*")[0])


def test_deterministic_algorithms_exclude_cudnn_and_limit_the_head_dim_of_flash_attention_3():
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen((9, 0), rows=128)[0] == "cuda_flash"
        assert chosen((9, 0), "3, 2.8.3", dim=256)[0] == "cuda_flash"
    finally:
        torch.use_deterministic_algorithms(False)
    assert chosen((9, 0), "3, 2.8.3", dim=256)[0] == "flash_attn_3"


@pytest.mark.parametrize(("release", "missing"), [("3, 2.8.3", "num_splits"), ("4.0.0b10", "return_lse")])
def test_releases_without_the_arguments_are_not_taken(release, missing, monkeypatch):
    name, module = emulated_cuda.PACKAGES[release]
    if name == "flash_attn_3":
        schema = emulated_cuda._FORWARD3.replace(f"int {missing}", "int other")
        monkeypatch.setattr(emulated_cuda, "_FORWARD3", schema)
    else:
        old = SimpleNamespace(_flash_attn_fwd=lambda q, k, v, causal: None, _flash_attn_bwd=lambda q: None)
        monkeypatch.setitem(emulated_cuda.FLASH_ATTN_4, release, old)
    kernel, reason = chosen((9, 0), release)
    assert kernel == "cuda_flash" and f"{name} is installed in a release without" in reason


def test_fake_device_detects_waits_of_the_host():
    with fake_cuda():
        x = torch.empty(4, 4, device="cuda")
        for wait in (
            lambda: x.sum().item(),
            lambda: bool((x > 0).any()),
            lambda: x[x > 0],
            lambda: x[[0, 1]],
            lambda: x.nonzero(),
            lambda: x.cpu(),
            lambda: torch.tensor([1, 2], device="cuda"),
            lambda: x.copy_(torch.empty(4, 4)),
        ):
            with pytest.raises(HostSynchronisation):
                wait()
        pinned = torch.empty(4, 4).pin_memory()
        x.copy_(pinned, non_blocking=True)
        x.mul_(torch.tensor(2.0))


def test_fake_device_runs_autograd():
    with fake_cuda(autograd=True):
        w = torch.empty(8, 8, device="cuda", requires_grad=True)
        (w @ w.T).relu().sum().backward()
        assert w.grad.device.type == "cuda" and w.grad.shape == w.shape
