"""Comparison of the patched with the unpatched model; the ranks are threads that share one copy of the weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.data.chat_family import ChatFamily
from mllm_seqpar.data.sources import FrameSource

SECONDS = 3600.0
"""Time limit of a transfer: a rank of a large model on a CPU may compute for long before it sends."""


@dataclass(frozen=True)
class Comparison:
    """Results of the patched and the unpatched model for one question.

    `difference` is the mean absolute difference of the logits; `disagreement` is how far the unpatched model's logit of
    a generated token is below its largest logit (0: both choose the same tokens). Both are relative to the standard
    deviation of the logits; they are the largest of all ranks and of all tokens.
    """

    finite: bool  # all logits of the unpatched model
    difference: float
    disagreement: float
    prompt: str
    prompt_tokens: int
    frames: int
    answer: str  # the patched model's, greedy


@torch.no_grad()
def compare(
    model: nn.Module, family: ChatFamily, media: FrameSource, kind: str, question: str, ranks: int, max_new_tokens: int
) -> Comparison:
    """Ask about `media`, an "image" or a "video", with the model unpatched and patched on `ranks` ranks."""
    weight = next(model.parameters())
    messages = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": question}]}]
    text = family.text([messages], [[media]], add_generation_prompt=True)
    frames = {
        name: x.to(weight.device, weight.dtype if x.is_floating_point() else None)
        for name, x in family.unsharded(media).items()
    }
    arguments = {name: x.to(weight.device) for name, x in family.arguments(text).items()}
    logits = model(**arguments, **frames).logits[0].float()

    def one_rank(comm: Communicator) -> tuple[float, Tensor]:
        with torch.no_grad():
            shared = {id(x): x for x in chain(model.parameters(), model.buffers())}
            patched: Any = patch_model(copy.deepcopy(model, shared), group=comm)
            difference = (patched(**arguments, **frames).logits[0].float() - logits).abs().mean() / logits.std()
            options = family.generation(patched) | {"do_sample": False, "max_new_tokens": max_new_tokens}
            return float(difference), patched.generate(**arguments, **frames, **options)[0]

    results = run_loopback(ranks, one_rank, timeout=SECONDS)
    length = text.input_ids.shape[1]
    tokens = results[0][1][length:]
    finite, difference = bool(logits.isfinite().all()), max(difference for difference, _ in results)
    largest, decode = disagreement(model, family, arguments, frames, tokens), family.tokenizer.decode
    prompt, reply = decode(text.input_ids[0]), decode(tokens, skip_special_tokens=True)
    return Comparison(finite, difference, largest, prompt, length, len(media), reply)


def disagreement(
    model: Any, family: ChatFamily, arguments: dict[str, Tensor], frames: dict[str, Tensor], tokens: Tensor
) -> float:
    """Return `Comparison.disagreement` of an answer, from one pass of the unpatched model over prompt and answer."""
    length, added = arguments[family.ids_name].shape[1], tokens.shape[0]
    extended = dict(arguments)
    for name, x in arguments.items():
        if name == family.ids_name:
            extended[name] = torch.cat([x, tokens[None]], dim=1)
        elif name in ("attention_mask", "mm_token_type_ids") or (x.dim() > 2 and x.shape[1] == length):
            # The answer attends to the same images as the last token of the prompt.
            extended[name] = torch.cat([x, x[:, -1:].expand(-1, added, *x.shape[2:])], dim=1)
    logits = model(**extended, **frames).logits[0, length - 1 : -1].float()
    for ids in family.generation(model).get("bad_words_ids") or ():
        if len(ids) == 1:
            logits[:, ids] = -torch.inf
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    finite = logits[logits.isfinite()]
    return float(((logits.amax(dim=1) - chosen) / finite.std()).max())
