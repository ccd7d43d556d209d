"""Runs of the inference script but for its launch, and the same by the unpatched model alone."""

from __future__ import annotations

import contextlib
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.data import VideoSource, chat_family
from mllm_seqpar.inference.run import infer
from mllm_seqpar.models.loading import load_model, load_processor
from ranks import ranks

QUESTIONS = ("What is it?", "First this <|video|> and then?")
NEW_TOKENS = 12


def run(rank: int, world: int, argv: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        infer(argv)
    return out.getvalue()


def answered(world: int, folder: Path, *argv: Any, questions: tuple[str, ...] = QUESTIONS) -> list[list[int]]:
    """The tokens of the answers to `questions`."""
    report = folder / "report.json"
    asked = [part for question in questions for part in ("--question", question)]
    common = ["--no-progress", "--max-new-tokens", NEW_TOKENS, "--encode-batch", 2, "--report", report]
    ranks(world).run(run, [*map(str, [*argv, *common, *asked])])
    return [answer["tokens"] for answer in json.loads(report.read_text())["answers"]]


def unpatched_tokens(folder: Path, name: str, frames: int) -> list[list[int]]:
    """The same by one process, all pictures as pixels in one call."""
    processor, model = load_processor(str(folder / name)), load_model(str(folder / name)).eval()
    family, source = chat_family(processor), VideoSource.open(folder / "clip.mp4", num_frames=frames)
    pictures = family.pixels(torch.cat(list(source.read(0, frames))))
    found = []
    for question in QUESTIONS:
        before, mark, after = question.partition("<|video|>")
        parts = [{"type": "text", "text": before}, {"type": "video"}, {"type": "text", "text": after}]
        if not mark:
            parts = [{"type": "video"}, {"type": "text", "text": question}]
        text = family.text([[{"role": "user", "content": parts}]], [[source]], add_generation_prompt=True)
        shown = {argument: x[None] for argument, x in zip(family.frame_names, pictures, strict=True)}
        generate = partial(_without_cache, model) if family.ids_name == "lang_x" else model.generate
        chosen = {"do_sample": False, "max_new_tokens": NEW_TOKENS} | family.generation(model)
        output = generate(**family.arguments(text), **shown, **chosen)
        found.append(output[0, text.input_ids.shape[1] :].tolist())
    return found


@torch.no_grad()
def _without_cache(
    model: Any,
    vision_x: Tensor,
    lang_x: Tensor,
    attention_mask: Tensor,
    max_new_tokens: int,
    bad_words_ids: Any,
    **_: Any,
) -> Tensor:
    """What `Flamingo.generate` would give: on transformers 5 the unpatched one fails."""
    for _step in range(max_new_tokens):
        logits = model(vision_x, lang_x, torch.ones_like(lang_x)).logits[:, -1]
        logits[:, [token for (token,) in bad_words_ids]] = -torch.inf
        lang_x = torch.cat([lang_x, logits.argmax(-1, keepdim=True)], 1)
        if int(lang_x[0, -1]) == model.eoc_token_id:
            break
    return lang_x
