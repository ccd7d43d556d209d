"""Layer: one process, loopback ranks. Bad inputs raise an error with a cause on every rank, and no rank waits.

All bad inputs of a family go to one patched model, so that anything that a failed pass leaves behind spoils the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from family_cases import BATCHES, INSTRUCT
from family_harness import family_module, inputs_of, model_of, on_ranks
from mllm_seqpar import FrameShard, patch_model
from mllm_seqpar.errors import AgreementError, ConfigError, MaskError, SeqParError, ShapeError
from mllm_seqpar.patches.idefics.testing import Case as Idefics
from mllm_seqpar.patches.mllama.testing import PATCHES, TILES
from mllm_seqpar.patches.mllama.testing import Case as Mllama
from mllm_seqpar.patches.mplug_owl3.testing import Case as Owl
from mllm_seqpar.patches.mplug_owl3.testing import local_frames, tiny_frames, tiny_model, tiny_text

Inputs = dict[str, Any]
DIFFERENT = "given different inputs"
"""All ranks report that their inputs differ."""
ELSEWHERE = r"rank 1 of the group failed while checking its arguments"
"""The error of the ranks whose own inputs are valid."""


@dataclass(frozen=True)
class Bad:
    """What rank 1 passes, its error, and the error of the others; without `others`, all ranks pass it.

    Attributes:
        change: the new values of arguments (None removes one), or a function from the valid arguments to these.
        base: makes the valid arguments of a rank.
    """

    change: Inputs | Callable[[Inputs], Inputs]
    kind: type[Exception]
    message: str
    others: str = ""
    base: Callable[[Inputs, Any], Inputs] = lambda inputs, comm: inputs

    def inputs(self, valid: Inputs, comm: Any) -> Inputs:
        valid = self.base(valid, comm)
        if self.others and comm.rank != 1:
            return valid
        changed = self.change(valid) if callable(self.change) else self.change
        return {name: x for name, x in (valid | changed).items() if x is not None}


def bad(kind: type[Exception], others: str, changes: dict[str, Any], **base: Any) -> list[Bad]:
    """Return bad inputs that raise the same kind of error, from a dictionary of messages and changes."""
    return [Bad(change, kind, message, others, **base) for message, change in changes.items()]


OWL = Owl(frames=(3,), length=12)
FEATURES = torch.zeros(3, 4, 64)
LONGER = {"input_ids": tiny_text(3, length=14), "labels": tiny_text(3, length=14)}
OFFSETS = torch.zeros(1, 12, 2, dtype=torch.long)
OWL_ERRORS = [
    *bad(
        AgreementError,
        DIFFERENT,
        {
            "checksum of token ids: rank 0 has": lambda x: {name: x[name].flip(1) for name in ("input_ids", "labels")},
            "text tokens: rank 0 has 12, rank 1 has 14": LONGER,
            "checksum of labels": lambda x: {"labels": x["labels"] + 1},
            "labels given: rank 0 has 1, rank 1 has 0": {"labels": None},
            "checksum of pixels": {"pixel_values": tiny_frames(3, seed=8)},
            "frames: rank 0 has 3, rank 1 has 2, rank 2 has 3": {"pixel_values": tiny_frames(2)},
            "checksum of position ids": {"position_ids": torch.arange(1, 13)[None]},
            "checksum of what says where the frames belong": {"media_offset": OFFSETS},
            "kind of frames": {"pixel_values": None, "image_embeds": FEATURES},
            "cache asked for: rank 0 has 0, rank 1 has 1": {"use_cache": True},
            "frames given by visual_shard: rank 0 has 0, rank 1 has 1": {
                "pixel_values": tiny_frames(3)[1:2],
                "visual_shard": FrameShard(1, 2, 3),
            },
        },
    ),
    *bad(
        ShapeError,
        ELSEWHERE,
        {
            "pass either pixel_values or image_embeds, not both": {"image_embeds": FEATURES},
            "pass either input_ids or inputs_embeds": {"input_ids": None},
            r"expected \(frames, tokens, 64\)": {"pixel_values": None, "image_embeds": FEATURES[..., :32]},
        },
    ),
    *bad(
        ShapeError,
        ELSEWHERE,
        {
            r"rank 1 of 3 holds frames 1 to 2 of 3 .*FrameShard\(start=0": {"visual_shard": FrameShard(0, 1, 3)},
            "means 1 frames, 3 were passed": {"pixel_values": tiny_frames(3)},
            "a rank without frames passes an empty tensor": {"pixel_values": None},
            r"expected a FrameShard\(start, stop, total\), got tuple": {"visual_shard": (1, 2, 3)},
        },
        base=local_frames,
    ),
    *bad(
        ConfigError,
        ELSEWHERE,
        {
            "output_attentions=True: attention weights do not exist": {"output_attentions": True},
            "is_causal=False: the text of a patched model is causal in every layer": {"is_causal": False},
        },
    ),
    *bad(
        ShapeError,
        "",
        {
            "neither pixel_values nor image_embeds was passed": {"pixel_values": None},
            "placeholders for 3 frames .* and 4 were passed": {"pixel_values": tiny_frames(4)},
            r"pixel_values has shape .*expected \(frames, 3, 28, 28\)": {"pixel_values": torch.zeros(3, 3, 42, 42)},
        },
    ),
    Bad({"attention_mask": torch.ones(1, 1, 12, 12)}, MaskError, r"a padding mask of shape \(1, 12\), got \(1, 1, 12,"),
    Bad({"output_attentions": True}, ConfigError, "output_attentions=True"),
    Bad({"use_cache": True}, ConfigError, "use_cache: a pass with a cache has no backward pass"),
]

IDEFICS = Idefics(frames=(4,), mask="before", labels=None, model=INSTRUCT)
LATENTS = {"pixel_values": None, "perceiver_embeddings": torch.zeros(1, 4, 3, 24)}
IDEFICS_ERRORS = [
    *bad(
        ValueError,
        "",
        {
            r"image_attention_mask: expected \(samples, text tokens, .* got nothing": {"image_attention_mask": None},
            r"got \(1, 4, 4\)": {"image_attention_mask": torch.ones(1, 4, 4)},
            "whose mask speaks of 3 each": {"image_attention_mask": torch.ones(1, 11, 3)},
            "IDEFICS needs images: pass one of pixel_values": {"pixel_values": None},
            "pass interpolate_pos_encoding=True": {"pixel_values": torch.zeros(1, 4, 3, 24, 24)},
            "perceiver_embeddings were passed to a model without resampler": LATENTS,
            "output_attentions=True: attention weights do not exist": {"output_attentions": True},
        },
    ),
    *bad(
        ConfigError,
        "",
        {"use_cache: a pass with a cache has no backward": {"use_cache": True}},
        base=lambda inputs, comm: family_module("idefics").local_frames(inputs, comm),
    ),
]

MLLAMA = Mllama(frames=((3, 1, 2, 3),), labels=None)


def _mask(*shape: int) -> Inputs:
    return {"cross_attention_mask": torch.ones(*shape)}


def _pixels(*shape: int) -> Inputs:
    return {"pixel_values": torch.zeros(*shape)}


def _states(*shape: int) -> Inputs:
    return {"cross_attention_states": torch.zeros(*shape)}


NO_PIXELS = {"pixel_values": None}
MLLAMA_ERRORS = bad(
    SeqParError,
    ELSEWHERE,
    {
        r"mask has shape \(1, 4, 4, 3\); expected \(batch, tokens, images, tiles\): 1 samples, 11": _mask(
            1, 4, 4, TILES
        ),
        "12 tiles in all images of a sam": _mask(1, 11, 3, TILES),
        r"has shape \(1, 11, 4\); expected": _mask(1, 11, 4),
        r"has shape \(2, 11, 4, 3\)": _mask(2, 11, 4, TILES),
        "given without aspect_ratio_ids, aspect_ratio_mask; pass what the processor returns": {
            "aspect_ratio_ids": None,
            "aspect_ratio_mask": None,
        },
        r"\[\(4, 3, 3, 28, 28\), \(1,\), \(4, 3\)\] by images": {
            "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long)
        },
        r"expected \(batch, images, 3 tiles, channels": _pixels(1, 4, 2, 3, 28, 28),
        r"\[\(12, 3, 28, 28\), \(4,\), ": _pixels(4, 3, 3, 28, 28),
        "pass either pixel_values or cross_attention_states, not both": _states(12, PATCHES, 64),
        r"\(12, 5, 96\); expected \(batch x images x tiles, patches, 64\) with 5": NO_PIXELS | _states(12, PATCHES, 96),
        "with 5 patches a tile, as cross_attention_mask has it": NO_PIXELS | _states(1, 12 * PATCHES - 1, 64),
        "output_attentions=True: attention weights do not exist": {"output_attentions": True},
    },
)


def check_errors(family: str, ranks: int, case: Any, errors: list[Bad]) -> None:
    def run(model: Any, inputs: Inputs, comm: Any) -> None:
        for each in errors:
            own = not each.others or comm.rank == 1
            # A rank whose own inputs are valid reports a disagreement, whatever the error elsewhere.
            kind, message = (each.kind, each.message) if own else (AgreementError, each.others)
            with pytest.raises(kind) as caught:
                model(**each.inputs(inputs, comm))
                pytest.fail(f"no error: {message}")
            assert re.search(message, str(caught.value)), (message, comm.rank, str(caught.value))
            if family == "open_flamingo":
                model.lang_encoder.clear_conditioned_layers()
        out = model(**inputs)  # the group is still usable
        assert out.loss is None or torch.isfinite(out.loss)

    on_ranks(ranks, family, case, run)


@pytest.mark.parametrize(
    ("family", "ranks", "case", "errors"),
    [
        ("mplug_owl3", 3, OWL, OWL_ERRORS),
        ("idefics", 2, IDEFICS, IDEFICS_ERRORS),
        ("mllama", 2, MLLAMA, MLLAMA_ERRORS),
    ],
    ids=["mplug_owl3", "idefics", "mllama"],
)
def test_bad_inputs_are_refused_on_every_rank(family: str, ranks: int, case: Any, errors: list[Bad]) -> None:
    check_errors(family, ranks, case, errors)


def test_bad_media_of_open_flamingo_are_refused_on_every_rank() -> None:
    flamingo = family_module("open_flamingo")
    errors = bad(
        ValueError,
        f"of the group|{DIFFERENT}",
        {
            "expected .*one frame to a medium": {"vision_x": torch.zeros(2, 2, 3, 3, 12, 12)},
            r"expected \(B, media, 1, C, H, W\)": {"vision_x": torch.zeros(2, 2, 3, 12, 12)},
            "0 media for 2 samples": {"vision_x": torch.zeros(2, 0, 1, 3, 12, 12)},
            "2 rows of text, but media for 3 samples": {"vision_x": flamingo.pixels(3, 2)},
            DIFFERENT: {"vision_x": flamingo.pixels(2, 2, seed=9)},
        },
    )
    three = {"vision_x": flamingo.pixels(1, 3)}  # two samples cannot share them equally
    shared = bad(
        ShapeError, "", {"3 media for 2 samples": {}}, base=lambda x, comm: flamingo.local_frames(x | three, comm)
    )
    case = BATCHES["open_flamingo"].with_model(language_model="opt")
    check_errors("open_flamingo", 2, case, errors + shared)


def test_local_images_that_samples_cannot_share_are_refused() -> None:
    case = BATCHES["mllama"]
    model = patch_model(model_of("mllama", case))
    inputs = inputs_of("mllama", case, model) | {"cross_attention_mask": None, "labels": None}
    images = family_module("mllama").local_frames(inputs_of("mllama", MLLAMA, model))
    names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    three = {name: images[name][:3] for name in names} | {"visual_shard": FrameShard(0, 3, 3)}
    with pytest.raises(ValueError, match="9 tiles of 2 samples were passed with a batch of 2; every sample needs as"):
        model(**inputs | three)


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
