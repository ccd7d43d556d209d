"""A program that measures the memory of training steps on mapped features, with and without `visual_offload="cpu"`.

    python offload_memory.py FRAMES [FRAMES ...]

A tiny mPLUG-Owl3 attends from 32 text tokens to the features of the given numbers of frames, which a safetensors file
holds. It prints a JSON list with an entry per number: the bytes of the features, and the growth of this process's
anonymous memory (RssAnon of Linux) during a step with and without offload. Mapped pages are not anonymous: the kernel
drops them when it needs memory. Loss and gradients must be bitwise equal to those of the same features in memory.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from mllm_seqpar import patch_model
from mllm_seqpar.data.feature_store import open_features, save_features
from mllm_seqpar.runtime import visual_features

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts" / "lib"))
from tiny_models.mplug_owl3 import tiny_model  # noqa: E402 - found on the path above

TEXT, TOKENS, WIDTH, CHUNK_BYTES, POLL_SECONDS = 32, 8, 64, 2**18, 0.002


def main() -> None:
    torch.set_num_threads(1)
    visual_features.CHUNK_BYTES = CHUNK_BYTES
    offloaded, plain = make_model("cpu"), make_model(None)
    rows = []
    for frames in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            features = torch.randn(frames, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
            save_features(folder, features, start=0, total=frames, rank=0, world=1)
            del features
            mapped = open_features(folder).map((0, frames))
            file, results = step(offloaded, mapped)
            _, expected = step(offloaded, mapped.clone())
            whole, _ = step(plain, mapped)
        assert all(found.equal(other) for found, other in zip(results, expected, strict=True))
        rows.append({"size": mapped.nbytes, "offload": file, "no offload": whole})
    sys.stdout.write(json.dumps(rows) + "\n")


def make_model(offload: str | None) -> Any:
    """Return a patched model that has run a small step, so that one-time allocations do not count."""
    model = tiny_model(vision={"image_size": 56})
    model.vision_model = model.vision2text_model = None  # the features are given
    model = patch_model(model.train(), group="self", visual_offload=offload)
    step(model, torch.randn(8, 16, WIDTH))
    return model


def step(model: Any, features: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """Run a training step in which every token attends to all frames.

    Return the peak growth of anonymous memory in bytes, and the loss and all gradients.
    """
    ids = torch.arange(3, 3 + TEXT)[None]
    offsets = torch.tensor([0, features.shape[0]]).expand(1, TEXT, 2)
    model.zero_grad()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, growth, stop = anonymous_bytes(), 0, threading.Event()

    def poll() -> None:
        nonlocal growth
        while not stop.wait(POLL_SECONDS):
            growth = max(growth, anonymous_bytes() - before)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        loss = model(input_ids=ids, image_embeds=features, media_offset=offsets, labels=ids).loss
        loss.backward()
    finally:
        stop.set()
        thread.join()
    growth = max(growth, anonymous_bytes() - before)
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return growth, [loss.detach(), *grads]


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


if __name__ == "__main__":
    main()
