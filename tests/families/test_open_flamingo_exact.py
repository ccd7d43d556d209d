"""Layer: gloo ranks. OpenFlamingo's loss, logits and every gradient are the unpatched model's, over four LMs."""

import pytest
import torch
from open_flamingo_cases import PATIENCE, Case, check, inputs_of, model_of, patched_rank, reference
from tiny_open_flamingo import LANGUAGE_MODELS, MPT_1B

from mllm_seqpar import patch_model, unpatch_model
from outcomes import error
from ranks import ranks

EVERYWHERE = {
    # the first sample speaks of more media than there are, the second of fewer; rows before any medium in both
    "two samples": Case(media=((1, 4, 7), (3,)), images=2),
    "all earlier media, one medium": Case(media=((2, 6),), images=1, immediate=False),
    "left padding": Case(media=((0, 5), (4, 9), (8,)), images=2, padding="left"),
}
"""For 1 to 4 ranks; with one medium, all ranks but the first are without."""

ONCE = {
    "right padding": Case(media=((0, 5), (4, 6)), images=2, padding="right"),
    "a sample without media tokens": Case(media=((), (2, 3)), images=2),
    "no media tokens at all": Case(media=((), ()), images=2),
    "all earlier media, two samples": Case(media=((1, 4, 7), (3,)), images=2, immediate=False),
    "uneven media": Case(media=((0, 1, 5, 6, 9),), images=5, length=17),
    "text shorter than the group": Case(media=((0,),), images=2, length=3),
    "every second layer": Case(every=2),
    "own media only": Case(media=((1, 4), (3,)), images=2, local_frames=True),
    "own media only, fewer than ranks": Case(media=((1, 4),), images=1, local_frames=True),
    "ring": Case(media=((1, 4, 7), (3,)), images=2).with_options(strategy="ring"),
    "ring, nothing recomputed": Case(immediate=False).with_options(strategy="ring", recompute_visual=False),
    "nothing recomputed, contiguous": Case().with_options(recompute_visual=False, text_layout="contiguous"),
    "striped": Case(media=((1, 4), (7,)), padding="left").with_options(text_layout="striped"),
    "local text": Case(media=((1, 4, 7), (3,)), images=2, padding="left").with_options(self_attention="local"),
    "local text, ring": Case(immediate=False).with_options(self_attention="local", strategy="ring"),
    "full logits in training": Case().with_options(logits="full"),
    "no labels": Case(media=((1, 4, 7), (3,)), images=2, labels=False),
}
"""Each with one language model and one number of ranks, both in turn."""


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("case", EVERYWHERE)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_equals_unpatched(world: int, case: str, name: str) -> None:
    what = EVERYWHERE[case]
    check(ranks(world).run(patched_rank, name, what, timeout=PATIENCE), reference(name, what), what)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_mpt_with_normalised_queries_and_keys_equals_unpatched(world: int) -> None:
    what = EVERYWHERE["left padding"]
    check(ranks(world).run(patched_rank, MPT_1B, what, timeout=PATIENCE), reference(MPT_1B, what), what)


@pytest.mark.parametrize(
    ("world", "name", "case"),
    sorted((2 + index % 3, LANGUAGE_MODELS[index % 4], case) for index, case in enumerate(ONCE)),
    ids=lambda value: str(value),
)
def test_equals_unpatched_in(world: int, name: str, case: str) -> None:
    what = ONCE[case]
    outcomes, expected = ranks(world).run(patched_rank, name, what, timeout=PATIENCE), reference(name, what)
    if "local text" in case or "full logits" in case or "no labels" in case:
        assert all(outcome.logits.shape == expected.logits.shape for outcome in outcomes)
    check(outcomes, expected, what)


def double_rank(rank: int, world: int, name: str, case: Case) -> dict[str, torch.Tensor]:
    model = model_of(name, case).double()
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs_of(case).items()}
    found = {}
    for patched in (False, True):
        model.zero_grad()
        if patched:
            patch_model(model)
        model(**inputs).loss.backward()
        for key, p in model.named_parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            if patched:
                torch.distributed.all_reduce(grad)
                found[key] = torch.stack([found[key], grad / world])
            else:
                found[key] = grad
    unpatch_model(model).float()
    return found


@pytest.mark.parametrize("name", ["opt", "llama", "gpt_neox"])  # MPT computes its softmax in float32 in every dtype
def test_gradients_in_float64(name: str) -> None:
    """Every single one, gates too, to far more digits than float32 has."""
    found = ranks(2).run(double_rank, name, EVERYWHERE["two samples"], timeout=PATIENCE)[0]
    for key, (expected, mine) in found.items():
        if not key.endswith("k_proj.bias") and not (name == "gpt_neox" and "query_key_value.bias" in key):
            assert error(mine, expected) < 1e-10, key


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_hidden_states(name: str) -> None:
    """On one process, as the language model's own class gives them."""
    case = EVERYWHERE["two samples"]
    model, inputs = model_of(name, case), inputs_of(case)
    found = []
    for patched in (False, True):
        if patched:
            patch_model(model)
        model._encode_vision_x(inputs["vision_x"])
        with torch.no_grad():
            out = model.lang_encoder(inputs["lang_x"], inputs["attention_mask"], output_hidden_states=True)
        model.lang_encoder.clear_conditioned_layers()
        found.append([*out.hidden_states, out.logits])
    unpatch_model(model)
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert error(mine, theirs) < 1e-5
