"""Layer: one process, loopback ranks. Frames that come with later passes over a cache: k passes equal one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from family_cases import BATCHES, FUSED
from family_harness import family_module, model_of, settings
from mllm_seqpar import FrameShard, patch_model
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.errors import ShapeError
from mllm_seqpar.models.cache import cache_state_of
from mllm_seqpar.sharding import APPENDED
from moss_vl_reference import compute_in_float64
from outcomes import error

TOLERANCE = 1e-9
"""Float64 through a few layers; float32 would show as 1e-6."""

SIZES = ((6, 2), (3, 0), (5, 1), (4, 3), (2, 0))
"""The passes: tokens, and the frames that come with them in each sample."""

UNEVEN = ((0, 1), (1, 2), (0, 3), (0, 5))
"""Frames that samples lack: each has another number in each pass; in one, sample 1 has none."""


@dataclass(frozen=True)
class Talk:
    """A text in several passes.

    `starts` has the place of each frame of each sample in the whole text. `missing` are (sample, frame) of frames that
    a sample does not have, for families with frames in one flat list.
    """

    family: str
    sizes: tuple[tuple[int, int], ...] = SIZES
    batch: int = 2
    model: Any = None
    missing: tuple[tuple[int, int], ...] = ()

    @property
    def bounds(self) -> list[int]:
        lengths = torch.tensor([0, *(tokens for tokens, _ in self.sizes)])
        return lengths.cumsum(0).tolist()

    def starts(self, sample: int) -> list[int]:
        """Frames begin with the first token of a pass, so that Llama's rows all attend to some tile."""
        found = []
        for first, (tokens, frames) in zip(self.bounds, self.sizes, strict=False):
            places = [first + number * tokens // max(1, frames) for number in range(frames)]
            found += [place + (sample if place > first else 0) for place in places]
        return [place for number, place in enumerate(found) if (sample, number) not in self.missing]

    def numbers(self, sample: int, frames: slice) -> list[int]:
        """Return the numbers of the frames that a sample has among these."""
        return [number for number in range(self.frames)[frames] if (sample, number) not in self.missing]

    @property
    def frames(self) -> int:
        return sum(frames for _, frames in self.sizes)

    def new_model(self) -> Any:
        from dataclasses import replace

        case = replace(BATCHES[self.family], double=True)
        return model_of(self.family, case if self.model is None else case.with_model(**self.model)).double()

    def ids(self, token: int) -> Tensor:
        ids = torch.randint(3, 60, (self.batch, self.bounds[-1]), generator=torch.Generator().manual_seed(5))
        for sample in range(self.batch):
            ids[sample, self.starts(sample)] = token
        return ids

    def pixels(self, *shape: int) -> Tensor:
        """(samples, frames, ...), one video for each sample."""
        generator = torch.Generator().manual_seed(7)
        return torch.randn(self.batch, self.frames, *shape, generator=generator, dtype=torch.float64)

    def of_pass(self, number: int) -> slice:
        """The frames of each sample that come with a pass."""
        before = sum(frames for _, frames in self.sizes[:number])
        return slice(before, before + self.sizes[number][1])

    def inputs(self, number: int | None = None) -> dict[str, Any]:
        """Return the arguments of one pass, or of one pass over the whole text."""
        rows = slice(None) if number is None else slice(*self.bounds[number : number + 2])
        new = slice(None) if number is None else self.of_pass(number)
        if self.family == "moss_vl":
            return _moss(self, rows, range(len(self.sizes)) if number is None else [number])
        seen = self.frames if number is None else new.stop
        text, visual = _OF_FAMILY[self.family](self, rows, seen)
        visual = {name: x[:, new] for name, x in visual.items()}
        if any(x.shape[1] == 0 for x in visual.values()):
            visual = {}
        elif self.family == "mplug_owl3":
            (pixels,) = (x for x in _OF_FAMILY[self.family](self, rows, seen)[1].values())
            own = [(sample, frame) for sample in range(self.batch) for frame in self.numbers(sample, new)]
            visual = {"pixel_values": pixels[tuple(zip(*own, strict=True))]}
        return text | visual


def _visible(talk: Talk, rows: slice, seen: int) -> Tensor:
    """(B, L, frames) bool: a row attends to every frame that begins at or before it."""
    row = torch.arange(talk.bounds[-1])[None, :, None]
    starts = torch.tensor([talk.starts(sample) for sample in range(talk.batch)])
    return (starts[:, None] <= row)[:, rows, :seen]


def _owl(talk: Talk, rows: slice, seen: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    module = family_module("mplug_owl3")
    size = module.IMAGE_SIZE
    return {"input_ids": talk.ids(module.IMAGE_TOKEN)[:, rows]}, {"pixel_values": talk.pixels(3, size, size)}


def _llama(talk: Talk, rows: slice, seen: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    module = family_module("mllama")
    tiles = module.TILES
    ratios = (torch.arange(talk.batch * talk.frames) % 3 + 1).view(talk.batch, -1)
    held = torch.arange(tiles) < ratios[..., None]
    mask = _visible(talk, rows, seen)[..., None] & held[:, None, :seen]
    visual = {
        "pixel_values": talk.pixels(tiles, 3, 28, 28),
        "aspect_ratio_ids": ratios,
        "aspect_ratio_mask": held.long(),
    }
    return {"input_ids": talk.ids(module.IMAGE)[:, rows], "cross_attention_mask": mask.long()}, visual


def _video_llama(talk: Talk, rows: slice, seen: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    module = family_module("video_mllama")
    mask, ones = _visible(talk, rows, seen)[..., None], torch.ones(talk.batch, talk.frames, dtype=torch.long)
    visual = {
        "pixel_values": talk.pixels(1, 3, module.SIDE, module.SIDE),
        "aspect_ratio_ids": ones,
        "aspect_ratio_mask": ones[..., None],
        "vision_position_ids": torch.tensor([talk.starts(sample) for sample in range(talk.batch)]),
    }
    return {"input_ids": talk.ids(module.IMAGE)[:, rows], "cross_attention_mask": mask.long()}, visual


def _idefics(talk: Talk, rows: slice, seen: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    mask = _visible(talk, rows, seen).long()
    return {"input_ids": talk.ids(9)[:, rows], "image_attention_mask": mask}, {"pixel_values": talk.pixels(3, 16, 16)}


def _flamingo(talk: Talk, rows: slice, seen: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    module = family_module("open_flamingo")
    ids = talk.ids(module.MEDIA)
    mask = torch.ones_like(ids)[:, : rows.stop]
    shape = module.pixels(1, 1).shape[2:]
    return {"lang_x": ids[:, rows], "attention_mask": mask}, {"vision_x": talk.pixels(*shape)}


GRIDS = ((4, 6), (2, 2), (6, 4), (2, 8), (4, 4))
"""Height and width of the frames of MOSS-VL, in patches."""


def _moss(talk: Talk, rows: slice, passes: Sequence[int]) -> dict[str, Any]:
    """Return the inputs of passes; the frames that come with one are a video, or images of unequal size."""
    module = family_module("moss_vl")
    ids = talk.ids(module.IMAGE)[:, rows]
    grids: list[tuple[int, int, int]] = []
    patches, media = list[Tensor](), []
    for sample in range(talk.batch):
        before = len(grids)
        for number in passes:
            frames = talk.numbers(sample, talk.of_pass(number))
            sizes = [GRIDS[(number + sample + frame) % len(GRIDS)] for frame in frames]
            if (number + sample) % 2 and frames:
                sizes = sizes[:1] * len(frames)
                grids.append((len(frames), *sizes[0]))
            else:
                grids += [(1, *size) for size in sizes]
            for frame, (height, width) in zip(frames, sizes, strict=True):
                generator = torch.Generator().manual_seed(100 * sample + frame)
                values = 3 * module.PATCH**2
                patches.append(torch.randn(height * width, values, generator=generator, dtype=torch.float64))
        media.append(len(grids) - before)
    if not grids:
        return {"input_ids": ids}
    visual = {"pixel_values": torch.cat(patches), "grid_thw": torch.tensor(grids), "media_nums_per_sample": media}
    return {"input_ids": ids, "cross_attention_mask": (ids == module.IMAGE).long().cumsum(1), **visual}


_OF_FAMILY: dict[str, Callable[[Talk, slice, int], Any]] = {
    "mplug_owl3": _owl,
    "mllama": _llama,
    "video_mllama": _video_llama,
    "idefics": _idefics,
    "open_flamingo": _flamingo,
}
TALKS: dict[str, Talk] = {
    "gated": Talk("mplug_owl3"),
    "fused": Talk("mplug_owl3", model=FUSED),
    "mllama": Talk("mllama"),
    "video_mllama": Talk("video_mllama"),
    "idefics": Talk("idefics"),
    "moss_vl": Talk("moss_vl"),
    "moss_vl, other numbers": Talk("moss_vl", missing=UNEVEN),
    "gated, other numbers": Talk("mplug_owl3", missing=UNEVEN),
    # MPT, the default, has a softmax in float32.
    **({"open_flamingo": Talk("open_flamingo", model={"language_model": "opt"})} if "open_flamingo" in BATCHES else {}),
    "one frame each": Talk("mplug_owl3", ((3, 1), (2, 1), (2, 1), (3, 1)), batch=1),
    "moss_vl, text first": Talk("moss_vl", ((3, 0), (4, 2), (6, 3))),
    "text first": Talk("mplug_owl3", ((3, 0), (4, 2), (6, 3))),
}


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_float64(monkeypatch)


@functools.cache
@torch.no_grad()
def expected(name: str) -> Tensor:
    """The logits of the unpatched model in one pass."""
    found: Tensor = TALKS[name].new_model()(**TALKS[name].inputs()).logits
    return found


def one_pass(talk: Talk, model: Any, number: int, cache: Any, **more: Any) -> Any:
    """Return the output of one pass over the cache. OpenFlamingo keeps its media for passes without any."""
    inputs = talk.inputs(number) | cache_argument(cache) | more
    if talk.family == "open_flamingo":
        model.lang_encoder._use_cached_vision_x = "vision_x" not in inputs
        inputs = {"vision_x": None, "clear_conditioned_layers": False} | inputs
    out = model(**inputs, use_cache=True)
    if talk.family == "open_flamingo":
        model.lang_encoder._use_cached_vision_x = False
    return out


@torch.no_grad()
def passes(talk: Talk, model: Any, cache: Any = None, first: int = 0) -> tuple[Tensor, Any]:
    """Return the logits of all passes, and the cache."""
    found = []
    for number in range(first, len(talk.sizes)):
        out = one_pass(talk, model, number, cache)
        cache = cache_of(out)
        found.append(out.logits)
    return torch.cat(found, 1), cache


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
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
GENERATES = {name: Talk(talk.family, FINAL, model=talk.model) for name, talk in TALKS.items() if talk.sizes == SIZES}


@pytest.mark.parametrize("name", GENERATES)
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


VISUAL = ("pixel_values", "vision_x", "aspect_ratio_ids", "aspect_ratio_mask", "vision_position_ids")


def family_generate(family: str) -> Callable[..., Tensor]:
    module = family_module(family)
    return getattr(module, "unpatched_generate", lambda model, **inputs: model.generate(**inputs))


MOVED = ("gated", "fused", "mllama", "idefics", "moss_vl", "moss_vl, other numbers")


NATIVE = tuple(name for name, talk in TALKS.items() if talk.family in ("mplug_owl3", "moss_vl"))


@pytest.mark.parametrize("name", NATIVE)
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
