"""Layer: one process, no GPU. The Triton programs for intervals against float64, in Triton's interpreter."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import interpreted_triton
import kernel_cases
import pytest
import torch
from kernel_cases import Block, Results, dense, run, run_split

from launch import ROOT
from mllm_seqpar.attention import functional
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.kernels import registry, triton_launches
from mllm_seqpar.kernels.base import FinalRows, merge_, output_with_row_sums, row_sums
from mllm_seqpar.kernels.triton_intervals import TritonIntervalsKernel
from mllm_seqpar.masks import FrameMask, Intervals
from selections import slow_unless
from tolerances import EXACT, relative_error

pytestmark = [pytest.mark.rounding, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]

FAMILIES = ("random", "stairs", "window", "packed", "holes", "few")
KERNEL = TritonIntervalsKernel()


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    interpreted_triton.with_bfloat16(monkeypatch)


def intervals(family: str, batch: int, rows: int, keys: int) -> Intervals:
    """Return a mask of one family; some rows see nothing."""
    low, high = torch.randint(0, keys + 1, (2, batch, rows)).sort(dim=0).values
    at = (torch.arange(rows) * keys // rows).expand(batch, -1)
    if family == "stairs":
        low, high = torch.zeros_like(low), high.sort(dim=1).values
    elif family == "window":
        low, high = at - keys // 5, at + 1
    elif family == "packed":  # three sequences, each in the order of the keys, with rows of padding at the end
        piece = (torch.arange(rows) * 3 // rows).expand(batch, -1)
        low, high = piece * keys // 3, torch.minimum((piece + 1) * keys // 3, at + 1)
        high = torch.where(torch.arange(rows) < rows - rows // 8, high, low)
    elif family == "holes":
        high = torch.where(torch.rand(batch, rows) < 0.5, low, high)
    elif family == "few":
        high = torch.where(torch.arange(rows) == rows // 2, high, low)
    return Intervals(low, high, keys)


def block(family: str | None = None, scale: float | None = None, **sizes) -> Block:
    """Return a random block with a mask of one family."""
    b = kernel_cases.block(**{"batch": 1, "heads": 2, "groups": 1, "rows": 40, "keys": 90} | sizes)
    mask = None if family is None else intervals(family, b.q.shape[0], b.q.shape[2], b.k.shape[2])
    return replace(b, intervals=mask, scale=scale)


def check(b: Block, found: Results | None = None) -> None:
    """Compare the results of a block (None: of the kernel) with float64."""
    found = run(KERNEL, b) if found is None else found
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in found)
    kernel_cases.check(found, b)


@pytest.mark.parametrize("family", slow_unless(lambda family: family in ("stairs", "holes", None), [*FAMILIES, None]))
def test_masks_equal_dense_attention(family):
    torch.manual_seed(0)
    for sizes in (
        {"heads": 6, "groups": 2, "batch": 2},
        {"rows": 1, "heads": 7},
        {"rows": 33, "keys": 17},
        {"keys": 1},
    ):
        check(block(family, **sizes))


@pytest.mark.parametrize(
    ("dtype", "dim"),
    slow_unless(
        lambda row: row[0] is torch.bfloat16 and row[1] in (72, 256),
        itertools.product((torch.bfloat16, torch.float16, torch.float32), (64, 72, 80, 96, 128, 256)),
    ),
    ids=str,
)
def test_head_dims_and_dtypes(dtype, dim):
    torch.manual_seed(0)
    check(block("stairs", dim=dim, dtype=dtype, rows=33, keys=70))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_random_masks_of_random_sizes(family):
    torch.manual_seed(0)
    for _ in range(6):
        batch, groups, repeat = (int(x) for x in torch.randint(1, 4, (3,)))
        rows, keys = (int(x) for x in torch.randint(1, 130, (2,)))
        check(block(family, batch=batch, heads=groups * repeat, groups=groups, rows=rows, keys=keys, dim=8))


def test_rows_are_looked_at_in_several_chunks(monkeypatch):
    assert [triton_launches.rows_at_once(repeat) for repeat in (1, 2, 7, 8, 71)] == [4096, 2048, 512, 512, 256]
    monkeypatch.setattr(triton_launches, "rows_at_once", lambda repeat: 64)
    torch.manual_seed(0)
    for family in ("stairs", "packed", "random"):
        check(block(family, rows=2 * 64 + 3, keys=70))


@pytest.mark.parametrize("family", slow_unless(lambda family: family == "holes", ["stairs", "holes", None]))
def test_keys_are_divided_for_few_rows(family, monkeypatch):
    """Empty parts, parts that a row does not see, and a last part that is shorter."""
    monkeypatch.setattr(triton_launches, "_parts", lambda programs, keys, q: 5)
    torch.manual_seed(0)
    for rows, keys in ((3, 330), (20, 100)):
        check(block(family, heads=4, groups=2, rows=rows, keys=keys))


def test_intervals_may_be_shared_by_the_batch_and_scale_negative():
    torch.manual_seed(0)
    check(replace(block(batch=3, rows=20, keys=50, scale=-0.3), intervals=intervals("random", 1, 20, 50)))


def test_logits_of_ten_thousand_do_not_overflow():
    torch.manual_seed(0)
    b = block("random", size=4e3, scale=1.0)
    found = run(KERNEL, b)
    assert found.lse.abs()[found.lse > -torch.inf].max() > 1e4 and all(x.isfinite().all() for x in found[2:])
    assert relative_error(found.o, dense(b).o) <= 1e-2


def test_inputs_may_be_views_and_do_float32():
    torch.manual_seed(0)
    b = block("random", batch=2, heads=4, groups=2, rows=20, keys=50, dtype=torch.bfloat16)
    expected = run(KERNEL, b)
    for view in (
        lambda x: torch.nn.functional.pad(x, (0, 0, 3, 2))[:, :, 3:-2],
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.mT.contiguous().mT,
    ):
        q, k, v, do = (view(x) for x in (b.q, b.k, b.v, b.do))
        assert not any(x.is_contiguous() for x in (q, k, v, do))
        found = run(KERNEL, Block(q, k, v, do.float(), b.intervals))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("keys", [80, 300])
def test_backward_takes_the_merged_output_or_its_row_sums(keys):
    """Rows that see nothing of one of two blocks have the log-sum-exp of the other; also beside rows that see all."""
    torch.manual_seed(0)
    b, cut = block("random", heads=4, groups=2, rows=30, keys=keys), 35
    if keys == 300:
        cut, even = 150, torch.arange(30)[None] % 2 == 0
        b.intervals = Intervals(torch.where(even, cut, 0), torch.full((1, 30), keys), keys)
    found = run_split(KERNEL, b, cut)
    check(b, found)
    rows, part = FinalRows(b.q, found.o, found.lse, b.do), b.part(0, cut)
    grads = (KERNEL.backward(x, part.k, part.v, **part.options) for x in (rows, rows.with_delta()._replace(o=None)))
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


def test_keys_before_and_after_all_intervals_are_not_read():
    torch.manual_seed(0)
    low, high = torch.randint(150, 211, (2, 1, 40)).sort(dim=0).values
    block_of_keys = replace(block(keys=300), intervals=Intervals(low, high, 300))
    first, stop = block_of_keys.intervals.span
    expected = run(KERNEL, block_of_keys)
    for x in (block_of_keys.k, block_of_keys.v):
        x[:, :, :first], x[:, :, stop:] = torch.nan, torch.nan
    found = run(KERNEL, block_of_keys)
    assert all(torch.equal(a, b) for a, b in zip(found[:3], expected[:3], strict=True))
    for a, b in zip(found[3:], expected[3:], strict=True):
        assert torch.equal(a[:, :, first:stop], b[:, :, first:stop])
        assert not b[:, :, :first].any() and not b[:, :, stop:].any()


def test_merge_equals_that_of_torch():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(2, 3, 40, 24).to(dtype)
        lse, new_lse = torch.randn(2, 3, 50)[..., 5:45], torch.randn(2, 3, 40)
        new_lse = torch.where(torch.rand(2, 3, 40) < 0.3, -torch.inf, new_lse)
        lse[0, 0, :9], lse[1, 0, :5], new_lse[:, :, 3] = -torch.inf, 200.0, -torch.inf
        new = torch.randn(2, 40, 3, 24).transpose(1, 2)
        expected = whole.clone(), lse.clone()
        merge_(*expected, new, new_lse)
        torch.ops.mllm_seqpar.merge_(whole, lse, new, new_lse)
        torch.testing.assert_close((whole, lse), expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)
        assert torch.equal(whole[:, :, 3], expected[0][:, :, 3]), "nothing is added"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_output_with_row_sums_equals_that_of_torch(dtype):
    torch.manual_seed(0)
    for dim in (64, 72, 33):
        do, delta = torch.randn(2, 3, 20, dim).to(dtype), torch.randn(2, 3, 20)
        do[0, 0, :3], do[0, 1] = 0.0, 1.0
        o = torch.ops.mllm_seqpar.output_with_row_sums(do, delta, dtype)
        expected = output_with_row_sums(do, delta, dtype)
        assert o.dtype is dtype and torch.equal(o != 0, expected != 0)
        torch.testing.assert_close(row_sums(do, o), row_sums(do, expected), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_programs_compile_for_a_gpu_and_fit_its_shared_memory(tmp_path):
    """Triton's package contains the compiler for NVIDIA GPUs, which needs none."""
    script, out = ROOT / "scripts" / "bench" / "triton_tiles.py", tmp_path / "rows.jsonl"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), "--compile", "9.0", "--dims", "128", "--out", str(out)]
    subprocess.run(command, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, check=True, capture_output=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["program"] for row in rows] == ["forward", "dq", "dk_dv"]
    for row in rows:
        assert "problem" not in row and row["shared_kib"] <= row["limit_kib"], row


class Interpreted(TritonIntervalsKernel):
    """The kernel on the CPU. Triton's interpreter runs one program at a time, and ranks are threads."""

    lock = threading.Lock()

    def unsupported_reason(self, q, k, intervals=None):
        return None

    def forward(self, *args, **options):
        with self.lock:
            return super().forward(*args, **options)

    def backward(self, *args, **options):
        with self.lock:
            return super().backward(*args, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lv_xattn", "ring_attention"])
def test_distributed_attention_of_random_frame_masks(name, monkeypatch):
    """Masks with holes have several layers; with lv_xattn, backward of another rank's rows has their row sums only."""
    monkeypatch.setitem(registry._KERNELS, "interpreted", Interpreted)
    torch.manual_seed(0)
    shapes = (2, 4, 12, 16), (2, 2, 18, 16), (2, 2, 18, 16), (2, 4, 12, 16)
    q, k, v, do = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    frames = torch.rand(2, 12, 6) < 0.5
    frames[:, 3:6] = False

    def run(comm, kernel, dtype):
        rows, keys = slice(4 * comm.rank, 4 * comm.rank + 4), slice(6 * comm.rank, 6 * comm.rank + 6)
        leaves = [x[:, :, at].to(dtype).requires_grad_() for x, at in ((q, rows), (k, keys), (v, keys))]
        mask = FrameMask.from_dense(frames[:, rows], 3)
        o = getattr(functional, name)(*leaves, mask=mask, group=comm, kernel=kernel)
        return o, *torch.autograd.grad(o, leaves, do[:, :, rows].to(dtype))

    for found, exact in zip(
        run_loopback(3, run, "interpreted", torch.float32),
        run_loopback(3, run, "blocked_matmul", torch.float64),
        strict=True,
    ):
        for value, right in zip(found, exact, strict=True):
            assert relative_error(value, right) <= EXACT[torch.float32]
