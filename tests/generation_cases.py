"""Cases of `generate` for all families: what is generated from, with which settings, on how many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from family_cases import FUSED, INSTRUCT, LANGUAGE_MODELS, LONG_WINDOW, MLLAMA, MOSS, PREVIEW, QWENS, RESAMPLER
from tiny_models.idefics import Case as Idefics
from tiny_models.mllama import Case as Mllama
from tiny_models.moss_vl import Case as Moss
from tiny_models.mplug_owl3 import Case as Owl
from tiny_models.qwen2_5_vl import TAKES_EMBEDDINGS

GREEDY: dict[str, Any] = {}
BEAMS, THREE_BEAMS = {"num_beams": 2, "num_return_sequences": 2}, {"num_beams": 3}
SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 50}
NO_CACHE = {"use_cache": False}
STATIC = {"cache_implementation": "static"}
LOOKUP = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12}
SHARDED = {"shard_prompt_from": 2}
"""The prompt is read with its text sharded, and the text's K and V stay on the rank that computed them."""

_OWL_ONE, _OWL_TWO = Owl(labels=None), Owl(frames=(4, 1), padding="left", labels=None)
_OWL_TEXT, _OWL_WINDOW = Owl(frames=(0, 0), labels=None), Owl(frames=(3,), labels=None, model=LONG_WINDOW)
_OWL_FEATURES = Owl(frames=(2, 3), features="projected", labels=None)
_IDEFICS_ONE = Idefics(frames=(4,), mask="before", labels=None, model=INSTRUCT)
_IDEFICS_TWO = Idefics(frames=(3, 1), padding="left", labels=None)
LATENTS = Idefics(frames=(2, 3), mask="holes", model=RESAMPLER, labels=None)
_MLLAMA_ONE, _MLLAMA_TWO = Mllama(labels=None), replace(MLLAMA, padding="left", labels=None)
_MLLAMA_ANY, _MLLAMA_TEXT = replace(MLLAMA, mask="scattered", labels=None), Mllama(frames=((), ()), labels=None)
_MLLAMA_NO_MASK = replace(MLLAMA, mask="none", labels=None)
_PREVIEW_TWO = replace(PREVIEW, padding="left", labels=None)
_PREVIEW_STATES = replace(PREVIEW, features="sample", labels=None)
_MLLAMA_STATES = replace(MLLAMA, features="sample", labels=None)


_MOSS_ONE, _MOSS_TWO = Moss(labels=None), replace(MOSS, padding="left", labels=None)
_MOSS_COUNTS, _MOSS_TEXT = replace(_MOSS_TWO, mask="counts"), Moss(frames=((), ()), padding="left", labels=None)
_MOSS_FEATURES = replace(_MOSS_TWO, features="embeddings")


_CHUNKS = {"mlp_chunk_size": 5, "vision_chunk_size": 1}


def _local(case: Any) -> Any:
    return replace(case, local_frames=True)


_IDEFICS_LOCAL = _local(Idefics(frames=(3, 2), labels=None))
_MLLAMA_LOCAL = _local(replace(MLLAMA, labels=None))
_OWL_GENERATED: dict[str, tuple[Any, dict[str, Any]]] = {
    "greedy": (_OWL_ONE, GREEDY),
    "padded batch, local frames": (_local(_OWL_TWO), GREEDY),
    "beams, padded batch": (_OWL_TWO, BEAMS),
    "no cache, local logits": (_OWL_ONE.with_options(logits="local"), NO_CACHE),
    "no cache, local text": (_OWL_TWO.with_options(self_attention="local"), NO_CACHE),
    "local features": (_local(_OWL_FEATURES), GREEDY),
    "one frame": (Owl(frames=(1,), length=6, labels=None), GREEDY),
    "sliding window": (_OWL_WINDOW, GREEDY),
    "media_offset": (Owl(frames=(2, 1), offsets=True, labels=None), GREEDY),
    "ring, local text": (_OWL_ONE.with_options(strategy="ring", self_attention="local"), GREEDY),
    "static cache": (_OWL_TWO, STATIC),
    "lookup in repetitions, local frames": (_local(replace(_OWL_ONE, length=40)), LOOKUP | {"max_new_tokens": 30}),
    "sharded prompt, local frames": (_local(_OWL_ONE).with_options(**SHARDED), GREEDY),
    "sharded prompt, striped, padded batch": (_OWL_TWO.with_options(**SHARDED, text_layout="striped"), GREEDY),
    "sharded prompt, contiguous, beams": (_OWL_ONE.with_options(**SHARDED, text_layout="contiguous"), THREE_BEAMS),
    "sharded prompt, beams, padded batch": (_OWL_TWO.with_options(**SHARDED), BEAMS),
    "sharded prompt, text only": (_OWL_TEXT.with_options(**SHARDED), GREEDY),
    "sharded prompt, sliding window": (_OWL_WINDOW.with_options(**SHARDED), GREEDY),
    "sharded prompt, lookup": (_OWL_ONE.with_options(**SHARDED), LOOKUP),
}
GENERATED: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "mplug_owl3": _OWL_GENERATED
    | {
        f"fused: {name}": (case.with_model(**FUSED), given)
        for index, (name, (case, given)) in enumerate(_OWL_GENERATED.items())
        if index % 3 == 1 or name == "sharded prompt, local frames"
    },
    "idefics": {
        "greedy": (_IDEFICS_ONE, GREEDY),
        "beams, padded batch": (_IDEFICS_TWO, BEAMS),
        "no cache, beams": (LATENTS, {"use_cache": False, "num_beams": 2}),
        "local text": (_IDEFICS_TWO.with_options(self_attention="local"), GREEDY),
        "ring": (LATENTS.with_options(strategy="ring"), GREEDY),
        "sharded prompt": (_IDEFICS_TWO.with_options(**SHARDED), GREEDY),
        "sharded prompt, beams": (LATENTS.with_options(**SHARDED), THREE_BEAMS),
        "sharded prompt, lookup": (_IDEFICS_ONE.with_options(**SHARDED), LOOKUP),
        "sharded prompt, chunks": (_IDEFICS_TWO.with_options(**_CHUNKS, **SHARDED), {"num_beams": 2}),
        "padded batch, chunks": (_IDEFICS_TWO.with_options(**_CHUNKS), GREEDY),
        "local frames, beams": (_IDEFICS_LOCAL, {"num_beams": 2}),
    },
    "mllama": {
        "greedy": (_MLLAMA_ONE, GREEDY),
        "beams, padded batch": (_MLLAMA_TWO, BEAMS),
        "beams, no mask": (_MLLAMA_NO_MASK, BEAMS),
        "static cache, beams": (_MLLAMA_ANY, STATIC | BEAMS),
        "embeddings": (replace(MLLAMA, embeds=True, labels=None), GREEDY),
        "features, beams, no cache": (_MLLAMA_STATES, BEAMS | NO_CACHE),
        "local features, beams": (_local(_MLLAMA_STATES), BEAMS),
        "local text": (_MLLAMA_TWO.with_options(self_attention="local"), GREEDY),
        "ring": (_MLLAMA_ANY.with_options(strategy="ring"), GREEDY),
        "sharded prompt": (_MLLAMA_TWO.with_options(**SHARDED), GREEDY),
        "sharded prompt, beams": (_MLLAMA_ANY.with_options(**SHARDED), THREE_BEAMS),
        "sharded prompt, text only": (_MLLAMA_TEXT.with_options(**SHARDED), GREEDY),
        "local frames, beams, no mask": (replace(_MLLAMA_LOCAL, frames=((3, 1), (1, 2)), mask="none"), BEAMS),
        "local frames, embeddings": (replace(_MLLAMA_LOCAL, embeds=True), BEAMS),
        "local frames, no cache": (_MLLAMA_LOCAL, BEAMS | NO_CACHE),
        "lookup, any tiles": (Mllama(mask="scattered", labels=None), LOOKUP),
        "sharded prompt, lookup": (_MLLAMA_ONE.with_options(**SHARDED), LOOKUP),
    },
    "video_mllama": {
        "greedy": (replace(PREVIEW, frames=(3,), labels=None), GREEDY),
        "beams, padded batch": (_PREVIEW_TWO, BEAMS),
        "beams, no mask": (replace(PREVIEW, mask="none", labels=None), BEAMS),
        "frames without positions": (replace(PREVIEW, positions=False, labels=None), GREEDY),
        "static cache, beams": (replace(PREVIEW, mask="scattered", labels=None), STATIC | BEAMS),
        "embeddings": (replace(PREVIEW, embeds=True, labels=None), GREEDY),
        "features, beams, no cache": (_PREVIEW_STATES, BEAMS | NO_CACHE),
        "features of frames, beams": (replace(_PREVIEW_STATES, features="frames"), THREE_BEAMS),
        "local features, beams": (_local(_PREVIEW_STATES), BEAMS),
        "local text": (_PREVIEW_TWO.with_options(self_attention="local"), GREEDY),
        "ring": (_PREVIEW_TWO.with_options(strategy="ring"), GREEDY),
        "sharded prompt, beams": (_PREVIEW_TWO.with_options(**SHARDED), THREE_BEAMS),
        "sharded prompt, local frames": (_local(_PREVIEW_TWO).with_options(**SHARDED), GREEDY),
        "sharded prompt, text only": (replace(PREVIEW, frames=(0, 0), labels=None).with_options(**SHARDED), GREEDY),
        "local frames, no cache": (_local(replace(PREVIEW, labels=None)), BEAMS | NO_CACHE),
        "lookup": (replace(PREVIEW, frames=(3,), labels=None), LOOKUP),
        "sharded prompt, lookup": (replace(PREVIEW, frames=(3,), labels=None).with_options(**SHARDED), LOOKUP),
    },
}
GENERATED["moss_vl"] = {
    "greedy": (_MOSS_ONE, GREEDY),
    "beams, padded batch": (_MOSS_TWO, BEAMS),
    "beams, no mask": (replace(_MOSS_TWO, mask="none"), BEAMS),
    "beams, one sample": (_MOSS_ONE, THREE_BEAMS),
    "static cache, beams": (_MOSS_COUNTS, STATIC | BEAMS),
    "features, beams, no cache": (_MOSS_FEATURES, BEAMS | NO_CACHE),
    "local features, beams": (_local(_MOSS_FEATURES), BEAMS),
    "local frames, no cache": (_local(_MOSS_COUNTS), NO_CACHE),
    "local text": (_MOSS_TWO.with_options(self_attention="local"), GREEDY),
    "ring": (_MOSS_TWO.with_options(strategy="ring"), GREEDY),
    "sharded prompt": (_MOSS_TWO.with_options(**SHARDED), GREEDY),
    "sharded prompt, beams": (_MOSS_COUNTS.with_options(**SHARDED), THREE_BEAMS),
    "sharded prompt, text only": (_MOSS_TEXT.with_options(**SHARDED), GREEDY),
    "padded text only": (_MOSS_TEXT, GREEDY),
    "a sample without frames": (Moss(frames=((), ((2, 4, 6),)), padding="left", labels=None), GREEDY),
    "lookup": (_MOSS_ONE, LOOKUP),
    "sharded prompt, lookup": (_MOSS_ONE.with_options(**SHARDED), LOOKUP),
    "sharded prompt, chunks": (_MOSS_TWO.with_options(**_CHUNKS, **SHARDED), {"num_beams": 2}),
    "embeddings": (replace(_MOSS_TWO, embeds=True), GREEDY),
}
for _number, (_family, _qwen) in enumerate(QWENS.items()):
    _one = replace(_qwen, frames=_qwen.frames[:1], length=44, labels=None)
    _two, _text = replace(_qwen, padding="left", labels=None), replace(_qwen, frames=((), ()), length=11, labels=None)
    _alternating = {
        "no cache, beams": (_two, NO_CACHE | {"num_beams": 2}),
        "static cache, beams": (_two, STATIC | BEAMS),
        "local frames, no cache": (_local(_two), NO_CACHE),
        "local text": (_two.with_options(self_attention="local"), GREEDY),
        "lookup": (_one, LOOKUP),
        "sharded prompt, chunks": (_two.with_options(**_CHUNKS, **SHARDED, self_attention="ulysses"), THREE_BEAMS),
        "sharded prompt, striped, local frames": (_local(_two).with_options(**SHARDED, text_layout="striped"), GREEDY),
        "sharded prompt, lookup": (_one.with_options(**SHARDED), LOOKUP),
        "sharded prompt, text only": (_text.with_options(**SHARDED), GREEDY),
        "sharded prompt, beams": (_two.with_options(**SHARDED), BEAMS),
        "embeddings": (replace(_two, embeds=True), GREEDY),
        "ulysses, beams": (_two.with_options(**SHARDED, self_attention="ulysses"), BEAMS),
        "local frames, lookup": (_local(_one), LOOKUP),
    }
    GENERATED[_family] = {
        "greedy": (_one, GREEDY),
        "beams, padded batch": (_two, BEAMS),
        "sharded prompt": (_two.with_options(**SHARDED), GREEDY),
        "local frames, beams": (_local(_two), THREE_BEAMS),
        **dict(list(_alternating.items())[_number::2]),
    }
    if TAKES_EMBEDDINGS:
        _features = _local(replace(_two, features="embeddings")).with_options(**SHARDED)
        GENERATED[_family]["local features, beams"] = (_features, BEAMS)
        GENERATED[_family]["features, beams, no cache"] = (replace(_two, features="embeddings"), BEAMS | NO_CACHE)
if LANGUAGE_MODELS:
    from tiny_models.open_flamingo import MEDIA, MPT_1B, PAD, VOCABULARY
    from tiny_models.open_flamingo import Case as Flamingo

    CACHED: dict[str, Any] = {"use_cache": True, "pad_token_id": PAD}
    # One media token beyond the media, one sample with fewer.
    FLAMINGO_TWO = Flamingo(frames=((1, 4, 7), (5,)), media=2, padding="left", labels=None)
    _FEW = Flamingo(frames=((0, 3),), media=1, labels=None, model={"immediate": False})
    FLAMINGO_EARLY = Flamingo(frames=((), (2,)), media=3, length=9, labels=None, model={"immediate": False})
    _STRIPED = FLAMINGO_TWO.with_options(**SHARDED, text_layout="striped")
    GENERATED["open_flamingo"] = {
        f"{decoder}: {name}": (case.with_model(language_model=decoder), CACHED | given)
        for number, decoder in enumerate(LANGUAGE_MODELS)
        for index, (name, (case, given)) in enumerate(
            {
                "greedy": (FLAMINGO_TWO, GREEDY),
                "sharded prompt": (FLAMINGO_TWO.with_options(**SHARDED), GREEDY),
                "beams": (FLAMINGO_TWO, THREE_BEAMS),
                "beams, local frames": (_local(FLAMINGO_TWO), THREE_BEAMS),
                "beams, all earlier media": (_FEW, BEAMS),
                "no media token before a token": (FLAMINGO_EARLY, GREEDY),
                "no cache": (FLAMINGO_TWO, NO_CACHE),
                "ring, local text": (FLAMINGO_TWO.with_options(strategy="ring", self_attention="local"), GREEDY),
                "sharded prompt, striped, beams": (_STRIPED, {"num_beams": 2}),
                "sharded prompt, local frames": (_local(FLAMINGO_TWO).with_options(**SHARDED), GREEDY),
                "lookup": (_FEW, {"prompt_lookup_num_tokens": 3, "max_new_tokens": 10}),
            }.items()
        )
        if index < 2 or index % 4 == number
    }

SAMPLING: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "mplug_owl3": {
        "sampled": (_OWL_TWO, SAMPLED),
        "sharded prompt": (_OWL_TWO.with_options(**SHARDED).with_model(**FUSED), SAMPLED),
    },
    "idefics": {"sampled": (_IDEFICS_TWO, SAMPLED)},
    "mllama": {"sampled": (_MLLAMA_TWO, SAMPLED)},
    "moss_vl": {"sampled": (_MOSS_TWO, SAMPLED)},
    "video_mllama": {"sampled": (_PREVIEW_TWO, SAMPLED)},
    **{
        family: {
            "sampled, sharded prompt": (replace(qwen, padding="left", labels=None).with_options(**SHARDED), SAMPLED)
        }
        for family, qwen in QWENS.items()
    },
}
"""Cases whose ranks need a random generator each, and so a process each."""
if LANGUAGE_MODELS:
    _ONLY_MEDIA = [token for token in range(VOCABULARY) if token not in (MEDIA, 7, 8, 9)]
    WIDE = {"do_sample": True, "temperature": 1.5, "top_k": 50} | CACHED
    SAMPLING["open_flamingo"] = {
        "sampled": (FLAMINGO_TWO.with_model(language_model="opt"), WIDE),
        "new media tokens": (FLAMINGO_TWO.with_model(language_model="llama"), WIDE | {"suppress_tokens": _ONLY_MEDIA}),
        "sharded prompt, all earlier media": (
            FLAMINGO_EARLY.with_options(**SHARDED).with_model(language_model="gpt_neox"),
            CACHED | {"do_sample": True},
        ),
        "QK norm, sharded prompt": (FLAMINGO_TWO.with_options(**SHARDED).with_model(language_model=MPT_1B), WIDE),
    }


def generated_cases() -> Iterator[Any]:
    """Yield each case with one number of ranks, 1 to 4."""
    for family, cases in GENERATED.items():
        for index, (name, (case, given)) in enumerate(cases.items()):
            size = (3, 2, 4, 1)[index % 4] if name.split(": ")[-1] != "greedy" else 3
            quick = name.split(": ")[-1] in ("beams, padded batch", "sharded prompt") and ": " not in name
            marks = () if quick or name == "opt: sharded prompt" else pytest.mark.slow
            yield pytest.param(family, size, case, given, id=f"{family}-{name}-{size}", marks=marks)
