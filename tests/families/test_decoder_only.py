"""Layer: one process, loopback ranks. What only decoder-only families have: visual tokens that travel to their rows.

That the results equal the unpatched model's is compared with all other families' in `test_exactness`. Here it is
compared in float64 to rounding, and what travels is counted.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from family_cases import BATCHES, QWENS
from family_harness import build, check_tokens, model_of, on_ranks, outcome, reference, settings, slow_unless
from mllm_seqpar import patch_model
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.errors import AdapterError, ConfigError
from mllm_seqpar.runtime.visual_tokens import LABEL, FrameTokens, TokenRoutes, VisualTokenLayout
from outcomes import Outcome, average, error, run_case
from tolerances import assert_as_near_as_unpatched

PIXEL_NAMES = ("pixel_values", "pixel_values_videos")
FLOAT64 = 1e-9
"""Rounding is 1e-15; a row that the model rounds to float32 shows at 1e-8."""


class _NoFloat32(TorchFunctionMode):
    """Keeps float64 where the models compute norms, rotations and the loss in float32, whatever dtype they have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Tensors of one dimension are samples, whose bits are compared as those of float32.
        wide = bool(args) and isinstance(args[0], Tensor) and args[0].dtype is torch.float64 and args[0].dim() > 1
        if wide and func is Tensor.float:
            return args[0]
        if wide and func is Tensor.to and torch.float32 in (*args[1:2], kwargs.get("dtype")):
            return args[0]
        if func is Tensor.matmul and torch.float64 in (x.dtype for x in args):  # one factor was int
            args = tuple(x.double() for x in args)
        return func(*args, **kwargs)


def in_float64(family: str, case: Any, comm: Any = None) -> Outcome:
    """Return the result of the model in float64 throughout, patched if there is a rank."""
    with _NoFloat32():
        if comm is not None:
            return outcome(family, case, comm)
        model, inputs = build(family, replace(case, options={}, local_frames=False))
        return run_case(model, inputs)


WAYS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (3, {"text_layout": "striped"}),
    (4, {"self_attention": "mesh", "tile": (2, 2)}),
    (2, {"self_attention": "ulysses", "text_layout": "contiguous"}),
    (3, {"self_attention": "local", "vision_chunk_size": 2}),
]


@pytest.mark.parametrize("family", slow_unless(lambda family: family == "qwen3_vl", QWENS))
def test_float64_equals_unpatched_to_rounding(family: str) -> None:
    case = replace(QWENS[family], double=True, padding="left").with_options(logits="full")
    expected, real = in_float64(family, case), case.real()
    for size, options in WAYS:
        given = replace(case.with_options(**options), local_frames=size == 4)
        found = run_loopback(size, lambda comm, given=given: in_float64(family, given, comm))
        for one in found:
            assert abs(one.loss - expected.loss) < FLOAT64, (size, options)
            assert error(one.logits[real], expected.logits[real]) < FLOAT64, (size, options)
        mean = average([one.grads for one in found])
        for name, grad in expected.grads.items():
            if not name.endswith("k_proj.bias"):  # zero but for rounding
                assert error(mean[name], grad) < FLOAT64, (size, options, name)


@pytest.mark.parametrize(("family", "size"), [("qwen2_5_vl", 2), ("qwen3_vl", 3)])
def test_each_embedding_travels_once_and_only_to_the_rank_of_its_row(family: str, size: int) -> None:
    """No rank encodes, receives or sends more than its own frames and its own rows."""
    case = QWENS[family]
    model, inputs = build(family, case)
    merge, width = model.config.vision_config.spatial_merge_size, 64 * (3 if family == "qwen3_vl" else 1)
    grids = torch.cat([inputs["image_grid_thw"], inputs["video_grid_thw"]])
    tokens = int(grids.prod(1).sum()) // merge**2

    def run(model: Any, inputs: dict[str, Any], comm: Any) -> tuple[int, int, int]:
        encoded: list[int] = []
        model.model.visual.register_forward_hook(lambda _, __, out: encoded.append(out.pooler_output.shape[0]))
        loss = model(**inputs).loss
        forward = comm.bytes.sent[LABEL]
        loss.backward()
        return sum(encoded), forward, comm.bytes.sent[LABEL] - forward

    found = on_ranks(size, family, case, run)
    assert sum(encoded for encoded, _, _ in found) == tokens
    assert max(encoded for encoded, _, _ in found) < tokens
    total = sum(forward for _, forward, _ in found)
    assert total == sum(backward for *_, backward in found)
    assert total < tokens * width * 4  # fewer than all: those that are encoded on the rank of their row stay


def test_routes_send_rows_to_their_owners_and_gradients_back() -> None:
    """Every rank has its share of ten embeddings, which eight placeholders in two samples refer to, some twice."""
    samples, positions = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]), torch.tensor([1, 2, 5, 0, 1, 2, 3, 4])
    layout = VisualTokenLayout(
        FrameTokens.of(samples, positions, torch.zeros(8, dtype=torch.long)),
        torch.tensor([0, 1, 9, 0, 5, 6, 7, 8]),
        torch.tensor([0, 4, 4, 10]),
    )
    rows = [torch.tensor([0, 5]), torch.tensor([1, 4]), torch.tensor([2, 3])]
    features = torch.arange(10.0)[:, None] * torch.ones(2)

    def run(comm: Any) -> tuple[Tensor, Tensor]:
        local = features[layout.bounds[comm.rank] : layout.bounds[comm.rank + 1]].clone().requires_grad_()
        text = torch.full((2, 2, 2), -1.0)
        (tokens,) = layout.routes(rows, comm.rank).exchange(local, comm)
        out = tokens.replace_rows(text)
        (out.sum() * (comm.rank + 1)).backward()
        return out[..., 0].detach(), local.grad[:, 0]

    outs, grads = zip(*run_loopback(3, run), strict=True)
    expected = torch.full((2, 6), -1.0)
    expected[samples, positions] = layout.embeddings.float()
    for out, own in zip(outs, rows, strict=True):
        assert torch.equal(out, expected[:, own])
    # A row on rank r counts r + 1 times: embedding 0 is at positions 1 and 0, on the ranks 1 and 0.
    assert torch.cat(grads).tolist() == [3.0, 3.0, 0.0, 0.0, 0.0, 2.0, 3.0, 3.0, 2.0, 1.0]


def test_empty_routes_keep_the_graph() -> None:
    none = torch.zeros(0, dtype=torch.long)
    local = torch.zeros(0, 4, requires_grad=True)
    (tokens,) = TokenRoutes([none], [none], none, repeated=False).exchange(local, run_loopback(1, lambda comm: comm)[0])
    tokens.replace_rows(torch.ones(1, 3, 4)).sum().backward()
    assert local.grad is not None


@pytest.mark.parametrize(("family", "size"), [("qwen2_5_vl", 1), ("qwen3_vl", 3)])
def test_further_questions_compute_their_own_tokens_only(family: str, size: int) -> None:
    """The video's K and V stay in the cache of the rank that computed them, which is cropped to the common tokens."""
    case = replace(QWENS[family], frames=QWENS[family].frames[:1], length=44, labels=None)
    questions = [torch.tensor([[3, 4 + number, 5, 6]]) for number in range(3)]
    model, inputs = build(family, case)
    inputs.pop("attention_mask", None)

    def ask(model: Any, inputs: dict[str, Any], question: Tensor, **more: Any) -> Any:
        ids = torch.cat([inputs["input_ids"], question], 1)
        kinds = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(question)], 1)
        given = inputs | {"input_ids": ids, "mm_token_type_ids": kinds} | more
        return model.generate(**given, **settings(use_cache=True, return_dict_in_generate=True))

    expected = [ask(model, inputs, question).sequences for question in questions]

    def run(model: Any, inputs: dict[str, Any], comm: Any) -> tuple[list[Tensor], list[int], list[int], list[int]]:
        rows: list[int] = []
        towers: list[int] = []
        model.model.visual.register_forward_hook(lambda *_: towers.append(1))
        model.model.language_model.register_forward_pre_hook(
            lambda _, __, kwargs: rows.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
        )
        found, prefills, ran, cache, kept = [], [], [], {}, []
        for question in questions:
            rows.clear()
            towers.clear()
            out = ask(model, inputs, question, **cache)
            found.append(out.sequences)
            prefills.append(rows[0])
            ran.append(len(towers))
            kept.append(cache_of(out).layers[0].keys.shape[2])
            cache_of(out).crop(case.length - cache_of(out).get_seq_length())
            cache = cache_argument(cache_of(out))
        return found, prefills, ran, kept

    for found, prefills, towers, kept in on_ranks(size, family, case.with_options(shard_prompt_from=8), run):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert prefills[0] >= 48 // size and prefills[1:] == [4, 4]
        assert towers[0] > 0 and towers[1:] == [0, 0]
        assert max(kept) <= -(-(48 + 6) // size) + 4, "the prompt's K and V are on one rank each"


@torch.no_grad()
@pytest.mark.parametrize("family", QWENS)
def test_positions_continue_after_padding_of_a_text_alone(family: str) -> None:
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 6:8] = mask[0, 0] = 0

    def run(model: Any) -> Tensor:
        cache, logits = None, []
        for start, stop in ((0, 5), (5, 8), (8, 12)):
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **cache_argument(cache))
            cache = cache_of(out)
            logits.append(out.logits)
        return torch.cat(logits, 1)[mask.bool()]

    def new() -> Any:
        return model_of(family, BATCHES[family]).eval()

    expected = new()(ids, attention_mask=mask).logits[mask.bool()]
    for logits in (run(new()), *run_loopback(2, lambda comm: run(patch_model(new(), group=comm)))):
        assert error(logits, expected) < 1e-5


@pytest.mark.parametrize("family", QWENS)
def test_new_frames_may_follow_those_of_a_filled_cache(family: str) -> None:
    case = replace(QWENS[family], labels=None)

    @torch.no_grad()
    def run(model: Any, inputs: dict[str, Any], _: Any = None) -> Tensor:
        given = {name: x for name, x in inputs.items() if name != "attention_mask"}
        cache = cache_of(model(**given, use_cache=True))
        rows, length = given["input_ids"].shape
        given |= {name: 1 - x for name, x in given.items() if name.startswith("pixel_values")}
        given["position_ids"] = torch.arange(length, 2 * length).expand(3, rows, length)
        return model(**given, **cache_argument(cache), use_cache=True).logits

    expected = run(*build(family, case))
    for found in on_ranks(2, family, case, run):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("family", "size", "local"),
    slow_unless(
        lambda row: row[0] == "qwen3_vl", [("qwen3_vl", 1, False), ("qwen2_5_vl", 2, False), ("qwen3_vl", 3, True)]
    ),
)
def test_assistant_drafts_from_the_same_frames(family: str, size: int, local: bool) -> None:
    """With all frames on every rank the assistant need not be patched; otherwise it is, over the same ranks."""
    case = replace(QWENS[family], frames=QWENS[family].frames[:1], length=44, labels=None)
    model, inputs = build(family, case)
    expected = model.generate(**inputs, **settings(max_new_tokens=12))

    def run(model: Any, inputs: dict[str, Any], comm: Any) -> tuple[Tensor, int]:
        helper, passes = copy.deepcopy(helpers[comm.rank]), list[int]()
        if local:
            patch_model(helper, group=comm)
        model.register_forward_pre_hook(lambda *_: passes.append(1))
        return model.generate(**inputs, **settings(max_new_tokens=12), assistant_model=helper), len(passes)

    helpers = [model_of(family, case) for _ in range(size)]
    with torch.no_grad():
        for helper in helpers:
            helper.lm_head.weight[::3] *= 1.1  # so that some drafts are wrong
    given = replace(case, local_frames=local).with_options(shard_prompt_from=8)
    for found, passes in on_ranks(size, family, given, run):
        assert torch.equal(found, expected)
        assert passes < 12, "some drafts are accepted"


@pytest.mark.rounding
@pytest.mark.parametrize("family", QWENS)
def test_bf16_steps_over_a_sharded_prompt_are_as_near_to_float32_as_unpatched(family: str) -> None:
    case = replace(QWENS[family], frames=QWENS[family].frames[:1], length=44, labels=None)
    answer = torch.arange(20, 28)[None]

    @torch.no_grad()
    def steps(model: Any, inputs: dict[str, Any], comm: Any = None, narrow: bool = True) -> dict[str, Tensor]:
        if narrow:
            model.bfloat16()
            inputs = {n: x.bfloat16() if n.startswith("pixel_values") else x for n, x in inputs.items()}
        out = model(**inputs, use_cache=True)
        logits = [out.logits]
        for token in answer.split(1, 1):
            logits.append(model(input_ids=token, **cache_argument(cache_of(out))).logits)
        assert not narrow or logits[-1].dtype is torch.bfloat16
        return {"": torch.cat(logits, 1)[:, -9:].float()}

    exact, unpatched = (steps(*build(family, case), narrow=narrow) for narrow in (False, True))
    for found in on_ranks(3, family, case.with_options(shard_prompt_from=8), steps):
        assert_as_near_as_unpatched(found, unpatched, exact)


def test_options_of_cross_attention_are_refused() -> None:
    model = model_of("qwen2_5_vl", QWENS["qwen2_5_vl"])
    with pytest.raises(ConfigError, match='has no cross-attention to frames, .* pass self_attention="ring"'):
        patch_model(model, "ring")
    with pytest.raises(ConfigError, match="which this option is for; leave it out$"):
        patch_model(model, "replicate")
    with pytest.raises(ConfigError, match="has no visual features besides its text to offload"):
        patch_model(model, visual_offload="cpu")


def test_log_names_what_communicates(caplog: pytest.LogCaptureFixture) -> None:
    for options, name in (({}, "ring"), ({"strategy": "auto"}, "auto"), ({"self_attention": "ulysses"}, "ulysses")):
        model = model_of("qwen3_vl", QWENS["qwen3_vl"])
        with caplog.at_level("INFO", logger="mllm_seqpar"):
            patch_model(model, **options)
        assert caplog.messages[-1].endswith(f"over 1 rank: self-attention by {name} (zigzag text)")


OTHER_MODELS = ("Qwen2VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "Qwen2_5OmniThinker", "Qwen3OmniMoeThinker")


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_further_families_of_qwen_are_refused_in_one_sentence(name: str) -> None:
    """Mixtures of experts, linear attention, audio: other classes, and none is taken for one of the two families."""
    model_class = getattr(transformers, f"{name}ForConditionalGeneration", None)
    if model_class is None:
        pytest.skip(f"this version of transformers has no {name}")
    config = model_class.config_class()
    config.get_text_config().num_hidden_layers = 1
    with torch.device("meta"):
        model = model_class(config)
    message = rf"^patch_model: no adapter matches .*{name}[^\n]* Supported families: .*Qwen3-VL \(dense\)[^\n]*$"
    with pytest.raises(AdapterError, match=message):
        patch_model(model)


@pytest.mark.parametrize("family", QWENS)
def test_lengths_of_packed_sequences_are_refused_unless_positions_state_them(family: str) -> None:
    case = replace(QWENS[family], frames=((),), length=20, packed=(9, 11))
    lengths = {"cu_seq_lens_q": torch.tensor([0, 9, 20], dtype=torch.int32), "max_length_q": 11}

    def run(model: Any, inputs: dict[str, Any], comm: Any) -> float:
        message = r"^cu_seq_lens_q, max_length_q: the lengths that [^\n]* separate packed sequences by position_ids"
        with pytest.raises(ConfigError, match=message):
            model(**{name: x for name, x in inputs.items() if name != "position_ids"} | lengths)
        return model(**inputs, **lengths).loss.item()

    expected = reference(family, case).loss
    assert on_ranks(2, family, case, run) == pytest.approx([expected] * 2)


@pytest.mark.parametrize("family", QWENS)
def test_star_attention_is_exact_on_two_ranks(family: str) -> None:
    """The anchor is on both ranks, so its visual tokens go to both; the query's go to every rank."""
    case = replace(QWENS[family], frames=QWENS[family].frames[:1], length=44, labels=None)
    for more in ({}, {"local_frames": True, "padding": "left"}):
        given = replace(case, **more).with_options(self_attention="star", shard_prompt_from=2)
        check_tokens(family, 2, given, {"max_new_tokens": 3})
