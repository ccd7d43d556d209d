"""Calls of cross-attention over links of a given speed: settings, modes, and the timing of all modes of a setting.

A setting taken from the paper (arXiv 2502.02406, tables 3 and 4) is scaled down in time and in bytes, by one factor
each. The ratios that decide which strategy is faster are kept: queries to keys, query heads to KV heads, and the time
of an attention block to the time of a transfer. The last one follows from the paper's own seconds and therefore
includes whatever speed its kernels and links reached. With n GPUs, LV-XAttn's transfers overlapped and Ring
Attention's not overlapped:

    block      cross-attention of LV-XAttn / (layers 3.5 n)      backward takes 2.5 times the forward pass
    transfer   cross-attention of Ring / (layers 3 (n - 1))      K, V in forward; K, V, dK, dV in bf16 in backward

A mode runs as a layer of a patched model does: from a `CallSpec` that is made for it, after the ranks have agreed on
their arguments. The mode `none` is LV-XAttn whose transfers are replaced by local copies.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from statistics import median
from typing import Any

import torch
from harness import rounds, slowest_rank, synchronize
from models import ScaledModel
from paper_tables import GPUS, PaperRow, paper_row
from torch import Tensor

from mllm_seqpar.attention.attend import attend
from mllm_seqpar.attention.call_spec import accumulation, call_spec_for, problem_of
from mllm_seqpar.attention.keys import GivenKeys
from mllm_seqpar.comm import Communicator, Pending, Recv, Send
from mllm_seqpar.kernels import FinalRows, registry
from mllm_seqpar.masks import BlockMasks, Intervals
from mllm_seqpar.planner import AttentionCall, Cluster, ParallelSpec
from mllm_seqpar.planner.call_cost import with_overlap_ratios
from mllm_seqpar.schedules.bytes_sent import Problem, expanded, mesh_bytes, ulysses_bytes
from mllm_seqpar.schedules.mesh_shapes import mesh_shapes_of
from namespaces import Network

Speed = tuple[float, float]
"""What a link delivers: bytes/s in each direction, and the seconds of a message of a few bytes."""
BlockTime = tuple[float, float]
"""Seconds of forward and backward of one block (one Q shard by one KV shard), measured without transfers."""
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference between the results of two strategies, relative to the largest value: they sum in other orders."""
BACKWARD = 2.5
"""Time of an emulated block's backward pass over its forward pass: five matrix products against two."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A call of cross-attention and its links or, with `model`, a training step with such calls."""

    name: str
    ranks: int
    rows: int  # of each rank, as are the keys
    keys: int
    heads: int
    kv_heads: int
    dim: int
    block_s: float | None  # emulated seconds of one block (one Q shard by one KV shard) in forward; None: real blocks
    mbit: float | None = None  # cap of each link; None: derived from `transfer_in_blocks`, or uncapped without it
    transfer_in_blocks: float | None = None  # time to send a rank's expanded K and V over a block's forward pass
    paper: PaperRow | None = None  # that is scaled down
    only_mesh_shapes: bool = False  # measure all mesh shapes and nothing else
    dtype: str = "bfloat16"  # of Q, K, V
    model: ScaledModel | None = None  # of whose training step the time is measured
    layers: int = 1  # of the model, with cross-attention
    rest: float | None = None  # a step outside cross-attention, over that without transfers; None: the model's own

    def problem(self) -> Problem:
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "dim": self.dim}
        element = 4 if self.dtype == "float32" else 2
        return Problem(rows=self.rows, keys=(self.keys,) * self.ranks, **sizes, element=element)

    def cap_mbit(self, block_s: float) -> float | None:
        """Return the cap of each link, given the seconds of one block's forward pass."""
        if self.transfer_in_blocks is None:
            return self.mbit
        expanded = 2 * self.keys * self.heads * self.dim * self.problem().element
        return expanded * 8e-6 / (self.transfer_in_blocks * block_s)


def scaled_row(name: str, row: PaperRow, ranks: int, rows: int | None, block_s: float | None) -> Setting:
    """Return the setting with the proportions of a row of the paper and `rows` query rows per rank (None: all)."""
    gpus, rows = GPUS[row.table], rows or row.rows // ranks
    transfer_s, block_of_paper_s = row.seconds["ring"] / (3 * (gpus - 1)), row.seconds["lv-xattn"] / (3.5 * gpus)
    return Setting(
        name=name,
        ranks=ranks,
        rows=rows,
        keys=rows * row.keys // row.rows,
        **row.heads,
        block_s=block_s,
        transfer_in_blocks=transfer_s / block_of_paper_s,
        paper=row,
    )


PAPER = {
    "a30-flamingo": ("table4", "OpenFlamingo-9b"),
    "a30-owl3": ("table4", "mPLUG-Owl3-7b"),
    "a100-flamingo": ("table3", "OpenFlamingo-9b"),
    "a100-owl3": ("table3", "mPLUG-Owl3-7b"),
}
"""Table and model of each setting taken from the paper, which uses the row with the longest video."""


def _scaled(key: str, ranks: int, rows: int | None = None, block_s: float | None = None) -> Setting:
    return scaled_row(key, paper_row(*PAPER[key]), ranks, rows, block_s)


def _mesh(ranks: int, rows: int, keys: int) -> Setting:
    """Return a setting on one side of the crossover.

    With these heads a query row costs as many bytes as four keys. LV-XAttn is best with more keys than that per row,
    Ring Attention with fewer, and a mesh in between.
    """
    sizes = {"ranks": ranks, "rows": rows, "keys": keys, "heads": 8, "kv_heads": 2, "dim": 64}
    return Setting(name=f"{ranks}-ranks-{rows}x{keys}", **sizes, block_s=0.01, mbit=100, only_mesh_shapes=True)


EMULATED = {"a30-flamingo": (8, 0.02), "a30-owl3": (2, 0.025), "a100-flamingo": (16, 0.05), "a100-owl3": (1, 0.03)}
"""Query rows of a rank, and seconds of a block."""
REAL = {"a30-flamingo": 64, "a30-owl3": 16, "a100-flamingo": 64}
MESH = [(4, 512, 512), (4, 128, 2048), (6, 256, 512), (6, 128, 1024), (8, 512, 512), (8, 256, 1024), (8, 128, 2048)]
SUITES: dict[str, Callable[[], list[Setting]]] = {
    "paper": lambda: [_scaled(key, 8, *sizes) for key, sizes in EMULATED.items()],
    "tiles": lambda: [_mesh(*sizes) for sizes in MESH],
    "real": lambda: [replace(_scaled(key, 2, rows), dtype="float32") for key, rows in REAL.items()],
    "full": lambda: [_scaled(key, int(os.environ.get("WORLD_SIZE", "8"))) for key in PAPER],
}


@dataclass(frozen=True, kw_only=True)
class Mode:
    name: str
    spec: ParallelSpec | None  # None: what "auto" selects
    transfers: bool = True  # False: local copies instead
    overlap: bool = True
    expanded: bool = False  # K and V are repeated for all query heads first, as in the paper's Ring Attention
    accumulate_dtype: torch.dtype | None = torch.float32  # of partial results as sent; None: that of the inputs

    def run(self, q: Tensor, k: Tensor, v: Tensor, comm: Communicator, kernel: str, network: Cluster | None) -> Tensor:
        """Return this rank's o (B, H, s, D). The steps of a mesh are ordered for `network`, as strategy "auto" does."""
        assert self.spec is not None
        keys, dtype = (k.shape[2],) * comm.size, accumulation(self.accumulate_dtype, q.dtype)
        problem = problem_of(q.shape, k.shape, keys, q.dtype, self.accumulate_dtype)
        spec = self.spec
        if network is not None:
            spec = with_overlap_ratios(spec, problem, network)
        blocks = BlockMasks.full(q.shape[0], q.shape[2], keys)
        call = call_spec_for(spec, blocks, problem, dtype, self.overlap)
        comm = comm if self.transfers else without_transfers(comm)
        keys = [GivenKeys(call, k, v)]
        return attend(q, [keys], rows="sharded", comm=comm, scale=q.shape[-1] ** -0.5, kernel=kernel)[0][0]

    def problem(self, setting: Setting) -> Problem:
        problem = setting.problem()
        if self.accumulate_dtype is None:
            problem = replace(problem, accumulated=problem.element)
        return expanded(problem) if self.expanded else problem

    def bytes_sent(self, setting: Setting, rank: int) -> dict[str, int]:
        """Return the bytes that a rank sends in forward and backward together, by label, according to the formulas."""
        if self.spec is None or not self.transfers or setting.ranks == 1:
            return {}
        formula = ulysses_bytes if self.spec.strategy == "ulysses" else mesh_bytes
        problem, total = replace(self.problem(setting), rank=rank), Counter[str]()
        for backward in (False, True):
            total.update(formula(problem, self.spec.mesh_shape, backward=backward))
        return {label: size for label, size in total.items() if size}

    def predicted_s(self, setting: Setting, block: BlockTime, speed: Speed | None) -> float:
        """Return the seconds of forward and backward according to the planner's cost model."""
        if self.spec is None or not self.transfers or speed is None:
            return setting.ranks * sum(block)
        network, problem = cluster(setting, block, speed), self.problem(setting)
        if not self.overlap:
            network = replace(network, overlap=0.0)
        passes = [AttentionCall(problem, self.spec, network, backward=b).cost for b in (False, True)]
        return sum(cost.seconds for cost in passes)


def modes(setting: Setting) -> list[Mode]:
    """Return all modes that are measured in a setting, `none` first."""
    n = setting.ranks
    lv, ring = ParallelSpec("lv-xattn", (n, 1)), ParallelSpec("ring", (1, n))
    none = Mode(name="none", spec=lv, transfers=False)
    meshes = [Mode(name=f"tile {a}x{b}", spec=ParallelSpec("mesh", (a, b))) for a, b in mesh_shapes_of(n)]
    if setting.only_mesh_shapes:
        return [none, *meshes]
    found = [
        none,
        Mode(name="lv-xattn", spec=lv),
        Mode(name="lv-xattn, waiting", spec=lv, overlap=False),
        Mode(name="ring", spec=ring),
        Mode(name="ring, waiting", spec=ring, overlap=False),
        # dK, dV in the inputs' dtype: the bytes that agree with the paper's times
        Mode(name="ring, expanded", spec=ring, expanded=True, accumulate_dtype=None),
    ]
    group = gcd(setting.heads, n)
    if group > 1 or n == 1:  # heads are sharded over as many ranks as divide them, LV-XAttn runs between these groups
        name = "ulysses" if group == n else f"ulysses {group} x lv-xattn"
        found.append(Mode(name=name, spec=ParallelSpec("ulysses", (n // group, 1), group)))
    return found + meshes[1:-1]  # without (n, 1) and (1, n), which are LV-XAttn and Ring Attention


def cluster(setting: Setting, block: BlockTime, speed: Speed) -> Cluster:
    """Return the network as the planner describes it, with one rank per node."""
    entries = setting.rows * setting.keys * setting.heads * setting.dim
    bandwidth, latency = speed
    links = {"node_link": bandwidth, "network_link": bandwidth, "node_latency_s": latency, "network_latency_s": latency}
    rates = {"attention_forward": 4 * entries / block[0], "attention_backward": 10 * entries / block[1]}
    return Cluster(name="benchmark", gpus_per_node=1, **rates, matmul=1.0, memory_bytes=1.0, **links)


class _Done(Pending):
    def wait(self) -> None:
        pass


def without_transfers(comm: Communicator) -> Communicator:
    """Return a communicator like `comm` that sends nothing for LV-XAttn: a rank receives what it would send.

    Keys and values, which self-attention sends by Ring Attention, and collectives are sent.
    """

    def exchange(sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        if any(send.label in ("k", "v", "dk", "dv") for send in sends):
            return comm.exchange(sends, recvs)
        for send, recv in zip(sends, recvs, strict=False):
            if send.tensor.shape == recv.buffer.shape and send.tensor.dtype == recv.buffer.dtype:
                recv.buffer.copy_(send.tensor)
            else:
                recv.buffer.zero_()
        return _Done()

    silent = copy.copy(comm)
    collectives = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
    vars(silent).update({name: getattr(comm, name) for name in collectives}, exchange=exchange)
    return silent


class EmulatedKernel:
    """A block kernel that sleeps for the time of a block and returns zeros, so that ranks may outnumber the cores.

    The executor, the schedules, the merging and the transfers around it are the real ones, and so are the bytes sent.
    `rate` is the FLOP/s of the emulated processor; a block takes 4 FLOP per entry of (rows, keys, dim) in forward.
    """

    name = "emulated"

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.seconds = 0.0  # total of all calls

    def unsupported_reason(self, q: Tensor, k: Tensor, intervals: Intervals | None = None) -> str | None:
        return "sleeps on the host, which an accelerator would not wait for" if q.device.type != "cpu" else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, ...]:
        return self._zeros([q.shape, q.shape[:3]], 4.0, q, k)

    def backward(self, rows: FinalRows, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, ...]:
        return self._zeros([rows.q.shape, k.shape, v.shape], 4.0 * BACKWARD, rows.q, k)

    def _zeros(self, shapes: Sequence[torch.Size], flops: float, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """Return zeros of these shapes after the time of `flops` per entry."""
        start, seconds = time.perf_counter(), flops * q.numel() * k.shape[2] / self.rate
        results = tuple(q.new_zeros(shape, dtype=torch.float32) for shape in shapes)
        self.seconds += seconds
        time.sleep(max(0.0, start + seconds - time.perf_counter()))
        return results

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Make `kernel="emulated"` available in this process inside the block."""
        registry._KERNELS[self.name] = lambda: self
        try:
            yield
        finally:
            del registry._KERNELS[self.name]


def measure_speed(comm: Communicator, device: torch.device, expected: float) -> Speed:
    """Return the speed of ring hops with all ranks sending at once; the result is the same on all ranks."""
    large = max(1 << 16, int(expected * 0.5))  # half a second at the expected bytes/s
    _hop_s(comm, device, 8, 5)
    latency = median(_hop_s(comm, device, 8, 10) for _ in range(5))
    return large / max(_hop_s(comm, device, large, 4) - latency, 1e-9), latency


def _hop_s(comm: Communicator, device: torch.device, size: int, count: int) -> float:
    """Return the seconds of one of `count` consecutive hops of `size` bytes on the slowest rank."""
    out, into = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with slowest_rank(comm, device) as timer:
        for _ in range(count):
            comm.exchange([Send(after, out, "probe")], [Recv(before, into)]).wait()
    return timer.seconds / count


def setting_columns(setting: Setting, block_s: float, mbit: float | None, speed: Speed | None) -> dict[str, Any]:
    """Return the columns that all modes of a setting share: the seconds of a block in forward, the cap, the speed."""
    shape = {name: getattr(setting, name) for name in ("ranks", "rows", "keys", "heads", "kv_heads", "dim", "dtype")}
    common = {"setting": setting.name, "blocks": "emulated" if setting.block_s else "real"}
    common |= shape | {"block_ms": block_s * 1e3}
    if mbit is not None:
        common["cap_mbit"] = mbit
    if speed is not None:
        common |= {"link_mbit": speed[0] * 8e-6, "latency_ms": speed[1] * 1e3}
    if (paper := setting.paper) is not None:
        common |= {"paper_cluster": {"table3": "A100", "table4": "A30"}[paper.table], "paper_model": paper.label}
        common |= {"paper_gpus": GPUS[paper.table], "paper_rows": paper.rows, "paper_keys": paper.keys}
        common |= {"paper_ring_s": paper.seconds["ring"], "paper_lv_xattn_s": paper.seconds["lv-xattn"]}
    return common


def mode_columns(mode: str, seconds: Sequence[float], sent: int, predicted: float) -> dict[str, Any]:
    times = {"seconds": median(seconds), "least_s": min(seconds), "most_s": max(seconds)}
    return {"mode": mode, "repeats": len(seconds), **times, "sent_bytes": sent, "predicted_s": predicted}


class CallBenchmark:
    """All modes of a setting's call, as one of its ranks."""

    def __init__(self, setting: Setting, comm: Communicator) -> None:
        self.setting, self.comm, self.device = setting, comm, comm.device
        entries = setting.heads * setting.rows * setting.keys * setting.dim
        self.kernel = EmulatedKernel(4 * entries / setting.block_s) if setting.block_s else None
        self.inputs = _inputs(setting, comm.rank, comm.device)
        self.expected: Tensors | None = None  # results of the first mode, which the others must reproduce
        self.network: Cluster | None = None

    def run(self, repeats: int, links: Network | None) -> list[dict[str, Any]]:
        """Return a row per mode, after one run of each to warm up."""
        found = {mode.name: mode for mode in modes(self.setting)}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
        with self.emulated():
            block_s = self.setting.block_s
            if block_s is None:  # a real block's, with all ranks computing at once
                block_s = median(self.once(found["none"])[0] for _ in range(5)) / self.setting.ranks
            mbit, speed = self.shape_link(links, block_s)
            if speed is not None:
                self.network = cluster(self.setting, (block_s, BACKWARD * block_s), speed)
            for name, timed in rounds(found, repeats):
                seconds = self.once(found[name])
                if timed:
                    times[name].append(seconds)
        common = {"benchmark": "network"} | setting_columns(self.setting, block_s, mbit, speed)
        forward, total = ({name: [pair[i] for pair in pairs] for name, pairs in times.items()} for i in (0, 1))
        forward_none, none = median(forward["none"]), median(total["none"])
        block = forward_none / self.setting.ranks, (none - forward_none) / self.setting.ranks
        rows = []
        for name, mode in found.items():
            sent = sum(mode.bytes_sent(self.setting, self.comm.rank).values())
            row = mode_columns(name, total[name], sent, mode.predicted_s(self.setting, block, speed))
            if mode.spec and mode.transfers:
                row["tile"] = "{}x{}".format(*mode.spec.mesh_shape)
            row |= {"overlap": mode.overlap, "forward_s": median(forward[name])}
            rows.append(common | row | {"over_none": row["seconds"] / none})
        return rows

    def emulated(self) -> contextlib.AbstractContextManager[None]:
        """Make the emulated kernel, if the setting has one, available inside a block."""
        return self.kernel.registered() if self.kernel else contextlib.nullcontext()

    def shape_link(self, links: Network | None, block_s: float) -> tuple[float | None, Speed | None]:
        """Cap the links, if any, for this time of a block; return the cap in Mbit/s and the measured speed."""
        mbit = self.setting.cap_mbit(block_s) if links else None
        if links and mbit is not None:
            self.comm.gather_ints([0])
            links.cap(self.comm.rank, mbit)
            self.comm.gather_ints([0])
        if self.comm.size == 1:
            return mbit, None
        return mbit, measure_speed(self.comm, self.device, mbit * 125e3 if mbit else 1e8)

    def once(self, mode: Mode) -> tuple[float, float]:
        """Return the slowest rank's seconds of forward, and of both passes; SystemExit on all ranks if any is wrong."""
        inputs = self.inputs[mode.expanded]
        q, k, v = leaves = [inputs[name].detach().requires_grad_() for name in ("q", "k", "v")]
        self.comm.gather_ints([0])  # all ranks start together
        self.comm.bytes.reset()
        if self.kernel:
            self.kernel.seconds = 0.0
        synchronize(self.device)
        start = time.perf_counter()
        o = mode.run(q, k, v, self.comm, self.kernel.name if self.kernel else "auto", self.network)
        synchronize(self.device)
        middle = time.perf_counter()
        o.backward(inputs["do"])
        synchronize(self.device)
        end = time.perf_counter()
        results = dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *(x.grad for x in leaves)), strict=True))
        problem = self._problem(mode, results)
        all_ranks = self.comm.gather_ints([int((middle - start) * 1e9), int((end - start) * 1e9), problem is not None])
        forward, total, failed = map(max, zip(*all_ranks, strict=True))
        if failed:
            found = problem or "this rank's check passed, another rank's failed"
            raise SystemExit(f"{self.setting.name}, {mode.name}: rank {self.comm.rank}: {found}")
        return forward / 1e9, total / 1e9

    def _problem(self, mode: Mode, results: Tensors) -> str | None:
        """Return how bytes differ from the formulas, or blocks and results from those of other modes, if they do."""
        counted = self.comm.bytes.sent.items()
        sent = {label: size for label, size in counted if size and label not in ("agreement", "gather")}
        expected = mode.bytes_sent(self.setting, self.comm.rank)
        if sent != expected:
            return f"sent {sent}; expected by the formulas: {expected}"
        if self.kernel is not None and self.setting.block_s is not None:
            work = self.setting.ranks * self.setting.block_s * (1 + BACKWARD)
            if abs(self.kernel.seconds / work - 1) >= 1e-6:
                return f"computed {self.kernel.seconds} s of blocks; expected {work} s"
        if self.kernel or not mode.transfers:  # emulated blocks compute zeros, and `none` attends to local keys only
            return None
        if mode.expanded:  # the gradient of a KV head is the sum over its query heads
            for name in ("dk", "dv"):
                results[name] = results[name].unflatten(1, (self.setting.kv_heads, -1)).sum(2)
        if self.expected is None:
            self.expected = results
        limit = CLOSE[results["o"].dtype]
        for name, x in results.items():
            other = self.expected[name].float()
            difference = float((x.float() - other).abs().max() / other.abs().max())
            if not difference <= limit:
                return f"{name} differs by {difference:.1e} from the first mode's; the limit is {limit:.0e}"
        return None


def _inputs(setting: Setting, rank: int, device: torch.device) -> dict[bool, Tensors]:
    """Return random q, k, v and do of this rank, by whether K and V are expanded to all query heads."""
    generator = torch.Generator().manual_seed(rank)
    rows, keys = (setting.heads, setting.rows), (setting.kv_heads, setting.keys)
    plain = {
        name: torch.randn(1, *size, setting.dim, generator=generator).to(device, getattr(torch, setting.dtype))
        for name, size in {"q": rows, "k": keys, "v": keys, "do": rows}.items()
    }
    queries_per_kv = setting.heads // setting.kv_heads
    expanded = {name: plain[name].repeat_interleave(queries_per_kv, dim=1) for name in ("k", "v")}
    return {False: plain, True: plain | expanded}
