"""Layer: one process, loopback ranks. Decoding: what is encoded, projected and stored, and where; later turns."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation import stopping_criteria

from family_cases import BATCHES, FUSED, MOSS, PREVIEW
from family_harness import TOLERANCE, family_module, inputs_of, model_of, on_ranks, settings, slow_unless
from generation_cases import SHARDED
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.errors import AgreementError
from mllm_seqpar.models.mplug_owl3.media import cached_frames
from outcomes import error
from tiny_models.idefics import Case as Idefics
from tiny_models.mllama import PATCHES, TILES
from tiny_models.mllama import Case as Mllama
from tiny_models.mplug_owl3 import Case as Owl
from tiny_models.video_mllama import Case as Preview

OWL = Owl(labels=None)
MLLAMA = replace(BATCHES["mllama"], labels=None)


def _layers(decoder: Any, attention: str, projection: str) -> list[Any]:
    owners = [getattr(layer, attention, None) for layer in decoder.layers]
    return [getattr(owner, projection) for owner in owners if hasattr(owner, projection)]


# A prompt whose frames are sharded 2, 1, 1 over three ranks, each layer's projection of K (or K and V), the tower, and
# the number of visual tokens of a frame.
ONCE: dict[str, tuple[Any, Callable[[Any], list[Any]], Callable[[Any], Any], int]] = {
    "mplug_owl3": (
        Owl(frames=(4,), labels=None),
        lambda m: _layers(m.language_model.model, "self_attn", "v_kv_proj"),
        lambda m: m.vision_model.encoder.layers[0],
        4,
    ),
    "idefics": (
        Idefics(frames=(4,), mask="before", labels=None),
        lambda m: [block.cross_attn.k_proj for block in m.model.gated_cross_attn_layers],
        lambda m: m.model.vision_model.encoder.layers[0],
        5,
    ),
    "mllama": (
        Mllama(frames=((3, 1, 2, 3),), labels=None),
        lambda m: _layers(m.model.language_model, "cross_attn", "k_proj"),
        lambda m: m.model.vision_model.transformer,
        TILES * PATCHES,
    ),
}
ONCE["video_mllama"] = (
    Preview(frames=(4,), labels=None),
    ONCE["mllama"][1],
    lambda m: m.model.vision_model.transformer.layers[0],
    PATCHES,
)
if "open_flamingo" in BATCHES:
    _TWO = replace(BATCHES["open_flamingo"], frames=((1, 4, 7), (5,)), padding="left", labels=None)
    ONCE["open_flamingo"] = (
        _TWO.with_model(language_model="opt"),
        lambda m: [block.attn.to_kv for block in m.lang_encoder.gated_cross_attn_layers],
        lambda m: m.vision_encoder,
        64,
    )


def count_calls(model: Any, family: str) -> tuple[list[int], list[int]]:
    """Return two lists that the model's passes fill: visual tokens of each projection, frames of each tower call."""
    _, layers, tower, _ = ONCE[family]
    projected: list[int] = []
    encoded: list[int] = []
    for layer in layers(model):
        layer.register_forward_hook(lambda _, args, out: projected.append(out[..., 0].numel()))
    tower(model).register_forward_pre_hook(
        lambda _, args, kwargs: encoded.append(len(args[0] if args else kwargs["hidden_states"])), with_kwargs=True
    )
    return projected, encoded


STATIC = {"cache_implementation": "static"}  # which OpenFlamingo lacks
COUNTED = [
    (family, given, local)
    for family in ONCE
    for given, local in (({"num_beams": 3}, True), ({} if family == "open_flamingo" else STATIC, False))
]


@pytest.mark.parametrize(
    ("family", "given", "local"), slow_unless(lambda row: row[0] in ("mplug_owl3", "mllama") and row[2], COUNTED)
)
def test_frames_are_encoded_and_projected_once_on_their_owner_rank(family: str, given: dict, local: bool) -> None:
    """This holds for the whole prompt and 4 tokens, and for all beams of a sample."""
    case, layers, _, tokens = ONCE[family]

    def run(model: Any, inputs: dict[str, Any], _: Any) -> tuple[list[int], list[int]]:
        counts = count_calls(model, family)
        model.generate(**inputs, **settings(max_new_tokens=4, use_cache=True, **given))
        return counts

    number = len(layers(model_of(family, case)))
    for rank, (projected, encoded) in enumerate(on_ranks(3, family, replace(case, local_frames=local), run)):
        zigzag = family in ("mplug_owl3", "mllama", "video_mllama") and not local
        frames = ((1, 1, 2) if zigzag else (2, 1, 1))[rank]
        assert projected == [frames * tokens] * number and encoded == [frames]


def two_turns(model: Any, inputs: dict[str, Any]) -> tuple[list[Tensor], Any]:
    """Return the tokens of two turns, and a copy of the first turn's cache, with which the second continues."""
    first = model.generate(**inputs, **settings(return_dict_in_generate=True))
    # The cache lacks the last token, which the next call reads.
    asked = torch.cat([first.sequences, torch.arange(7, 15).view(2, 4)[: len(first.sequences)]], dim=1)
    more, cache = {}, copy.deepcopy(cache_of(first))
    if "cross_attention_mask" in inputs:
        mask = inputs["cross_attention_mask"]
        last = mask[:, -1:].expand(-1, asked.shape[1] - mask.shape[1], -1, -1)
        more = {"cross_attention_mask": torch.cat([mask, last], dim=1)}
    second = model.generate(asked, **cache_argument(cache_of(first)), **more, **settings())
    return [first.sequences, second], cache


TURNS = [
    (family, case, options)
    for family, case in (
        ("mplug_owl3", OWL),
        ("mllama", MLLAMA),
        ("moss_vl", replace(MOSS, mask="none", labels=None)),
        ("video_mllama", replace(PREVIEW, labels=None)),
    )
    for options in ({}, SHARDED)
]


@pytest.mark.parametrize(
    ("family", "case", "options"),
    slow_unless(lambda row: row[2] == SHARDED, [*TURNS, ("mplug_owl3", OWL.with_model(**FUSED), SHARDED)]),
)
def test_second_turn_continues_the_cache(family: str, case: Any, options: dict[str, Any]) -> None:
    """Each rank stores K and V of its own frames. With a sharded prompt, each text token is stored on one rank."""
    model = model_of(family, case)
    expected, _ = two_turns(model, inputs_of(family, case, model))
    found = on_ranks(3, family, case.with_options(**options), lambda m, x, comm: two_turns(m, x))
    for turns, _ in found:
        assert all(torch.equal(a, b) for a, b in zip(turns, expected, strict=True))
    if family == "mplug_owl3" and not options:
        stored = [{i: k.shape[2] for i, (k, _) in cached_frames(cache).visual_kv.states.items()} for _, cache in found]
        assert stored == [{0: frames * 4, 2: frames * 4} for frames in (1, 2, 2)]
    elif family == "mplug_owl3":
        total = expected[0].shape[1] - 1  # the last token has not been through the model
        assert all(cache.get_seq_length() == total for _, cache in found)
        for layer in range(4):
            stored = [cache.layers[layer].keys.shape[2] for _, cache in found]
            assert sum(stored) == total and max(stored) <= total // 3 + 3, stored


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["replicated text", "sharded text"])
def test_passes_by_hand_accept_a_mask_of_the_whole_text(options: dict[str, Any]) -> None:
    """Each pass of mllama reads the rows of its own tokens."""
    mask = (torch.rand(2, MLLAMA.length + 4, 3, TILES) < 0.4).long()
    mask[:, [1, MLLAMA.length + 1, MLLAMA.length + 2]] = 0  # these tokens attend to nothing
    ids = torch.randint(3, 90, (2, 3))

    @torch.no_grad()
    def passes(model: Any, inputs: dict[str, Any], _: Any = None) -> list[Tensor]:
        found, cache = [], None
        for part in (inputs, {"input_ids": ids[:, :2]}, {"input_ids": ids[:, 2:]}):
            out = model(**part | {"cross_attention_mask": mask}, **cache_argument(cache), use_cache=True)
            cache = cache_of(out)
            found.append(out.logits)
        return found

    model = model_of("mllama", MLLAMA)
    expected = passes(model, inputs_of("mllama", MLLAMA, model))
    for found in on_ranks(3, "mllama", MLLAMA.with_options(**options), passes):
        assert all(error(a, b) < TOLERANCE for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ([{"max_new_tokens": 3}, {"max_new_tokens": 4}], ["(?s)max_new_tokens=3.*max_new_tokens=4"] * 2),
        ([{}, {"max_time": 1.0}], ["(?s)settings: .*; rank 1: .*max_time=1.0"] * 2),
    ],
    ids=["different lengths", "time limit on one rank"],
)
def test_settings_that_would_hang_are_refused_on_every_rank(given: list[dict[str, Any]], messages: list[str]) -> None:
    def run(model: Any, inputs: dict[str, Any], comm: Any) -> None:
        with pytest.raises(ValueError, match=messages[comm.rank]):
            model.generate(**inputs, **settings(**given[comm.rank]))

    on_ranks(2, "mplug_owl3", OWL, run)


def test_unreadable_settings_of_one_rank_are_refused_on_every_rank() -> None:
    def run(model: Any, inputs: dict[str, Any], comm: Any) -> None:
        given = {"generation_config": {"max_new_tokens": 3}} if comm.rank == 1 else settings()
        with pytest.raises((AttributeError, AgreementError), match="to_dict"):
            model.generate(**inputs, **given)

    on_ranks(2, "mplug_owl3", OWL, run)


class After(StoppingCriteria):
    """Ends all rows after `count` tokens."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.count -= 1
        return torch.full((input_ids.shape[0],), self.count <= 0)


@pytest.mark.parametrize("beams", [1, 2])
def test_generation_ends_on_all_ranks_when_it_ends_on_rank_0(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Criteria of the caller, and time limits, may end it on the other ranks earlier, later or never."""
    clocks = threading.local()
    monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=lambda: clocks.now))

    def run(model: Any, inputs: dict[str, Any], comm: Any) -> list[Tensor]:
        def generate(**given: Any) -> Tensor:
            return model.generate(**inputs, **settings(num_beams=beams, **given))

        def later(ids: Tensor, scores: Tensor) -> Tensor:
            clocks.now += (1, 0.5, 5)[comm.rank]
            return scores

        clocks.now = 0.0
        found = [generate(stopping_criteria=[After((3, 1, 5)[comm.rank])])]
        return [*found, generate(max_time=2.5, logits_processor=[later])]

    whole, *_ = on_ranks(1, "mplug_owl3", OWL, lambda model, inputs, _: model.generate(**inputs, **settings()))
    for found in on_ranks(3, "mplug_owl3", OWL, run):
        assert [x.shape[1] for x in found] == [OWL.length + 3] * 2
        assert beams > 1 or all(torch.equal(x, whole[:, : OWL.length + 3]) for x in found)


def likelihoods(model: Any, case: Any, group: Any = None, local: bool = False) -> list[Tensor]:
    """Evaluate several texts against media that OpenFlamingo caches once, with and without a text cache."""
    flamingo = family_module("open_flamingo")
    inputs = flamingo.inputs_of(case)
    context, mask = inputs["lang_x"], inputs["attention_mask"]
    source = flamingo.local_frames(inputs, group) if local else inputs
    media = {name: x for name, x in source.items() if name.startswith("vis")}
    answers = [torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.tensor([[11, 4], [12, 13]]), context]
    model.cache_media(context, **media)
    found = []
    for answer in answers:  # the last has media tokens of its own
        out = model(None, answer, torch.ones_like(answer), labels=answer, clear_conditioned_layers=False)
        found.append(out.loss.detach())
    with torch.no_grad():
        first = model(None, context, mask, clear_conditioned_layers=False, use_cache=True)
        for answer in answers[:2]:
            whole = torch.cat([mask, torch.ones_like(answer)], dim=1)
            cached = {"past_key_values": copy.deepcopy(cache_of(first)), "use_cache": True}  # as `Flamingo` names it
            found.append(model(None, answer, whole, clear_conditioned_layers=False, **cached).logits)
    model.uncache_media()
    assert not model.lang_encoder.is_conditioned()
    with pytest.raises(AssertionError, match="Must provide either vision_x"):
        model(None, context, mask)
    return found


@pytest.mark.parametrize(
    ("ranks", "decoder", "immediate", "local"),
    slow_unless(
        lambda row: row[0] == 3,
        [(1, "opt", True, False), (3, "llama", False, True), (2, "mpt", True, True), (4, "gpt_neox", False, False)],
    ),
)
def test_cached_media_give_the_unpatched_likelihoods(ranks: int, decoder: str, immediate: bool, local: bool) -> None:
    family_module("open_flamingo")
    case = replace(BATCHES["open_flamingo"], frames=((1, 4, 7), (5,)))
    case = case.with_model(language_model=decoder, immediate=immediate)
    expected = likelihoods(model_of("open_flamingo", case), case)
    for found in on_ranks(ranks, "open_flamingo", case, lambda m, _, comm: likelihoods(m, case, comm, local)):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_cached_media_are_encoded_once_and_projected_once_for_a_text_cache() -> None:
    family_module("open_flamingo")
    case, _, _, tokens = ONCE["open_flamingo"]

    @torch.no_grad()
    def run(model: Any, _: Any, comm: Any) -> tuple[list[int], list[int]]:
        counts = count_calls(model, "open_flamingo")
        likelihoods(model, replace(case, labels="usual"), comm, True)
        return counts

    for rank, (projected, encoded) in enumerate(on_ranks(3, "open_flamingo", case, run)):
        frames = (2, 1, 1)[rank]
        assert encoded == [frames]
        assert projected == [tokens * frames] * 2 * (3 + 1)  # two layers: three texts without a cache, one cache


@pytest.mark.parametrize("decoder", ["llama", "mpt"])
def test_new_media_replace_those_of_a_filled_cache(decoder: str) -> None:
    flamingo = family_module("open_flamingo")
    case = ONCE["open_flamingo"][0].with_model(language_model=decoder)

    @torch.no_grad()
    def run(model: Any, inputs: dict[str, Any], _: Any = None) -> Tensor:
        cache = cache_of(model(**inputs, use_cache=True))
        answer = torch.tensor([[flamingo.MEDIA, 5, 6], [7, flamingo.MEDIA, 8]])
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(answer)], dim=1)
        return model(flamingo.pixels(2, 3, seed=5), answer, mask, past_key_values=cache, use_cache=True).logits

    expected = run(model_of("open_flamingo", case), flamingo.inputs_of(case))
    for found in on_ranks(2, "open_flamingo", case, run):
        assert error(found, expected) < TOLERANCE
