"""Layer: one process. How many operators reach the device for a block, on fake CUDA tensors.

A launch takes the host about as long as a small block takes the device, so their number must not grow with the mask.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fake_cuda import DeviceOperators, fake_cuda
from mllm_seqpar.attention import decode_attention, lv_xattn
from mllm_seqpar.attention.call_spec import with_kernels
from mllm_seqpar.attention.executor import BlockMath, GradientAccumulator, PartialResult
from mllm_seqpar.kernels import FinalRows
from mllm_seqpar.masks import FrameMask, Intervals

FORWARD, BACKWARD = 12, 16
ROWS, KEYS = 256, 4096


def masks() -> dict[str, Intervals | None]:
    row = torch.arange(ROWS)[None]
    both = torch.cat([row, row + 7])
    holes = torch.where(torch.arange(ROWS) % 3 == 0, 0, (row + 1) * KEYS // ROWS)
    found = {
        "frames before": (0 * row, (row + 1) * KEYS // ROWS),
        "last frame": (row // 16 * 256, row // 16 * 256 + 256),
        "window": (row * 16 - 400, row * 16 + 16),
        "one range for all rows": (0 * row + 5, 0 * row + 2000),
        "rows that see nothing": (0 * row, holes),
        "items of a batch": (0 * both, both * KEYS // ROWS),
    }
    return {name: Intervals(low, high, KEYS) for name, (low, high) in found.items()} | {"none": None}


def tensors(rows: int, keys: int) -> tuple[Tensor, ...]:
    shapes = [(28, rows), (4, keys), (4, keys), (28, rows)]
    return tuple(torch.empty(2, h, length, 128, device="cuda", dtype=torch.bfloat16) for h, length in shapes)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_launches_of_a_block_do_not_depend_on_its_mask(capability):
    found = {}
    with fake_cuda(capability):
        for name, mask in masks().items() | {("causal", Intervals.causal(ROWS))}:
            q, k, v, do = tensors(ROWS, ROWS if name == "causal" else KEYS)
            found[name] = count(q, k, v, do, mask)
    assert all(forward <= FORWARD and backward <= BACKWARD for forward, backward in found.values()), found
    assert len({found[name][0] for name in masks() if name != "none"}) == 1, found
    # A range that all rows share needs no mask, and goes to another kernel.
    backward = [found[name][1] for name in masks() if name not in ("none", "one range for all rows")]
    assert max(backward) <= min(backward) + 2, found  # lse and delta of some rows are copied


def test_launches_of_a_block_of_few_rows():
    with fake_cuda():
        found = {rows: count(*(x[:1] for x in tensors(rows, KEYS)), None) for rows in (1, 7, 64)}
    assert all(forward <= FORWARD and backward <= BACKWARD for forward, backward in found.values()), found


def test_launches_of_a_table_with_holes_are_those_of_its_layers():
    row = torch.arange(ROWS)[None]
    layers = [Intervals(n * 1000 + row, n * 1000 + row + 500, KEYS) for n in range(3)]
    with fake_cuda():
        forward, backward = count(*tensors(ROWS, KEYS), *layers)
    assert forward <= len(layers) * FORWARD and backward <= len(layers) * BACKWARD


@torch.no_grad()
def test_launches_of_a_layer_do_not_depend_on_the_number_of_frames():
    found = set()
    for frames in (256, 1024, 4096):
        stop = torch.arange(1, ROWS + 1)[None] * frames // ROWS
        mask = FrameMask.from_intervals(torch.zeros_like(stop), stop, 16, frames)
        with fake_cuda():
            q, k, v, _ = (x[:1] for x in tensors(ROWS, 16 * frames))
            with DeviceOperators() as layer:
                lv_xattn(q, k, v, mask=mask)
            with DeviceOperators() as token:
                decode_attention(q[:, :, :1], k, v)
        found.add((layer.total(), token.total()))
    assert len(found) == 1 and max(max(found)) <= FORWARD, found


def count(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *mask: Intervals | None) -> tuple[int, int]:
    """Return the numbers of a block forward and backward, of rows of another rank that have a result already."""
    given = None if mask == (None,) else mask
    layers, block_math = with_kernels(given, q, k, "auto"), BlockMath("auto", 0.1)
    partial = PartialResult(q, torch.float32)
    grads = tuple(GradientAccumulator(x, torch.float32) for x in (q, k, v))
    o, lse = partial.value
    assert all(grad.value.is_cuda for grad in grads)
    block_math.forward(q, k, v, layers, partial)  # copies the intervals to the device, once for all layers
    with DeviceOperators() as forward:
        block_math.forward(q, k, v, layers, partial)
    with DeviceOperators() as backward:
        block_math.backward(grads, FinalRows(q, None, lse, do, torch.empty_like(lse)), k, v, layers)
    with DeviceOperators() as with_output:
        block_math.backward(grads, FinalRows(q, o, lse, do), k, v, layers)
    return forward.total(), max(backward.total(), with_output.total())
