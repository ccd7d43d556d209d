"""Layer: one process, loopback ranks. Inner modules of a patched model run only inside its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from family_cases import named_case
from family_harness import build, family_module, model_of, slow_unless, traces
from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.errors import AdapterError
from mllm_seqpar.models.mplug_owl3.hyper_attention import HyperDecoderLayer
from model_copies import tiny_model
from tiny_models.mplug_owl3 import tiny_frames, tiny_text

REFUSED = {
    "mplug_owl3": ("language_model", "language_model.model", "language_model.model.layers.0.self_attn"),
    "mllama": ("model", "model.language_model", *(f"model.language_model.layers.1{x}" for x in ("", ".cross_attn"))),
    "moss_vl": ("model", "model.language_model", *(f"model.language_model.layers.1{x}" for x in ("", ".cross_attn"))),
    "idefics": ("model", "model.layers.0", "model.layers.0.self_attn", "model.gated_cross_attn_layers.1.cross_attn"),
    "opt": ("lang_encoder.model.decoder", "lang_encoder.model.decoder.layers.0.decoder_layer.self_attn"),
    "llama": ("lang_encoder.model", *(f"lang_encoder.model.layers.{x}" for x in (0, "1.gated_cross_attn_layer.attn"))),
    "mpt": ("lang_encoder.transformer", "lang_encoder.transformer.blocks.0.decoder_layer"),
    "gpt_neox": ("lang_encoder.gpt_neox", "lang_encoder.gpt_neox.layers.1.decoder_layer.attention"),
}


@pytest.mark.parametrize("is_patched", [False, True])
def test_hyper_attention_requires_the_norm_of_its_frames(is_patched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of another class, which does not pass the norm, must not attend to frames without it."""
    model, inputs = build("mplug_owl3", family_module("mplug_owl3").Case())
    if is_patched:
        patch_model(model)
    monkeypatch.setattr(HyperDecoderLayer, "forward", HyperDecoderLayer.__mro__[1].forward)
    with pytest.raises(TypeError, match="visual_norm"):
        model(**inputs)


TILES = torch.ones(1, 1, 3, dtype=torch.long)
# Modules that read no tokens of other ranks: towers, projectors, embeddings, MLPs.
ALLOWED: dict[str, list[Callable[[Any], Any]]] = {
    "mplug_owl3": [
        lambda m: m.encode_frames(tiny_frames(2)),
        lambda m: m.language_model.model.layers[0].mlp(torch.zeros(1, 2, 64)),
        lambda m: m.get_output_embeddings()(m.get_input_embeddings()(tiny_text(1))),
    ],
    "mllama": [lambda m: m.model.vision_model(torch.zeros(1, 1, 3, 3, 28, 28), TILES[..., 0], TILES)],
    "moss_vl": [lambda m: m.model.encode_frames(torch.zeros(8, 48), torch.tensor([[1, 2, 4]]))],
    "idefics": [lambda m: m.model.vision_model(torch.zeros(1, 3, 16, 16))],
}
FLAMINGO_TOWER = [lambda m: m.perceiver(m.vision_encoder(torch.zeros(1, 3, 12, 12))[1][:, None, None])]


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("mplug_owl3", "idefics", "mllama", "opt"), REFUSED))
def test_inner_modules_refuse_calls_outside_of_the_forward_pass(name: str) -> None:
    models = [model_of(*named_case(name)) for _ in range(2)]
    model, before = models[0], traces(models[0])
    run_loopback(2, lambda comm: patch_model(models[comm.rank], group=comm))
    for path in REFUSED[name]:
        with pytest.raises(AdapterError, match="was called outside of the patched forward.* on 2 ranks.*unpatch_model"):
            model.get_submodule(path)()
    for call in ALLOWED.get(name, FLAMINGO_TOWER):
        call(model)
    unpatch_model(model)
    assert traces(model) == before
    patch_model(model)  # one rank computes what the unpatched model computes
    with pytest.raises(TypeError):
        model.get_submodule(REFUSED[name][-1])()


def test_forward_replaced_after_patching_cannot_run_unsharded() -> None:
    """Liger and TRL install a forward of their own, which calls the decoder and fuses the head with the loss."""
    models = [tiny_model() for _ in range(2)]
    run_loopback(2, lambda comm: patch_model(models[comm.rank], group=comm))
    models[0].forward = lambda ids: models[0].language_model.model(input_ids=ids)  # type: ignore[method-assign]
    with pytest.raises(AdapterError, match=r"language_model.model \(HyperQwen2Model\) was called outside"):
        models[0](tiny_text(1))


def test_forward_replaced_before_patching_is_not_dropped() -> None:
    model = tiny_model()
    model.forward = lambda *args: args  # type: ignore[method-assign]
    with pytest.raises(AdapterError, match="was replaced by something else already.*Patch first, then prepare"):
        patch_model(model)
