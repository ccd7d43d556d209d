"""Layer: gloo ranks. Which logits a caller gets, how little of the text a rank holds, and what is sent for it."""

from collections import Counter

import pytest
import torch
from patched import GATES, PATIENCE, TOLERANCE, Case, inputs_of, model_of

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.patching import patch_of
from mllm_seqpar.runtime.visual_features import VisualFeatures
from mllm_seqpar.schedules.bytes_sent import Problem, lv_xattn_bytes, ring_bytes
from mllm_seqpar.sharding import padded_length, sequence_positions
from outcomes import error
from ranks import ranks
from tolerances import assert_as_near_as_unpatched

CASE = Case(frames=(2, 1), length=13)
INDICES = torch.tensor([0, 5, 12])
EACH = torch.tensor([[0, 5, 12], [3, 3, 11]])
"""Rows of each sample's own; and the same as a mask of all rows, of which samples have as many as they like."""
MARKED = (torch.arange(13) == 5) | torch.tensor([[False], [True]]) & (torch.arange(13) > 10)


def logits_of_every_mode(rank: int, world: int, gate: str | None) -> dict[str, torch.Tensor]:
    model = model_of(gate, CASE)
    labelled = inputs_of(gate, CASE, model)
    plain = {name: x for name, x in labelled.items() if name != "labels"}
    found = {}
    for mode in ("auto", "full", "local"):
        patch_model(model, logits=mode)
        with torch.no_grad():
            found[f"{mode} labels"] = model(**labelled).logits
            found[f"{mode} plain"] = model(**plain).logits
            found[f"{mode} last"] = model(**plain, logits_to_keep=1).logits
            found[f"{mode} some"] = model(**plain, logits_to_keep=INDICES).logits
            found[f"{mode} each"] = model(**plain, logits_to_keep=EACH).logits
            found[f"{mode} marked"] = model(**plain, logits_to_keep=MARKED).logits
            found[f"{mode} cached"] = model(**plain, use_cache=True, logits_to_keep=2).logits
            found[f"{mode} tuple"] = model(**plain, return_dict=False)[0]
        unpatch_model(model)
    patch_model(model, shard_prompt_from=2)
    with torch.no_grad():
        for name, rows in (("some", INDICES), ("each", EACH), ("marked", MARKED)):
            found[f"dealt {name}"] = model(**plain, use_cache=True, logits_to_keep=rows).logits
    unpatch_model(model)
    return found


@pytest.mark.parametrize("gate", GATES)
def test_modes(gate: str | None) -> None:
    world = 3
    model = model_of(gate, CASE)
    inputs = inputs_of(gate, CASE, model)
    with torch.no_grad():
        whole = model(**inputs).logits
        assert error(model(**inputs | {"labels": None}, logits_to_keep=MARKED).logits, whole[MARKED]) < TOLERANCE
    padded = torch.nn.functional.pad(whole, (0, 0, 0, padded_length(13, world, "zigzag") - 13))
    for rank, found in enumerate(ranks(world).run(logits_of_every_mode, gate, timeout=PATIENCE)):
        at = sequence_positions(padded.shape[1], rank, world, "zigzag")
        real = at < 13
        for name, logits in found.items():
            expected = whole
            if name in ("auto labels", "local labels", "local plain", "local tuple"):
                logits, expected = logits[:, real], padded[:, at][:, real]
            elif name.endswith("last"):
                expected = whole[:, -1:]
            elif name.endswith("some"):
                expected = whole[:, INDICES]
            elif name.endswith("each"):
                expected = torch.stack([whole[0, EACH[0]], whole[1, EACH[1]]])
            elif name.endswith("marked"):
                expected = whole[MARKED]
            elif name.endswith("cached"):
                expected = whole[:, -2:]
            assert error(logits, expected) < TOLERANCE, name


def local_sizes(rank: int, world: int, case: Case) -> dict[str, list[int]]:
    """Tokens of each decoder layer's input, frames that the tower saw, frames that the layers share."""
    model = model_of("per_head", case)
    found: dict[str, list[int]] = {"tokens": [], "tower": [], "frames": []}
    handles = [
        layer.register_forward_pre_hook(lambda _, args: found["tokens"].append(args[0].shape[1]))
        for layer in model.language_model.model.layers
    ]
    handles.append(
        model.vision_model.embeddings.register_forward_pre_hook(lambda _, args: found["tower"].append(len(args[0])))
    )
    handles.append(
        model.language_model.model.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: found["frames"].append(len(_shared(kwargs).features)), with_kwargs=True
        )
    )
    patch_model(model)
    model(**inputs_of("per_head", case, model))
    unpatch_model(model)
    for handle in handles:
        handle.remove()
    return found


def _shared(kwargs: dict) -> VisualFeatures:
    return kwargs["seqpar"].frames.visual


def test_a_rank_holds_its_share_only() -> None:
    case = Case(frames=(3, 2), length=16)
    for rank, found in enumerate(ranks(4).run(local_sizes, case, timeout=PATIENCE)):
        frames = [2, 1, 1, 1][rank]
        assert found == {"tokens": [4] * 4, "tower": [frames], "frames": [frames]}
    one_frame = ranks(4).run(local_sizes, Case(frames=(1,), length=16), timeout=PATIENCE)
    assert [found["frames"] for found in one_frame] == [[1], [0], [0], [0]]
    assert all(found["tower"] == [1] for found in one_frame)  # an empty one, for the sake of the parameters' gradients


def sent_by(rank: int, world: int, gate: str | None, options: dict) -> dict[str, int]:
    model = model_of(gate, CASE)
    patch_model(model, **options)
    patch = patch_of(model)
    assert patch is not None
    patch.context.comm.bytes.reset()
    model(**inputs_of(gate, CASE, model)).loss.backward()
    sent = dict(patch.context.comm.bytes.sent)
    unpatch_model(model)
    return sent


def rows_that_see(gate: str | None, world: int) -> list[list[int]]:
    """[i][j]: rows of rank i, of all samples, that see a frame of rank j; from the unpatched model's layout."""
    model = model_of(gate, CASE)
    inputs = inputs_of(gate, CASE, model)
    layout = model.media_layout(3, input_ids=inputs["input_ids"], position_ids=torch.arange(CASE.length)[None])
    first, stop = (bound[..., None] for bound in layout.rows(0, CASE.length))
    sees = (first <= torch.arange(3)) & (torch.arange(3) < stop)  # of 3 ranks, each has one frame
    total = padded_length(CASE.length, world, "zigzag")
    counts = []
    for rank in range(world):
        rows = sequence_positions(total, rank, world, "zigzag")
        counts.append(sees[:, rows[rows < CASE.length]].sum((0, 1)).tolist())
    return counts


@pytest.mark.parametrize("strategy", ["lv-xattn", "ring"])
@pytest.mark.parametrize("gate", GATES)
def test_bytes_sent(gate: str | None, strategy: str) -> None:
    """One forward and backward pass sends what the formulas of `traffic` say; 4 layers, of which 2 also see frames."""
    world, batch, heads, groups, dim, per_frame = 3, 2, 4, 2, 16, 4
    s = padded_length(CASE.length, world, "zigzag") // world
    seen = rows_that_see(gate, world)
    for rank, sent in enumerate(ranks(world).run(sent_by, gate, {"strategy": strategy}, timeout=PATIENCE)):
        shape = {"heads": heads, "kv_heads": groups, "dim": dim, "batch": batch, "rank": rank, "element": 4}
        text = Problem(rows=s, keys=(s,) * world, key_batch=batch, **shape)
        visual = Problem(rows=s, keys=(per_frame,) * world, **shape)
        expected: Counter[str] = Counter()
        for backward in (False, True):
            for _ in range(4):
                expected.update(ring_bytes(text, backward=backward))
            for _ in range(2):
                if strategy == "lv-xattn":
                    expected.update(lv_xattn_bytes(visual, backward=backward, visible_rows=seen))
                else:
                    expected.update(ring_bytes(visual, backward=backward))
        expected = +expected  # what is not sent is not counted
        assert {name: sent[name] for name in expected} == dict(expected)
        rest = {name: n for name, n in sent.items() if name not in expected}
        # beside attention: one number of the loss, and the comparison of inputs
        assert set(rest) == {"loss", "agreement"} and sum(rest.values()) < 1024


def logits_under_autocast(rank: int, world: int, gate: str | None) -> list[torch.Tensor]:
    model = model_of(gate, PROMPT)
    patch_model(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = two_passes(model, inputs_of(gate, PROMPT, model))
    unpatch_model(model)
    return found


PROMPT = Case(frames=(2, 1), length=13, labels=None)


def two_passes(model: torch.nn.Module, inputs: dict) -> list[torch.Tensor]:
    """A prompt with a cache, and one more token for each sample."""
    first = model(**inputs, use_cache=True)
    second = model(input_ids=inputs["input_ids"][:, :1], past_key_values=first.past_key_values)
    return [first.logits, second.logits]


@pytest.mark.rounding
@pytest.mark.parametrize("gate", GATES)
def test_a_cache_under_autocast(gate: str | None) -> None:
    model = model_of(gate, PROMPT)
    with torch.no_grad():
        exact = two_passes(model, inputs_of(gate, PROMPT, model))
        with torch.autocast("cpu", torch.bfloat16):
            alone = two_passes(model, inputs_of(gate, PROMPT, model))
    outcomes = ranks(2).run(logits_under_autocast, gate, timeout=PATIENCE)
    for found in outcomes:
        assert all(torch.equal(mine, first) for mine, first in zip(found, outcomes[0], strict=True))
        assert_as_near_as_unpatched(*(dict(zip(("first", "second"), x, strict=True)) for x in (found, alone, exact)))
