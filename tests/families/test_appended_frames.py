"""Layer: one process, loopback ranks. Frames that come with later passes over a cache: k passes equal one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from appended_frames import SIZES, TALKS, Talk, one_pass, passes
from family_harness import family_module, settings
from mllm_seqpar import FrameShard, patch_model
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.errors import ShapeError
from mllm_seqpar.models.cache import cache_state_of
from mllm_seqpar.patches.moss_vl import MossVLFamily
from mllm_seqpar.sharding import APPENDED
from moss_vl_reference import compute_in_float64
from outcomes import error
from selections import slow_unless

TOLERANCE = 1e-9
"""Float64 through a few layers; float32 would show as 1e-6."""


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_float64(monkeypatch)


@functools.cache
@torch.no_grad()
def expected(name: str) -> Tensor:
    """The logits of the unpatched model in one pass."""
    found: Tensor = TALKS[name].new_model()(**TALKS[name].inputs()).logits
    return found


@pytest.mark.parametrize("ranks", slow_unless(lambda ranks: ranks == 3, [1, 2, 3, 4]))
@pytest.mark.parametrize("name", TALKS)
def test_passes_that_bring_frames_equal_one_pass(name: str, ranks: int) -> None:
    talk = TALKS[name]

    def run(comm: Communicator) -> tuple[Tensor, list[int]]:
        logits, cache = passes(talk, patch_model(talk.new_model(), group=comm, shard_prompt_from=4))
        visual = cache_state_of(cache).visual_kv
        return logits, visual.units_by_rank(comm.size)

    for logits, units in run_loopback(ranks, run):
        assert error(logits, expected(name)) < TOLERANCE
        largest = {"mllama": 3, "moss_vl": 7}.get(talk.family, 1)  # units of a frame
        assert max(units) - min(units) <= largest * 2


FINAL = ((6, 2), (3, 0), (6, 2))
"""Two turns with frames, the second of which is answered."""
GENERATES = {name: replace(talk, sizes=FINAL) for name, talk in TALKS.items() if talk.sizes == SIZES}


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("gated", "mllama", "moss_vl"), GENERATES))
def test_generate_over_a_filled_cache_takes_new_frames(name: str) -> None:
    talk = GENERATES[name]
    answer = settings(max_new_tokens=5)

    @torch.no_grad()
    def run(comm: Communicator | None) -> Tensor:
        model = talk.new_model()
        whole = talk.inputs()
        if comm is None:
            return family_generate(talk.family)(model, **whole, **answer)
        patch_model(model, group=comm)
        cache = None
        for number in range(2):
            cache = cache_of(one_pass(talk, model, number, cache))
        new = talk.inputs(2)
        of_new = VISUAL if talk.family != "moss_vl" else new.keys() - {"input_ids"}
        given = {x: new.get(x, value) if x in of_new else value for x, value in whole.items()}
        return model.generate(**given, **cache_argument(cache), **answer)

    expected = run(None)
    for found in run_loopback(3, run):
        assert torch.equal(found, expected)


MOVED = slow_unless(
    lambda name: name in ("gated", "mllama", "moss_vl"),
    ("gated", "fused", "mllama", "idefics", "moss_vl", "moss_vl, other numbers"),
)
"""Whose rows of the cache move: for beams, with another order, and with a crop."""


@pytest.mark.parametrize("name", MOVED)
def test_beams_over_a_filled_cache_take_new_frames(name: str) -> None:
    """The rows of the cache are repeated for the beams, which share the frames of their sample."""
    talk, answer = GENERATES[name], settings(max_new_tokens=5, num_beams=3)

    @torch.no_grad()
    def run(comm: Communicator) -> Tensor:
        model, cache, new = patch_model(talk.new_model(), group=comm), None, talk.inputs(2)
        for number in range(2):
            cache = cache_of(one_pass(talk, model, number, cache))
        cache.batch_repeat_interleave(3)
        given = {**new, "input_ids": talk.inputs()["input_ids"]}
        return model.generate(**given, **cache_argument(cache), **answer)

    with torch.no_grad():
        expected = talk.new_model().generate(**talk.inputs(), **answer)
    for found in run_loopback(2, run):
        assert torch.equal(found, expected)


VISUAL = ("pixel_values", "vision_x", "aspect_ratio_ids", "aspect_ratio_mask", "vision_position_ids")


def family_generate(family: str) -> Callable[..., Tensor]:
    module = family_module(family)
    return getattr(module, "unpatched_generate", lambda model, **inputs: model.generate(**inputs))


NATIVE = tuple(name for name, talk in TALKS.items() if talk.family in ("mplug_owl3", "moss_vl"))


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("gated", "moss_vl"), NATIVE))
def test_native_models_append_frames_unpatched(name: str) -> None:
    """Passes of the unpatched and of the patched model continue the cache of each other."""
    talk = TALKS[name]
    for first_is_patched in (False, True):
        models = [talk.new_model(), patch_model(talk.new_model())]
        found, cache = [], None
        for number in range(len(talk.sizes)):
            out = one_pass(talk, models[(number // 2 + first_is_patched) % 2], number, cache)
            cache = cache_of(out)
            found.append(out.logits)
        assert error(torch.cat(found, 1), expected(name)) < TOLERANCE
    logits, cache = passes(talk, models[0])
    assert error(logits, expected(name)) < TOLERANCE
    number = len(talk.sizes) - 2
    cache.crop(talk.bounds[number] - cache.get_seq_length())
    logits, _ = passes(talk, models[0], cache, first=number)
    assert error(logits, expected(name)[:, talk.bounds[number] :]) < TOLERANCE


@pytest.mark.parametrize("name", [name for name in NATIVE if name in GENERATES])
def test_generate_of_native_models_appends_frames_unpatched(name: str) -> None:
    talk, model = GENERATES[name], GENERATES[name].new_model()
    answer, cache, whole, new = settings(max_new_tokens=5), None, talk.inputs(), talk.inputs(2)
    with torch.no_grad():
        expected = model.generate(**whole, **answer)
        for number in range(2):
            cache = cache_of(one_pass(talk, model, number, cache))
    given = {**new, "input_ids": whole["input_ids"]}
    assert torch.equal(model.generate(**given, **cache_argument(cache), **answer), expected)


PADDED: dict[str, tuple[Talk, list[tuple[int, int, int]]]] = {
    # One sample has only padding in a pass that brings frames to the other one, which has some behind its tokens.
    "with frames": (TALKS["moss_vl, other numbers"], [(1, 9, 14), (0, 13, 14)]),
    "without frames": (TALKS["moss_vl, other numbers"], [(0, 8, 9), (1, 6, 8), (1, 18, 19)]),
    "before frames": (Talk("moss_vl", ((3, 0), (2, 0), (1, 0), (4, 2), (2, 0))), [(1, 0, 1), (0, 3, 4), (1, 5, 6)]),
}
"""Padding of the whole text: sample, first token, and the token after the last."""


@pytest.mark.parametrize("name", PADDED)
def test_positions_continue_after_padding(name: str) -> None:
    talk, padding = PADDED[name]
    mask = torch.ones(talk.batch, talk.bounds[-1], dtype=torch.long)
    for sample, start, stop in padding:
        mask[sample, start:stop] = 0
    real = mask.bool()

    @torch.no_grad()
    def run(model: Any) -> Tensor:
        cache, found = None, dict[int, Tensor]()
        for number in (0, 1, 2, 3, 4, 3, 4):
            if number in found and (extra := cache.get_seq_length() - talk.bounds[number]):
                cache.crop(-extra)  # the text goes back to before its last frames
            out = one_pass(talk, model, number, cache, attention_mask=mask[:, : talk.bounds[number + 1]])
            cache = cache_of(out)
            assert number not in found or error(found[number], out.logits) < TOLERANCE
            found[number] = out.logits
        return torch.cat([found[number] for number in range(5)], 1)[real]

    with torch.no_grad():
        expected = talk.new_model()(**talk.inputs(), attention_mask=mask).logits[real]
    ranks = run_loopback(2, lambda comm: run(patch_model(talk.new_model(), group=comm)))
    for logits in (run(talk.new_model()), *ranks):
        assert error(logits, expected) < TOLERANCE


def test_frames_of_the_whole_conversation_are_refused_over_its_cache() -> None:
    talk = TALKS["moss_vl"]
    for model in (talk.new_model(), patch_model(talk.new_model())):
        cache = cache_of(one_pass(talk, model, 0, None))
        given = talk.inputs() | {"input_ids": talk.inputs(2)["input_ids"], "cross_attention_mask": None}
        with pytest.raises(ShapeError, match="pass only the frames of these"):
            model(**given, **cache_argument(cache), use_cache=True)


@pytest.mark.parametrize("name", MOVED)
def test_cropped_text_takes_its_appended_frames_along(name: str) -> None:
    """The text goes back to before its last frames, or those before, and the copy of the cache keeps them."""
    talk = TALKS[name]

    def run(comm: Communicator) -> None:
        model = patch_model(talk.new_model(), group=comm)
        cache = passes(talk, model)[1]
        for number in (3, 2):
            copied = copy.deepcopy(cache)
            copied.crop(talk.bounds[number] - copied.get_seq_length())
            logits, _ = passes(talk, model, copied, first=number)
            assert error(logits, expected(name)[:, talk.bounds[number] :]) < TOLERANCE
        assert cache_state_of(cache).visual_kv.total_frames == talk.frames * talk.batch - len(talk.missing)

    run_loopback(2, run)


@pytest.mark.parametrize("name", MOVED)
def test_rows_of_earlier_frames_follow_the_rows_of_the_cache(name: str) -> None:
    talk = TALKS[name]

    @torch.no_grad()
    def run(comm: Communicator) -> Tensor:
        model = patch_model(talk.new_model(), group=comm)
        cache = None
        for number in range(4):
            cache = cache_of(one_pass(talk, model, number, cache))
        cache.reorder_cache(torch.tensor([1, 0]))
        last = {x: value.flip(0) for x, value in talk.inputs(4).items()}
        return model(**last, **cache_argument(cache), use_cache=True).logits

    for logits in run_loopback(2, run):
        assert error(logits, expected(name)[:, talk.bounds[4] :].flip(0)) < TOLERANCE


def test_frames_that_follow_those_of_moved_rows_belong_to_the_rows_of_their_own_pass() -> None:
    """The rows are exchanged between two passes that bring frames."""
    talk = TALKS["gated"]

    @torch.no_grad()
    def run(comm: Communicator) -> Tensor:
        model = patch_model(talk.new_model(), group=comm)
        cache, found = None, []
        for number in range(5):
            inputs = talk.inputs(number)
            if number >= 2:
                size = talk.sizes[number][1]
                inputs["input_ids"] = inputs["input_ids"].flip(0)
                if size:
                    inputs["pixel_values"] = inputs["pixel_values"].unflatten(0, (2, size)).flip(0).flatten(0, 1)
            out = model(**inputs, **cache_argument(cache), use_cache=True)
            cache = cache_of(out)
            found.append(out.logits if number < 2 else out.logits.flip(0))
            if number == 1:
                cache.reorder_cache(torch.tensor([1, 0]))
        return torch.cat(found, 1)

    for logits in run_loopback(3, run):
        assert error(logits, expected("gated")) < TOLERANCE


@pytest.mark.parametrize("layout", ["contiguous", APPENDED])
def test_shards_of_later_frames_count_the_frames_of_their_pass(layout: str) -> None:
    """Callers shard the frames of a pass by themselves, or so that they balance those of the cache."""
    talk = TALKS["one frame each"]

    @torch.no_grad()
    def run(comm: Communicator) -> Tensor:
        model = patch_model(talk.new_model(), group=comm)
        cache, found = None, []
        for number in range(len(talk.sizes)):
            inputs = talk.inputs(number)
            held = None
            if layout == APPENDED:
                held = [0] * comm.size if cache is None else cache_state_of(cache).visual_kv.units_by_rank(comm.size)
            shard = FrameShard.of(1, comm, held=held)
            inputs["pixel_values"] = inputs["pixel_values"][shard.start : shard.stop]
            out = model(**inputs, **cache_argument(cache), visual_shard=shard, use_cache=True)
            cache = cache_of(out)
            found.append(out.logits)
        held = cache_state_of(cache).visual_kv.units_by_rank(comm.size)
        assert held == ((4, 0, 0) if layout == "contiguous" else (2, 1, 1))
        return torch.cat(found, 1)

    for logits in run_loopback(3, run):
        assert error(logits, expected("one frame each")) < TOLERANCE


@pytest.mark.parametrize("name", ["gated", "mllama"])
def test_appended_frames_in_host_memory(name: str) -> None:
    talk = TALKS[name]
    for logits in run_loopback(
        2, lambda comm: passes(talk, patch_model(talk.new_model(), group=comm, visual_offload="cpu"))[0]
    ):
        assert error(logits, expected(name)) < TOLERANCE


@pytest.mark.parametrize("family", ["mplug_owl3", "moss_vl"])
def test_k_and_v_of_earlier_frames_stay_where_they_are(family: str) -> None:
    """A later pass sends what a pass without frames sends, and earlier K and V are the tensors of their own pass."""
    talk = Talk(family, ((6, 2), (3, 0), (5, 3), (5, 0)))

    @torch.no_grad()
    def run(comm: Communicator) -> tuple[dict[str, int], dict[str, int]]:
        model = patch_model(talk.new_model(), group=comm)
        cache, sent = None, list[dict[str, int]]()
        for number in range(4):
            comm.bytes.reset()
            cache = cache_of(one_pass(talk, model, number, cache))
            sent.append({name: size for name, size in comm.bytes.sent.items() if size})
            if number == 0:
                first = cache_state_of(cache).visual_kv
                stored = {layer: [x.data_ptr() for x in states] for layer, states in first.states.items()}
        parts = cache_state_of(cache).visual_kv.parts
        assert parts[0] is first and len(parts) == 2
        assert stored == {layer: [x.data_ptr() for x in states] for layer, states in first.states.items()}
        return sent[2], sent[3]

    for with_frames, without in run_loopback(2, run):
        results = {name: size for name, size in without.items() if "check" not in name}
        assert results and {name: with_frames[name] for name in results} == results, (with_frames, without)
        assert (
            sum(with_frames.values()) - sum(without.values()) < 500
        )  # numbers by which the ranks compare their inputs


def test_inputs_of_an_earlier_pass_have_no_frames_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier: list[Any] = []
    visibility = MossVLFamily.visibility

    def record(self: Any, inputs: Any, *args: Any) -> Any:
        if inputs.frames is None:
            earlier.append(inputs)
        return visibility(self, inputs, *args)

    monkeypatch.setattr(MossVLFamily, "visibility", record)
    passes(TALKS["moss_vl"], patch_model(TALKS["moss_vl"].new_model()))
    assert earlier
    for inputs in earlier:
        assert inputs.grids == (None, []) and inputs.units_per_frame == 2 and inputs.total_frames == 0
        assert inputs.past_length > 0 and inputs.tokens.shape[0] == inputs.batch
