"""Training steps of one model, patched and unpatched in turns, for `model_step.py`."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from decode_models import FAMILIES, WORDS, Subject
from step_clock import Clock
from step_parts import AVERAGING, PARTS, timed
from torch import Tensor

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.comm import Communicator, as_communicator

CLOSE = 1e-4
"""How far loss and gradient norm may lie from the unpatched model's, relatively, in float32."""


@dataclass(frozen=True)
class Step:
    """What a step found, and its seconds: of the whole, and of its parts where they were timed."""

    loss: float
    gradient: float
    seconds: float
    parts: dict[str, float]


@dataclass
class StepBench:
    """One model on this rank.

    Attributes:
        family: of `decode_models.FAMILIES`.
        images, words: of one sample.
        strategy: of the cross-attention.
        device: of the model.
    """

    family: str
    images: int
    words: int
    strategy: str
    device: torch.device
    comm: Communicator = field(default_factory=lambda: as_communicator(None))
    subject: Subject = field(init=False)
    inputs: dict[str, Any] = field(init=False)
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)  # what `random_weights` leaves as the class made it
        self.subject = FAMILIES[self.family](self.images, self.words)
        model = self.subject.model.to(self.device)
        given = {name: x.to(self.device) for name, x in self.subject.inputs.items()}
        ids = given["lang_x" if "lang_x" in given else "input_ids"]
        labels = ids.masked_fill(ids >= WORDS - 2, -100)
        self.inputs = given | {"labels": labels, "use_cache": False}
        self.clock = Clock(self.device)
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)

    def rows(self, repeats: int) -> list[dict[str, Any]]:
        """Unpatched and patched.

        Raises:
            SystemExit: the patched model found another loss or gradient.
        """
        steps: dict[str, list[Step]] = {"unpatched": [], "patched": []}
        clocked: dict[str, list[Step]] = {"unpatched": [], "patched": []}
        for repeat in range(1 + repeats):  # the first one warms up
            for found, with_clock in ((steps, False), (clocked, True)):
                pair = {"patched": self.patched(with_clock), "unpatched": self.unpatched(with_clock)}
                self.check(pair["patched"], pair["unpatched"])
                for who, step in pair.items():
                    found[who] += [step] if repeat and step is not None else []
        found_rows = []
        for who in steps if self.comm.rank == 0 else ():
            row = self.facts(who) | {"repeats": repeats, "step_s": median(step.seconds for step in steps[who])}
            if who == "patched":
                pairs = zip(steps["unpatched"], steps["patched"], strict=True)
                row["ratio"] = median(ours.seconds / alone.seconds for alone, ours in pairs)
            found_rows.append(row | shares(clocked[who]))
        return found_rows

    def facts(self, who: str) -> dict[str, Any]:
        """What a row says of its setting."""
        return {
            "benchmark": "model_step",
            "family": self.family,
            "who": who,
            "ranks": self.comm.size,
            "strategy": self.strategy,
            "images": self.images,
            "visual_keys": self.subject.keys,
            "text": self.inputs["labels"].shape[1],
            "device": self.device.type,
            "dtype": "float32",
        }

    def patched(self, with_clock: bool) -> Step:
        """A step of the group; its seconds are the slowest rank's, its parts the mean over ranks."""
        patch_model(self.subject.model, self.strategy)
        try:
            self.comm.gather_ints([0])  # together
            mine = self.once(with_clock, self.comm)
        finally:
            unpatch_model(self.subject.model)
        names = list(mine.parts)
        everyone = self.comm.gather_ints([int(x * 1e9) for x in (mine.seconds, *mine.parts.values())])
        means = [sum(column) / len(everyone) / 1e9 for column in zip(*everyone, strict=True)][1:]
        parts = dict(zip(names, means, strict=True))
        return Step(mine.loss, mine.gradient, max(row[0] for row in everyone) / 1e9, parts)

    def unpatched(self, with_clock: bool) -> Step | None:
        """A step of rank 0 by itself; the others wait for it."""
        alone = self.once(with_clock, None) if self.comm.rank == 0 else None
        self.comm.gather_ints([0])
        return alone

    def once(self, with_clock: bool, comm: Communicator | None) -> Step:
        """One step of the model as it is."""
        model, clock = self.subject.model, self.clock
        self.optimizer.zero_grad(set_to_none=True)
        with timed(self.family, model, clock) if with_clock else nullcontext():
            self._finish()
            start = time.perf_counter()
            with clock.running() if with_clock else nullcontext():
                loss = model(**self.inputs).loss
                loss.backward()
                if with_clock:
                    clock.backward_done()
                with clock.part(AVERAGING):
                    gradient = self._averaged(comm)
                self.optimizer.step()
            self._finish()
            seconds = time.perf_counter() - start
        parts = {part: clock.seconds[part] for part in PARTS} if with_clock else {}
        return Step(float(loss.detach()), float(gradient.norm()), seconds, parts)

    def _averaged(self, comm: Communicator | None) -> Tensor:
        """All gradients as one vector, the mean over the ranks, as data parallelism makes it; each is set to it."""
        grads = [p.grad for p in self.subject.model.parameters() if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        if comm is None or comm.size == 1:
            return flat
        flat = comm.all_reduce(flat, "gradients") / comm.size
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))
        return flat

    def check(self, ours: Step | None, alone: Step | None) -> None:
        """Raises where the patched step found something else than the unpatched one."""
        if ours is None or alone is None:
            return
        for what, found, expected in (
            ("loss", ours.loss, alone.loss),
            ("gradient norm", ours.gradient, alone.gradient),
        ):
            if not abs(found - expected) <= CLOSE * abs(expected):
                raise SystemExit(f"{self.family}, {self.comm.size} ranks: {what} {found}, unpatched {expected}")

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def shares(steps: list[Step]) -> dict[str, float]:
    """Of each part: seconds, and its share of all of them, medians over steps."""
    found: dict[str, float] = {}
    for part in PARTS:
        found[f"{part}_s"] = median(step.parts[part] for step in steps)
        found[f"{part}_share"] = median(step.parts[part] / sum(step.parts.values()) for step in steps)
    return found
