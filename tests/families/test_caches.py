"""Layer: gloo ranks. What is kept beside a cache follows its rows, its copies and its end."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cache_cases import FAMILIES, GATE_OF, MOVES, NEW, OTHER, Talk, moved_rows
from harness import PATIENCE, TOLERANCE, settings
from transformers import StaticCache

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.errors import ConfigError, ShapeError
from outcomes import error, worst_gradient
from ranks import ranks
from tiny import tiny_frames, tiny_model, tiny_text


@contextmanager
def patched(model: Any, **options: Any) -> Iterator[None]:
    patch_model(model, **options)
    try:
        yield
    finally:
        unpatch_model(model)


@torch.no_grad()
def check_moves(found: dict[Any, Any]) -> None:
    for (family, move), (logits, original) in found.items():
        talk = Talk(family)
        assert error(logits, talk.unpatched(move)) < TOLERANCE, (family, move)
        assert error(original, talk.whole(OTHER, [0, 1])) < TOLERANCE, (family, move, "the original")


def test_rows_of_a_cache_move_with_what_is_kept_beside_it() -> None:
    """And a copy is independent of the original: each continues with a text of its own."""
    check_moves(moved_rows(0, 1, FAMILIES, {}))


@pytest.mark.parametrize("options", [{}, {"shard_prompt_from": 2}], ids=["whole text", "sharded text"])
def test_rows_of_a_cache_move_on_several_ranks(options: dict[str, Any]) -> None:
    for found in ranks(3).run(moved_rows, FAMILIES, options, timeout=PATIENCE):
        check_moves(found)


@torch.no_grad()
@pytest.mark.parametrize("native", ["per_head", "fused"])
def test_rows_of_the_native_models_cache_move(native: str) -> None:
    check_moves({(native, move): Talk(native).moved(move) for move in MOVES})


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_is_reordered_and_copied(family: str) -> None:
    talk = Talk(family)
    expected = talk.whole(NEW, [1, 0])
    with patched(talk.model):
        cache = copy.deepcopy(talk.fill(StaticCache(config=talk.model.config, max_cache_len=40)))
        cache.reorder_cache(torch.tensor([1, 0]))
        assert error(talk.go_on(cache, NEW, [1, 0]), expected) < TOLERANCE


@torch.no_grad()
def test_idefics_sees_the_images_that_are_passed_with_a_moved_cache() -> None:
    """As the unpatched model, which projects them in every pass."""
    talk = Talk("idefics")
    pixels = talk.prompt["pixel_values"]
    for given in (pixels[[1, 0]], pixels, pixels + 1):
        cache = talk.fill()
        cache.reorder_cache(torch.tensor([1, 0]))
        expected = talk.go_on(cache, NEW, [1, 0], pixel_values=given)
        with patched(talk.model):
            cache = talk.fill()
            cache.reorder_cache(torch.tensor([1, 0]))
            assert error(talk.go_on(cache, NEW, [1, 0], pixel_values=given), expected) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("native", ["per_head", "fused"])
@pytest.mark.parametrize("left", [2, 5, 9])
def test_cropping_a_prompt_takes_its_frames_away(native: str, left: int) -> None:
    """What remains is what the model computes of the shorter prompt with the frames that it still has."""
    model, ids, frames = tiny_model(GATE_OF[native]), tiny_text(5), tiny_frames(5)
    short = torch.cat([ids[:, :left], NEW[:1]], dim=1)
    count = int((ids[:, :left] == model.config.image_token_id).sum())
    expected = model(short, frames[:count] if count else None, use_cache=False).logits[:, -3:]
    for is_patched in (False, True):
        with patched(model) if is_patched else torch.no_grad():
            cache = model(ids, frames, use_cache=True).past_key_values
            cache.crop(left - ids.shape[1])
            found = [model(part, past_key_values=cache).logits for part in (NEW[:1, :2], NEW[:1, 2:])]
        assert error(torch.cat(found, dim=1), expected) < TOLERANCE, is_patched


def two_passes(talk: Talk, frames: dict[str, Any], prompt_too: bool) -> dict[str, Any]:
    """Gradients of the losses of a prompt and of a text over its cache, or of the text's alone."""
    talk.model.zero_grad(set_to_none=True)
    labels = talk.prompt["input_ids"].clone()
    labels[labels >= talk.model.get_output_embeddings().weight.shape[0]] = -100  # Llama's image token
    with torch.set_grad_enabled(prompt_too):
        first = talk.model(**talk.prompt, labels=labels, use_cache=True)
    masks = talk.masks([0, 1], 0, 3)
    second = talk.model(input_ids=NEW, labels=NEW, past_key_values=first.past_key_values, **masks, **frames)
    (2 * second.loss + first.loss * prompt_too).backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in talk.model.named_parameters()}
    talk.model.zero_grad(set_to_none=True)
    return grads


@pytest.mark.parametrize("prompt_too", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_trains_through_a_cache(family: str, prompt_too: bool) -> None:
    talk = Talk(family)
    frames = {name: talk.prompt[name] for name in ("pixel_values",) if family == "idefics"}
    expected = two_passes(talk, frames, prompt_too)
    with patched(talk.model):
        found = two_passes(talk, frames, prompt_too)
    value, where = worst_gradient(found, expected)
    assert value < TOLERANCE, (value, where)


@torch.no_grad()
@pytest.mark.parametrize("native", ["per_head", "fused"])
def test_native_and_patched_continue_each_others_caches_on_one_process(native: str) -> None:
    talk = Talk(native)
    expected = talk.whole(NEW, [1, 0])
    native = talk.fill()
    with patched(talk.model):
        of_patched = talk.fill()
        native.reorder_cache(torch.tensor([1, 0]))
        assert error(talk.go_on(native, NEW, [1, 0]), expected) < TOLERANCE
    of_patched.reorder_cache(torch.tensor([1, 0]))
    assert error(talk.go_on(of_patched, NEW, [1, 0]), expected) < TOLERANCE


@torch.no_grad()
def test_caches_of_images_do_not_change_between_patched_and_unpatched_mllama() -> None:
    talk = Talk("mllama")
    unpatched = talk.fill()
    with patched(talk.model):
        of_patched = talk.fill()
        with pytest.raises(
            ConfigError, match=r"past_key_values holds K and V of images that an unpatched model comput"
        ):
            talk.go_on(unpatched, NEW, [0, 1])
    with pytest.raises(ConfigError, match="in the form of the patched model that filled it, the frames' K and V among"):
        talk.go_on(of_patched, NEW, [0, 1])
    of_patched.reset()
    if of_patched.get_seq_length():
        return  # older versions of transformers only fill a dynamic cache with zeros
    assert torch.equal(talk.go_on(talk.fill(of_patched), NEW, [0, 1]), talk.go_on(unpatched, NEW, [0, 1]))


@torch.no_grad()
def foreign_caches(rank: int, world: int) -> dict[str, str]:
    """What continuing a cache says that another kind of model, or another group, filled."""
    alone = [torch.distributed.new_group([member]) for member in range(world)][rank]
    found = {}
    for family, options in (("per_head", {}), ("idefics", {"shard_prompt_from": 2})):
        talk = Talk(family)
        native = talk.fill()
        with patched(talk.model, **options):
            cache = talk.fill()
            if family == "per_head":
                found["native, continued by patched"] = _message(talk, native)
        found[f"{family}, continued by unpatched"] = _message(talk, cache)
        with patched(talk.model, group=alone):
            found[f"{family}, continued by another group"] = _message(talk, cache)
    return found


def _message(talk: Talk, cache: Any) -> str:
    frames = {"pixel_values": talk.prompt["pixel_values"]} if talk.family == "idefics" else {}
    with pytest.raises(ConfigError) as caught:
        talk.go_on(cache, NEW, [0, 1], **frames)
    return str(caught.value)


def test_caches_of_several_ranks_are_refused_elsewhere() -> None:
    for rank, found in enumerate(ranks(2).run(foreign_caches, timeout=PATIENCE)):
        assert "unpatched model computed, all of them on this rank" in found.pop("native, continued by patched")
        assert "holds K and V of the frames of one rank only" in found.pop("per_head, continued by unpatched")
        assert "each rank its own tokens' only" in found.pop("idefics, continued by unpatched")
        for message in found.values():
            assert f"rank {rank} of 2 ranks then, rank 0 of 1 now" in message


@pytest.mark.parametrize("family", ["mllama", "per_head"])
def test_generate_takes_a_prefix_cache_with_the_whole_prompt(family: str) -> None:
    """As transformers documents it: the prompt's frames are passed again, and are those of the cache."""
    talk = Talk(family)
    given = talk.prompt_and(NEW)
    expected = talk.model.generate(**given, **settings())
    with patched(talk.model):
        with torch.no_grad():
            prefix = talk.fill()
        found = talk.model.generate(**given, past_key_values=copy.deepcopy(prefix), **settings())
        assert torch.equal(found, expected)
        with pytest.raises(ShapeError, match="other frames were passed|others already"):
            others = given | {"pixel_values": given["pixel_values"] + 1}
            talk.model.generate(**others, past_key_values=prefix, **settings())


@pytest.mark.parametrize("family", FAMILIES)
def test_several_sampled_sequences_of_a_prompt_are_the_unpatched_models(family: str) -> None:
    talk, given = Talk(family), settings(do_sample=True, temperature=1.3, top_k=20, num_return_sequences=3)
    torch.manual_seed(3)
    expected = talk.model.generate(**talk.prompt, **given)
    with patched(talk.model):
        torch.manual_seed(3)
        assert torch.equal(talk.model.generate(**talk.prompt, **given), expected)


@torch.no_grad()
def test_a_call_with_other_rows_than_the_cache_is_refused() -> None:
    for family in FAMILIES:
        talk = Talk(family)
        with patched(talk.model):
            cache = talk.fill()
            with pytest.raises(ShapeError, match="past_key_values has 2 rows and the call has 1"):
                talk.go_on(cache, NEW, [1])


def test_configs_stay_the_models_own_and_are_saved_as_before() -> None:
    for family in FAMILIES:
        model = Talk(family).model
        before = {name: vars(m).get("config") for name, m in model.named_modules()}
        saved = model.config.to_json_string()
        with patched(model):
            assert model.get_decoder().config is model.config.get_text_config()
            changed = {name for name, m in model.named_modules() if vars(m).get("config") is not before[name]}
            assert changed and all(name.endswith("self_attn") for name in changed), changed
            assert model.config.to_json_string() == saved
            twin = type(model)(model.config)  # of the same config object
            assert twin.config._attn_implementation == "sdpa" and "mllm_seqpar" not in repr(twin.config)
