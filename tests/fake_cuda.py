"""Tensors without data on a fake CUDA device, for machines and builds of torch without CUDA.

    with fake_cuda():
        x = torch.empty(2, 4, device="cuda", dtype=torch.bfloat16)
        y = x[:, 1:].contiguous()          # shapes, strides, dtypes and devices as on a GPU
        y.sum().item()                     # raises HostSynchronisation

Operators run with their real schemas and meta kernels under `FakeTensorMode`. CPU tensors stay real, so that the host
can plan by their values. Several threads may enter the mode that `fake_cuda` returns.

A build of torch without CUDA has no device guard for CUDA, which indexing, `copy_` and most Python methods need. torch
replaces a guard that counts no devices by one for fake tensors (`c10::impl::ensureCUDADeviceGuardSet`); a guard of that
kind is therefore registered first, that of the Lazy device, which has no backend. The guard stays registered: nothing
else asks for it.

The autograd engine asks for the stream of an accelerator, which such a build lacks. With `fake_cuda(autograd=True)`,
a fake CUDA tensor therefore reports the device "meta" to C++ code and "cuda" to Python code. Backward then runs in the
calling thread, as for meta tensors. Autocast, which asks in C++, does not apply there: use bf16 parameters.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from mllm_seqpar.kernels import triton_launches

CUDA, LAZY, DEVICE_TYPES = 1, 17, 21
"""Values of `c10::DeviceType`."""
_aten = torch.ops.aten
READ_BY_HOST = (
    _aten._local_scalar_dense,
    _aten.item,
    _aten.equal,
    _aten.is_nonzero,
    _aten.nonzero,
    _aten.nonzero_numpy,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.bincount,
)
"""Operators whose result, or its shape, depends on values of the device."""
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class HostSynchronisation(AssertionError):
    """An operator waits for the device, or copies between it and pageable memory."""


class NoHostSynchronisation(TorchDispatchMode):
    """Raise HostSynchronisation where the host would wait for the CUDA device.

    These are operators that read values of the device, and operators on tensors of both the CPU and the device, except
    for CPU tensors without dims, which are arguments by value, and pinned ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pinned = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is _aten._pin_memory:
            result = func(*args, **kwargs)
            self._pinned[result] = True
            return result
        if func.overloadpacket is _aten.is_pinned:
            return args[0] in self._pinned
        inputs = _tensors(args, kwargs)
        if func.overloadpacket in READ_BY_HOST and any(x.is_cuda for x in inputs):
            raise HostSynchronisation(f"{func} reads values of the device")
        try:
            result = func(*args, **kwargs)
        except DynamicOutputShapeException as error:  # a boolean index
            raise HostSynchronisation(f"{func} needs the values of a mask") from error
        both = inputs + _tensors(result)
        pageable = [x for x in both if x.device.type == "cpu" and x not in self._pinned]
        if func.overloadpacket is not _aten._to_copy:
            pageable = [x for x in pageable if x.dim()]
        if pageable and any(x.is_cuda for x in both):
            raise HostSynchronisation(f"{func} copies between the device and pageable memory")
        return result


class DeviceOperators(TorchDispatchMode):
    """Counts the operators that reach the device, by name, except operators that only allocate or make a view.

    Each Triton launch of a block is within one operator of `mllm_seqpar`, which `LAUNCHES` counts.
    """

    LAUNCHES = {"interval_attention_backward": 2}

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def total(self) -> int:
        return sum(self.found.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        returns = func._schema.returns
        if func.namespace == "prim":
            return result
        is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view and name not in ALLOCATIONS and any(x.is_cuda for x in _tensors(args, kwargs, result)):
            self.found[name] += self.LAUNCHES.get(name, 1)
        return result


def _tensors(*trees: Any) -> list[Tensor]:
    """Return the tensors in lists, tuples and dictionaries, which is all that operators take and return."""
    found: list[Tensor] = []
    for tree in trees:
        if isinstance(tree, Tensor):
            found.append(tree)
        elif isinstance(tree, (tuple, list, dict)):
            found += _tensors(*(tree.values() if isinstance(tree, dict) else tree))
    return found


@contextmanager
def fake_cuda(
    capability: tuple[int, int] = (9, 0), *, autograd: bool = False, may_synchronise: bool = False
) -> Iterator[FakeTensorMode]:
    """Create tensors without data on a fake CUDA device of this compute capability; fail on host synchronisation."""
    ensure_cuda_guard()
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "get_device_capability", capability),
            (torch.cuda, "is_bf16_supported", True),
            (torch.cuda.amp.common, "amp_definitely_not_available", False),
            (torch.cuda, "get_device_properties", SimpleNamespace(multi_processor_count=132)),
            (torch.backends.cuda, "is_flash_attention_available", True),
            (torch.backends.cudnn, "version", 91900),
            (triton_launches, "triton_unavailable", None),  # a launch on fake tensors needs no Triton
        ):
            stack.enter_context(mock.patch.object(owner, name, mock.Mock(return_value=value)))
        stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", _address, create=True))
        if autograd:
            stack.enter_context(_meta_for_autograd())
        mode = stack.enter_context(_FakeMode())
        if not may_synchronise:
            stack.enter_context(NoHostSynchronisation())
        yield mode


def _address(x: FakeTensor) -> int:
    """Return an address that is aligned at the start of each storage and different for each storage."""
    return 512 * x.untyped_storage()._cdata + x.storage_offset() * x.element_size()


class _FakeMode(FakeTensorMode):
    """A FakeTensorMode for CUDA alone, which several threads may enter.

    CPU tensors are real, so that the host can plan by their values. What C++ code creates on the device of a "meta"
    tensor (see `_meta_for_autograd`) is created on the CUDA device.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        super().__init__(allow_non_fake_inputs=True)

    @property
    def in_kernel_invocation(self) -> bool:
        return getattr(self._of_thread, "in_kernel", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._of_thread.in_kernel = value

    def dispatch(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and device.type == "meta":
            device = kwargs["device"] = torch.device("cuda:0")
        tensors = _tensors(args, kwargs)
        if func.overloadpacket is _aten._pin_memory:  # the build may have no accelerator to pin memory for
            return args[0].clone()
        if (device is None or device.type == "cpu") and not any(isinstance(x, FakeTensor) for x in tensors):
            return func(*args, **kwargs)
        return super().dispatch(func, types, args, kwargs)


@contextmanager
def _meta_for_autograd() -> Iterator[None]:
    query, original = torch.ops.prim.device.default, FakeTensor.__torch_dispatch__

    def in_cpp(args) -> torch.device:
        device = args[0].device
        return torch.device("meta") if device.type == "cuda" else device

    def dispatch(cls, func, types, args=(), kwargs=None) -> Any:
        return in_cpp(args) if func is query else original(func, types, args, kwargs or {})

    with (
        mock.patch.dict(fake_tensor._DISPATCH_META_HANDLERS, {query: in_cpp}),
        mock.patch.object(FakeTensor, "__torch_dispatch__", classmethod(dispatch)),
        mock.patch.object(FakeTensor, "is_cuda", property(lambda x: x.device.type == "cuda")),
    ):
        yield


def ensure_cuda_guard() -> None:
    """Register torch's device guard for fake CUDA tensors unless the build has a guard for CUDA."""
    c10 = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
    guards = (ctypes.c_void_p * DEVICE_TYPES).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    if not guards[CUDA]:
        guards[CUDA] = guards[LAZY]
        torch._C._ensureCUDADeviceGuardSet()
        assert guards[CUDA] not in (None, guards[LAZY]), "this torch has no guard for fake CUDA tensors"
