"""The command `mllm-seqpar calibrate`: measures this machine, and on several ranks its links, for the planner."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.planner.calibrate import AttentionShape, calibrate, kernel_rates
from mllm_seqpar.planner.cluster import cluster_text
from mllm_seqpar.videos.decode_cost import decode_rate

from .launch import DEVICES, DTYPES, ranks_with_options
from .options import CommandOptions, option, parse_options
from .outputs import require_writable, write_text


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(CommandOptions):
    """The options of `mllm-seqpar calibrate`: what to measure, and where to write it."""

    output: str | None = option("cluster file to write; default: print it", None)
    device: str = option("auto: cuda if this node has a GPU for each process", "auto", choices=DEVICES)
    dtype: str | None = option(
        "what the model computes in; default: bfloat16 on cuda, float32 on cpu", None, choices=DTYPES[1:]
    )
    heads: int = option("query heads of the attention to measure", 16, least=1)
    kv_heads: int = option("KV heads of the attention to measure", 4, least=1)
    dim: int = option("head dimension of the attention to measure", 128, least=1)
    name: str = option("name of the cluster in the file", "measured")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ConfigError(f"--kv_heads {self.kv_heads} do not divide --heads {self.heads}; give a divisor")


def measure(argv: Sequence[str]) -> None:
    """Measure, and write the cluster file that the options in `argv` name. Every rank calls this."""

    def read() -> CalibrateOptions:
        return parse_options(
            CalibrateOptions,
            argv,
            prog="mllm-seqpar calibrate",
            description="Measure this machine, and with --num_processes or a launcher its links, for mllm-seqpar plan.",
            example="mllm-seqpar calibrate --num_processes 8 --output here.yaml",
            ranks=True,
        )

    with ranks_with_options(read) as (args, comm, device):
        output = args.output if comm.rank == 0 else None
        agree(comm, "output", lambda: None if output is None else require_writable("output", output))
        dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
        shape = AttentionShape(heads=args.heads, kv_heads=args.kv_heads, dim=args.dim, dtype=dtype)
        rates = kernel_rates(comm, device=device, shape=shape)
        cluster = calibrate(comm, device=device, shape=replace(shape, kernel=rates), name=args.name)
        cluster = replace(cluster, kernels=rates)
        with suppress(ImportError):  # without PyAV
            cluster = replace(cluster, decode_rate=round(decode_rate(), 1))
        if comm.rank == 0:
            if comm.size == 1:
                cluster = replace(cluster, source=cluster.source + "; only one rank: links are not measured")
            sys.stderr.write(f"mllm-seqpar calibrate: {cluster.source}\n")
            if cluster.decode_rate is not None:
                sys.stderr.write(f"decoding, one core: {cluster.decode_rate:.3g} frames/s (H.264, 720p)\n")
            for rate in rates:
                mask = ", under a mask" if rate.masked else ""
                flops = f"{14 / rate.seconds:.3g} FLOP/s in forward and backward"
                sys.stderr.write(f"kernel {rate.kernel}: {flops}, head dim {rate.dim}{mask}\n")
            write_text(output, cluster_text(cluster))
