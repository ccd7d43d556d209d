"""Layer: gloo ranks. `generate` gives every rank the tokens of the unpatched model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from patched import GATES, PATIENCE, Case, inputs_of, local_frames, model_of

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.models.mplug_owl3.visual_inputs import visual_cache
from ranks import ranks

NEW = 6

ONE = Case(frames=(5,), labels=None)
TWO = Case(frames=(4, 1), padding="left", labels=None)
FEATURES = Case(frames=(2, 3), features=True, labels=None)
TEXT = Case(frames=(0, 0), labels=None)
WINDOW = Case(frames=(3,), labels=None, model={"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1})

CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "greedy": (ONE, {}),
    "greedy, padded batch": (TWO, {}),
    "sampled": (TWO, {"do_sample": True, "temperature": 1.3, "top_k": 50}),
    "beams": (ONE, {"num_beams": 3}),
    "beams, padded batch": (TWO, {"num_beams": 2, "num_return_sequences": 2}),
    "no cache": (TWO, {"use_cache": False}),
    "no cache, local logits": (ONE.with_options(logits="local"), {"use_cache": False}),
    "features": (FEATURES, {}),
    "one frame": (Case(frames=(1,), length=6, labels=None), {}),
    "text only": (TEXT, {}),
    "text only, no cache": (TEXT, {"use_cache": False}),
    "sliding window": (WINDOW, {}),
    "offsets": (Case(frames=(2, 1), offsets=True, labels=None), {}),
    "ring, local text": (ONE.with_options(strategy="ring", self_attention="local"), {}),
    "local text, no cache": (TWO.with_options(self_attention="local"), {"use_cache": False}),
}
CASES |= {
    "static cache": (ONE, {"cache_implementation": "static"}),
    "static cache, padded batch": (TWO, {"cache_implementation": "static"}),
    "static cache, text only": (TEXT, {"cache_implementation": "static"}),
    "looked up in repetitions": (replace(ONE, length=40), {"prompt_lookup_num_tokens": 2, "max_new_tokens": 30}),
}
DEALT = {"shard_prompt_from": 2}
CASES |= {
    "dealt prompt": (ONE.with_options(**DEALT), {}),
    "dealt prompt, padded batch": (TWO.with_options(**DEALT, text_layout="striped"), {}),
    "dealt prompt, sampled": (TWO.with_options(**DEALT), {"do_sample": True, "temperature": 1.3, "top_k": 50}),
    "dealt prompt, beams": (ONE.with_options(**DEALT, text_layout="contiguous"), {"num_beams": 3}),
    "dealt prompt, several beams": (TWO.with_options(**DEALT), {"num_beams": 2, "num_return_sequences": 2}),
    "dealt prompt, text only": (TEXT.with_options(**DEALT), {}),
    "dealt prompt, sliding window": (WINDOW.with_options(**DEALT), {}),
    "dealt prompt, looked up": (ONE.with_options(**DEALT), {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12}),
    "prompt looked up": (ONE, {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12}),
}
"""The prompt is read with its text dealt to the ranks, and the text's K and V stay dealt."""
LOCAL = (
    "greedy, padded batch",
    "looked up in repetitions",
    "dealt prompt",
    "features",
    "no cache",
    "beams",
    "one frame",
)
"""Run a second time with each rank passing its own frames only."""


def settings(**given: Any) -> dict[str, Any]:
    return {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | given


def tokens_of_all(rank: int, world: int, gate: str | None) -> dict[str, torch.Tensor]:
    found = {}
    for name, (case, given) in CASES.items():
        model = model_of(gate, case)
        inputs = inputs_of(gate, case, model)
        patch_model(model, **case.options)
        torch.manual_seed(17 if rank == 0 else 1000 + rank)  # the other ranks were not seeded alike
        found[name] = model.generate(**inputs, **settings(**given))
        if name in LOCAL:
            found[f"{name}, own frames"] = model.generate(**local_frames(inputs), **settings(**given))
        unpatch_model(model)
    return found


@pytest.mark.parametrize("gate,world", [("per_head", 1), ("per_head", 2), ("per_head", 4), (None, 1), (None, 3)])
def test_tokens(gate: str | None, world: int) -> None:
    outcomes = ranks(world).run(tokens_of_all, gate, timeout=PATIENCE)
    for name, (case, given) in CASES.items():
        model = model_of(gate, case)
        torch.manual_seed(17)
        expected = model.generate(**inputs_of(gate, case, model), **settings(**given))
        for found in outcomes:
            assert torch.equal(found[name], expected), name
            if name in LOCAL:
                assert torch.equal(found[f"{name}, own frames"], expected), name


def conversation(model: Any, inputs: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Two turns: the second goes on with the cache of the first and passes no frames. And what was projected."""
    projected: list[int] = []
    for layer in model.language_model.model.layers:
        if hasattr(layer.self_attn, "v_kv_proj"):
            layer.self_attn.v_kv_proj.register_forward_hook(lambda _, args, out: projected.append(out[..., 0].numel()))
    first = model.generate(**inputs, **settings(return_dict_in_generate=True))
    # as a chat does: the cache lacks the last token, which the next call takes from the ids
    asked = torch.cat([first.sequences, torch.tensor([[7, 8, 9, 10]])], dim=1)
    frames_before = visual_cache(first.past_key_values)
    second = model.generate(asked, past_key_values=first.past_key_values, **settings())
    for layer in model.language_model.model.layers:
        if hasattr(layer.self_attn, "v_kv_proj"):
            layer.self_attn.v_kv_proj._forward_hooks.clear()
    kept = {index: k.shape[2] for index, (k, _) in frames_before.states.items()}
    return [first.sequences, second], {"projected": projected, "kept": kept}


def patched_conversation(rank: int, world: int, gate: str | None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    model = model_of(gate, ONE)
    patch_model(model)
    try:
        return conversation(model, inputs_of(gate, ONE, model))
    finally:
        unpatch_model(model)


@pytest.mark.parametrize("gate", GATES)
def test_a_conversation_goes_on_with_the_cache(gate: str | None) -> None:
    """And K and V of the frames are projected once per layer, and kept by the rank whose frames they are."""
    expected, _ = conversation(model_of(gate, ONE), inputs_of(gate, ONE, model_of(gate, ONE)))
    for rank, (found, counts) in enumerate(ranks(3).run(patched_conversation, gate, timeout=PATIENCE)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        keys = [2, 2, 1][rank] * 4
        assert counts == {"projected": [keys, keys], "kept": {0: keys, 2: keys}}


def dealt_conversation(rank: int, world: int, gate: str | None) -> tuple[list[torch.Tensor], list[int]]:
    """The two turns over a dealt cache, and how many text tokens' K this rank keeps in each layer after the first."""
    case = ONE.with_options(shard_prompt_from=2)
    model = model_of(gate, case)
    inputs = inputs_of(gate, case, model)
    patch_model(model, **case.options)
    try:
        first = model.generate(**inputs, **settings(return_dict_in_generate=True))
        kept = [layer.keys.shape[2] for layer in first.past_key_values.layers[:4]]
        assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
        asked = torch.cat([first.sequences, torch.tensor([[7, 8, 9, 10]])], dim=1)
        second = model.generate(asked, past_key_values=first.past_key_values, **settings())
        return [first.sequences, second], kept
    finally:
        unpatch_model(model)


@pytest.mark.parametrize("gate", GATES)
def test_a_dealt_prompt_stays_dealt(gate: str | None) -> None:
    """Every token's K and V are on one rank only, about as many on each; and a second turn goes on with them."""
    expected, _ = conversation(model_of(gate, ONE), inputs_of(gate, ONE, model_of(gate, ONE)))
    outcomes = ranks(3).run(dealt_conversation, gate, timeout=PATIENCE)
    for found, _ in outcomes:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    in_all = expected[0].shape[1] - 1  # the last token has not been through the model
    for layer in range(4):
        kept = [counts[layer] for _, counts in outcomes]
        assert sum(kept) == in_all and max(kept) <= in_all // 3 + 3, kept


def different_settings(rank: int, world: int, given: list[dict[str, Any]]) -> None:
    model = model_of("per_head", ONE)
    patch_model(model)
    try:
        model.generate(**inputs_of("per_head", ONE, model), **settings(**given[rank]))
    finally:
        unpatch_model(model)


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ([{"max_new_tokens": 3}, {"max_new_tokens": 4}], ["max_new_tokens=3", "max_new_tokens=4"]),
        ([{"max_time": 1.0}, {"max_time": 1.0}], ["max_time=1.0", "use max_new_tokens"]),
        ([{}, {"max_time": 1.0}], ["rank 1 of the group failed", "max_time=1.0"]),
    ],
    ids=["other length", "by the clock", "by one clock"],
)
def test_settings_that_would_hang(given: list[dict[str, Any]], messages: list[str]) -> None:
    errors = ranks(2).errors(different_settings, given, timeout=PATIENCE)
    assert all(error is not None for error in errors)
    assert all(any(message in str(error) for error in errors) for message in messages), errors
