"""Layer: gloo ranks. Star Attention: patched models of every family compute the unpatched ones under its own mask.

What is refused, and how a prompt is cut, are in `test_star_rules`.
"""

import functools
import logging
from typing import Any

import pytest
import torch
from harness import PATIENCE, TOLERANCE, settings
from star_cases import LENGTH, PROMPTS, STAR, Warnings
from tiny_open_flamingo import MEDIA
from torch import Tensor

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.patching import patch_of
from mllm_seqpar.runtime.star import block_length
from outcomes import error
from ranks import ranks
from star_reference import under_star_mask

ASKED = {"last": 1, "last five": 5, "here and there": torch.tensor([LENGTH - 1, 3, LENGTH // 2, 0, LENGTH - 5])}
"""Rows asked for by `logits_to_keep`."""
SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 50}
LOOKED_UP = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12}
GENERATED: dict[str, dict[str, dict[str, Any]]] = {name: {"greedy": {}} for name in PROMPTS}
for _name in ("mPLUG-Owl3, fused, padded batch", "IDEFICS, padded batch", "Llama 3.2 Vision, padded batch"):
    GENERATED[_name] |= {"sampled": SAMPLED, "beams": {"num_beams": 2, "num_return_sequences": 2}}
for _name in PROMPTS:
    if "Flamingo" in _name:  # a new medium is another thing with a cache, which has no earlier tokens, than without
        GENERATED[_name] = {"greedy": {"suppress_tokens": [MEDIA]}}
GENERATED["OpenFlamingo over LLaMA"]["beams"] = {"num_beams": 3, "suppress_tokens": [MEDIA]}
GENERATED["mPLUG-Owl3, gated"]["looked up"] = LOOKED_UP
GENERATED["mPLUG-Owl3, sliding window"]["long"] = {"max_new_tokens": 12}
SOME = ("mPLUG-Owl3, fused, padded batch", "IDEFICS", "Llama 3.2 Vision, padded batch")
ON_RANKS = {2: SOME, 3: tuple(PROMPTS), 4: SOME}
STRATEGY = {2: "ring", 3: "lv-xattn", 4: "ulysses"}
"""Of the cross-attention, in the hyper layers one softmax with the text."""


def _asks(name: str) -> bool:
    return "Flamingo" not in name  # whose forward takes no such arguments


def all_outcomes(rank: int, world: int, names: tuple[str, ...]) -> dict[str, Any]:
    """On a rank: by prompt, the patched model's logits, hidden states, tokens, and warnings."""
    found: dict[str, Any] = {}
    log = logging.getLogger("mllm_seqpar")
    for name in names:
        prompt, warnings = PROMPTS[name](), Warnings()
        log.addHandler(warnings)
        patch_model(prompt.model, STRATEGY[world], **STAR)
        try:
            with torch.no_grad():
                more = {"output_hidden_states": True} if _asks(name) else {}
                out = prompt.model(**prompt.inputs, use_cache=True, **more)
                kept = {
                    what: prompt.model(**prompt.inputs, use_cache=True, logits_to_keep=rows).logits
                    for what, rows in ASKED.items()
                    if name in SOME
                }
            tokens = {}
            for what, given in GENERATED[name].items():
                torch.manual_seed(17 if rank == 0 else 1000 + rank)
                tokens[what] = prompt.model.generate(**prompt.inputs, **settings(use_cache=True, **given))
        except Exception as caught:
            caught.add_note(f"prompt {name}")
            raise
        finally:
            log.removeHandler(warnings)
            unpatch_model(prompt.model)
        states = list(out.hidden_states) if _asks(name) else []
        found[name] = {
            "logits": out.logits,
            "states": states,
            "kept": kept,
            "tokens": tokens,
            "warned": [message for message in warnings.messages if "approximate" in message],
        }
    return found


@functools.cache
def expected_outcomes(world: int, names: tuple[str, ...]) -> dict[str, Any]:
    """In this process: the unpatched models under the mask of that many ranks."""
    block, expected = block_length(LENGTH, world), {}
    for name in names:
        prompt = PROMPTS[name]()
        with under_star_mask(prompt.owner, LENGTH, block, world, **prompt.reference):
            with torch.no_grad():
                more = {"output_hidden_states": True} if _asks(name) else {}
                out = prompt.model(**prompt.inputs, use_cache=False, **more)
            tokens = {}
            for what, given in GENERATED[name].items():
                torch.manual_seed(17)
                plain = {key: x for key, x in given.items() if not key.startswith("prompt_lookup")}
                tokens[what] = prompt.model.generate(**prompt.inputs, **settings(use_cache=False, **plain))
        states = list(out.hidden_states) if _asks(name) else []
        expected[name] = {"logits": out.logits, "states": states, "tokens": tokens}
    return expected


def _real(name: str) -> Tensor | slice:
    """(B, L) bool: what padding computes is nobody's concern."""
    mask = PROMPTS[name]().inputs.get("attention_mask")
    return slice(None) if mask is None else mask.bool()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_family_computes_star_attention(world: int) -> None:
    names = ON_RANKS[world]
    outcomes, expected = ranks(world).run(all_outcomes, names, timeout=PATIENCE), expected_outcomes(world, names)
    for name in names:
        real, theirs = _real(name), expected[name]
        for rank, outcome in enumerate(outcomes):
            mine = outcome[name]
            assert error(mine["logits"][real], theirs["logits"][real]) < TOLERANCE, name
            for state, reference in zip(mine["states"], theirs["states"], strict=True):
                assert error(state[real], reference[real]) < TOLERANCE, name
            for what, logits in mine["kept"].items():
                rows = ASKED[what]
                same = mine["logits"][:, -rows:] if isinstance(rows, int) else mine["logits"][:, rows]
                assert error(logits, same) < TOLERANCE, (name, what)
            for what, tokens in mine["tokens"].items():
                assert torch.equal(tokens, theirs["tokens"][what]), (name, what, tokens, theirs["tokens"][what])
            # once, by one rank, for many passes; what two ranks compute is exact
            assert len(mine["warned"]) == (rank == 0 and world > 2), name


def test_the_mask_matters() -> None:
    """The reference under 4 ranks' mask is far from that of 2 ranks, which hides nothing: the test above can fail."""
    dense, star = expected_outcomes(2, SOME), expected_outcomes(4, SOME)
    for name in SOME:
        real = _real(name)
        assert error(star[name]["logits"][real], dense[name]["logits"][real]) > 0.05, name
        prompt = PROMPTS[name]()
        with torch.no_grad():
            unpatched = prompt.model(**prompt.inputs).logits
        assert error(dense[name]["logits"][real], unpatched[real]) < TOLERANCE, name


def traffic(rank: int, world: int) -> tuple[dict[str, int], list[int]]:
    """Bytes that a rank sends for a prompt of text alone, and the tokens whose K it keeps after 6 new ones."""
    prompt = PROMPTS["mPLUG-Owl3, text only"]()
    patch_model(prompt.model, **STAR)
    counter = patch_of(prompt.model).context.comm.bytes  # type: ignore[union-attr]
    try:
        with torch.no_grad():
            prompt.model(**prompt.inputs, use_cache=True, logits_to_keep=1)
            before = dict(counter.sent)
            prompt.model(**prompt.inputs, use_cache=True, logits_to_keep=1)
        sent = {label: count - before.get(label, 0) for label, count in counter.sent.items()}
        out = prompt.model.generate(**prompt.inputs, **settings(return_dict_in_generate=True))
        return sent, [layer.keys.shape[2] for layer in out.past_key_values.layers[:4]]
    finally:
        unpatch_model(prompt.model)


def test_the_context_sends_nothing_and_the_last_rank_keeps_what_is_new() -> None:
    world, layers, batch, heads, dim, width = 3, 4, 2, 4, 16, 64
    block = block_length(LENGTH, world)
    query = LENGTH - world * block
    for rank, (sent, kept) in enumerate(ranks(world).run(traffic, timeout=PATIENCE)):
        merged = layers * (world - 1) * batch * heads * query * (dim + 1) * 4
        del sent["agreement"]
        shared = (world - 1) * batch * width * 4  # the last hidden state of one rank, so that all pick the same token
        assert {label: count for label, count in sent.items() if count} == {"o": merged} | (
            {"hidden": shared} if rank == 0 else {}
        )
        assert kept == [block + (query + 5 if rank == world - 1 else 0)] * layers  # the last token is not read again
