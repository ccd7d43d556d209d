"""Layer: gloo ranks. OpenFlamingo's `generate` gives the tokens of the unpatched model, over four language models.

Unpatched, `generate` needs help on transformers 5 (`accept_missing_mask`); patched it does not, on one process neither.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from open_flamingo_cases import PATIENCE, TOLERANCE, Case, inputs_of, model_of, own_media
from tiny_open_flamingo import LANGUAGE_MODELS, MEDIA, MPT_1B, PAD, VOCABULARY, accept_missing_mask, pixels

from mllm_seqpar import patch_model, unpatch_model
from outcomes import error
from ranks import ranks

TWO = Case(media=((1, 4, 7), (5,)), images=2, padding="left", labels=False)  # one time beyond the media, one not
FEW = Case(media=((0, 3),), images=1, immediate=False, labels=False)
EARLY = Case(media=((), (2,)), images=3, length=9, immediate=False, labels=False)
DEALT = {"shard_prompt_from": 2}
MEDIA_AGAIN = [token for token in range(VOCABULARY) if token not in (MEDIA, 7, 8, 9)]

CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "greedy": (TWO, {}),
    "sampled": (TWO, {"do_sample": True, "temperature": 1.5, "top_k": 50}),
    "beams": (TWO, {"num_beams": 3}),
    "beams, all earlier media": (FEW, {"num_beams": 2, "num_return_sequences": 2}),
    "no media token before a row": (EARLY, {}),
    "no cache": (TWO, {"use_cache": False}),
    "media tokens among the new ones": (TWO, {"do_sample": True, "suppress_tokens": MEDIA_AGAIN}),
    "ring, local text": (TWO.with_options(strategy="ring", self_attention="local"), {}),
    "dealt prompt": (TWO.with_options(**DEALT), {}),
    "dealt prompt, beams": (TWO.with_options(**DEALT, text_layout="striped"), {"num_beams": 2}),
    "dealt prompt, all earlier media": (EARLY.with_options(**DEALT), {"do_sample": True}),
    "looked up": (FEW, {"prompt_lookup_num_tokens": 3, "max_new_tokens": 10}),
}
EVERYWHERE = ("greedy", "sampled", "beams", "dealt prompt")
"""For 1 to 4 ranks; the others for 3."""
LOCAL = ("greedy", "beams", "dealt prompt")
"""Run a second time with each rank passing its own media only."""


def settings(**given: Any) -> dict[str, Any]:
    usual = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None, "use_cache": True}
    return usual | given


@contextmanager
def helped(model: Any) -> Iterator[None]:
    accept_missing_mask(model)
    yield
    del model.lang_encoder.forward


def tokens_of_all(rank: int, world: int, name: str) -> dict[str, torch.Tensor]:
    found = {}
    for what, (case, given) in CASES.items():
        if world != 3 and what not in EVERYWHERE:
            continue
        model, inputs = model_of(name, case), inputs_of(case)
        patch_model(model, **case.options)
        torch.manual_seed(17 if rank == 0 else 1000 + rank)  # the other ranks were not seeded alike
        found[what] = model.generate(**inputs, **settings(**given))
        assert not model.lang_encoder.is_conditioned() and not model.lang_encoder._use_cached_vision_x
        if world == 3 and what in LOCAL:
            found[f"{what}, own media"] = model.generate(**own_media(inputs), **settings(**given))
        unpatch_model(model)
    return found


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_tokens(name: str) -> None:
    expected, seen = {}, set()
    for what, (case, given) in CASES.items():
        model = model_of(name, case)
        torch.manual_seed(17)
        with helped(model):
            expected[what] = model.generate(**inputs_of(case), **settings(**given))
        seen.update(expected[what][:, case.length :].flatten().tolist())
    assert len(seen) > 6 and MEDIA in seen  # not always the same few
    for world in (1, 2, 3, 4):
        for found in ranks(world).run(tokens_of_all, name, timeout=PATIENCE):
            assert len(found) == (len(CASES) + len(LOCAL) if world == 3 else len(EVERYWHERE))
            for what, tokens in found.items():
                assert torch.equal(tokens, expected[what.removesuffix(", own media")]), (world, what)


SAMPLED = {"do_sample": True, "temperature": 1.5}


def tokens_of_a_sharded_prompt(rank: int, world: int) -> torch.Tensor:
    case, _ = CASES["dealt prompt"]
    model = patch_model(model_of(MPT_1B, case), **case.options)
    torch.manual_seed(17)
    try:
        return model.generate(**inputs_of(case), **settings(**SAMPLED))
    finally:
        unpatch_model(model)


def test_mpt_with_normalised_queries_and_keys_generates_from_a_sharded_prompt() -> None:
    model = model_of(MPT_1B, TWO)
    torch.manual_seed(17)
    with helped(model):
        expected = model.generate(**inputs_of(TWO), **settings(**SAMPLED))
    assert len(expected[:, TWO.length :].unique()) > 6
    for found in ranks(3).run(tokens_of_a_sharded_prompt, timeout=PATIENCE):
        assert torch.equal(found, expected)


def projections(rank: int, world: int, name: str) -> tuple[list[int], list[int]]:
    """How many tokens of media are projected, and how many are encoded: generation with beams, then cached media."""
    model, projected, encoded = model_of(name, TWO), [], []
    hooks = [
        block.attn.to_kv.register_forward_hook(lambda _, args, out: projected.append(out[..., 0].numel()))
        for block in model.lang_encoder.gated_cross_attn_layers
        if block is not None
    ]
    hooks.append(model.vision_encoder.register_forward_hook(lambda _, args, out: encoded.append(len(args[0]))))
    patch_model(model)
    try:
        model.generate(**inputs_of(TWO), **settings(num_beams=3))
        with torch.no_grad():
            likelihoods(model, TWO, True)
    finally:
        unpatch_model(model)
        for hook in hooks:
            hook.remove()
    return projected, encoded


def test_media_are_encoded_and_projected_once() -> None:
    """Each by the rank that holds them, also for beams, and once for all texts that go on from one cache."""
    for rank, (projected, encoded) in enumerate(ranks(3).run(projections, "opt", timeout=PATIENCE)):
        own = [2, 1, 1][rank]
        assert encoded == [own] * 2  # one generation, one `cache_media`
        # of each layer: once for the generation, for each of 3 texts without a cache, and for one with
        assert projected == [64 * own] * 2 * (1 + 3 + 1)


def likelihoods(model: Any, case: Case, own: bool) -> list[torch.Tensor]:
    """An evaluation by log-likelihood: media once, then several texts against them, with and without a cache."""
    inputs = inputs_of(case)
    context, mask = inputs["lang_x"], inputs["attention_mask"]
    media = {name: x for name, x in (own_media(inputs) if own else inputs).items() if name.startswith("vis")}
    answers = [torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.tensor([[11, 4], [12, 13]]), context]
    model.cache_media(context, **media)
    found = []
    for answer in answers:  # the last has media tokens of its own
        found.append(model(None, answer, torch.ones_like(answer), labels=answer, clear_conditioned_layers=False))
    with torch.no_grad():
        first = model(None, context, mask, clear_conditioned_layers=False, use_cache=True)
        for answer in answers[:2]:
            whole = torch.cat([mask, torch.ones_like(answer)], dim=1)
            cached = {"past_key_values": copy.deepcopy(first.past_key_values), "use_cache": True}
            found.append(model(None, answer, whole, clear_conditioned_layers=False, **cached))
    model.uncache_media()
    assert not model.lang_encoder.is_conditioned()
    with pytest.raises(AssertionError, match="Must provide either vision_x"):
        model(None, context, mask)
    return [found[0].loss.detach(), found[1].loss.detach(), found[2].loss.detach(), *(x.logits for x in found[3:])]


def patched_likelihoods(rank: int, world: int, name: str, case: Case, own: bool) -> list[torch.Tensor]:
    model = model_of(name, case)
    patch_model(model)
    try:
        return likelihoods(model, case, own)
    finally:
        unpatch_model(model)


@pytest.mark.parametrize(
    ("world", "name", "immediate", "own"),
    [(1, "opt", True, False), (3, "llama", False, True), (2, "mpt", True, True), (4, "gpt_neox", False, False)],
)
def test_media_cached_for_log_likelihoods(world: int, name: str, immediate: bool, own: bool) -> None:
    case = Case(media=((1, 4, 7), (5,)), images=2, immediate=immediate)
    expected = likelihoods(model_of(name, case), case, False)
    for found in ranks(world).run(patched_likelihoods, name, case, own, timeout=PATIENCE):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def new_media(model: Any) -> torch.Tensor:
    """A text that goes on with its cache and other media: the new rows see only those."""
    inputs = inputs_of(TWO)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        answer = torch.tensor([[MEDIA, 5, 6], [7, MEDIA, 8]])
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(answer)], dim=1)
        return model(pixels(2, 3, seed=5), answer, mask, past_key_values=cache, use_cache=True).logits


def patched_new_media(rank: int, world: int, name: str) -> torch.Tensor:
    model = patch_model(model_of(name, TWO))
    try:
        return new_media(model)
    finally:
        unpatch_model(model)


@pytest.mark.parametrize("name", ["llama", "mpt"])
def test_other_media_over_a_filled_cache(name: str) -> None:
    expected = new_media(model_of(name, TWO))
    for found in ranks(2).run(patched_new_media, name, timeout=PATIENCE):
        assert error(found, expected) < TOLERANCE
