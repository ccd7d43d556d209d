"""The batches on which every family is compared with its unpatched model, by family and name, with a number of ranks.

A case fails for its own reason and not for its number of ranks, so 1 to 4 ranks are spread over the cases, and what
does not depend on the family or the kind of layer is spread over these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mllm_seqpar import config
from tiny_models.idefics import Case as Idefics
from tiny_models.mllama import Case as Mllama
from tiny_models.moss_vl import Case as Moss
from tiny_models.mplug_owl3 import Case as Owl
from tiny_models.qwen2_5_vl import TAKES_EMBEDDINGS
from tiny_models.qwen2_5_vl import Case as Qwen2_5
from tiny_models.qwen3_vl import Case as Qwen3
from tiny_models.video_mllama import Case as Preview

try:
    from tiny_models.open_flamingo import LANGUAGE_MODELS, MPT_1B
    from tiny_models.open_flamingo import Case as Flamingo
except ImportError:  # scripts/test.sh installs it without its dependencies, because it pins an old torch
    LANGUAGE_MODELS = ()

FUSED = {"gate": None}
"""mPLUG-Owl3 with one softmax over text and frames; the default is a gate per head."""
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
LONG_WINDOW = SLIDING | {"sliding_window": 6}
RESAMPLER = {"use_resampler": True}
BASE, INSTRUCT = {"additional_vocab_size": 2}, {"additional_vocab_size": 3}
"""The published base and instruct models have more columns of logits than `vocab_size`."""
COUNTED = {"num_items_in_batch": 37}
SILENCE = {"silence_token_id": 43, "silence_token_weight": 0.1}
"""A token that is a target in the batches of MOSS-Video-Preview."""

# The batch that most cases of a family use: two samples with different numbers of frames.
OWL = Owl(frames=(4, 1))
IDEFICS = Idefics(frames=(4, 1), mask="holes")
MLLAMA = Mllama(frames=((2, 3, 1), (1,)))
MOSS = Moss(frames=(((3, 4, 6), (8, 4)), ((2, 6, 2),)))
PREVIEW = Preview(frames=(4, 1))
# Two samples with a video and images of different sizes.
QWEN: dict[str, Any] = {"frames": (((3, 4, 6), (6, 4)), ((2, 4, 4), (1, 2, 2), (4, 4))), "length": 52}
QWENS: dict[str, Any] = {"qwen2_5_vl": Qwen2_5(**QWEN), "qwen3_vl": Qwen3(**QWEN)}
"""The decoder-only families, which have no strategy for cross-attention."""
BATCHES: dict[str, Any] = {
    "mplug_owl3": OWL,
    "idefics": IDEFICS,
    "mllama": MLLAMA,
    "moss_vl": MOSS,
    "video_mllama": PREVIEW,
}
BATCHES |= QWENS
PADDED: dict[str, Any] = {
    "mplug_owl3": Owl(frames=(2, 3, 1), padding="left"),
    "idefics": Idefics(frames=(2, 3, 1), padding="left", mask="before"),
    "mllama": Mllama(frames=((2, 3), (1,), (3,)), padding="left"),
    "moss_vl": Moss(frames=(((2, 4, 6),), ((6, 2), (4, 4)), ((2, 12),)), padding="left"),
    "video_mllama": Preview(frames=(2, 3, 1), padding="left"),
    **{family: replace(case, padding="left") for family, case in QWENS.items()},
}
if LANGUAGE_MODELS:
    # The first sample has more media tokens than media, the second fewer; both have tokens before any medium.
    FLAMINGO = Flamingo(frames=((1, 4, 7), (3,)), media=2)
    BATCHES["open_flamingo"] = FLAMINGO
    PADDED["open_flamingo"] = Flamingo(frames=((0, 5), (4, 9), (8,)), media=2, padding="left")


CROSS_ATTENTION = tuple(family for family in BATCHES if family not in QWENS)
"""The families that attend to frames by cross-attention."""


def named_case(name: str) -> tuple[str, Any]:
    """Return the family and the case of a family's name, or of the name of OpenFlamingo's language model."""
    if name in BATCHES:
        return name, BATCHES[name]
    if not LANGUAGE_MODELS:
        pytest.skip("open_flamingo is not installed")
    return "open_flamingo", FLAMINGO.with_model(language_model=name)


def shared(family: str) -> dict[str, Any]:
    """Return the cases that all families have, and every second one of those that differ in options only."""
    batch, padded = BATCHES[family], PADDED[family]
    stored = {"recompute_visual": False}
    cases = {
        "two samples": batch,
        "left padding": padded,
        "right padding, few targets": replace(batch, padding="right", labels="few"),
        "local frames": replace(batch, local_frames=True),
    }
    if family not in QWENS:  # which refuse it
        cases["local frames, zigzag"] = replace(batch, local_frames=True, frame_layout="zigzag")
    options = {
        "no labels": replace(batch, labels=None),
        "few targets, no logits": replace(batch, padding="right", labels="few").with_options(logits="none"),
        "local text, no logits": padded.with_options(self_attention="local", logits="none"),
        "ring, striped text": batch.with_options(strategy="ring", text_layout="striped"),
        "contiguous text, K and V stored": batch.with_options(text_layout="contiguous", **stored),
        "local text, ring": padded.with_options(self_attention="local", strategy="ring", **stored),
        "all logits in training, chunks": batch.with_options(logits="full", mlp_chunk_size=5, vision_chunk_size=1),
    }
    names = list(options)[list(BATCHES).index(family) % 2 :: 2] if family != "mplug_owl3" else list(options)
    return {name: for_family(family, case) for name, case in (cases | {x: options[x] for x in names}).items()}


def for_family(family: str, case: Any) -> Any:
    """Return the case without a strategy for cross-attention if the family has none."""
    if family not in QWENS:
        return case
    return replace(case, options={name: value for name, value in case.options.items() if name != "strategy"})


def _owl() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return cases of every kind of hyper layer, and cases that do not depend on the kind."""
    positions = torch.cat([torch.arange(5), torch.arange(8)])[None]
    every_kind = {
        "one sample": Owl(),
        "a sample without frames": Owl(frames=(0, 3), length=10),
        "two tokens, no frames": Owl(frames=(0,), length=2, labels="every row"),  # one key: q has no gradient
        "packed sequences": Owl(frames=(3,), packed=(5, 8)),
        "positions that look packed, with a cache": Owl(frames=(3, 1), arguments={"position_ids": positions}),
        "sliding window": Owl(frames=(3, 2), model=SLIDING),
        "sliding window, packed": Owl(frames=(3,), packed=(7, 6), model=SLIDING),
        "sliding window, striped text": Owl(frames=(3,), model=SLIDING).with_options(text_layout="striped"),
        "local text, packed": Owl(frames=(3,), packed=(5, 8)).with_options(self_attention="local"),
        "local text, sliding window": Owl(frames=(3,), model=SLIDING).with_options(self_attention="local"),
        "shifted labels": replace(OWL, labels="shifted"),
        "media_offset": Owl(frames=(2, 0, 1), offsets=True, model={"image_token_id": None}),
        "gradients of pixels": Owl(frames=(2, 1), wants_grad=("pixel_values",)),
        "gradients of embeddings": Owl(frames=(2, 1), embeds=True, offsets=True, wants_grad=("inputs_embeds",)),
        "local features": Owl(frames=(2, 3), local_frames=True, features="projected"),
        "two ranges of frames on each rank": Owl(frames=(9, 4), length=27),
        "contiguous frames of all ranks": Owl(frames=(9, 4), length=27, local_frames=True),
        "all features, offloaded": Owl(frames=(9,), length=20, features="projected", options={"visual_offload": "cpu"}),
    }
    once = {
        "text shorter than the group": Owl(frames=(1,), length=3),
        "text only": Owl(frames=(0, 0), length=11),
        "local text only": Owl(frames=(0,)).with_options(self_attention="local"),
        "items counted by the caller": replace(OWL, arguments=COUNTED),
        "ignore_index": Owl(frames=(2, 1), labels="every row", arguments={"ignore_index": 7}),
        "gradients of features": Owl(frames=(2, 1), features="projected", wants_grad=("image_embeds",)),
        "no overlap": Owl().with_options(overlap=False, accumulate_dtype=None),
        "vector gate": Owl(frames=(2, 0, 3), padding="left", offsets=True, model={"gate": "vector"}),
    }
    common = shared("mplug_owl3")
    for name in ("right padding, few targets", "contiguous text, K and V stored", "all logits in training, chunks"):
        once[name] = common.pop(name)
    return common | every_kind, once


_EVERY_KIND, _ONCE = _owl()
_BOTH_KINDS = ("two samples", "left padding", "local frames", "a sample without frames", "local features")
"""Cases for gates and for one softmax; the others alternate between the two."""
_LATENTS = Idefics(frames=(3, 2), features="perceiver", model=RESAMPLER)
EXACT: dict[str, dict[str, Any]] = {
    "mplug_owl3": _ONCE
    | {name: case for number, (name, case) in enumerate(_EVERY_KIND.items()) if number % 2 or name in _BOTH_KINDS}
    | {
        f"fused: {name}": case.with_model(**FUSED)
        for number, (name, case) in enumerate(_EVERY_KIND.items())
        if not number % 2 or name in _BOTH_KINDS
    },
    "idefics": shared("idefics")
    | {
        "one sample": Idefics(model=INSTRUCT),
        "additional tokens, local logits": Idefics(frames=(4, 1), model=BASE).with_options(logits="local"),
        "additional tokens, all logits": Idefics(frames=(2, 1), model=INSTRUCT).with_options(logits="full"),
        "resampler": Idefics(frames=(2, 3), mask="before", model=RESAMPLER),
        "text shorter than the group": Idefics(frames=(1,), length=3),
        "no visible image": Idefics(frames=(2,), mask="nothing"),
        "no QK norm": Idefics(model={"qk_layer_norms": False}),
        "scalar gate": Idefics(model={"alpha_type": "float"}, double=True),
        "a block before every layer": Idefics(model={"cross_layer_interval": 1}),
        "gradients of pixels": Idefics(frames=(2, 1), wants_grad=("pixel_values",)),
        "gradients of features": Idefics(frames=(2, 1), features="encoder", wants_grad=("image_encoder_embeddings",)),
        "features, resampled": Idefics(frames=(2, 1), features="encoder", model=RESAMPLER),
        "gradients of latents": replace(_LATENTS, wants_grad=("perceiver_embeddings",)),
        "gradients of embeddings": Idefics(frames=(2, 1), embeds=True, wants_grad=("inputs_embeds",)),
        "another image size": Idefics(arguments={"interpolate_pos_encoding": True}),
        "local features": replace(_LATENTS, local_frames=True),
        "items counted by the caller": replace(IDEFICS, arguments=COUNTED),
    },
    "mllama": shared("mllama")
    | {
        "one sample": Mllama(),
        "a sample without images": Mllama(frames=((), (3, 1)), mask="scattered"),
        "text shorter than the group": Mllama(frames=((2,), (1,)), length=3),
        "text only": Mllama(frames=((), ())),
        "local text only": Mllama(frames=((), ())).with_options(self_attention="local"),
        "no mask, two samples": replace(MLLAMA, mask="none"),
        "no mask, right padding": replace(MLLAMA, mask="none", padding="right"),
        "any tiles": Mllama(frames=((3, 2, 3), (1, 3)), mask="scattered", length=17),
        "shifted labels": replace(MLLAMA, labels="shifted"),
        "items counted by the caller": replace(MLLAMA, arguments=COUNTED),
        "cross-attention last": Mllama(model={"cross_attention_layers": (2, 4)}),
        "gradients of pixels": replace(MLLAMA, wants_grad=("pixel_values",)),
        "gradients of features": replace(MLLAMA, features="tiles", wants_grad=("cross_attention_states",)),
        "features by sample": replace(MLLAMA, features="sample", wants_grad=("cross_attention_states",)),
        "features without a mask": replace(MLLAMA, features="sample", mask="none"),
        "gradients of embeddings": replace(MLLAMA, embeds=True, wants_grad=("inputs_embeds",)),
        "local frames, one image, no mask": Mllama(frames=((3,),), mask="none", local_frames=True),
        "local features": replace(MLLAMA, features="tiles", local_frames=True),
        "training mode": replace(MLLAMA, train=True),
    },
    "moss_vl": shared("moss_vl")
    | {
        "one sample": Moss(),
        "a sample without frames": Moss(frames=((), ((2, 4, 6),))),
        "a sample without frames, last": Moss(frames=(((2, 4, 6),), (), ())),
        "text shorter than the group": Moss(frames=((), ((2, 2),)), length=3),
        "fewer frames than ranks": Moss(frames=(((4, 6),),), length=9),
        "text only": Moss(frames=((), ()), length=11),
        "local text only": Moss(frames=((), ()), length=11).with_options(self_attention="local"),
        "no mask, two samples": replace(MOSS, mask="none"),
        "numbers of frames as the mask": replace(MOSS, mask="counts", padding="right"),
        "one token an image": Moss(frames=(((5, 2, 2), (2, 2)),)),
        "two ranges of frames on each rank": Moss(frames=(((9, 2, 4),), ((4, 2),)), length=27),
        "frames of equal size": Moss(frames=(((3, 4, 6), (6, 4)), ((2, 12, 2),))),
        "one large frame": Moss(frames=(((6, 2, 2), (12, 14)), ((2, 2),)), length=27),
        "cross-attention last": Moss(model={"cross_attention_layers": (2, 4)}),
        "shifted labels": replace(MOSS, labels="shifted"),
        "items counted by the caller": replace(MOSS, arguments=COUNTED),
        "gradients of pixels": replace(MOSS, wants_grad=("pixel_values",)),
        "gradients of features": replace(MOSS, features="embeddings", wants_grad=("visual_embeds",)),
        "gradients of embeddings": replace(MOSS, embeds=True, wants_grad=("inputs_embeds",)),
        "local features": replace(MOSS, features="embeddings", local_frames=True),
        "all features, offloaded": replace(MOSS, features="embeddings", options={"visual_offload": "cpu"}),
        "training mode": replace(MOSS, train=True),
    },
    "video_mllama": shared("video_mllama")
    | {
        "one sample": Preview(),
        "a sample without frames": Preview(frames=(0, 3)),
        "text shorter than the group": Preview(frames=(1, 1), length=3),
        "fewer frames than ranks": Preview(frames=(1,), length=9),
        "text only": Preview(frames=(0, 0)),
        "local text only": Preview(frames=(0, 0)).with_options(self_attention="local"),
        "no mask, two samples": replace(PREVIEW, mask="none"),
        "frames without positions": replace(PREVIEW, positions=False, padding="right"),
        "any frames": Preview(frames=(4, 2), mask="scattered", length=17),
        "maxima of patches": PREVIEW.with_model(pool_mode="max"),
        "interpolated patches": PREVIEW.with_model(pool_mode="bilinear", stride=3),
        "fused channels": PREVIEW.with_model(pool_mode="channelFusion"),
        "all patches": PREVIEW.with_model(pool_mode=None, stride=None),
        "weight of silence": PREVIEW.with_model(**SILENCE),
        "weight of silence, local text": PREVIEW.with_model(**SILENCE).with_options(self_attention="local"),
        "weight of silence, no logits": PREVIEW.with_model(**SILENCE).with_options(logits="none"),
        "weight of silence, shifted labels": replace(PREVIEW, labels="shifted").with_model(**SILENCE),
        "weight of silence, counted": replace(PREVIEW, arguments=COUNTED).with_model(**SILENCE),
        "shifted labels": replace(PREVIEW, labels="shifted"),
        "items counted by the caller": replace(PREVIEW, arguments=COUNTED),
        "gradients of pixels": replace(PREVIEW, wants_grad=("pixel_values",)),
        "gradients of features": replace(PREVIEW, features="frames", wants_grad=("cross_attention_states",)),
        "gradients of embeddings": replace(PREVIEW, embeds=True, wants_grad=("inputs_embeds",)),
        "local features": replace(PREVIEW, features="frames", local_frames=True),
        "training mode": replace(PREVIEW, train=True),
    },
}
for _number, (_family, _qwen) in enumerate(QWENS.items()):
    _one = replace(_qwen, frames=_qwen.frames[:1])
    _alternating = {
        "a sample without frames": replace(_qwen, frames=((), ((2, 4, 4),)), length=32),
        "fewer frames than ranks, local": replace(_qwen, frames=(((2, 2),),), length=11, local_frames=True),
        "text only": replace(_qwen, frames=((), ()), length=11),
        "text shorter than the group": replace(_qwen, frames=((), ()), length=3),
        "one token an image": replace(_qwen, frames=(((5, 2, 2), (2, 2)),), length=40),
        "shifted labels": replace(_qwen, labels="shifted"),
        "items counted by the caller": replace(_qwen, arguments=COUNTED),
        "training mode, local logits": replace(_qwen, train=True).with_options(logits="local"),
        "gradients of embeddings": replace(_qwen, embeds=True, wants_grad=("inputs_embeds",)),
        "local text, chunks": replace(_one, length=44).with_options(self_attention="local", vision_chunk_size=2),
    }
    EXACT[_family] = shared(_family) | {
        "one sample": replace(_one, length=44),
        "packed sequences": replace(_qwen, frames=((),), length=20, packed=(9, 11)),
        "gradients of pixels": replace(_qwen, wants_grad=("pixel_values", "pixel_values_videos")),
        **dict(list(_alternating.items())[_number::2]),
    }
    if TAKES_EMBEDDINGS:  # the embeddings of deepstack are a difference between the two
        _features = replace(_qwen, features="embeddings")
        EXACT[_family] |= {"gradients of features": replace(_features, wants_grad=("visual_embeds",))}
        EXACT[_family] |= {"local features": replace(_features, local_frames=True)}
EXACT["qwen2_5_vl"]["sliding window"] = Qwen2_5(**QWEN, model=LONG_WINDOW)
EXACT["qwen3_vl"]["no deepstack"] = Qwen3(**QWEN, model={"deepstack": ()})
if LANGUAGE_MODELS:
    _FLAMINGO = {
        "all earlier media, two samples": FLAMINGO.with_model(immediate=False),
        "a sample without media tokens": Flamingo(frames=((), (2, 3)), media=2),
        "no media tokens": Flamingo(frames=((), ()), media=2),
        "uneven media": Flamingo(frames=((0, 1, 5, 6, 9),), media=5, length=17),
        "text shorter than the group": Flamingo(frames=((0,),), media=2, length=3),
        "every second layer": Flamingo(model={"every": 2}),
        "local media, fewer than ranks": Flamingo(frames=((1, 4),), media=1, local_frames=True),
    }
    EXACT["open_flamingo"] = {
        f"{LANGUAGE_MODELS[index % 4]}: {name}": case.with_model(language_model=LANGUAGE_MODELS[index % 4])
        for index, (name, case) in enumerate({**shared("open_flamingo"), **_FLAMINGO}.items())
    } | {
        f"{decoder}: {name}": case.with_model(language_model=decoder)
        for decoder in (*LANGUAGE_MODELS, MPT_1B)
        for name, case in {
            "two samples": FLAMINGO.with_options(mlp_chunk_size=5),
            "left padding": PADDED["open_flamingo"],
            "all earlier media, one medium": Flamingo(frames=((2, 6),), media=1, model={"immediate": False}),
        }.items()
    }

QUICK = ("left padding", "local frames")
"""What the quick suite keeps of `EXACT`, for every family."""

ON_FOUR_RANKS: dict[str, dict[str, Any]] = {
    "mesh 2x2": {"strategy": "mesh", "self_attention": "mesh", "tile": (2, 2), "text_layout": "striped"},
    "mesh, any shape": {"strategy": "mesh", "self_attention": "mesh"},
    "mesh for frames": {"strategy": "mesh", "tile": (2, 2), "recompute_visual": False},
    "ulysses": {"strategy": "ulysses", "self_attention": "ulysses"},
    "ulysses for frames": {"strategy": "ulysses", "recompute_visual": False},
    "ulysses for text": {"self_attention": "ulysses", "text_layout": "contiguous"},
    "ulysses for frames, mesh for text": {"strategy": "ulysses", "self_attention": "mesh", "tile": (2, 2)},
    "hybrid": {"strategy": "ulysses", "self_attention": "ulysses", "tile": (1, 2), "text_layout": "striped"},
    "hybrid with LV-XAttn, local text": {"strategy": "ulysses", "tile": (2, 1), "self_attention": "local"},
    "replicate": {"strategy": "replicate"},
    "replicate, K and V stored": {"strategy": "replicate", "recompute_visual": False, "self_attention": "ulysses"},
    "auto": {"strategy": "auto"},
}
ON_FOUR_RANKS_WITHOUT_FRAMES: tuple[dict[str, Any], ...] = (
    {"self_attention": "mesh", "tile": (2, 2), "text_layout": "striped"},
    {"self_attention": "mesh", "text_layout": "contiguous"},
    {"self_attention": "ulysses"},
    {"self_attention": "ulysses", "tile": (1, 2), "text_layout": "striped"},
    {"self_attention": "auto"},
    {"strategy": "auto"},
)
assert {x.get("strategy", "lv-xattn") for x in ON_FOUR_RANKS.values()} == set(config.CHOICES["strategy"]) - {"ring"}


def strategy_cases() -> Iterator[Any]:
    """Yield each strategy with two batches, and so each batch with several strategies; the first batch is quick."""
    batches: list[tuple[str, Any]] = [
        ("mplug_owl3", replace(OWL, padding="left")),
        ("mplug_owl3", replace(OWL, padding="left", model=FUSED)),
        ("idefics", IDEFICS),
        ("mllama", MLLAMA),
        ("moss_vl", MOSS),
        ("video_mllama", PREVIEW),
    ]
    if LANGUAGE_MODELS:
        batches.append(("open_flamingo", FLAMINGO.with_model(language_model="opt")))
        four_heads = [name for name in LANGUAGE_MODELS if name != "mpt"]
    for index, (name, options) in enumerate(ON_FOUR_RANKS.items()):
        for place, (family, batch) in enumerate(batches):
            if family == "open_flamingo":
                batch = batch.with_model(language_model=four_heads[index % 3])
            fused = "-fused" if batch.model == FUSED else ""
            turn = (place - index) % len(batches)
            if turn > (name != "auto"):  # which measures
                continue
            marks = pytest.mark.slow if turn or index % 2 else ()
            yield pytest.param(family, 4, batch.with_options(**options), id=f"{family}{fused}-{name}", marks=marks)
    for index, options in enumerate(ON_FOUR_RANKS_WITHOUT_FRAMES):
        for family, batch in list(QWENS.items())[index % 2 :][: 1 + (index == 0)]:
            marks = pytest.mark.slow if "auto" in options.values() else ()  # measures for a second
            name = ", ".join(f"{option} {value}" for option, value in options.items())
            yield pytest.param(family, 4, batch.with_options(**options), id=f"{family}-{name}", marks=marks)
    if LANGUAGE_MODELS:  # ALiBi differs by head, and MPT has three heads
        mpt = PADDED["open_flamingo"].with_model(language_model="mpt")
        by_heads = mpt.with_options(self_attention="ulysses", strategy="replicate")
        yield pytest.param("open_flamingo", 3, by_heads, id="mpt-head sharding")
        mesh = mpt.with_options(self_attention="mesh", strategy="mesh")
        yield pytest.param("open_flamingo", 3, mesh, id="mpt-mesh", marks=pytest.mark.slow)


def exact_cases() -> Iterator[Any]:
    """Yield each case with one number of ranks, and the padded batch and the single sample also with one."""
    for family, cases in EXACT.items():
        for index, (name, case) in enumerate(cases.items()):
            short = name.split(": ")[-1]
            sizes: tuple[int, ...] = ((2, 3, 2, 4)[index % 4],)
            if short in ("left padding", "one sample"):
                sizes = (1, 3)
            if "shorter than the group" in short or "fewer" in short:
                sizes = (4,)
            for size in sizes:
                quick = short in QUICK and (size == 3 or len(sizes) == 1) and "fused: left" not in name
                marks = () if quick else pytest.mark.slow
                yield pytest.param(family, size, case, id=f"{family}-{name}-{size}", marks=marks)
