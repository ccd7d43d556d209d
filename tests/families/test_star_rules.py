"""Layer: gloo ranks. Star Attention: how a prompt is cut, what stays exact, what is refused."""

import logging
from typing import Any

import pytest
import torch
from harness import PATIENCE, settings
from star_cases import LENGTH, PROMPTS, STAR, Warnings

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.errors import ConfigError, MaskError
from mllm_seqpar.runtime.star import block_length
from ranks import ranks
from star_reference import under_star_mask
from tiny import IMAGE_TOKEN

NAME = "mPLUG-Owl3, fused, padded batch"


@pytest.mark.parametrize(
    ("length", "size", "block"),
    [
        (131072, 8, 16352),  # 256 tokens of query
        (131079, 8, 16352),  # and 7 more, which do not divide
        (131080, 8, 16353),
        (4096, 4, 960),  # a sixteenth
        (4095, 4, 960),
        (1024, 3, 320),
        (16, 4, 3),  # one token of query, and three
        (9, 4, 2),
        (5, 4, 1),
        (4, 4, 0),  # too short to be cut
        (1, 1, 0),
    ],
)
def test_blocks_are_equal_and_leave_a_query(length: int, size: int, block: int) -> None:
    assert block_length(length, size) == block


def conversation(model: Any, inputs: dict[str, Any], again: dict[str, Any], **given: Any) -> list[torch.Tensor]:
    """An answer, and a second one to what is asked then."""
    first = model.generate(**inputs, **settings(return_dict_in_generate=True, **given))
    asked = torch.cat([first.sequences, torch.tensor([[7, 8, 9, 10]])], dim=1)
    if given["use_cache"]:
        again = {"past_key_values": first.past_key_values}
    return [first.sequences, model.generate(asked, **again, **settings(**given))]


def exact_cases(rank: int, world: int, name: str, patched: bool = True) -> tuple[dict[str, Any], list[str]]:
    """Tokens of short prompts, of caches that hold all text, of prompts too short to cut; and what is warned of."""
    prompt, found, warnings = PROMPTS[name](), {}, Warnings()
    last = prompt.inputs["input_ids"][:, -4:]
    short = {"input_ids": last.masked_fill(last == IMAGE_TOKEN, 7)}
    logging.getLogger("mllm_seqpar").addHandler(warnings)
    for what, options, inputs, given in (
        ("short prompt", {"self_attention": "star"}, prompt.inputs, {}),
        ("static cache", STAR, prompt.inputs, {"cache_implementation": "static"}),
        ("a token a rank", STAR, short, {}),
    ):
        if patched:
            patch_model(prompt.model, **options)
        try:
            found[what] = prompt.model.generate(**inputs, **settings(**given))
        finally:
            if patched:
                unpatch_model(prompt.model)
    logging.getLogger("mllm_seqpar").removeHandler(warnings)
    return found, warnings.messages


def test_short_prompts_and_other_caches_are_exact() -> None:
    """And nobody says anything of an approximation."""
    expected, _ = exact_cases(0, 1, NAME, patched=False)
    for found, warned in ranks(4).run(exact_cases, NAME, timeout=PATIENCE):
        assert found.keys() == expected.keys() and not warned
        assert all(torch.equal(found[what], expected[what]) for what in expected)


def test_one_rank_is_exact() -> None:
    prompt = PROMPTS[NAME]()
    expected = prompt.model.generate(**prompt.inputs, **settings())
    patch_model(prompt.model, **STAR)
    try:
        assert torch.equal(prompt.model.generate(**prompt.inputs, **settings()), expected)
    finally:
        unpatch_model(prompt.model)


def patched_conversation(rank: int, world: int, name: str) -> list[torch.Tensor]:
    prompt = PROMPTS[name]()
    patch_model(prompt.model, **STAR)
    try:
        return conversation(prompt.model, prompt.inputs, {}, use_cache=True)
    finally:
        unpatch_model(prompt.model)


def test_a_conversation_goes_on_with_the_cache() -> None:
    """The second question sees everything, and its K and V join those of the first answer."""
    prompt = PROMPTS["mPLUG-Owl3, gated"]()
    again = {"pixel_values": prompt.inputs["pixel_values"]}
    with under_star_mask(prompt.owner, LENGTH, block_length(LENGTH, 3), 3, **prompt.reference):
        expected = conversation(prompt.model, prompt.inputs, again, use_cache=False)
    for found in ranks(3).run(patched_conversation, "mPLUG-Owl3, gated", timeout=PATIENCE):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def refused(rank: int, world: int, name: str, what: str) -> None:
    prompt = PROMPTS[name]()
    inputs = dict(prompt.inputs)
    patch_model(prompt.model, **STAR)
    try:
        if what == "training":
            prompt.model.train()(**inputs, labels=inputs["input_ids"])
        elif what == "a cached pass with gradients":
            prompt.model(**inputs, use_cache=True)
        elif what == "a step with gradients":
            with torch.no_grad():
                cache = prompt.model(**inputs, use_cache=True).past_key_values
            prompt.model(inputs["input_ids"][:, :1], past_key_values=cache)
        elif what == "no cache":
            with torch.no_grad():
                prompt.model(**inputs)
        elif what == "generate without a cache":
            prompt.model.generate(**inputs, **settings(use_cache=False))
        else:
            inputs["attention_mask"][1, : LENGTH // 2] = 0
            prompt.model.generate(**inputs, **settings())
    finally:
        unpatch_model(prompt.model)
        prompt.model.eval()


NO_GRADIENTS = 'self_attention="star" is an approximation for inference and has no backward pass'
NO_CACHE = 'self_attention="star" reads a prompt into a cache, and this pass has none; pass use_cache=True'


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("training", ConfigError, NO_GRADIENTS),
        ("a cached pass with gradients", ConfigError, NO_GRADIENTS),
        ("a step with gradients", ConfigError, NO_GRADIENTS),
        ("no cache", ConfigError, NO_CACHE),
        ("generate without a cache", ConfigError, NO_CACHE),
        ("no anchor", MaskError, "attention_mask: sample 1 has padding only among its first 8 tokens"),
    ],
)
def test_what_it_is_not_made_for_is_refused(world: int, what: str, kind: type[Exception], message: str) -> None:
    if (world == 1 and what in ("no cache", "no anchor")) or (world == 2 and what == "no anchor"):
        return  # one rank makes a cache of itself, and has no anchor; the message is that of three ranks
    for error in ranks(world).errors(refused, NAME, what, timeout=PATIENCE):
        assert type(error) is kind and message in str(error), error


@pytest.mark.parametrize("name", ["IDEFICS", "Llama 3.2 Vision", "OpenFlamingo over OPT"])
def test_every_family_refuses_training(name: str) -> None:
    prompt = PROMPTS[name]()
    patch_model(prompt.model, **STAR)
    try:
        with pytest.raises(ConfigError, match="is an approximation for inference and has no backward pass"):
            prompt.model(**prompt.inputs)
    finally:
        unpatch_model(prompt.model)
