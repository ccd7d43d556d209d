"""Layer: one process, loopback ranks. Bad inputs and ranks that differ raise an error on every rank, and no rank waits.

All bad inputs of a family go to one patched model, so that anything that a failed pass leaves behind spoils the next.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from family_cases import BATCHES, INSTRUCT, QWENS
from family_harness import FAMILIES, family_module, inputs_of, model_of, on_ranks
from mllm_seqpar import FrameShard, frame_range, patch_model
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.digests import fingerprint_of
from mllm_seqpar.errors import AgreementError, ConfigError, MaskError, SeqParError, ShapeError
from model_copies import tiny_model
from tiny_models import idefics
from tiny_models.mllama import CROSS_LAYERS, PATCHES, TILES
from tiny_models.mllama import Case as Mllama
from tiny_models.moss_vl import Case as Moss
from tiny_models.mplug_owl3 import Case as Owl
from tiny_models.mplug_owl3 import local_frames, tiny_frames, tiny_text
from tiny_models.video_mllama import SIDE
from tiny_models.video_mllama import Case as Preview

Inputs = dict[str, Any]
DIFFERENT = "the ranks differ in"
"""All ranks report that their inputs differ."""
ELSEWHERE = "rank 1: "
"""The error of the ranks whose own inputs are valid."""


Errors = dict[tuple[Any, ...], dict[str, Any]]
"""Bad inputs by kind of error, error of the other ranks and function that makes a rank's valid arguments (or none).

Each message has the new values of arguments (None removes one), or a function from the valid arguments to these. Rank 1
passes them, or all ranks if there is no error of the others.
"""

OWL = Owl(frames=(3,), length=12)
FEATURES = torch.zeros(3, 4, 64)
LONGER = {"input_ids": tiny_text(3, length=14), "labels": tiny_text(3, length=14)}
OFFSETS = torch.zeros(1, 12, 2, dtype=torch.long)
OWL_ERRORS = {
    (AgreementError, DIFFERENT): {
        "digest of token ids: ranks 0, 2: ": lambda x: {name: x[name].flip(1) for name in ("input_ids", "labels")},
        "text tokens: ranks 0, 2: 12; rank 1: 14": LONGER,
        "digest of labels": lambda x: {"labels": x["labels"] + 1},
        "labels given: ranks 0, 2: True; rank 1: False": {"labels": None},
        "shift_labels given: ranks 0, 2: False; rank 1: True": lambda x: {"labels": None, "shift_labels": x["labels"]},
        "digest of pixels": {"pixel_values": tiny_frames(3, seed=8)},
        "frames: ranks 0, 2: 3; rank 1: 2": {"pixel_values": tiny_frames(2)},
        "digest of position ids": {"position_ids": torch.arange(1, 13)[None]},
        "digest of the positions of frames": {"media_offset": OFFSETS},
        "kind of frames: ranks 0, 2: pixels; rank 1: features": {"pixel_values": None, "image_embeds": FEATURES},
        "use_cache: ranks 0, 2: False; rank 1: True": {"use_cache": True},
        "frames given by visual_shard: ranks 0, 2: False; rank 1: True": {
            "pixel_values": tiny_frames(3)[1:2],
            "visual_shard": FrameShard(1, 2, 3),
        },
    },
    (AgreementError, DIFFERENT, lambda x, comm: {**x, "logits_to_keep": torch.tensor([2])}): {
        "digest of logits_to_keep": {"logits_to_keep": torch.tensor([3])}
    },
    (ShapeError, ELSEWHERE): {
        "pass either pixel_values or image_embeds, not both": {"image_embeds": FEATURES},
        "pass either input_ids or inputs_embeds": {"input_ids": None},
        r"expected \(frames, tokens, 64\)": {"pixel_values": None, "image_embeds": FEATURES[..., :32]},
    },
    (ShapeError, ELSEWHERE, local_frames): {
        r"rank 1 of 3 holds frames 1 to 2 of 3 .*FrameShard\(start=0": {"visual_shard": FrameShard(0, 1, 3)},
        "means 1 frames, 3 were passed": {"pixel_values": tiny_frames(3)},
        "a rank without frames passes an empty tensor": {"pixel_values": None},
        r"expected a FrameShard\(start, stop, total\), got tuple": {"visual_shard": (1, 2, 3)},
    },
    (TypeError, ELSEWHERE): {"new\\(\\): invalid data type 'str'": {"media_offset": "x"}},
    (ShapeError, ELSEWHERE, lambda x, comm: {**x, "labels": None, **cache_argument(DynamicCache())}): {
        "input_ids: expected a tensor, got list": {"input_ids": [[1, 2, 3]]}
    },
    (ConfigError, ELSEWHERE): {
        "output_attentions=True: attention weights do not exist": {"output_attentions": True},
        "is_causal=False: the text of a patched model is causal in every layer": {"is_causal": False},
    },
    (ShapeError, ""): {
        "neither pixel_values nor image_embeds was passed": {"pixel_values": None},
        "placeholders for 3 frames .* and 4 were passed": {"pixel_values": tiny_frames(4)},
        r"pixel_values has shape .*expected \(frames, 3, 28, 28\)": {"pixel_values": torch.zeros(3, 3, 42, 42)},
    },
    (MaskError, ""): {r"of shape \(1, 12\), got \(1, 1, 12,": {"attention_mask": torch.ones(1, 1, 12, 12)}},
    (ConfigError, ""): {
        "output_attentions=True": {"output_attentions": True},
        "use_cache: a pass with a cache has no backward pass": {"use_cache": True},
    },
}

IDEFICS = idefics.Case(frames=(4,), mask="before", labels=None, model=INSTRUCT)
LATENTS = {"pixel_values": None, "perceiver_embeddings": torch.zeros(1, 4, 3, 24)}
IDEFICS_ERRORS = {
    (ValueError, ""): {
        r"image_attention_mask is missing; expected \(1, 11, images of a": {"image_attention_mask": None},
        r"has shape \(1, 4, 4\); expected \(1, 11, images of a": {"image_attention_mask": torch.ones(1, 4, 4)},
        "whose mask is for 3 each": {"image_attention_mask": torch.ones(1, 11, 3)},
        "IDEFICS needs images: pass one of pixel_values": {"pixel_values": None},
        "pass interpolate_pos_encoding=True": {"pixel_values": torch.zeros(1, 4, 3, 24, 24)},
        "perceiver_embeddings were passed to a model without resampler": LATENTS,
        "output_attentions=True: attention weights do not exist": {"output_attentions": True},
    },
    (AgreementError, DIFFERENT, lambda x, comm: {**x, "input_ids": None, "inputs_embeds": torch.ones(1, 11, 32)}): {
        "digest of embeddings": {"inputs_embeds": torch.full((1, 11, 32), 2.0)}
    },
    (ConfigError, "", idefics.local_frames): {"use_cache: a pass with a cache has no backward": {"use_cache": True}},
}

MLLAMA = Mllama(frames=((3, 1, 2, 3),), labels=None)
PREVIEW = Preview(frames=(3, 1), labels=None)
PREVIEW_CHANGES: dict[str, Inputs] = {
    r"vision_position_ids has shape \(2, 2\); expected \(2, 3\)": {"vision_position_ids": torch.ones(2, 2).long()},
    r"expected \(images, 1, channels": {"pixel_values": torch.zeros(2, 3, 2, 3, SIDE, SIDE)},
    "3 tiles in all images of a sample": {"cross_attention_mask": torch.ones(2, 11, 2, 1)},
}
PREVIEW_OTHERS = {"digest of the positions of frames": lambda x: {"vision_position_ids": x["vision_position_ids"] + 1}}


def _states(*shape: int) -> Inputs:
    return {"cross_attention_states": torch.zeros(shape)}


NO_PIXELS = {"pixel_values": None}
MLLAMA_MASKS = {
    r"mask has shape \(1, 4, 4, 3\); expected \(batch, tokens, images, tiles\): 1 samples, 11": (1, 4, 4, TILES),
    "12 tiles in all images of a sam": (1, 11, 3, TILES),
    r"has shape \(1, 11, 4\); expected": (1, 11, 4),
    r"has shape \(2, 11, 4, 3\)": (2, 11, 4, TILES),
}
RATIOS = ("aspect_ratio_ids", "aspect_ratio_mask")
MLLAMA_CHANGES: dict[str, Inputs] = {
    **{message: {"cross_attention_mask": torch.ones(shape)} for message, shape in MLLAMA_MASKS.items()},
    r"aspect_ratio_ids is missing; expected \(4\)": dict.fromkeys(RATIOS),
    r"aspect_ratio_ids has shape \(1,\); expected \(4\)": {"aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long)},
    r"expected \(images, 3, channels": {"pixel_values": torch.zeros(1, 4, 2, 3, 28, 28)},
    r"has shape \(12, 3, 28, 28\); expected \(images, 3,": {"pixel_values": torch.zeros(4, 3, 3, 28, 28)},
    "pass either pixel_values or cross_attention_states, not both": _states(12, PATCHES, 64),
    r"\(12, 5, 96\); expected \(tiles of all images, 5, 64\)": NO_PIXELS | _states(12, PATCHES, 96),
    r"\(1, 59, 64\); expected \(tiles of all images, 5, 64\)": NO_PIXELS | _states(1, 12 * PATCHES - 1, 64),
    "output_attentions=True: attention weights do not exist": {"output_attentions": True},
}


PIXEL_NAMES = ("pixel_values", "pixel_values_videos")


def _whole_with_a_shard(x: Inputs, comm: Any) -> Inputs:
    total = int(x["image_grid_thw"][:, 0].sum() + x["video_grid_thw"][:, 0].sum())
    local = frame_range(total, comm)
    return x | {"visual_shard": FrameShard(local.start, local.stop, total)}


# Without the embeddings of deepstack, a pass of Qwen3-VL would compute other results.
WRONG_EMBEDDINGS = {
    family: dict.fromkeys(PIXEL_NAMES) | {"visual_embeds": torch.zeros(37, width)}
    for family, width in (("qwen2_5_vl", 32), ("qwen3_vl", 64))
}
QWEN_ERRORS: Errors = {
    (ShapeError, ""): {
        r"features and \w+ tokens do not match: the text has \d+ .* not truncated": lambda x: {
            name: x[name][:, :20] for name in ("input_ids", "mm_token_type_ids")
        },
        r"rows were passed; the grids mean .* says so by visual_shard": lambda x: {
            "pixel_values": x["pixel_values"][4:]
        },
        "image_grid_thw: found None; expected": {"image_grid_thw": None},
        "visual_samples: 3; the batch of": {"visual_samples": 3},
        "visual_samples: -1; the batch of": {"visual_samples": -1},
    },
    (ShapeError, "", _whole_with_a_shard): {
        r"means \(\d+, \d+\) rows of pixel_values and pixel_values_videos, the temporal patches of this rank": {}
    },
    (ValueError, DIFFERENT): {
        f"{DIFFERENT} digest of": lambda x: {"video_grid_thw": x["video_grid_thw"][:, [0, 2, 1]]},
        f"{DIFFERENT} digest": lambda x: {"pixel_values_videos": x["pixel_values_videos"] + 1},
        DIFFERENT: lambda x: {"pixel_values": x["pixel_values"].clone().requires_grad_()},
    },
}


MOSS_ONE = Moss(labels=None)  # three frames of 4 x 6 patches and one of 6 x 4


def _moss_features(x: Inputs, comm: Any) -> Inputs:
    return x | {"pixel_values": None, "visual_embeds": torch.zeros(28, 64)}


MOSS_ERRORS: Errors = {
    (SeqParError, ELSEWHERE): {
        "frames were passed without grid_thw": {"grid_thw": None},
        r"grid_thw has shape \(4,\)": {"grid_thw": torch.ones(4, dtype=torch.long)},
        r"grid_thw has shape \(2, 3\); .* all above 0": {"grid_thw": torch.tensor([[0, 4, 6], [4, 6, 4]])},
        "media_nums_per_sample is .*3.* for 2 rows": {"media_nums_per_sample": [3]},
        r"pixel_values has shape \(1, 96, 48\); expected \(patches, values\)": {"pixel_values": torch.zeros(1, 96, 48)},
        "pass either pixel_values or visual_embeds, not both": {"visual_embeds": torch.zeros(28, 64)},
        r"visual_embeds has shape \(28, 32\); expected \(visual tokens, 64\)": {
            "pixel_values": None,
            "visual_embeds": torch.zeros(28, 32),
        },
    },
    (AgreementError, DIFFERENT): {
        "digest of pixels": lambda x: {"pixel_values": x["pixel_values"] + 1},
        "digest of the positions of frames": lambda x: {"grid_thw": x["grid_thw"][:, [0, 2, 1]]},
        "units of frames": {"grid_thw": torch.tensor([[2, 6, 4], [1, 6, 8]])},
    },
    (AgreementError, DIFFERENT, _moss_features): {"rows of frames": {"visual_embeds": torch.zeros(27, 64)}},
    (ShapeError, ""): {
        "pixel_values: expected 96 patches, those of 4 frames in grid_thw, got 95": lambda x: {
            "pixel_values": x["pixel_values"][1:]
        },
        "placeholders <|image_pad|>, and frames": lambda x: {
            "grid_thw": x["grid_thw"][:1],
            "pixel_values": x["pixel_values"][:72],
            "media_nums_per_sample": [1],
        },
    },
    (MaskError, ""): {
        "cross_attention_mask has 2 samples": lambda x: {
            "cross_attention_mask": x["cross_attention_mask"].expand(2, -1, -1, -1)
        },
        "hidden ones between them": lambda x: {
            "cross_attention_mask": torch.tensor([False, True, False, True]).expand(1, 1, 19, 4)
        },
    },
    (SeqParError, ELSEWHERE, lambda x, comm: family_module("moss_vl").local_frames(x, comm)): {
        "visual_shard: .* but grid_thw has 4 frames": {"visual_shard": FrameShard(2, 4, 5)},
        "pixel_values: expected 48 patches, those of 2 frames in grid_thw, got 24": lambda x: {
            "pixel_values": x["pixel_values"][24:]
        },
        "a rank without frames passes an empty tensor": {"pixel_values": None},
    },
}


def check_errors(family: str, ranks: int, case: Any, errors: Errors) -> None:
    def run(model: Any, inputs: Inputs, comm: Any) -> None:
        for (kind, others, *base), changes in errors.items():
            valid, own = base[0](inputs, comm) if base else inputs, not others or comm.rank == 1
            for message, change in changes.items():
                given = valid | (change(valid) if callable(change) else change) if own else valid
                # A rank whose own inputs are valid reports a disagreement, whatever the error elsewhere.
                with pytest.raises(kind if own else AgreementError) as caught:
                    model(**{name: x for name, x in given.items() if x is not None})
                    pytest.fail(f"no error: {message}")
                assert re.search(message if own else others, str(caught.value)), (message, comm.rank, str(caught.value))
                if family == "open_flamingo":
                    model.lang_encoder.clear_conditioned_layers()
        out = model(**inputs)  # the group is still usable
        assert out.loss is None or torch.isfinite(out.loss)

    on_ranks(ranks, family, case, run)


BAD = {
    "mplug_owl3": (3, OWL, OWL_ERRORS),
    "idefics": (2, IDEFICS, IDEFICS_ERRORS),
    "mllama": (2, MLLAMA, {(SeqParError, ELSEWHERE): MLLAMA_CHANGES}),
    "moss_vl": (2, MOSS_ONE, MOSS_ERRORS),
    "video_mllama": (
        *(2, PREVIEW),
        {(SeqParError, ELSEWHERE): PREVIEW_CHANGES, (AgreementError, DIFFERENT): PREVIEW_OTHERS},
    ),
    **{
        family: (
            2,
            replace(case, labels=None),
            QWEN_ERRORS
            | {
                (ShapeError, "", lambda x, comm, f=family: x | WRONG_EMBEDDINGS[f]): {
                    r"visual_embeds has shape \(\d+, \d+\); expected \(tokens, \d+\)": {}
                }
            },
        )
        for family, case in QWENS.items()
    },
}


NO_TENSORS: Errors = {
    (ShapeError, ELSEWHERE, lambda x, comm: x): {
        "input_ids: expected a tensor, got list": {"input_ids": [[1, 2, 3]]},
        "inputs_embeds: expected a tensor, got str": {"input_ids": None, "inputs_embeds": "x"},
    }
}


@pytest.mark.parametrize("family", BAD)
def test_bad_inputs_are_refused_on_every_rank(family: str) -> None:
    ranks, case, errors = BAD[family]
    check_errors(family, ranks, case, errors | NO_TENSORS)


def test_bad_media_of_open_flamingo_are_refused_on_every_rank() -> None:
    flamingo = family_module("open_flamingo")
    different = {
        r"\(4, 3, 3, 12, 12\); expected .*one frame to a medium": torch.zeros(2, 2, 3, 3, 12, 12),
        r"expected \(media, 1, channels, height, width\)": torch.zeros(2, 2, 3, 12, 12),
        "0 media for 2 samples": torch.zeros(2, 0, 1, 3, 12, 12),
        "2 rows of text, but media for 3 samples": flamingo.pixels(3, 2),
        DIFFERENT: flamingo.pixels(2, 2, seed=9),
    }
    three = {"vision_x": flamingo.pixels(1, 3)}  # two samples cannot share them equally
    errors: Errors = {
        (ValueError, f"{ELSEWHERE}|{DIFFERENT}"): {message: {"vision_x": x} for message, x in different.items()},
        (ShapeError, "", lambda x, comm: flamingo.local_frames(x | three, comm)): {"3 media for 2 samples": {}},
    }
    case = BATCHES["open_flamingo"].with_model(language_model="opt")
    check_errors("open_flamingo", 2, case, errors)


def test_local_images_that_samples_cannot_share_are_refused() -> None:
    model = patch_model(model_of("mllama", MLLAMA))
    images = family_module("mllama").local_frames(inputs_of("mllama", MLLAMA, model))
    three = {name: images[name][:3] for name in ("pixel_values", *RATIOS)}
    ids = torch.full((2, 11), 7)
    with pytest.raises(ValueError, match="9 tiles of 2 samples were passed with a batch of 2; every sample needs as"):
        model(ids, **three, visual_shard=FrameShard(0, 3, 3))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"pixel_valuez": tiny_frames(2)}, ConfigError, "forward: unknown argument pixel_valuez"),
        ({"position_ids": torch.arange(11)[None]}, ShapeError, r"position_ids: has shape \(1, 11\)"),
        ({"position_ids": torch.arange(12)}, ShapeError, r"position_ids: has shape \(12,\)"),
        ({"labels": torch.zeros(1, 12)}, ShapeError, "labels: has dtype torch.float32; expected integers"),
        ({"input_ids": tiny_text(2)[0]}, ShapeError, r"input_ids: has shape \(12,\); expected 2 dimensions"),
    ],
)
def test_unknown_or_misshapen_arguments_are_refused(arguments: Inputs, kind: type[Exception], message: str) -> None:
    given = {"input_ids": tiny_text(2), "pixel_values": tiny_frames(2)} | arguments
    with pytest.raises(kind, match=message):
        patch_model(tiny_model())(**given)


def test_surplus_positional_arguments_are_a_type_error_as_in_the_unpatched_model() -> None:
    model = tiny_model()
    arguments = [tiny_text(2), *[None] * 40]
    for called in (model, patch_model(model)):
        with pytest.raises(TypeError, match="positional arguments but 42 were given"):
            called(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_attentions": True}, "output_attentions=True: attention weights do not exist"),
        ({"output_attention": True}, "forward: unknown argument output_attention"),
        ({"is_causal": False}, "is_causal=False: the text of a patched model is causal"),
        ({"cu_seq_lens_q": torch.tensor([0, 1])}, "cu_seq_lens_q: the lengths that FlashAttention's varlen kernels"),
        ({"inputs_embeds": torch.zeros(1, 1, 64)}, "pass either input_ids or inputs_embeds"),
    ],
)
@torch.no_grad()
def test_arguments_are_checked_in_decoding_steps_too(arguments: Inputs, message: str) -> None:
    model = patch_model(tiny_model())
    cache = cache_of(model(tiny_text(2), tiny_frames(2), use_cache=True))
    token = {"input_ids": tiny_text(2)[:, :1], **cache_argument(cache)}
    with pytest.raises((ConfigError, ShapeError), match=message):
        model(**token, **arguments)
    assert model(**token).logits.shape[1] == 1


@pytest.mark.parametrize("family", ["mplug_owl3", "idefics"])
@torch.no_grad()
def test_a_decoding_step_takes_token_ids_or_embeddings(family: str) -> None:
    """Families state on their own what a decoding step is, so the check must not depend on it."""
    case = BATCHES[family]
    model = patch_model(model_of(family, case))
    inputs = inputs_of(family, case, model)
    inputs = {name: x for name, x in inputs.items() if "labels" not in name}
    cache = cache_of(model(**inputs, use_cache=True))
    mask = (
        inputs["attention_mask"] if inputs.get("attention_mask") is not None else torch.ones_like(inputs["input_ids"])
    )
    token = {"input_ids": inputs["input_ids"][:, -1:], "attention_mask": torch.cat([mask, mask[:, -1:]], 1)}
    embeds = torch.zeros(*token["input_ids"].shape, model.get_input_embeddings().weight.shape[1])
    with pytest.raises(ShapeError, match="pass either input_ids or inputs_embeds"):
        model(**token, **cache_argument(cache), inputs_embeds=embeds)


def autocast_loss(model: Any, inputs: Inputs, comm: Any, dtypes: tuple[torch.dtype, ...]) -> float:
    """Return the loss under autocast with features of a dtype for each rank."""
    features = inputs["image_embeds"].to(dtypes[comm.rank])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return float(model(**inputs | {"image_embeds": features}).loss)


def features_case(strategy: str) -> Owl:
    return Owl(frames=(2,), length=12, features="features", local_frames=True).with_options(strategy=strategy)


@pytest.mark.parametrize("strategy", ["replicate", "ring"])
def test_rank_without_frames_may_pass_features_of_any_dtype(strategy: str) -> None:
    """Under autocast features keep their dtype, and ranks that send them to each other need the same."""
    half, single = torch.bfloat16, torch.float32
    case = features_case(strategy)
    expected = on_ranks(3, "mplug_owl3", case, lambda *given: autocast_loss(*given, (half, half, half)))
    found = on_ranks(3, "mplug_owl3", case, lambda *given: autocast_loss(*given, (half, half, single)))
    assert found == expected == expected[:1] * 3


@pytest.mark.parametrize(("strategy", "trained"), [("replicate", 2), ("ring", 2), ("replicate", 1)])
def test_rank_whose_features_have_no_gradient_takes_part_in_their_backward_pass(strategy: str, trained: int) -> None:
    """The features of the first ranks require gradients. Rank 2 has no frames, and rank 1 has one."""

    def gradient(model: Any, inputs: Inputs, requires_grad: bool) -> torch.Tensor | None:
        features = inputs["image_embeds"].detach().requires_grad_(requires_grad)
        model(**inputs | {"image_embeds": features}).loss.backward()
        return features.grad

    def run(requires: range) -> list[torch.Tensor | None]:
        return on_ranks(3, "mplug_owl3", features_case(strategy), lambda *x: gradient(*x[:2], x[2].rank in requires))

    found, expected = run(range(trained)), run(range(3))
    assert all(torch.equal(x, y) for x, y in zip(found[:trained], expected, strict=False))
    assert found[trained:] == [None] * (3 - trained)


def test_ranks_with_features_of_different_dtypes_are_refused() -> None:
    def run(*given: Any) -> None:
        with pytest.raises(AgreementError, match="dtype of frames: rank 0: torch.bfloat16; rank 1: torch.float32"):
            autocast_loss(*given, (torch.bfloat16, torch.float32, torch.int8))

    on_ranks(3, "mplug_owl3", features_case("lv-xattn"), run)


SHORT = tiny_text(3, length=11)
BAD_TOKENS = [
    ({"input_ids": torch.full((1, 12), 256)}, "input_ids: 256 is not a token of this model, whose tokens are 0 to 255"),
    ({"input_ids": torch.full((1, 12), -1)}, "input_ids: -1 is not a token of this model"),
    ({"labels": SHORT}, r"labels: has shape \(1, 11\); expected \(1, 12\)"),
    ({"labels": None, "shift_labels": SHORT}, r"shift_labels: has shape \(1, 11\); expected \(1, 12\)"),
    ({"labels": torch.full((1, 12), 256)}, "labels: 256 is not a token of this model, whose tokens are 0 to 255"),
    ({"labels": torch.full((1, 12), -1)}, "labels: -1 is not a token of this model"),
]


LOCAL = {"self_attention": "local"}
BAD_TOKEN_RUNS: list[tuple[int, dict[str, Any]]] = [(1, {}), (1, {"logits": "none"}), (2, LOCAL)]
BAD_TOKEN_RUNS += [(2, {"logits": logits}) for logits in ("none", "auto", "full")]


@pytest.mark.parametrize(("size", "options"), BAD_TOKEN_RUNS)
def test_bad_tokens_and_labels_are_refused_on_every_rank(size: int, options: dict[str, Any]) -> None:
    """Of sharded text, only the rank that has the token would fail otherwise, and the others would wait for it.

    Where one rank has the whole text, a loss function of the user may take labels of another shape.
    """
    whole_text = options in ({}, LOCAL)

    def run(model: Any, inputs: Inputs, _: Any) -> None:
        for changed, message in BAD_TOKENS:
            if whole_text and "shape" in message:
                continue
            with pytest.raises(ShapeError, match=message):
                model(**inputs | changed)
        first_and_last = inputs["labels"].index_copy(1, torch.tensor([1, 2]), torch.tensor([[0, 255]]))
        assert model(**inputs | {"labels": first_and_last}).loss.isfinite()

    on_ranks(size, "mplug_owl3", OWL.with_options(**options), run)


def test_unknown_token_is_refused_where_peft_has_a_copy_of_the_embedding() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model()
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    assert sum(isinstance(x, torch.nn.Embedding) for x in model.get_input_embeddings().modules()) == 2
    with pytest.raises(ShapeError, match="256 is not a token of this model, whose tokens are 0 to 255"):
        patch_model(model)(input_ids=torch.full((1, 12), 256))


def with_attention_dropout(family: str, model: Any) -> Any:
    if family == "idefics":
        for block in model.model.gated_cross_attn_layers:
            block.cross_attn.dropout = 0.1
    elif family in ("mllama", "video_mllama"):
        for number in CROSS_LAYERS:
            model.model.language_model.layers[number].cross_attn.dropout = 0.1
    elif family == "moss_vl":
        for number in CROSS_LAYERS:
            model.model.language_model.layers[number].cross_attn.attention_dropout = 0.1
    elif family in QWENS:
        for layer in model.model.language_model.layers:
            layer.self_attn.attention_dropout = 0.1
    elif family == "open_flamingo":
        for block in model.lang_encoder.transformer.blocks:
            getattr(block, "decoder_layer", block).attn.attn_dropout_p = 0.1
    return model.train()


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_dropout_is_refused_in_training_only(family: str) -> None:
    family_module(family)
    case = BATCHES[family].with_model(attention_dropout=0.1) if family == "mplug_owl3" else BATCHES[family]

    def run(model: Any, inputs: Inputs, _: Any) -> None:
        with_attention_dropout(family, model)
        for arguments in ({}, {"use_cache": True}) if family == "mplug_owl3" else ({},):
            with pytest.raises(ValueError, match="dropout on attention weights is not supported"):
                model(**inputs, **arguments)
        if family == "open_flamingo":
            model.lang_encoder.clear_conditioned_layers()
        model.eval()(**inputs)

    on_ranks(2, family, case, run)


def test_frames_are_compared_by_values_and_not_by_memory_layout() -> None:
    frames = torch.randn(7, 33, 50, 3).permute(0, 3, 1, 2)
    assert fingerprint_of(frames) == fingerprint_of(frames.contiguous()) != fingerprint_of(frames + 1)


def generate(model: Any, **given: Any) -> Any:
    given = {"input_ids": tiny_text(2), "pixel_values": tiny_frames(2), "pad_token_id": 0, "max_new_tokens": 2} | given
    return model.generate(**given)


def step(model: Any, **given: Any) -> Any:
    return model(**{"input_ids": tiny_text(2), "pixel_values": tiny_frames(2), "labels": tiny_text(2)} | given)


DIFFERENCES: dict[str, tuple[Any, Any]] = {
    "training mode": (step, lambda model: step(model.train())),
    "gradient checkpointing": (step, lambda model: step((model.gradient_checkpointing_enable(), model)[1])),
    "digest of requires_grad of the parameters": (step, lambda model: step(model.requires_grad_(False))),
    "num_items_in_batch": (step, lambda model: step(model, num_items_in_batch=3)),
    "output_hidden_states: rank 1: True": (step, lambda model: step(model, output_hidden_states=True)),
    "dtypes of text, labels and frames": (step, lambda model: step(model, pixel_values=tiny_frames(2).double())),
    "autocast": (step, torch.autocast("cpu", torch.bfloat16)(step)),
    "stopping_criteria": (generate, lambda model: generate(model, stopping_criteria=[lambda *_: True])),
    "different calls at the same time: rank 0: forward pass; rank 1: generate": (step, generate),
}
"""What rank 0 and what rank 1 calls, by what the error names."""


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_compute_differently_are_refused(what: str) -> None:
    """Their losses would differ, or one would wait for a transfer that the other does not send."""

    def run(model: Any, inputs: Inputs, comm: Any) -> float:
        with pytest.raises(AgreementError) as caught:
            DIFFERENCES[what][comm.rank](model)
        assert what in str(caught.value)
        if what.startswith("different calls"):
            return model(**inputs).loss.item()
        return 0.0

    first, second = on_ranks(2, "mplug_owl3", OWL, run)
    assert first == pytest.approx(second)  # both ranks can go on


DISAGREE = "the ranks differ in parameters"


@pytest.mark.parametrize(
    ("options", "make", "own", "others"),
    [
        (
            {"text_layout": "striped"},
            tiny_model,
            *["differ in text_layout: rank 0: zigzag; rank 1: striped"] * 2,
        ),
        ({"text_lay_out": "striped"}, tiny_model, "unknown option text_lay_out", ELSEWHERE),
        ({}, lambda: tiny_model(intermediate_size=112), DISAGREE, DISAGREE),
        ({}, lambda: tiny_model().requires_grad_(False), DISAGREE, DISAGREE),
        ({}, lambda: torch.nn.Linear(2, 2), "no adapter matches", ELSEWHERE),
    ],
    ids=["other options", "unknown option", "other model", "frozen", "no model"],
)
def test_ranks_that_patch_differently_are_refused(options: Inputs, make: Any, own: str, others: str) -> None:
    models = [tiny_model(), make()]

    def run(comm: Any) -> None:
        with pytest.raises(SeqParError, match=f"(?s){own if comm.rank == 1 else others}"):
            patch_model(models[comm.rank], group=comm, **(options if comm.rank == 1 else {}))

    run_loopback(2, run)


TOKEN_WITH_BAD_FRAMES: list[tuple[Inputs, str]] = [
    ({"image_embeds": FEATURES[..., :32]}, r"expected \(frames, tokens, 64\)"),
    ({"image_embeds": FEATURES, "visual_shard": FrameShard(5, 8, 9)}, r"visual_shard: rank \d of \d holds frames"),
    ({"image_embeds": FEATURES, "pixel_values": tiny_frames(3)}, "pass either pixel_values or image_embeds, not both"),
]


@pytest.mark.parametrize("size", [1, 2])
@torch.no_grad()
def test_frames_that_come_with_one_token_are_checked_on_every_rank(size: int) -> None:
    def run(model: Any, inputs: Inputs, comm: Any) -> None:
        text = {"input_ids": inputs["input_ids"], "use_cache": True}
        for bad, message in TOKEN_WITH_BAD_FRAMES:
            token = {"input_ids": tiny_text(1)[:, :1], **cache_argument(cache_of(model(**text)))}
            own = comm.rank == size - 1
            with torch.no_grad(), pytest.raises(ShapeError if own else AgreementError) as caught:
                model(**token, **(bad if own else {"image_embeds": FEATURES}))
            assert re.search(message, str(caught.value)), (message, comm.rank, str(caught.value))
            with torch.no_grad():
                assert model(**token).logits.shape[1] == 1

    case = replace(OWL, labels=None, frames=(0,))
    on_ranks(size, "mplug_owl3", case, run)
