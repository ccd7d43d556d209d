"""The options that `chat` and `serve` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mllm_seqpar.cli.options import option
from mllm_seqpar.inference.arguments import DEFAULT_FPS, ModelOptions


@dataclass(frozen=True, kw_only=True)
class ServingOptions(ModelOptions):
    """`ModelOptions` with the ranks to start, and the defaults of an answer in a conversation."""

    num_processes: int | None = option(
        "ranks to start on this machine (default: one for each GPU, or 1 without any); leave it out under a launcher",
        None,
    )
    max_new_tokens: int = option("maximum length of an answer", 512)
    timeout: float | None = option(
        "seconds to wait for a rank in a collective (default: 600 on GPUs, 300 on CPU); waiting for you has no limit",
        None,
    )

    def __post_init__(self) -> None:
        self._require_positive("num_processes")
        super().__post_init__()

    def frame_options(self, default_fps: float | None = DEFAULT_FPS) -> dict[str, Any]:
        """Return the default sampling of a video."""
        return super().frame_options(default_fps)
