"""Texts in several passes over a cache, the frames that come with each, and the passes of any family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from family_cases import BATCHES, FUSED
from family_harness import family_module, model_of
from mllm_seqpar._compat import cache_argument, cache_of

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
