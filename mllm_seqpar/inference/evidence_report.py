"""Answers with their evidence, for the options --evidence and --evidence_html of `mllm-seqpar ask`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from mllm_seqpar.data.sources import FrameSource

from .encoding import EncodedVideo
from .evidence import Evidence, answer_with_evidence
from .evidence_index import PageEntry
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
        source: the video, if it is read; without it, features from a store have no times and no images.
        name, model: of the video and the model, for the page.
    """

    def __init__(
        self,
        count: int,
        page: str | None,
        *,
        shown: bool = True,
        source: FrameSource | None = None,
        name: str = "",
        model: str = "",
    ) -> None:
        self._count, self._page, self._shown, self._source = count, page, shown, source
        self._name, self._model = name, model
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

    def write(self) -> PageEntry | None:
        """Write the page, and return its entry for the index; None if there is no page to write."""
        if not self._shown or self._page is None or not self._found:
            return None
        write_evidence_page(self._page, self._found, self._sources, name=self._name, model=self._model)
        return PageEntry.of(self._name, self._page, self._found, self._sources)
