"""Layer: one process, loopback ranks. Which logits a caller receives; what a rank holds and sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from family_cases import FUSED
from family_harness import TOLERANCE, build, inputs_of, model_of, on_ranks, slow_unless
from generation_cases import SHARDED
from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.runtime.text import select_logit_rows
from mllm_seqpar.schedules.bytes_sent import Problem, lv_xattn_bytes, ring_bytes
from mllm_seqpar.sharding import padded_length, sequence_positions
from outcomes import error
from tiny_models.mplug_owl3 import Case
from tolerances import assert_as_near_as_unpatched

CASES = {"gated": Case(frames=(2, 1)), "fused": Case(frames=(2, 1), model=FUSED)}
LENGTH = 13
KINDS = pytest.mark.parametrize("kind", slow_unless(lambda kind: kind == "fused", CASES))
INDICES = torch.tensor([0, 5, 12])
EACH = torch.tensor([[0, 5, 12], [3, 3, 11]])
MARKED = (torch.arange(13) == 5) | torch.tensor([[False], [True]]) & (torch.arange(13) > 10)
KEPT: dict[str, Any] = {"last": 1, "some": INDICES, "each": EACH, "marked": MARKED}
"""Values of `logits_to_keep`: a number, tokens of all samples, tokens of each sample, and a mask."""


@torch.no_grad()
def logits_of_every_mode(model: Any, labelled: dict[str, Any], group: Any) -> dict[str, torch.Tensor]:
    plain = {name: x for name, x in labelled.items() if name != "labels"}
    found = {}
    for mode in ("auto", "full", "local"):
        patch_model(model, group=group, logits=mode)
        found[f"{mode} labels"] = model(**labelled).logits
        found[f"{mode} plain"] = model(**plain).logits
        found[f"{mode} cached"] = model(**plain, use_cache=True, logits_to_keep=2).logits
        found[f"{mode} tuple"] = model(**plain, return_dict=False)[0]
        found |= {f"{mode} {name}": model(**plain, logits_to_keep=rows).logits for name, rows in KEPT.items()}
        unpatch_model(model)
    patch_model(model, group=group, **SHARDED)
    for name in ("some", "each", "marked"):
        found[f"sharded prompt {name}"] = model(**plain, use_cache=True, logits_to_keep=KEPT[name]).logits
    return found


@pytest.mark.slow
@KINDS
def test_logits_modes_return_all_logits_or_the_local_shard(kind: str) -> None:
    world, case = 3, CASES[kind]
    model, inputs = build("mplug_owl3", case)
    with torch.no_grad():
        whole = model(**inputs).logits
        assert error(model(**inputs | {"labels": None}, logits_to_keep=MARKED).logits, whole[MARKED]) < TOLERANCE
    padded = torch.nn.functional.pad(whole, (0, 0, 0, padded_length(LENGTH, world, "zigzag") - LENGTH))
    each_rank = run_loopback(world, lambda comm: logits_of_every_mode(model_of("mplug_owl3", case), inputs, comm))
    expected_of = {
        **{"last": whole[:, -1:], "cached": whole[:, -2:], "some": whole[:, INDICES], "marked": whole[MARKED]},
        "each": torch.stack([whole[0, EACH[0]], whole[1, EACH[1]]]),
    }
    for rank, found in enumerate(each_rank):
        positions = sequence_positions(padded.shape[1], rank, world, "zigzag")
        real = positions < LENGTH
        for name, logits in found.items():
            expected = expected_of.get(name.split()[-1], whole)
            if name in ("auto labels", "local labels", "local plain", "local tuple"):
                logits, expected = logits[:, real], padded[:, positions][:, real]
            assert error(logits, expected) < TOLERANCE, name


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["whole prompt", "sharded prompt"])
@pytest.mark.parametrize("world", [1, 2])
def test_pass_with_a_cache_and_labels_has_no_logits_if_none_are_wanted(world: int, options: dict[str, Any]) -> None:
    case = replace(CASES["gated"], labels="few").with_options(logits="none", **options)

    @torch.no_grad()
    def run(model: Any, inputs: dict[str, Any], _: Any) -> tuple[list[int], Any, Any]:
        rows: list[int] = []
        model.get_output_embeddings().register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[-2]))
        found = model(**inputs, use_cache=True)
        kept = model(**inputs, use_cache=True, logits_to_keep=LENGTH)
        assert cache_of(found).get_seq_length() == LENGTH
        assert found.logits is None and kept.logits.shape[1] == LENGTH
        return rows, found.loss, kept.loss

    model, inputs = build("mplug_owl3", case)
    targets = int((inputs["labels"][:, 1:] != -100).sum())
    assert 0 < targets < 2 * LENGTH
    with torch.no_grad():
        expected = model(**inputs).loss
    for rows, loss, kept in on_ranks(world, "mplug_owl3", case, run):
        assert rows == [targets, LENGTH]
        assert error(loss, expected) < TOLERANCE and error(kept, expected) < TOLERANCE


def sizes(model: Any, inputs: dict[str, Any], _: Any) -> dict[str, list[int]]:
    """Return the tokens of each decoder layer's input, and the frames of each tower call and of the shared features."""
    found: dict[str, list[int]] = {"tokens": [], "tower": [], "features": []}
    layers = model.language_model.model.layers
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args: found["tokens"].append(args[0].shape[1]))
    model.vision_model.embeddings.register_forward_pre_hook(lambda _, args: found["tower"].append(len(args[0])))
    layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: found["features"].append(len(kwargs["seqpar"].frames.source.features)), with_kwargs=True
    )
    model(**inputs)
    return found


def test_rank_holds_only_its_text_and_frame_shards() -> None:
    case = Case(frames=(3, 2), length=16)
    for rank, found in enumerate(on_ranks(4, "mplug_owl3", case, sizes)):
        frames = (1, 1, 1, 2)[rank]  # the last rank has the chunks in the middle
        assert found == {"tokens": [4] * 4, "tower": [frames], "features": [frames]}
    one_frame = on_ranks(4, "mplug_owl3", Case(frames=(1,), length=16), sizes)
    assert [found["features"] for found in one_frame] == [[1], [0], [0], [0]]
    # Ranks without frames run the tower on an empty frame, so that its parameters have gradients.
    assert all(found["tower"] == [1] for found in one_frame)


def visible_rows(case: Any, world: int) -> list[list[int]]:
    """Return [i][j]: the rows of rank i, of all samples, that see a frame of rank j in the unpatched model's layout."""
    model, inputs = build("mplug_owl3", case)
    layout = model.media_layout(3, input_ids=inputs["input_ids"], position_ids=torch.arange(LENGTH)[None])
    first, stop = (bound[..., None] for bound in layout.rows(0, LENGTH))
    visible = (first <= torch.arange(3)) & (torch.arange(3) < stop)  # each of 3 ranks has one frame
    total = padded_length(LENGTH, world, "zigzag")
    positions = (sequence_positions(total, rank, world, "zigzag") for rank in range(world))
    return [visible[:, rows[rows < LENGTH]].sum((0, 1)).tolist() for rows in positions]


@pytest.mark.parametrize("strategy", ["lv-xattn", "ring"])
@KINDS
def test_training_step_sends_the_documented_bytes(kind: str, strategy: str) -> None:
    """The model has four layers, of which two also see frames."""
    world, batch, heads, groups, dim, per_frame = 3, 2, 4, 2, 16, 4
    rows = padded_length(LENGTH, world, "zigzag") // world
    visible = visible_rows(CASES[kind], world)

    def run(model: Any, inputs: dict[str, Any], comm: Any) -> dict[str, int]:
        comm.bytes.reset()
        model(**inputs).loss.backward()
        return dict(comm.bytes.sent)

    case = CASES[kind].with_options(strategy=strategy)
    for rank, sent in enumerate(on_ranks(world, "mplug_owl3", case, run)):
        shape = {"heads": heads, "kv_heads": groups, "dim": dim, "batch": batch, "rank": rank, "element": 4}
        text = Problem(rows=rows, keys=(rows,) * world, key_batch=batch, **shape)
        visual = Problem(rows=rows, keys=(per_frame,) * world, **shape)
        expected: Counter[str] = Counter()
        for backward in (False, True):
            for _ in range(4):
                expected.update(ring_bytes(text, backward=backward))
            for _ in range(2):
                if strategy == "ring":
                    expected.update(ring_bytes(visual, backward=backward))
                else:
                    expected.update(lv_xattn_bytes(visual, backward=backward, visible_rows=visible))
        expected = +expected  # labels without bytes are not counted
        assert {name: sent[name] for name in expected} == dict(expected)
        rest = {name: n for name, n in sent.items() if name not in expected}
        # The rest is one number of the loss, and the comparison of inputs.
        assert set(rest) == {"loss", "agreement"} and sum(rest.values()) < 1024


@torch.no_grad()
def two_passes(model: torch.nn.Module, inputs: dict[str, Any], autocast: bool) -> dict[str, torch.Tensor]:
    """Return the logits of a prompt with a cache, and of one more token for each sample."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        first = model(**inputs, use_cache=True)
        second = model(input_ids=inputs["input_ids"][:, :1], **cache_argument(cache_of(first)))
    return {"first": first.logits, "second": second.logits}


@pytest.mark.rounding
@KINDS
def test_cache_under_autocast_is_as_near_to_float32_as_unpatched(kind: str) -> None:
    case = replace(CASES[kind], labels=None)
    model, inputs = build("mplug_owl3", case)
    exact, unpatched = two_passes(model, inputs, False), two_passes(model, inputs, True)
    found = on_ranks(2, "mplug_owl3", case, lambda m, x, _: two_passes(m, x, True))
    assert all(torch.equal(found[0][name], found[1][name]) for name in exact)
    assert_as_near_as_unpatched(found[0], unpatched, exact)


@pytest.mark.parametrize(("frames", "asking"), [(1, 1), (2, 0), (2, 1)])
def test_frames_may_require_gradients_on_one_rank(frames: int, asking: int) -> None:
    """All ranks take part in backward, or none: a rank without frames that asks alone gets no gradient."""
    case = Case(frames=(frames,), local_frames=True)

    def frozen(model: Any) -> Any:
        model.requires_grad_(False)
        model.get_output_embeddings().weight.requires_grad_()
        return model

    def step(model: Any, inputs: dict[str, Any], comm: Any) -> torch.Tensor | None:
        own = inputs["pixel_values"].detach().requires_grad_(comm.rank == asking)
        frozen(model)(**inputs | {"pixel_values": own}).loss.backward()
        return own.grad

    model = frozen(model_of("mplug_owl3", case))
    inputs = inputs_of("mplug_owl3", replace(case, wants_grad=("pixel_values",)), model)
    model(**inputs).loss.backward()
    found = on_ranks(2, "mplug_owl3", case, step)
    assert found[1 - asking] is None
    gradient = found[asking]
    if frames == 1:
        assert gradient is None
    else:
        assert gradient is not None
        assert error(gradient / 2, inputs["pixel_values"].grad[asking : asking + 1]) < TOLERANCE


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize(
    ("world", "options"),
    slow_unless(
        lambda row: row in ((1, {}), (2, SHARDED)),
        [
            *((1, {}), (1, {"logits": "none"}), (2, {}), (2, {"logits": "full"})),
            *((2, {"self_attention": "local"}), (2, SHARDED)),
        ],
    ),
)
def test_loss_of_a_pass_with_logits_to_keep(world: int, options: dict[str, Any], cached: bool) -> None:
    """Labels of the whole text, which an unpatched model refuses, or of the rows that are kept."""
    case = CASES["gated"].with_options(**options)
    model, inputs = build("mplug_owl3", case)
    whole = model(**inputs)
    whole.loss.backward()
    rows = {name: KEPT[name] for name in ("last", "some", "each")}
    kept_labels = inputs["labels"][:, -4:]
    expected_kept = model(**inputs | {"labels": kept_labels}, logits_to_keep=4).loss.detach()
    weight = model.get_output_embeddings().weight.grad

    def run(model: Any, inputs: dict[str, Any], _: Any) -> torch.Tensor | None:
        with torch.set_grad_enabled(not cached):
            for name, wanted in rows.items():
                found = model(**inputs, logits_to_keep=wanted, use_cache=cached)
                assert error(found.loss, whole.loss.detach()) < TOLERANCE, name
                assert error(found.logits, select_logit_rows(whole.logits, wanted).detach()) < TOLERANCE, name
            kept = model(**inputs | {"labels": kept_labels}, logits_to_keep=4, use_cache=cached)
            assert error(kept.loss, expected_kept) < TOLERANCE and kept.logits.shape[1] == 4
        if cached:
            return None
        model(**inputs, logits_to_keep=1).loss.backward()
        gradient: torch.Tensor = model.get_output_embeddings().weight.grad
        return gradient

    found = on_ranks(world, "mplug_owl3", case, run)
    if not cached:
        assert error(sum(found) / world, weight) < TOLERANCE


@pytest.mark.parametrize("world", [1, 2])
def test_gradient_of_labels_of_the_kept_rows_equals_unpatched(world: int) -> None:
    case = CASES["gated"]

    def run(model: Any, inputs: dict[str, Any], _: Any) -> torch.Tensor:
        model(**inputs | {"labels": inputs["labels"][:, -4:]}, logits_to_keep=4).loss.backward()
        return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])

    expected = run(*build("mplug_owl3", case), None)
    assert error(sum(on_ranks(world, "mplug_owl3", case, run)) / world, expected) < TOLERANCE
