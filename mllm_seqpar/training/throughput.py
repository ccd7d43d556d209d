"""The speed, the exposed communication and the memory of training steps, for the log of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.cli.progress import Clock, peak_memory, reset_peak_memory
from mllm_seqpar.patching.changes import Patch


class Throughput:
    """Statistics of this rank's training steps since the last report.

    Args:
        patch: that of the trained model, which counts frames and the time spent waiting for transfers.
        device: of the model.
    """

    def __init__(self, patch: Patch, device: torch.device) -> None:
        self._context, self._device = patch.context, device
        self._tokens: Tensor | int = 0
        self._frames = 0
        self._waited = 0.0
        self._clock = Clock(device)
        self._since = time.perf_counter()

    @contextmanager
    def step(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Count the tokens of a batch without padding, and measure the training step inside the context."""
        mask, text = inputs.get("attention_mask"), inputs.get("input_ids", inputs.get("lang_x"))
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self._tokens = self._tokens + mask.count_nonzero()  # not read here: the host would wait for the device
        elif isinstance(text, Tensor):
            self._tokens = self._tokens + text.numel()
        frames, waited = self._context.frames_seen, self._context.comm.bytes.waited
        try:
            yield
        finally:
            self._frames += self._context.frames_seen - frames
            self._waited += max(0.0, self._context.comm.bytes.waited - waited)

    def data_wait(self) -> AbstractContextManager[None]:
        """Return a context whose time counts as waiting for batches."""
        return self._clock.measure("data wait")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time inside the context, in which the run evaluates or saves, from the next report."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - max(before, self._since)  # a report inside has started again

    def report(self, accelerator: Any, degree: int) -> dict[str, float]:
        """Return the statistics of all ranks and reset them. All ranks call this at the same step.

        Args:
            accelerator: gathers one small tensor over all ranks.
            degree: number of ranks that share a sample.
        """
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        data_wait = self._clock.seconds().get("data wait", 0.0)
        row = [float(self._tokens), float(self._frames), self._waited, data_wait, peak_memory(self._device)]
        rows = accelerator.gather(torch.tensor([row], device=self._device)).cpu()
        self._tokens, self._frames, self._waited, self._clock = 0, 0, 0.0, Clock(self._device)
        reset_peak_memory(self._device)
        tokens, frames = rows[::degree, :2].sum(0).tolist()
        report = {"tokens_per_second": tokens / seconds, "frames_per_second": frames / seconds}
        report["data_wait_seconds"] = float(rows[:, 3].max())
        if not getattr(self._context.comm, "uses_nccl", False):  # the host does not wait for NCCL
            report["exposed_communication_seconds"] = float(rows[:, 2].max())
        return report | {f"peak_memory_mib/rank_{rank}": round(float(peak), 1) for rank, peak in enumerate(rows[:, 4])}
