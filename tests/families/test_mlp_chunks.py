"""Layer: gloo ranks. MLPs and towers in chunks: patched models give the unpatched loss, logits, gradients, tokens."""

from __future__ import annotations

import functools
from typing import Any

import open_flamingo_cases
import pytest
import tiny_idefics
import tiny_mllama
import torch
from harness import PATIENCE, check_case, check_tokens
from tiny_open_flamingo import LANGUAGE_MODELS, tiny_flamingo
from torch import nn
from torch.distributed.fsdp import fully_shard

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.errors import ConfigError
from ranks import ranks
from training import check_fsdp, check_lora

SIZE = 5
CHUNKS = {"mlp_chunk_size": SIZE, "vision_chunk_size": 1}
FLAMINGO = open_flamingo_cases.Case(media=((1, 4, 7), (3,)), images=2).with_options(**CHUNKS)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("family", ["chunks_of_idefics", "chunks_of_mllama"])
def test_equals_unpatched(family: str, world: int) -> None:
    """2 samples of 11 tokens: on two ranks, chunks of 5, 5 and 2 tokens of a rank's 12."""
    for name in __import__(family).CASES:
        check_case(family, "CASES", name, world)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_open_flamingo_equals_unpatched(name: str, world: int) -> None:
    outcomes = ranks(world).run(open_flamingo_cases.patched_rank, name, FLAMINGO, timeout=PATIENCE)
    open_flamingo_cases.check(outcomes, open_flamingo_cases.reference(name, FLAMINGO), FLAMINGO)


def test_generates_the_same_tokens() -> None:
    check_tokens("chunks_of_idefics", "GENERATED", 2)


IMAGES, ONE_IMAGE = tiny_mllama.Case(images=((2, 3, 1), (1,))), tiny_mllama.Case(images=((2,),), length=9)
TEXT = tiny_mllama.Case(images=((), ()), length=11)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_under_fsdp2(checkpointing: bool) -> None:
    """Weights are gone after a layer's forward, and gathered again before its backward."""
    check_fsdp("tiny_mllama", [[IMAGES, TEXT, ONE_IMAGE]], 2, checkpointing, CHUNKS)


def test_two_groups_of_texts_of_different_lengths() -> None:
    """The one group's ranks compute three chunks where the other's have few tokens and compute none."""
    short = tiny_mllama.Case(images=((2,),), length=5)
    check_fsdp("tiny_mllama", [[IMAGES, short], [short, IMAGES]], 4, False, CHUNKS)


def test_with_lora_on_attention() -> None:
    check_lora("tiny_mllama", IMAGES, 2, True, CHUNKS)


def refused_rank(rank: int, world: int) -> list[str]:
    """What a model says of which parts of MLPs are FSDP units, and of one sharded by whole MLPs."""
    found = []
    for names in (("down_proj",), ("mlp",)):
        model = tiny_mllama.fresh_model()
        for path, module in model.model.language_model.named_modules():
            if path.endswith(names):
                fully_shard(module)
        fully_shard(model)
        patch_model(model, **CHUNKS)
        try:
            model(**tiny_mllama.inputs_of(IMAGES, model)).loss.backward()
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


def test_units_within_an_mlp_are_refused() -> None:
    """They would be gathered for every chunk, and ranks of other groups may have other numbers of chunks."""
    for inner, whole in ranks(2).run(refused_rank, timeout=PATIENCE):
        assert "down_proj within FSDPMllamaTextMLP" in inner or "down_proj within MllamaTextMLP" in inner
        assert "call fully_shard on the decoder layer" in inner
        assert whole == ""


def most_tokens(model: Any, inner: int, run: Any) -> dict[str, int]:
    """The most tokens that each linear layer to or from the inner size was given, in forward and backward."""
    found: dict[str, int] = {}
    hooks = []

    def note(name: str, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        found[name] = max(found.get(name, 0), args[0].shape[:-1].numel())

    for name, module in model.named_modules():
        if name != "lm_head" and isinstance(module, nn.Linear) and inner in (module.in_features, module.out_features):
            hooks.append(module.register_forward_pre_hook(functools.partial(note, name)))
    run()
    for hook in hooks:
        hook.remove()
    return found


MODELS = {
    # the model, its inputs, the inner size of MLPs, and how many linear layers all of them have together
    "idefics": (tiny_idefics.fresh_model, lambda m: tiny_idefics.inputs_of(tiny_idefics.Case(), m), 48, 3 * 6),
    "mllama": (tiny_mllama.fresh_model, lambda m: tiny_mllama.inputs_of(tiny_mllama.Case(), m), 96, 3 * 5),
    "opt": (lambda: tiny_flamingo("opt"), None, 48, 2 * 2),
    "llama": (lambda: tiny_flamingo("llama"), None, 48, 3 * 3),
    "mpt": (lambda: tiny_flamingo("mpt"), None, 144, 2 * 2 + 2 * 2),  # its cross-attention blocks' inner size, too
    "gpt_neox": (lambda: tiny_flamingo("gpt_neox"), None, 48, 2 * 2),
    "cross-attention of opt": (lambda: tiny_flamingo("opt"), None, 128, 2 * 2),
    "cross-attention of llama": (lambda: tiny_flamingo("llama"), None, 128, 2 * 3),
    "cross-attention of gpt_neox": (lambda: tiny_flamingo("gpt_neox"), None, 128, 2 * 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_mlp_of_the_language_model_is_computed_in_chunks(name: str) -> None:
    build, inputs_of, inner, linears = MODELS[name]
    model: Any = build()
    inputs = open_flamingo_cases.inputs_of(FLAMINGO) if inputs_of is None else inputs_of(model)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    found = {}
    for size in (None, SIZE):
        patch_model(model, mlp_chunk_size=size)
        found[size] = most_tokens(model, inner, lambda: model(**inputs).loss.backward())
        unpatch_model(model)
    towers = {x for x in found[None] if "vision" in x or "multi_modal" in x or "perceiver" in x}
    assert {x: found[SIZE][x] for x in towers} == {x: found[None][x] for x in towers}  # left alone
    chunked = {x: tokens for x, tokens in found[SIZE].items() if x not in towers}
    assert len(chunked) == linears and set(chunked.values()) == {SIZE}
    assert min(found[None][x] for x in chunked) > SIZE
    for path, module in model.named_modules():
        names = vars(module).keys() - {"use_cached_media"}
        assert names == before[path].keys() - {"use_cached_media"}, path
