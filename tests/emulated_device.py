"""A device "cuda" that is emulated on the CPU with real values, and a count of what makes the host wait for it.

A `DeviceTensor` holds its values in a CPU tensor and says that it is on "cuda". Operators compute on the CPU. As on a
real GPU, an operator that takes tensors of both devices fails, except copies, index tensors and scalars. `Watch` is
active in one thread. It makes factory functions and `to` return tensors of the emulated device, and records:

- synchronisations: operators whose result the host reads (`item`, `tolist`, `nonzero`, masks as indices, `cpu`, ...);
- blocking copies: tensors of the host that are copied to the device from pageable memory, or without `non_blocking`;
- copies from pinned memory with `non_blocking`, which do not block.

Each is recorded with the place where it happened: "outside", or the kind of module that `inside` has marked.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing

from fake_cuda import READ_BY_HOST

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten

_PLACES = threading.local()


class DeviceTensor(Tensor):
    """A tensor of the emulated device; `elem` has its values."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> DeviceTensor:
        layout = {"strides": elem.stride(), "storage_offset": elem.storage_offset(), "dtype": elem.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, elem.shape, device="cpu", **layout)
        made.elem = elem
        return made

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.elem})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        watch = getattr(_PLACES, "watch", None)
        if watch is not None:
            watch.record_device_operator(func, args, kwargs)
        host: list[Tensor] = []

        def values(x: Tensor) -> Tensor:
            if isinstance(x, DeviceTensor):
                return x.elem
            host.append(x)
            return x

        plain, named = _map_tensors(values, args), _map_tensors(values, kwargs)
        if any(x.dim() for x in host) and func.overloadpacket not in _TAKES_BOTH:
            shapes = [x.shape for x in host]
            raise RuntimeError(f"{func}: expected all tensors on one device, found cuda and cpu {shapes}")
        out = func(*plain, **named)
        if func.overloadpacket is aten.copy_ and not isinstance(args[0], DeviceTensor):
            return args[0]
        out = _map_tensors(_wrapped, out)
        return return_and_correct_aliasing(func, args, kwargs, out) if _returns_alias(func) else out


_TAKES_BOTH = (aten.copy_, aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_)


def _wrapped(x: Tensor) -> Tensor:
    return x if isinstance(x, DeviceTensor) else DeviceTensor(x)


def _map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """Return `value` with `fn` applied to its tensors; torch's pytree takes ten times as long for arguments."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {name: _map_tensors(fn, item) for name, item in value.items()}
    return type(value)(_map_tensors(fn, item) for item in value) if type(value) in (tuple, list) else value


def _has_device_tensor(value: Any) -> bool:
    if type(value) in (tuple, list):
        return any(map(_has_device_tensor, value))
    return isinstance(value, DeviceTensor)


@functools.cache
def _returns_alias(func: Any) -> bool:
    """Return whether the operator returns its argument or a view of it."""
    return any(result.alias_info is not None for result in func._schema.returns)


class _Factories(TorchFunctionMode):
    """Creates tensors on the emulated device, and copies them to and from it."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is Tensor.backward:  # a mode is off while it handles a function, and backward runs Python
            loss = args[0]
            with _Factories(self.watch):
                run = (loss,), (torch.ones_like(loss),), False, False, ()
                return _engine_run_backward(*run, allow_unreachable=True, accumulate_grad=True)
        if name == "pin_memory":
            pinned = args[0].clone()
            pinned.pinned_for_emulation = True
            return pinned
        if name in ("to", "cpu", "cuda", "type_as") and isinstance(args[0], Tensor):
            return self._moved(func, name, args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
            if not _has_device_tensor(args):
                made = DeviceTensor(func(*args, **kwargs))
                if name in ("tensor", "as_tensor", "asarray") and made.numel():
                    self.watch.add("blocking copy", f"torch.{name}")
                return made
        elif (
            device is not None
            and not isinstance(func, torch._ops.OpOverload)
            and any(isinstance(x, DeviceTensor) for x in args)
        ):
            raise RuntimeError(f"{name}: not emulated with device={device}")
        return func(*args, **kwargs)

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        x, *rest = args
        target = {"cpu": torch.device("cpu"), "cuda": DEVICE}.get(name)
        if name == "type_as" or (rest and isinstance(rest[0], Tensor)):
            target, kwargs["dtype"], rest = rest[0].device, rest[0].dtype, rest[1:]
        elif rest and isinstance(rest[0], (str, int, torch.device)):
            target, rest = torch.device(rest[0]), rest[1:]
        elif "device" in kwargs and kwargs["device"] is not None:
            target = torch.device(kwargs["device"])
        kwargs.pop("device", None)
        non_blocking = kwargs.pop("non_blocking", False)
        if target is not None and target.type == "cuda" and not isinstance(x, DeviceTensor):
            waits = not (non_blocking and getattr(x, "pinned_for_emulation", False))
            self.watch.add("blocking copy" if waits and x.numel() else "copy", "to device")
            x = _ToDevice.apply(x)
        elif target is not None and target.type == "cpu" and isinstance(x, DeviceTensor):
            self.watch.add("synchronisation", "to host")
            x = _ToHost.apply(x)
        rest = [r for r in rest if r is not None]
        return x if not rest and not any(v is not None for v in kwargs.values()) else Tensor.to(x, *rest, **kwargs)


class _ToDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return DeviceTensor(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.elem


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.elem.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return DeviceTensor(grad)


class Watch:
    """Records what one thread does with the emulated device, from `start` to `stop`."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str, str]] = Counter()

    def add(self, kind: str, what: str) -> None:
        place = getattr(_PLACES, "place", "outside")
        self.found[place, kind, f"{what} {_caller()}"] += 1

    def count(self, kind: str, place: str | None = None) -> int:
        return sum(n for (p, k, _), n in self.found.items() if k == kind and place in (None, p))

    def places(self, kind: str, place: str | None = None) -> list[str]:
        return sorted(f"{p}: {n} x {w}" for (p, k, w), n in self.found.items() if k == kind and place in (None, p))

    def record_device_operator(self, func: Any, args: Any, kwargs: Any) -> None:
        packet = func.overloadpacket
        if packet in READ_BY_HOST:
            self.add("synchronisation", str(func))
        elif packet in (aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_):
            for index in args[1]:
                if index is None:
                    continue
                if isinstance(index, DeviceTensor) and index.dtype in (torch.bool, torch.uint8):
                    self.add("synchronisation", f"{packet} by a mask")
                elif not isinstance(index, DeviceTensor):
                    self.add("blocking copy", f"{packet} by an index on the host")
        elif packet is aten.repeat_interleave and kwargs.get("output_size") is None:
            self.add("synchronisation", str(func))
        elif packet is aten.copy_:
            to_device, from_device = (isinstance(x, DeviceTensor) for x in args[:2])
            if to_device != from_device and args[1].numel() and not (to_device and args[1].dim() == 0):
                self.add("blocking copy" if to_device else "synchronisation", "copy_")

    def __enter__(self) -> Watch:
        self._stack = contextlib.ExitStack()
        _PLACES.watch = self
        self._stack.callback(lambda: setattr(_PLACES, "watch", None))
        self._stack.enter_context(_Factories(self))
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()


def _caller() -> str:
    """Return the innermost line of this project or of transformers that led to the operator."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if ("mllm_seqpar" in name or "/patches/" in name or "transformers" in name) and "emulated" not in name:
            return f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@contextlib.contextmanager
def place(name: str) -> Iterator[None]:
    before, _PLACES.place = getattr(_PLACES, "place", "outside"), name
    try:
        yield
    finally:
        _PLACES.place = before


def mark(modules: Iterable[nn.Module], name: str) -> None:
    """Record what happens in the forward passes of the modules, recomputed ones included, under this name."""
    for module in modules:
        forward = module.forward

        def marked(*args: Any, _forward: Callable[..., Any] = forward, **kwargs: Any) -> Any:
            with place(name):
                return _forward(*args, **kwargs)

        module.forward = marked  # type: ignore[method-assign]


def to_device(value: Any, moved: Callable[[Tensor], Tensor] = lambda x: DeviceTensor(x.detach().clone())) -> Any:
    """Return tensors, or a model whose parameters and buffers are replaced in place, on the emulated device.

    Tied parameters stay tied. `moved` makes the tensor of another device instead.
    """
    if isinstance(value, Tensor):
        return moved(value).requires_grad_(value.requires_grad)
    if not isinstance(value, nn.Module):
        return _map_tensors(lambda x: to_device(x, moved), value)
    parameters: dict[int, nn.Parameter] = {}
    for module in value.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in parameters:
                    parameters[id(weight)] = nn.Parameter(moved(weight.detach()), weight.requires_grad)
                module._parameters[name] = parameters[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved(buffer)
    return value
