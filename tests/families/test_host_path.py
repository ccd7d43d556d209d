"""Layer: one process, loopback ranks. What a pass computes once for all layers, and what it leaves out on one process.

Results are those of the unpatched model in `test_exactness`; here the ways to them are counted.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mllm_seqpar
from family_cases import BATCHES, CROSS_ATTENTION, FUSED, PADDED, QWENS
from family_harness import build, check_exact, check_tokens, on_ranks, settings, slow_unless
from mllm_seqpar import patch_model
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.attention import attend, call_spec
from mllm_seqpar.models.cache import SequenceParallelCacheState
from mllm_seqpar.models.mplug_owl3.hyper_attention import HyperAttention
from mllm_seqpar.runtime import forward_state
from mllm_seqpar.runtime.visual_kv_cache import VisualKVCache
from tiny_models.mplug_owl3 import Case as Owl


def over_llama(family: str, case: Any) -> Any:
    """Return the case with OpenFlamingo over LLaMA; MPT adds biases to its scores."""
    return case.with_model(language_model="llama") if family == "open_flamingo" else case


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[None]:
    """Return a list that gets an entry for each call of a function."""
    calls: list[None] = []
    original = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, call)
    return calls


def cross_layers(family: str, model: Any) -> int:
    if family == "mplug_owl3":
        return len(model.config.hyper_layers)
    if family == "idefics":
        return len(model.model.gated_cross_attn_layers)
    if family in ("mllama", "moss_vl", "video_mllama"):
        return len(model.config.text_config.cross_attention_layers)
    if family in QWENS:
        return 0
    return sum(block is not None for block in model.lang_encoder.gated_cross_attn_layers)


@pytest.mark.parametrize("family", BATCHES)
def test_text_of_one_process_needs_no_block_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for cases in (BATCHES, PADDED):
        model, inputs = build(family, over_llama(family, cases[family]))
        patch_model(model)
        calls = counted(monkeypatch, attend, "distributed_forward")
        with torch.no_grad():
            model(**inputs)
        assert len(calls) <= cross_layers(family, model)
        calls.clear()
        model(**inputs)
        assert len(calls) == cross_layers(family, model)


@pytest.mark.parametrize("family", BATCHES)
def test_large_text_masks_are_divided_into_rectangles_on_one_process(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_state, "MAX_TEXT_MASK", 0)
    calls = counted(monkeypatch, attend, "distributed_forward")
    case = over_llama(family, PADDED[family])
    check_exact(family, 1, case)
    model, _ = build(family, case)
    assert len(calls) > cross_layers(family, model)


@pytest.mark.parametrize("family", BATCHES)
def test_one_process_is_exact_without_recomputation_and_with_a_kernel_selected_by_name(family: str) -> None:
    check_exact(family, 1, BATCHES[family].with_options(recompute_visual=False))
    check_exact(family, 1, PADDED[family].with_options(kernel="blocked_matmul"))


def test_window_shorter_than_the_text_is_kept_on_one_process() -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    check_exact("mplug_owl3", 1, Owl(frames=(4, 1), model=window))


@pytest.mark.parametrize(
    ("family", "size"), slow_unless(lambda row: row[0] == "mplug_owl3", [(f, n) for f in BATCHES for n in (1, 2)])
)
def test_decoding_chooses_kernels_once_per_pass(family: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, call_spec, "choose_kernel")
    case = replace(BATCHES[family], labels=None)

    def choices(count: int) -> int:
        before = len(calls)
        on_ranks(
            size,
            family,
            case,
            lambda model, given, _: model.generate(**given, **settings(max_new_tokens=count, use_cache=True)),
        )
        return len(calls) - before

    assert choices(4) == choices(3), "new tokens attend to the frames that the token before attended to"


def test_rotation_of_frames_is_computed_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("mplug_owl3", BATCHES["mplug_owl3"])
    calls = counted(monkeypatch, HyperAttention, "visual_rotation")
    model(**inputs)
    assert len(calls) == len(model.config.hyper_layers) > 1
    patch_model(model)
    calls.clear()
    model(**inputs).loss.backward()
    assert len(calls) == 1


@pytest.mark.parametrize("model", [{}, pytest.param(FUSED, marks=pytest.mark.slow)], ids=["gated", "fused"])
def test_hyper_layer_over_a_sharded_prompt_takes_one_exchange(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Owl(labels=None, model=model).with_options(shard_prompt_from=2)
    merges = counted(monkeypatch, attend, "merge_over_ranks")

    def exchanges(count: int) -> int:
        before = len(merges)
        found = on_ranks(2, "mplug_owl3", case, lambda m, i, _: m.generate(**i, **settings(max_new_tokens=count)))
        assert torch.equal(found[0], found[1])
        return len(merges) - before

    layers = build("mplug_owl3", case)[0].config.num_hidden_layers
    assert exchanges(4) - exchanges(3) == 2 * layers  # one in each layer of each rank
    check_tokens("mplug_owl3", 2, case, {})


@pytest.mark.slow
def test_text_layers_of_one_process_compile_as_one_graph() -> None:
    model, inputs = build("mplug_owl3", BATCHES["mplug_owl3"])
    expected = model(**inputs).logits
    patch_model(model)
    for layer in model.language_model.model.layers:
        if not isinstance(layer.self_attn, HyperAttention):
            layer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(**inputs).logits, expected)


QUESTIONS = 3


def questions(family: str, model: Any, inputs: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return `inputs` of one sample with several questions about its frames, and the name of the token ids."""
    name = "lang_x" if family == "open_flamingo" else "input_ids"
    ids = inputs[name].repeat(QUESTIONS, 1)
    ids[:, -2] = torch.arange(3, 3 + QUESTIONS)
    batch = inputs | {name: ids}
    for repeated in ("attention_mask", "image_attention_mask", "cross_attention_mask"):
        if inputs.get(repeated) is not None:
            batch[repeated] = inputs[repeated].repeat_interleave(QUESTIONS, 0)
    if family == "mplug_owl3":
        frames = inputs["pixel_values"].shape[0]
        batch["media_layout"] = model.media_layout(frames, input_ids=ids[:1]).repeat_samples(QUESTIONS)
    if family in ("mllama", "video_mllama"):
        batch["visual_samples"] = 1
    return batch, name


@pytest.mark.parametrize(
    ("family", "size"),
    slow_unless(lambda row: row == ("idefics", 2), [(f, n) for f in CROSS_ATTENTION for n in (1, 2)]),
)
def test_questions_about_one_video_share_its_keys(family: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    single = {
        "moss_vl": (((3, 4, 6),),),
        "mplug_owl3": (4,),
        "idefics": (4,),
        "mllama": ((2, 3),),
        "open_flamingo": ((1, 4),),
    }
    single["video_mllama"] = (4,)
    case = replace(BATCHES[family], frames=single[family], labels=None)

    stored: dict[int, list[VisualKVCache]] = {}
    store_frames = SequenceParallelCacheState.store_frames

    def record(self: Any, visual: VisualKVCache, *args: Any) -> None:
        stored.setdefault(threading.get_ident(), []).append(visual)
        store_frames(self, visual, *args)

    monkeypatch.setattr(SequenceParallelCacheState, "store_frames", record)

    def run(model: Any, inputs: dict[str, Any], _: Any) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        (batch, name), given = questions(family, model, inputs), settings(use_cache=True)
        together = model.generate(**batch, **given)
        alone = [model.generate(**inputs | {name: row[None]}, **given) for row in batch[name]]
        caches = stored[threading.get_ident()]
        assert len(caches) == 1 + QUESTIONS and all(cache.states for cache in caches)
        sizes = [sum(x.untyped_storage().nbytes() for kv in cache.states.values() for x in kv) for cache in caches]
        new = given["max_new_tokens"]
        return together[:, -new:], [x[0, -new:] for x in alone], sizes

    for together, alone, (shared, *others) in on_ranks(size, family, case, run):
        assert torch.equal(together, torch.stack(alone))
        assert [shared] * QUESTIONS == others, "K and V of the frames grow with the number of questions"


def test_questions_about_one_video_are_answered_with_beams() -> None:
    """Beams do not replace the caller's number of samples, `visual_samples`."""
    case = replace(BATCHES["mllama"], frames=((2, 3),), labels=None)

    def run(model: Any, inputs: dict[str, Any], _: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        (batch, name), given = questions("mllama", model, inputs), settings(num_beams=2)
        alone = [model.generate(**inputs | {name: row[None]}, **given) for row in batch[name]]
        return model.generate(**batch, **given), alone

    for together, alone in on_ranks(2, "mllama", case, run):
        assert torch.equal(together, torch.cat(alone))


def calls_of(size: int, decodes: bool) -> tuple[int, int]:
    """Return how often a pass of 8 layers calls functions of this package on rank 0, and one of its 2 hyper layers."""
    root = Path(mllm_seqpar.__file__).parents[1]
    folders = str(root / "mllm_seqpar"), str(root / "patches")
    case = Owl(frames=(6,), length=16, labels=None, model={"num_hidden_layers": 8, "hyper_layers": (2, 6)})

    def run(model: Any, inputs: dict[str, Any], comm: Any) -> tuple[int, int]:
        with torch.set_grad_enabled(not decodes):
            if decodes:
                cache = cache_of(model(**inputs, use_cache=True))
                inputs = {"input_ids": inputs["input_ids"][:, -1:], **cache_argument(cache), "use_cache": True}
            found = [0, 0]
            attention = model.language_model.model.layers[5].self_attn  # the second, which finds the plans of the first
            forward = attention.forward

            def counting(*args: Any, **kwargs: Any) -> Any:
                before = found[0]
                out = forward(*args, **kwargs)
                found[1] = found[0] - before
                return out

            def count(frame: Any, event: str, _: Any) -> None:
                name = frame.f_code.co_filename
                found[0] += event == "call" and name.startswith(folders) and "loopback" not in name

            for _ in range(2):  # the first two passes compare the weights of the ranks
                model(**inputs)
            object.__setattr__(attention, "forward", counting)
            sys.setprofile(count if comm.rank == 0 else None)
            try:
                model(**inputs)
            finally:
                sys.setprofile(None)
                object.__setattr__(attention, "forward", forward)
            return found[0], found[1]

    return on_ranks(size, "mplug_owl3", case, run)[0]


@pytest.mark.parametrize(
    ("size", "decodes", "a_pass", "a_layer"), [(1, False, 384, 65), (2, False, 878, 123), (2, True, 206, 38)]
)
def test_pass_takes_few_calls(size: int, decodes: bool, a_pass: int, a_layer: int) -> None:
    """The host must stay ahead of the device. Calls of the loopback transport do not count."""
    found = calls_of(size, decodes)
    assert found[0] <= a_pass and found[1] <= a_layer, found
