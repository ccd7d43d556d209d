"""Layer: one process, ranks as threads. The attention over frames of an answer, against dense float64 attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from family_cases import CROSS_ATTENTION, LANGUAGE_MODELS, LONG_WINDOW, QWENS
from family_harness import build, family_module, on_ranks, settings
from frame_attention_reference import PROMPT, expected_shares
from mllm_seqpar import attention_over_frames, patch_model, record_attention
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.errors import AgreementError, ConfigError
from mllm_seqpar.inference import attention_record
from mllm_seqpar.runtime import visual_features
from tiny_models.qwen2_5_vl import IMAGE, VIDEO

TOLERANCE = 1e-5
SHARDED = {"shard_prompt_from": 8}
ANSWER = settings(max_new_tokens=4, suppress_tokens=[IMAGE, VIDEO])


def case_of(family: str, **overrides: Any) -> Any:
    """Return a batch of one sample whose frames do not divide by 2, 3 or 4 ranks."""
    frames = {"mplug_owl3": (5,), "idefics": (5,), "mllama": ((3, 1, 2, 1, 3),), "open_flamingo": ((1, 3, 4, 6, 8),)}
    frames["video_mllama"] = (5,)
    frames |= dict.fromkeys(QWENS, (((3, 4, 6), (6, 4), (1, 2, 2)),))
    frames["moss_vl"] = (((3, 4, 6), (8, 4), (1, 2, 2)),)
    fields = {"frames": frames[family], "labels": None, "length": 52 if family in QWENS else 13}
    if family == "idefics":
        fields["mask"] = "holes"
    if family in ("mllama", "video_mllama"):
        fields["mask"] = "scattered"
    if family == "open_flamingo":
        fields |= {"media": 5, "model": {"language_model": "opt", "immediate": False}}
    return family_module(family).Case(**fields | overrides)


def seen_units(family: str, case: Any, inputs: dict[str, Any]) -> Tensor:
    """Return (F, units of a frame) bool: what the last row of the prompt attends to."""
    if family in QWENS or family == "moss_vl":
        return torch.ones(5, 1, dtype=torch.bool)
    if family == "idefics":
        return inputs["image_attention_mask"][0, -1, :, None].bool()
    if family in ("mllama", "video_mllama"):
        seen = inputs["cross_attention_mask"][0, -1].bool()
        return seen if bool(seen.any()) else ~seen  # a row without tiles attends to all
    frames = case.media if family == "open_flamingo" else case.frames[0]
    seen = torch.ones(frames, 1, dtype=torch.bool)
    if family == "open_flamingo" and case.model["immediate"]:
        seen[: len(case.frames[0]) - 1] = False
    return seen


def generated(family: str, inputs: dict[str, Any], found: Any) -> Tensor:
    """Return the tokens of the answer."""
    return found.output[0, inputs[PROMPT.get(family, "input_ids")].shape[1] :]


def check(family: str, size: int, case: Any) -> list[Any]:
    """Compare the shares of every rank with the reference, and return them."""

    def record(model: Any, inputs: dict[str, Any], comm: Any) -> Any:
        return attention_over_frames(model, **inputs, **ANSWER)

    found = on_ranks(size, family, case, record)
    model, inputs = build(family, replace(case, local_frames=False))
    answer, seen = generated(family, inputs, found[0]), seen_units(family, case, inputs)
    inputs = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()}
    units, text = expected_shares(family, model.double(), inputs, answer, seen.flatten())
    for one in found:
        assert one.frames.shape == (4, len(seen))
        assert torch.equal(one.frames, found[0].frames) and torch.equal(one.text, found[0].text)
        assert torch.equal(one.visible, seen.any(1).expand(4, -1))
        assert not one.frames[~one.visible].any()
        torch.testing.assert_close(one.frames.double(), units.unflatten(1, seen.shape).sum(-1), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(one.text.double(), text, atol=TOLERANCE, rtol=0)
    return found


FUSED = {"model": {"gate": None}}
HOST = {"visual_offload": "cpu"}
WINDOW = {"model": LONG_WINDOW | {"sliding_window": 20}}
QUICK = ("mplug_owl3-3", "mllama-3", "fused, sharded text-3", "host memory, sharded text-3")
QUICK += tuple(f"{family}, sharded text-3" for family in QWENS)
CASES = [
    pytest.param(family, size, fields, options, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for name, family, size, fields, options in (
        *[(f"{f}-{n}", f, n, {}, {}) for i, f in enumerate(CROSS_ATTENTION) for n in (1, 2 + i % 2 * 2, 3)],
        ("fused-1", "mplug_owl3", 1, FUSED, {}),
        ("fused-3", "mplug_owl3", 3, FUSED, {}),
        ("fused, sharded text-3", "mplug_owl3", 3, FUSED, SHARDED),
        ("sharded text-2", "mplug_owl3", 2, {}, SHARDED),
        ("fewer frames than ranks", "mplug_owl3", 4, {"frames": (2,)}, SHARDED),
        ("host memory-1", "mplug_owl3", 1, {}, HOST),
        ("host memory-2", "mplug_owl3", 2, {}, HOST),
        ("host memory, sharded text-3", "mllama", 3, {}, SHARDED | HOST),
        ("ring-4", "mllama", 4, {"local_frames": True}, SHARDED | {"strategy": "ring"}),
        ("ulysses-4", "idefics", 4, {}, SHARDED | {"strategy": "ulysses"}),
        ("mesh-4", "idefics", 4, {}, SHARDED | {"strategy": "mesh", "tile": (2, 2)}),
        ("replicate-2", "mplug_owl3", 2, {}, SHARDED | {"strategy": "replicate"}),
        ("star-2", "mplug_owl3", 2, {}, SHARDED | {"self_attention": "star"}),
        *[(f"{family}-{size}", family, size, {}, {}) for i, family in enumerate(QWENS) for size in (1, 2 + i)],
        *[(f"{family}, sharded text-3", family, 3, {}, SHARDED) for family in QWENS],
        *[(f"{family}, ulysses-2", family, 2, {}, SHARDED | {"self_attention": "ulysses"}) for family in QWENS],
        ("decoder-only, fewer frames than ranks", "qwen2_5_vl", 4, {"local_frames": True}, SHARDED),
        (
            "decoder-only, mesh-4",
            "qwen3_vl",
            4,
            {},
            SHARDED | {"self_attention": "mesh", "text_layout": "striped"},
        ),
        ("decoder-only, local text", "qwen3_vl", 2, {}, {"self_attention": "local"}),
        ("decoder-only, star-2", "qwen2_5_vl", 2, {}, SHARDED | {"self_attention": "star"}),
        ("decoder-only, kernel-1", "qwen3_vl", 1, {}, {"kernel": "torch_cpu"}),
        ("decoder-only, window-1", "qwen2_5_vl", 1, WINDOW, {}),
        ("decoder-only, window-3", "qwen2_5_vl", 3, WINDOW, {}),
        ("decoder-only, window, sharded text-3", "qwen2_5_vl", 3, WINDOW, SHARDED),
    )
]


@pytest.mark.parametrize("family, size, fields, options", CASES)
def test_shares_are_those_of_dense_attention(
    family: str, size: int, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    if family == "open_flamingo" and not LANGUAGE_MODELS:
        pytest.skip("open_flamingo is not installed")
    check(family, size, case_of(family, **fields).with_options(**options))


PADDED: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    *[(1, {}, {}), (1, {"kernel": "blocked_matmul"}, {}), (2, {}, {}), (2, SHARDED, {})],
    (1, {}, {"cache_implementation": "static"}),  # `generate` then prepares masks (B, 1, rows, keys)
    (2, {}, {"cache_implementation": "static"}),
]


@pytest.mark.parametrize("size, options, generating", PADDED)
def test_padding_of_a_decoder_only_model_has_no_share(
    size: int, options: dict[str, Any], generating: dict[str, Any]
) -> None:
    def padded(inputs: dict[str, Any]) -> dict[str, Any]:
        names = ("input_ids", "mm_token_type_ids", "attention_mask")
        given = inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}
        return given | {name: torch.nn.functional.pad(given[name], (3, 0)) for name in names}

    case = case_of("qwen3_vl")

    def record(model: Any, inputs: dict[str, Any], comm: Any) -> Any:
        return attention_over_frames(model, **padded(inputs), **ANSWER, **generating)

    found = on_ranks(size, "qwen3_vl", case.with_options(**options), record)
    model, inputs = build("qwen3_vl", case)
    answer = found[0].output[0, inputs["input_ids"].shape[1] + 3 :]
    given = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    frames, text = expected_shares("qwen3_vl", model.double(), given, answer, torch.ones(5, dtype=torch.bool))
    for one in found:
        torch.testing.assert_close(one.frames.double(), frames, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(one.text.double(), text, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("size", [1, 3])
def test_frames_of_a_kept_video_have_the_same_shares(size: int) -> None:
    """A cropped cache keeps where its frames are; frames that come later are counted behind them."""

    def record(model: Any, inputs: dict[str, Any], comm: Any) -> list[Any]:
        whole = attention_over_frames(model, **inputs, **ANSWER)
        options = settings(max_new_tokens=2, return_dict_in_generate=True)
        other = inputs | {"input_ids": inputs["input_ids"].clone()}
        other["input_ids"][:, -4:] = 7
        with torch.no_grad():
            cache = cache_of(model.generate(**other, **options))
            length = inputs["input_ids"].shape[1]
            cache.crop(length - 4 - cache.get_seq_length())
            with record_attention(model) as recorded:
                model.generate(**inputs, **cache_argument(cache), **ANSWER)
                kept = recorded.result()
            cache.crop(9 - cache.get_seq_length())  # within the first frame
            with record_attention(model) as recorded:
                model(input_ids=inputs["input_ids"][:, 40:48], **cache_argument(cache))
                cropped = recorded.result()
        return [whole, kept, cropped]

    def later(model: Any, inputs: dict[str, Any], comm: Any) -> list[Any]:
        """A text without frames first, and then the frames in two passes."""
        ids, kinds, units = inputs["input_ids"], inputs["mm_token_type_ids"], inputs["video_grid_thw"]
        images = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
        video = {name: inputs[name] for name in ("pixel_values_videos", "video_grid_thw")}
        split = int((kinds[0] == 2).nonzero()[-1]) + 2
        with torch.no_grad():
            out = model(input_ids=torch.full((1, 9), 5), use_cache=True)
            cache = cache_of(out)
            model(input_ids=ids[:, :split], mm_token_type_ids=kinds[:, :split], **video, **cache_argument(cache))
            with record_attention(model) as recorded:
                given = {"input_ids": ids[:, split:], "mm_token_type_ids": kinds[:, split:]}
                model(**given, **images, **cache_argument(cache))
                found = recorded.result()
        assert int(units[0, 0]) == 3
        return [found]

    case = case_of("qwen3_vl").with_options(**SHARDED)
    for whole, kept, cropped in on_ranks(size, "qwen3_vl", case, record):
        torch.testing.assert_close(kept.frames, whole.frames, atol=TOLERANCE, rtol=0)
        assert cropped.frames.shape == (1, 1) and 0 < float(cropped.frames) < 1
    case = case_of("qwen3_vl", frames=(((3, 4, 6), (1, 2, 2), (6, 4)),)).with_options(**SHARDED)
    alone = on_ranks(1, "qwen3_vl", case, later)[0]
    for (found,) in on_ranks(size, "qwen3_vl", case, later):
        assert found.frames.shape == (1, 5) and found.frames.all()
        torch.testing.assert_close(found.frames, alone[0].frames, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("size, options", [(1, {}), (2, HOST)])
def test_shares_do_not_depend_on_the_sizes_of_chunks(
    monkeypatch: pytest.MonkeyPatch, size: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(attention_record, "SCORES", 50)
    monkeypatch.setattr(visual_features, "CHUNK_BYTES", 1)
    check("mllama", size, case_of("mllama").with_options(**options))


@pytest.mark.slow
def test_only_the_last_medium_is_visible_to_openflamingo() -> None:
    if not LANGUAGE_MODELS:
        pytest.skip("open_flamingo is not installed")
    found = check("open_flamingo", 2, case_of("open_flamingo").with_model(immediate=True))
    assert not found[0].ranks_frames
    torch.testing.assert_close(found[0].frames[:, -1], torch.ones(4))


def test_recording_changes_no_token_and_ends_with_its_context() -> None:
    def tokens(model: Any, inputs: dict[str, Any], comm: Any) -> tuple[Tensor, Tensor, Tensor]:
        before = model.generate(**inputs, **ANSWER)
        with record_attention(model) as recorded:
            within = model.generate(**inputs, **ANSWER)
            assert not comm.bytes.sent["evidence"]
            first = recorded.result()
            layers, heads, dim, tokens, frames = 2, 4, 16, 4, 3
            assert comm.bytes.sent["evidence"] == 4 * (layers * heads * (dim + 1) + tokens * frames)
            model.generate(**inputs | {"input_ids": inputs["input_ids"][:, :-1]}, **ANSWER)
            assert not torch.equal(recorded.result().frames, first.frames)  # the record is that of the last answer
            out = model.generate(**inputs, **ANSWER, return_dict_in_generate=True)
            model.generate(out.sequences, **cache_argument(cache_of(out)), **ANSWER)  # its first pass has one row
            assert recorded.result().frames.shape == first.frames.shape
        return before, within, model.generate(**inputs, **ANSWER)

    for before, within, after in on_ranks(2, "mplug_owl3", case_of("mplug_owl3").with_options(**SHARDED), tokens):
        assert torch.equal(before, within) and torch.equal(before, after)


@pytest.mark.slow
def test_first_token_is_the_last_row_of_a_prompt_that_is_read_in_two_passes() -> None:
    def read(model: Any, inputs: dict[str, Any], comm: Any) -> None:
        ids = torch.cat([torch.full((5,), 255), torch.arange(10, 20)])[None]
        frames = {"pixel_values": inputs["pixel_values"]}
        with torch.no_grad():
            with record_attention(model) as recorded:
                model(input_ids=ids, **frames, use_cache=True)
                whole = recorded.result().frames
            with record_attention(model) as recorded:
                cache = cache_of(model(input_ids=ids[:, :9], **frames, use_cache=True))
                model(input_ids=ids[:, 9:], **cache_argument(cache))
                torch.testing.assert_close(recorded.result().frames, whole, atol=TOLERANCE, rtol=0)
        assert whole.shape == (1, 5)

    on_ranks(2, "mplug_owl3", case_of("mplug_owl3"), read)


@pytest.mark.parametrize(
    "given, named",
    [
        ({"num_beams": 2}, "num_beams"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size"),
        ({"use_cache": False}, "use_cache"),
    ],
)
def test_what_cannot_be_recorded_is_refused(given: dict[str, Any], named: str) -> None:
    model, inputs = build("mplug_owl3", case_of("mplug_owl3"))
    patch_model(model)
    with pytest.raises(ConfigError, match=named):
        attention_over_frames(model, **inputs, **ANSWER | given)
    with record_attention(model), pytest.raises(ConfigError, match="recorded already"), record_attention(model):
        pass


def test_missing_frames_batches_and_unpatched_models_are_refused() -> None:
    model, inputs = build("mplug_owl3", case_of("mplug_owl3"))
    with pytest.raises(ConfigError, match="not patched"):
        attention_over_frames(model, **inputs, **ANSWER)
    patch_model(model)
    with pytest.raises(ConfigError, match="no attention over frames"):
        attention_over_frames(model, input_ids=torch.arange(3, 9)[None], **ANSWER)
    two = build("mplug_owl3", family_module("mplug_owl3").Case(frames=(2, 1), labels=None))[1]
    with pytest.raises(ConfigError, match="2 rows"):
        attention_over_frames(model, **two, **ANSWER)


def test_a_rank_that_does_not_record_makes_all_ranks_raise() -> None:
    def run(model: Any, inputs: dict[str, Any], comm: Any) -> str:
        try:
            if comm.rank:
                model.generate(**inputs, **ANSWER)
            else:
                attention_over_frames(model, **inputs, **ANSWER)
        except AgreementError as error:
            return str(error)
        return ""

    for text in on_ranks(2, "mplug_owl3", case_of("mplug_owl3"), run):
        assert "attention over frames is recorded" in text
