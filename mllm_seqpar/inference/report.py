"""The times, memory and bytes sent of an inference run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from mllm_seqpar.cli.outputs import write_text

from .generation import Answer

ENCODE_STAGE = "read and encode"
"""The stage whose number of frames per second is reported."""


@dataclass(frozen=True)
class Answered:
    """An answer, its question, and the file or feature store of the video that it is about."""

    video: str
    question: str
    answer: Answer


@dataclass(frozen=True)
class Report:
    frames: int  # of all videos
    visual_tokens: int
    ranks: int
    seconds: dict[str, float]  # of each stage, on rank 0
    answers: list[Answered]  # in order
    peak_memory_mib: list[float]  # per rank: allocated on a GPU, resident on a CPU
    bytes_sent: list[int]  # to other ranks, per rank
    device: str
    encoding_seconds: list[dict[str, float]]  # per rank: the time of each of `encoding.PARTS`, which overlap

    def summary(self) -> str:
        stages = [f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items()]
        if (encoding := self.seconds.get(ENCODE_STAGE, 0.0)) > 0:
            stages[list(self.seconds).index(ENCODE_STAGE)] += (
                f" ({self.frames / encoding:.1f} frames/s{self._encoding_parts()})"
            )
        if self.answers:
            answers = [item.answer for item in self.answers]
            decode_seconds = sum(a.decode_seconds for a in answers)
            decoded = sum(len(a.tokens) - 1 for a in answers)  # prefill computes the first token of each answer
            rate = f" at {decoded / decode_seconds:.1f} tokens/s" if decode_seconds > 0 else ""
            stages.append(f"prefill {sum(a.prefill_seconds for a in answers):.2f} s")
            stages.append(f"decode {sum(len(a.tokens) for a in answers)} tokens{rate}")
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        kind = "allocated" if self.device == "cuda" else "resident"
        memory = ", ".join(f"{mib:.0f}" for mib in self.peak_memory_mib)
        return (
            f"{self.frames} frames, {self.visual_tokens} visual tokens on {ranks}; {', '.join(stages)}; "
            f"peak memory by rank ({kind}) {memory} MiB"
        )

    def _encoding_parts(self) -> str:
        """Return the time of each part of reading and encoding, on the rank that needed most."""
        if not self.encoding_seconds:
            return ""
        most = {part: max(row[part] for row in self.encoding_seconds) for part in self.encoding_seconds[0]}
        return "; " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in most.items())

    def write(self, path: str) -> None:
        rows = [{"video": item.video, "question": item.question} | _row(item.answer) for item in self.answers]
        answers = [item.answer for item in self.answers]
        seconds = self.seconds | {
            "prefill": round(sum(a.prefill_seconds for a in answers), 4),
            "generate": round(sum(a.decode_seconds for a in answers), 4),
        }
        values = asdict(replace(self, answers=[])) | {"seconds": seconds, "answers": rows}
        write_text(path, json.dumps(values, indent=1) + "\n")


def _row(answer: Answer) -> dict[str, Any]:
    """Return the answer with its moments, without the attention of each token."""
    found = answer.evidence
    moments = [] if found is None else [asdict(moment) for moment in found.moments]
    note = "" if found is None else found.note
    return asdict(replace(answer, evidence=None)) | {"evidence": moments, "evidence_note": note}
