"""Measure the memory of a training step on precomputed features, with and without `visual_offload="cpu"`.

    python scripts/bench/offload.py [--frames 1000 4000 16000 32000] [--tokens 16] [--chunk 1] [--threads 1]

A tiny mPLUG-Owl3 attends from 32 text tokens to the features of the given numbers of frames, which a safetensors file
holds. "Growth" is the peak of this process's anonymous memory (RssAnon of Linux) during the step over that before it.
Mapped pages of the file are not anonymous: the kernel drops them when it needs memory. The columns are:

    file         visual_offload="cpu", features mapped from the file
    memory       visual_offload="cpu", the same features in memory, which was allocated before the step
    no offload   features mapped from the file, no offload

The loss and all gradients of "file" and "memory" must be bitwise equal.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mllm_seqpar import patch_model
from mllm_seqpar.data.feature_store import open_features, save_features
from mllm_seqpar.runtime import visual_features

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from tiny_models.mplug_owl3 import tiny_model  # noqa: E402

MIB, TEXT, WIDTH, POLL_SECONDS = 2**20, 32, 64, 0.002


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    visual_features.CHUNK_BYTES = int(args.chunk * MIB)
    models = {option: make_model(option) for option in ("cpu", None)}
    print("| frames | features, MiB | growth, file | growth, memory | growth, no offload | file = memory |")
    print("|---|---|---|---|---|---|")
    rows = []
    for frames in args.frames:
        with tempfile.TemporaryDirectory(dir=args.directory) as folder:
            features = torch.randn(frames, args.tokens, WIDTH, generator=torch.Generator().manual_seed(0))
            save_features(folder, features, start=0, total=frames, rank=0, world=1)
            del features
            mapped = open_features(folder).map((0, frames))
            file, results = step(models["cpu"], mapped)
            memory, expected = step(models["cpu"], mapped.clone())
            whole, _ = step(models[None], mapped)
        equal = all(found.equal(other) for found, other in zip(results, expected, strict=True))
        size = mapped.numel() * mapped.element_size()
        cells = " | ".join(f"{x / MIB:,.1f}" for x in (size, file, memory, whole))
        print(f"| {frames:,} | {cells} | {'yes' if equal else 'NO'} |", flush=True)
        if not equal:
            raise SystemExit("offload.py: the results of a mapped file and of memory differ")
        rows.append({"frames": frames, "size": size, "file": file, "memory": memory, "no offload": whole})
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, nargs="+", default=[1000, 4000, 16000, 32000])
    parser.add_argument("--tokens", type=int, default=16, help="visual tokens of a frame")
    parser.add_argument("--chunk", type=float, default=1, help="MiB of features that are projected at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--directory", help="folder for the files of features; default: that for temporary files")
    return parser.parse_args(argv)


def make_model(offload: str | None) -> Any:
    """Return a patched model that has run a small step, so that one-time allocations do not count."""
    model = tiny_model(vision={"image_size": 56})
    model.vision_model = model.vision2text_model = None  # the features are given
    model = patch_model(model.train(), group="self", visual_offload=offload)
    step(model, torch.randn(8, 16, WIDTH))
    return model


def step(model: Any, features: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """Run a training step; return its peak growth of memory in bytes, and the loss and all gradients."""
    model.zero_grad()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with peak_anonymous() as growth:
        loss = run(model, features)
        loss.backward()
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return growth[0], [loss.detach(), *grads]


def run(model: Any, features: torch.Tensor) -> torch.Tensor:
    """Return the loss of a text of which every token attends to all frames."""
    ids = torch.arange(3, 3 + TEXT)[None]
    offsets = torch.tensor([0, features.shape[0]]).expand(1, TEXT, 2)
    return model(input_ids=ids, image_embeds=features, media_offset=offsets, labels=ids).loss


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


@contextmanager
def peak_anonymous() -> Iterator[list[int]]:
    """Yield a list whose entry is, at the end, the peak growth of this process's anonymous memory in bytes."""
    before, found, stop = anonymous_bytes(), [0], threading.Event()

    def poll() -> None:
        while not stop.wait(POLL_SECONDS):
            found[0] = max(found[0], anonymous_bytes() - before)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        found[0] = max(found[0], anonymous_bytes() - before)


if __name__ == "__main__":
    main()
