"""Layer: one process, loopback ranks. Star Attention: patched models compute the unpatched ones under its mask.

    prompt = c_1 ... c_n query: a token of block c_i attends to c_1 and, up to itself, c_i; a later token to all
    before it

The anchor's K and V are those of c_1 itself, whose tokens attend to nothing else. One forward pass of an unpatched
model over the whole text with this mask is therefore phase 1 and phase 2 together, and one for each new token is
generation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from family_cases import BATCHES, FUSED, LANGUAGE_MODELS
from family_harness import TOLERANCE, build, forward, on_ranks, settings, slow_unless
from generation_cases import BEAMS
from mllm_seqpar import patch_model
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.errors import ConfigError, MaskError
from mllm_seqpar.runtime.star import block_length
from outcomes import error
from tiny_models.idefics import Case as Idefics
from tiny_models.mllama import Case as Mllama
from tiny_models.moss_vl import Case as Moss
from tiny_models.mplug_owl3 import IMAGE_TOKEN
from tiny_models.mplug_owl3 import Case as Owl
from tiny_models.video_mllama import Case as Preview

LENGTH = 27
"""Blocks of 13, 8 and 6 tokens for 2, 3 and 4 ranks, and 1, 3 and 3 tokens of query."""
WINDOW = 9
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1} | FUSED
STAR = {"self_attention": "star", "shard_prompt_from": 2}
GREEDY: dict[str, dict[str, Any]] = {"greedy": {}}
BOTH = GREEDY | {"beams": BEAMS}


def star_mask(prompt: int, block: int, ranks: int, real: Tensor, window: int | None = None) -> Tensor:
    """Return the mask that attention adds to its scores, (B, 1, L, L) float32; `real` (B, L) is False for padding."""
    length = real.shape[1]
    position = torch.arange(length)
    row, key = position[:, None], position[None]
    part = position // block
    assert block * ranks < prompt <= length
    visible = (key <= row) & ((row >= block * ranks) | (part[None] == 0) | (part[None] == part[:, None]))
    if window is not None:
        visible &= row - key < window
    visible = visible & real[:, None]
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[:, None]


def counted(mask: Tensor) -> Tensor:
    """Return positions that count real tokens only, as IDEFICS computes them from its attention mask."""
    return (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)


def opt_positions(mask: Tensor) -> Tensor:
    """Return positions as OPT computes them."""
    return mask.cumsum(1) * mask - 1


@contextmanager
def under_star_mask(
    owner: Any,
    prompt: int,
    block: int,
    ranks: int,
    positions: Callable[[Tensor], Tensor] | None = None,
    window: int | None = None,
) -> Iterator[None]:
    """Apply Star Attention's mask in every pass of an unpatched model over a text that begins with the prompt.

    Args:
        owner: the module whose `forward` takes `attention_mask`.
        prompt: number of tokens of the prompt.
        block: number of tokens of each rank's block.
        ranks: number of ranks.
        positions: how the model computes positions from a padding mask, which it cannot from this mask.
        window: of sliding layers, which then have a mask of their own.
    """
    unpatched = owner.forward

    @functools.wraps(unpatched)
    def forward(input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        assert mask.shape == input_ids.shape and not kwargs.get("past_key_values"), "a pass over the whole text"
        if positions is not None and kwargs.get("position_ids") is None:
            kwargs["position_ids"] = positions(mask)
        whole: Any = star_mask(prompt, block, ranks, mask.bool())
        if window is not None:
            sliding = star_mask(prompt, block, ranks, mask.bool(), window)
            whole = {"full_attention": whole, "sliding_attention": sliding}
        return unpatched(input_ids=input_ids, attention_mask=whole, **kwargs)

    owner.forward = forward
    try:
        yield
    finally:
        del owner.forward


@dataclass(frozen=True)
class Prompt:
    """A prompt of `family`; `reference` has further arguments of `under_star_mask`, `generated` those of `generate`."""

    family: str
    case: Any
    reference: dict[str, Any] = field(default_factory=dict)
    generated: dict[str, dict[str, Any]] = field(default_factory=lambda: GREEDY)

    def under_mask(self, model: Any, ranks: int) -> Any:
        owner = model.lang_encoder if self.family == "open_flamingo" else model
        return under_star_mask(owner, LENGTH, block_length(LENGTH, ranks), ranks, **self.reference)

    def real(self) -> Tensor | slice:
        return slice(None) if self.case.real() is None else self.case.real()


COMMON: dict[str, Any] = {"length": LENGTH, "labels": None}
_OWL_PADDED = Owl(frames=(4, 1), padding="left", **COMMON)
_MLLAMA_PADDED = Mllama(frames=((2, 3, 1), (1,)), padding="left", **COMMON)
_LOOKUP, _LONG = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12}, {"max_new_tokens": 12}
_COUNTED = {"positions": counted}  # IDEFICS counts positions by the attention mask
PROMPTS = {
    "mPLUG-Owl3, gated": Prompt("mplug_owl3", Owl(**COMMON), {}, GREEDY | {"lookup": _LOOKUP}),
    "mPLUG-Owl3, gated, padded batch": Prompt("mplug_owl3", _OWL_PADDED),
    "mPLUG-Owl3, fused, padded batch": Prompt("mplug_owl3", _OWL_PADDED.with_model(**FUSED), {}, BOTH),
    "mPLUG-Owl3, sliding window": Prompt(
        "mplug_owl3", Owl(frames=(3,), model=SLIDING, **COMMON), {"window": WINDOW}, GREEDY | {"long": _LONG}
    ),
    "mPLUG-Owl3, text only": Prompt("mplug_owl3", Owl(frames=(0, 0), **COMMON)),
    "IDEFICS": Prompt("idefics", Idefics(frames=(4,), mask="before", **COMMON), _COUNTED),
    "IDEFICS, padded batch": Prompt("idefics", Idefics(frames=(3, 1), padding="left", **COMMON), _COUNTED, BOTH),
    "Llama 3.2 Vision": Prompt("mllama", Mllama(**COMMON)),
    "Llama 3.2 Vision, padded batch": Prompt("mllama", _MLLAMA_PADDED, {}, BOTH),
    "MOSS-Video-Preview": Prompt("video_mllama", Preview(**COMMON)),
    "MOSS-Video-Preview, padded batch": Prompt("video_mllama", Preview(frames=(4, 1), padding="left", **COMMON)),
    "MOSS-VL": Prompt("moss_vl", Moss(frames=(((3, 4, 6), (8, 4)), ((2, 6, 2),)), **COMMON), {}, BOTH),
}
if LANGUAGE_MODELS:
    from tiny_models.open_flamingo import MEDIA

    # Over a cache, a new medium replaces the earlier ones; without a cache it does not.
    _GIVEN: dict[str, Any] = {"suppress_tokens": [MEDIA]}
    _FLAMINGO = replace(BATCHES["open_flamingo"], frames=((1, 9, 20), (5,)), media=3, padding="left", **COMMON)
    for _name, _reference, _generated in (
        ("llama", {}, {"greedy": _GIVEN, "beams": _GIVEN | {"num_beams": 3}}),
        ("opt", {"positions": opt_positions}, {"greedy": _GIVEN}),
        ("mpt", {}, {"greedy": _GIVEN}),
    ):
        _case = _FLAMINGO.with_model(language_model=_name)
        PROMPTS[f"OpenFlamingo over {_name}"] = Prompt("open_flamingo", _case, _reference, _generated)
SOME = ("mPLUG-Owl3, fused, padded batch", "IDEFICS", "Llama 3.2 Vision, padded batch")
STRATEGY = {2: "ring", 3: "lv-xattn", 4: "ulysses"}
KEPT = {"last": 1, "last five": 5, "scattered": torch.tensor([LENGTH - 1, 3, LENGTH // 2, 0, LENGTH - 5])}
"""Values of `logits_to_keep`."""


@functools.cache
def expected(name: str, ranks: int) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Return logits, hidden states and tokens of the unpatched model under the mask of that many ranks."""
    prompt = PROMPTS[name]
    model, inputs = build(prompt.family, prompt.case)
    with prompt.under_mask(model, ranks):
        with torch.no_grad():
            out = forward(prompt.family, model, inputs | {"use_cache": False})
        tokens = {}
        for what, given in prompt.generated.items():
            plain = {key: x for key, x in given.items() if not key.startswith("prompt_lookup")}
            tokens[what] = model.generate(**inputs, **settings(use_cache=False, **plain))
    return out.logits, list(out.hidden_states or ()), tokens


CASES = [*((name, 4 if name in SOME else 3) for name in PROMPTS), ("IDEFICS", 2), ("IDEFICS", 3)]


@pytest.mark.parametrize(("name", "ranks"), slow_unless(lambda row: row == ("IDEFICS", 3), CASES))
def test_prompt_equals_unpatched_under_the_star_mask(name: str, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    prompt = PROMPTS[name]
    logits, states, tokens = expected(name, ranks)
    real = prompt.real()

    def run(model: Any, inputs: dict[str, Any], _: Any) -> None:
        with torch.no_grad():
            out = forward(prompt.family, model, inputs | {"use_cache": True})
            assert error(out.logits[real], logits[real]) < TOLERANCE
            for ours, theirs in zip(out.hidden_states or (), states, strict=True):
                assert error(ours[real], theirs[real]) < TOLERANCE
            for rows in KEPT.values() if name in SOME else ():
                kept = model(**inputs, use_cache=True, logits_to_keep=rows).logits
                same = out.logits[:, -rows:] if isinstance(rows, int) else out.logits[:, rows]
                assert error(kept, same) < TOLERANCE
        for what, given in prompt.generated.items():
            found = model.generate(**inputs, **settings(use_cache=True, **given))
            assert torch.equal(found, tokens[what]), (what, found, tokens[what])

    on_ranks(ranks, prompt.family, prompt.case.with_options(strategy=STRATEGY[ranks], **STAR), run)
    # One rank warns once for all passes. Two ranks are exact: their mask hides nothing.
    assert sum("approximate" in message for message in caplog.messages) == (ranks > 2)


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "IDEFICS", SOME))
def test_mask_of_four_ranks_changes_the_result_and_of_two_does_not(name: str) -> None:
    real, (model, inputs) = PROMPTS[name].real(), build(PROMPTS[name].family, PROMPTS[name].case)
    with torch.no_grad():
        unpatched = model(**inputs).logits
    assert error(expected(name, 4)[0][real], unpatched[real]) > 0.05
    assert error(expected(name, 2)[0][real], unpatched[real]) < TOLERANCE


def test_context_blocks_send_nothing_and_last_rank_stores_new_tokens() -> None:
    world, layers, batch, heads, dim, width = 3, 4, 2, 4, 16, 64
    block = block_length(LENGTH, world)
    query = LENGTH - world * block

    def run(model: Any, inputs: dict[str, Any], comm: Any) -> None:
        with torch.no_grad():
            model(**inputs, use_cache=True, logits_to_keep=1)
            before = dict(comm.bytes.sent)
            model(**inputs, use_cache=True, logits_to_keep=1)
        sent = {label: count - before.get(label, 0) for label, count in comm.bytes.sent.items()}
        del sent["agreement"]
        merged = layers * (world - 1) * batch * heads * query * (dim + 1) * 4
        # One rank sends its last hidden state, so that all choose the same token.
        hidden = {"hidden": (world - 1) * batch * width * 4} if comm.rank == 0 else {}
        assert {label: count for label, count in sent.items() if count} == {"o": merged} | hidden
        out = model.generate(**inputs, **settings(return_dict_in_generate=True))
        stored = [layer.keys.shape[2] for layer in cache_of(out).layers[:layers]]
        assert stored == [block + (query + 5 if comm.rank == world - 1 else 0)] * layers  # the last token is not read

    prompt = PROMPTS["mPLUG-Owl3, text only"]
    on_ranks(world, prompt.family, prompt.case.with_options(**STAR), run)


@pytest.mark.parametrize(
    ("length", "size", "block"),
    [
        *((131072, 8, 16352), (131079, 8, 16352), (131080, 8, 16353)),  # 256 tokens of query, 7 more, and 8 more
        *((4096, 4, 960), (4095, 4, 960), (1024, 3, 320)),  # a sixteenth
        *((16, 4, 3), (9, 4, 2), (5, 4, 1)),  # four tokens of query, and one
        *((4, 4, 0), (1, 1, 0)),  # too short to be cut
    ],
)
def test_blocks_are_equal_and_leave_a_query(length: int, size: int, block: int) -> None:
    assert block_length(length, size) == block


FUSED_PROMPT = PROMPTS["mPLUG-Owl3, fused, padded batch"]


@pytest.mark.parametrize(
    ("what", "ranks"),
    slow_unless(
        lambda row: row[0] == "one rank",
        [("short prompt", 4), ("static cache", 4), ("one token for each rank", 4), ("one rank", 1)],
    ),
)
def test_prompt_that_is_not_cut_is_exact(what: str, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = build(FUSED_PROMPT.family, FUSED_PROMPT.case)
    options = {"self_attention": "star"} if what == "short prompt" else STAR
    given = {"cache_implementation": "static"} if what == "static cache" else {}
    if what == "one token for each rank":
        last = inputs["input_ids"][:, -4:]
        inputs = {"input_ids": last.masked_fill(last == IMAGE_TOKEN, 7)}
    tokens = model.generate(**inputs, **settings(**given))
    case = FUSED_PROMPT.case.with_options(**options)
    found = on_ranks(ranks, "mplug_owl3", case, lambda m, _, comm: m.generate(**inputs, **settings(**given)))
    assert all(torch.equal(each, tokens) for each in found)
    assert not any(record.levelname == "WARNING" and "mllm_seqpar.runtime" in record.name for record in caplog.records)


def conversation(model: Any, inputs: dict[str, Any], again: dict[str, Any], **given: Any) -> list[Tensor]:
    first = model.generate(**inputs, **settings(return_dict_in_generate=True, **given))
    asked = torch.cat([first.sequences, torch.tensor([[7, 8, 9, 10]])], dim=1)
    if given["use_cache"]:
        again = cache_argument(cache_of(first))
    return [first.sequences, model.generate(asked, **again, **settings(**given))]


def test_second_question_sees_the_whole_cache() -> None:
    prompt = PROMPTS["mPLUG-Owl3, gated"]
    model, inputs = build(prompt.family, prompt.case)
    with prompt.under_mask(model, 3):
        both = conversation(model, inputs, {"pixel_values": inputs["pixel_values"]}, use_cache=False)
    case = prompt.case.with_options(**STAR)
    for found in on_ranks(3, prompt.family, case, lambda m, x, comm: conversation(m, x, {}, use_cache=True)):
        assert all(torch.equal(a, b) for a, b in zip(found, both, strict=True))


def _step_with_gradients(model: Any, inputs: dict[str, Any]) -> None:
    with torch.no_grad():
        cache = cache_of(model(**inputs, use_cache=True))
    model(inputs["input_ids"][:, :1], **cache_argument(cache))


def _no_anchor(model: Any, inputs: dict[str, Any]) -> None:
    inputs["attention_mask"][1, : LENGTH // 2] = 0
    model.generate(**inputs, **settings())


NO_GRADIENTS = 'self_attention="star" is an approximation for inference and has no backward pass'
NO_CACHE = 'self_attention="star" reads a prompt into a cache, and this pass has none; pass use_cache=True'
NO_ANCHOR = "attention_mask: sample 1 has padding only among its first 8 tokens"


@pytest.mark.parametrize(
    ("misuse", "ranks", "kind", "message"),
    [
        (lambda model, x: model.train()(**x, labels=x["input_ids"]), 1, ConfigError, NO_GRADIENTS),
        (lambda model, x: model.train()(**x, labels=x["input_ids"]), 3, ConfigError, NO_GRADIENTS),
        (lambda model, x: model(**x, use_cache=True), 2, ConfigError, NO_GRADIENTS),
        (_step_with_gradients, 3, ConfigError, NO_GRADIENTS),
        (torch.no_grad()(lambda model, x: model(**x)), 2, ConfigError, NO_CACHE),
        (lambda model, x: model.generate(**x, **settings(use_cache=False)), 1, ConfigError, NO_CACHE),
        (_no_anchor, 3, MaskError, NO_ANCHOR),
    ],
)
def test_unsupported_use_is_refused_on_every_rank(misuse: Any, ranks: int, kind: type[Exception], message: str) -> None:
    def run(model: Any, inputs: dict[str, Any], _: Any) -> None:
        with pytest.raises(kind) as caught:
            misuse(model, inputs)
        assert type(caught.value) is kind and message in str(caught.value)

    on_ranks(ranks, "mplug_owl3", FUSED_PROMPT.case.with_options(**STAR), run)


@pytest.mark.parametrize("name", sorted({"IDEFICS", "Llama 3.2 Vision", "OpenFlamingo over opt"} & PROMPTS.keys()))
def test_every_family_refuses_training(name: str) -> None:
    model, inputs = build(PROMPTS[name].family, PROMPTS[name].case)
    patch_model(model, **STAR)
    with pytest.raises(ConfigError, match="is an approximation for inference and has no backward pass"):
        model(**inputs)
