"""Layer: one process. MLPs and vision towers are computed in chunks, in every family and every layer.

That results equal the unpatched model's is in `test_exactness`, and that FSDP2 works with chunks in tests/distributed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from family_cases import BATCHES, named_case
from family_harness import TOLERANCE, build, check, check_exact, inputs_of, model_of, reference, slow_unless, traces
from mllm_seqpar import patch_model, unpatch_model
from model_copies import tiny_model
from outcomes import error, run_case, worst_gradient

SIZE = 5
OWL = BATCHES["mplug_owl3"]

# By name: the family or OpenFlamingo's language model, the inner size of the MLPs, and the number of linear layers that
# read or write that size, all MLPs together.
MLPS = {
    "mplug_owl3": (96, 3 * 4),
    "idefics": (48, 3 * 6),
    "mllama": (96, 3 * 5),
    "moss_vl": (96, 3 * 5),
    "video_mllama": (96, 3 * 5),
    "opt": (48, 2 * 2),
    "llama": (48, 3 * 3),
    "mpt": (144, 2 * 2 + 2 * 2),  # also the inner size of its cross-attention blocks
    "gpt_neox": (48, 2 * 2),
    "cross-attention of opt": (128, 2 * 2),
    "cross-attention of llama": (128, 2 * 3),
}


def most_tokens(model: Any, inner: int, run: Callable[[], object]) -> dict[str, int]:
    """Return the most tokens that each linear layer to or from the inner size receives, in forward and backward."""
    found: dict[str, int] = {}

    def note(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found[name] = max(found.get(name, 0), args[0].shape[:-1].numel())

    hooks = [
        module.register_forward_pre_hook(functools.partial(note, name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and inner in (module.in_features, module.out_features)
        and not name.endswith("lm_head")
    ]
    run()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("mplug_owl3", "idefics", "mllama", "opt"), MLPS))
def test_every_mlp_of_the_language_model_is_computed_in_chunks(name: str) -> None:
    inner, linears = MLPS[name]
    family, case = named_case(name.split()[-1])
    model, inputs = build(family, case)
    model(**inputs)
    before, found = traces(model), {}
    for size in (None, SIZE):
        patch_model(model, mlp_chunk_size=size)
        found[size] = most_tokens(model, inner, lambda: model(**inputs).loss.backward())
        unpatch_model(model)
    model.zero_grad()
    towers = {x for x in found[None] if any(part in x for part in ("vision", "visual", "multi_modal", "perceiver"))}
    assert {x: found[SIZE][x] for x in towers} == {x: found[None][x] for x in towers}  # not chunked
    chunked = {x: tokens for x, tokens in found[SIZE].items() if x not in towers}
    assert len(chunked) == linears and set(chunked.values()) == {SIZE}
    assert min(found[None][x] for x in chunked) > SIZE
    assert traces(model) == before


@pytest.mark.parametrize("size", [1, 26, 1000])
def test_chunks_of_any_size_equal_unpatched(size: int) -> None:
    check_exact("mplug_owl3", 1, OWL.with_options(mlp_chunk_size=size))


@pytest.mark.parametrize(("size", "chunks"), [(2, [2, 2, 1]), (None, [5])])
def test_tower_encodes_vision_chunk_size_frames_at_once(size: int | None, chunks: list[int]) -> None:
    model = patch_model(model_of("mplug_owl3", OWL), vision_chunk_size=size)
    found: list[int] = []
    tower = model.vision_model.encoder.layers[0]
    tower.register_forward_pre_hook(lambda _, args, kwargs: found.append(args[0].shape[0]), with_kwargs=True)
    result = run_case(model, inputs_of("mplug_owl3", OWL, model))
    assert found == chunks
    check([result], reference("mplug_owl3", OWL), OWL)


def with_lora(dropout: float = 0.0, inner: Any = None) -> Any:
    torch.manual_seed(3)
    targets = r".*language_model.*\.mlp\.(gate|up|down)_proj"
    config = LoraConfig(r=2, lora_alpha=4, lora_dropout=dropout, target_modules=targets, init_lora_weights=False)
    return get_peft_model(tiny_model() if inner is None else inner, config).train()


@pytest.mark.parametrize("patched_first", [True, False])
def test_lora_in_chunked_mlps_equals_unpatched(patched_first: bool) -> None:
    inputs = inputs_of("mplug_owl3", OWL, tiny_model())
    expected = run_case(with_lora(), inputs)
    if patched_first:
        model = with_lora(inner=patch_model(tiny_model(), mlp_chunk_size=SIZE))
        model.load_state_dict(with_lora().state_dict())
    else:
        model = patch_model(with_lora(), mlp_chunk_size=SIZE)
    found = run_case(model, inputs)
    assert found.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    assert sum("lora_" in name and grad is not None for name, grad in found.grads.items()) == 4 * 3 * 2
    assert worst_gradient(found.grads, expected.grads)[0] < TOLERANCE


def test_dropout_in_chunked_lora_uses_the_same_mask_in_backward() -> None:
    """Along its gradient, the loss grows by the gradient's square; with another mask in backward it does not."""
    model = patch_model(with_lora(dropout=0.5).double(), mlp_chunk_size=SIZE)
    inputs = inputs_of("mplug_owl3", OWL, model)
    inputs["pixel_values"] = inputs["pixel_values"].double()

    def loss() -> Tensor:
        torch.manual_seed(11)
        return model(**inputs).loss

    loss().backward()
    weights = [p for p in model.parameters() if p.grad is not None]
    square = sum(p.grad.square().sum() for p in weights)
    losses = []
    for step in (1e-4, -2e-4):  # to +1e-4, then to -1e-4
        with torch.no_grad():
            for p in weights:
                p += step * p.grad
        losses.append(loss().detach())
    assert error((losses[0] - losses[1]) / 2e-4, square) < 1e-3  # the loss is float32
