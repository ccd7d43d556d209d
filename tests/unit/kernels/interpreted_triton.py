"""Triton's interpreter, which runs the programs of kernels on CPU tensors, for machines without a GPU.

`conftest.py` selects it by TRITON_INTERPRET before Triton is imported.
"""

from __future__ import annotations

import pytest


def with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let matrix products of the interpreter take bf16.

    numpy has no bf16, so the interpreter keeps such numbers as 16-bit integers, and multiplies the integers.
    """
    triton = pytest.importorskip("triton")
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton was imported for the GPU of this machine")
    original = interpreter.InterpreterBuilder.create_dot

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype(numpy.uint32) << 16
        return interpreter.TensorHandle(bits.view(numpy.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return original(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
