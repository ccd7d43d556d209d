"""Layer: one process. Patching changes one instance and nothing else, and `unpatch_model` restores it bit for bit."""

from __future__ import annotations

import copy
import gc
import io
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from family_cases import BATCHES, FUSED, LANGUAGE_MODELS, QWENS
from family_harness import (
    build,
    check,
    family_module,
    forward,
    inputs_of,
    model_of,
    reference,
    settings,
    slow_unless,
    traces,
)
from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar._compat import cache_of
from mllm_seqpar.errors import AdapterError
from mllm_seqpar.models.mplug_owl3 import MPlugOwl3ForConditionalGeneration
from mllm_seqpar.patching import patch_of
from model_copies import tiny_model
from outcomes import error, run_case
from tiny_models.mplug_owl3 import tiny_config, tiny_frames, tiny_text

MODELS: list[tuple[str, Any]] = [
    ("mplug_owl3", BATCHES["mplug_owl3"]),
    ("mplug_owl3", BATCHES["mplug_owl3"].with_model(**FUSED)),
    ("idefics", BATCHES["idefics"]),
    ("mllama", BATCHES["mllama"]),
    ("moss_vl", BATCHES["moss_vl"]),
    *QWENS.items(),
    *(("open_flamingo", BATCHES["open_flamingo"].with_model(language_model=name)) for name in LANGUAGE_MODELS),
]


def attention_functions() -> dict[str, Any]:
    return {
        name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "seqpar" not in name
    }


@pytest.mark.parametrize("family", BATCHES)
def test_an_unpatched_model_is_freed_at_once(family: str) -> None:
    """Without waiting for the garbage collector, as if it had never been patched."""
    model, inputs = build(family, BATCHES[family])
    gc.collect()
    gc.disable()
    try:
        patch_model(model)
        forward(family, model, inputs).loss.backward()
        unpatch_model(model)
        weight = weakref.ref(next(model.parameters()))
        del model
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("family", "case"), slow_unless(lambda row: row in MODELS[:5], MODELS))
def test_unpatching_leaves_no_trace(family: str, case: Any) -> None:
    model, inputs = build(family, case)
    plain = inputs_of(family, replace(case, labels=None), model)
    logits, before, keys = model(**plain).logits, traces(model), list(model.state_dict())
    registered = attention_functions()
    assert patch_model(model, None if family in QWENS else "ring", text_layout="striped") is model
    assert patch_of(model) is not None and list(model.state_dict()) == keys
    model(**inputs).loss.backward()
    model.generate(**plain, **settings(max_new_tokens=2))
    if family == "open_flamingo":
        model.cache_media(inputs["lang_x"], inputs["vision_x"])
        model.uncache_media()
    model.zero_grad()
    assert unpatch_model(model) is model
    assert patch_of(model) is None
    assert traces(model) == before
    assert torch.equal(model(**plain).logits, logits)
    assert attention_functions() == registered  # sdpa among them


def test_attention_function_is_registered_under_its_own_name() -> None:
    patch_model(tiny_model())
    assert AttentionInterface()["mllm_seqpar"].__module__.startswith("mllm_seqpar.")
    assert "mllm_seqpar" in AttentionMaskInterface().valid_keys()  # otherwise transformers passes no mask


def test_another_model_of_the_same_config_is_unchanged() -> None:
    config = tiny_config("per_head")
    torch.manual_seed(1)
    patched, other = (MPlugOwl3ForConditionalGeneration(config).eval() for _ in range(2))
    ids, frames = tiny_text(2), tiny_frames(2)
    logits, before = other(ids, frames).logits, traces(other)
    patch_model(patched)
    assert traces(other) == before and torch.equal(other(ids, frames).logits, logits)
    assert patched.vision_model.config._attn_implementation == "sdpa"  # the tower is unchanged


@pytest.mark.parametrize(("family", "case"), [MODELS[0], MODELS[1], *MODELS[3:6]])
def test_patched_model_saves_the_same_files_and_loads_unpatched(family: str, case: Any, tmp_path: Path) -> None:
    model = model_of(family, case)
    inputs = inputs_of(family, replace(case, labels=None), model)
    logits = model(**inputs).logits
    model.save_pretrained(tmp_path / "before")
    patch_model(model)
    model.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path / "patched")
    for file in (tmp_path / "before").iterdir():
        assert (tmp_path / "patched" / file.name).read_bytes() == file.read_bytes(), file.name
    loaded = type(model).from_pretrained(tmp_path / "patched")
    assert error(loaded(**inputs).logits, logits) < 1e-6  # not equal: loaded weights have another alignment in memory
    patch_model(loaded)
    assert error(loaded(**inputs).logits, logits) < 1e-6


def test_patched_model_refuses_to_be_copied_or_pickled() -> None:
    model = patch_model(tiny_model())
    part = model.language_model.model.layers[0].self_attn  # which PEFT's modules_to_save copies
    for attempt in (lambda: copy.deepcopy(model), lambda: copy.deepcopy(part), lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(AdapterError, match=r"cannot be copied or pickled: .*Call unpatch_model"):
            attempt()
    copied = copy.deepcopy(unpatch_model(model))
    torch.save(copied, io.BytesIO())
    assert patch_of(patch_model(copied)) is not None and patch_of(model) is None


def test_patching_twice_and_unpatching_what_is_not_patched_are_refused() -> None:
    model = patch_model(tiny_model(), "ring")
    with pytest.raises(AdapterError, match=r"patched already; .*unpatch_model first.*SeqParConfig\(strategy='ring'"):
        patch_model(model)
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    before = traces(model)
    with pytest.raises(AdapterError, match="forward was replaced by something else after patch_model"):
        unpatch_model(model)
    assert traces(model) == before
    model.forward = ours
    unpatch_model(model)
    with pytest.raises(AdapterError, match="is not patched"):
        unpatch_model(model)


def test_one_process_without_torch_distributed_is_a_group_of_one() -> None:
    assert not dist.is_initialized()
    model = patch_model(tiny_model())
    patch = patch_of(model)
    assert patch is not None and patch.context.comm.size == 1
    model.config.output_hidden_states = True  # the decoder layers have an earlier copy of the config
    with torch.no_grad():
        out = model(tiny_text(2), tiny_frames(2))
    assert cache_of(out) is not None and len(out.hidden_states) == 5  # as unpatched


def test_torch_compile_does_not_trace_the_patched_forward() -> None:
    """Compiling a schedule takes minutes, and again for each mask."""

    def backend(graph: Any, _: Any) -> Any:
        pytest.fail("a graph was compiled")

    model, ids, frames = tiny_model(), tiny_text(2), tiny_frames(2)
    expected = model(ids, frames).logits
    compiled = torch.compile(patch_model(model), backend=backend)
    assert error(compiled(ids, frames).logits, expected) < 1e-5
    compiled(ids, frames, labels=ids).loss.backward()
    torch._dynamo.reset()


COMPILED = [family for family in BATCHES if family != "qwen2_5_vl"]  # whose layers are patched as those of qwen3_vl


@pytest.mark.slow
@pytest.mark.parametrize("family", COMPILED)
def test_compiled_layers_equal_unpatched(family: str) -> None:
    """Attention is a graph break; the rest of a layer is compiled, except where the whole layer is patched."""
    family_module(family)
    graphs, case = [], BATCHES[family]

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    model = model_of(family, case)
    inputs = inputs_of(family, case, model)
    layers = {type(m): m for name, m in model.named_modules() if re.search(r"(layers|blocks)\.\d+$", name)}
    for layer in layers.values():  # one of each class
        layer.compile(backend=backend)
    found = run_case(patch_model(model), inputs, forward(family, model, inputs))
    check([found], reference(family, case), case)
    assert graphs or family == "open_flamingo"
    torch._dynamo.reset()


def test_first_pass_logs_what_a_rank_holds(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    with caplog.at_level("INFO", logger="mllm_seqpar"):
        patch_model(model)
        model(tiny_text(2), tiny_frames(2), use_cache=False)
        model(tiny_text(2), tiny_frames(2), use_cache=False)
    assert [record.getMessage() for record in caplog.records] == [
        "MPlugOwl3ForConditionalGeneration is sequence-parallel over 1 rank: cross-attention by lv-xattn, "
        "self-attention by ring (zigzag text)",
        "rank 0 of 1 holds 12 of 12 text tokens (padding included) and 2 of 2 frames",
    ]
