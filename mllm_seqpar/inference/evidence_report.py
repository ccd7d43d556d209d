"""Answers with their evidence, for the options --evidence and --evidence_html of `mllm-seqpar ask`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from mllm_seqpar.data.sources import FrameSource

from .encoding import EncodedVideo
from .evidence import Evidence, answer_with_evidence
from .evidence_page import write_evidence_page
from .generation import Answer, Sampling, answer

MOMENTS = 5
"""The number of moments on a page, unless --evidence states one."""


class EvidenceReport:
    """Answers questions, with their evidence if it was asked for.

    Args:
        count: moments to print after each answer; 0: none.
        page: the HTML file to write, or None.
        shown: whether this rank prints and writes.
        source: the video, if it is read; without it, features from a store have no times and no pictures.
    """

    def __init__(self, count: int, page: str | None, *, shown: bool = True, source: FrameSource | None = None) -> None:
        self._count, self._page, self._shown, self._source = count, page, shown, source
        self._found: list[tuple[str, Evidence]] = []
        self._sources: list[Any] = []

    def answer(
        self,
        model: nn.Module,
        processor: Any,
        question: str,
        video: EncodedVideo,
        sampling: Sampling,
        *,
        on_text: Callable[[str], object] | None = None,
    ) -> Answer:
        """Return what `generation.answer` returns, with moments if they were asked for."""
        if not self._count and self._page is None:
            return answer(model, processor, question, video, sampling, on_text=on_text)
        options: dict[str, Any] = {"count": self._count or MOMENTS, "source": self._source, "on_text": on_text}
        result, evidence = answer_with_evidence(model, processor, question, video, sampling, **options)
        self._found.append((question, evidence))
        self._sources = [self._source or video.source]
        return result

    def show(self) -> None:
        """Print the evidence of the last answer to standard error: standard output has only the answers."""
        if self._shown and self._count and self._found:
            sys.stderr.write(self._found[-1][1].describe() + "\n")
            sys.stderr.flush()

    def write(self) -> None:
        """Write the page, if there is one to write."""
        if self._shown and self._page is not None and self._found:
            write_evidence_page(self._page, self._found, self._sources)
