"""Layer: one process. Inner modules of a patched model run in its own passes only, where ranks share a sample."""

import importlib
from typing import Any

import pytest
import torch
from tiny import tiny_frames, tiny_model, tiny_text
from torch import nn

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.errors import AdapterError

REFUSED = {
    "mplug_owl3": ("language_model", "language_model.model", "language_model.model.layers.0.self_attn"),
    "mllama": (
        "model",
        "model.language_model",
        "model.language_model.layers.1",
        "model.language_model.layers.1.cross_attn",
    ),
    "idefics": ("model", "model.layers.0", "model.layers.0.self_attn", "model.gated_cross_attn_layers.1.cross_attn"),
    "opt": ("lang_encoder.model.decoder", "lang_encoder.model.decoder.layers.0.decoder_layer.self_attn"),
    "llama": (
        "lang_encoder.model",
        "lang_encoder.model.layers.0",
        "lang_encoder.model.layers.1.gated_cross_attn_layer.attn",
    ),
    "mpt": ("lang_encoder.transformer", "lang_encoder.transformer.blocks.0.decoder_layer"),
    "gpt_neox": ("lang_encoder.gpt_neox", "lang_encoder.gpt_neox.layers.1.decoder_layer.attention"),
}


def model_of(family: str) -> Any:
    if family == "mplug_owl3":
        return tiny_model()
    if family in ("mllama", "idefics"):
        return importlib.import_module(f"tiny_{family}").fresh_model()
    return importlib.import_module("tiny_open_flamingo").tiny_flamingo(family)


def allowed(family: str, model: Any) -> None:
    """What reads no tokens of other ranks: vision towers, projectors, embeddings, the vocabulary, MLPs."""
    if family == "mplug_owl3":
        model.encode_frames(tiny_frames(2))
        model.language_model.model.layers[0].mlp(torch.zeros(1, 2, 64))
        model.get_output_embeddings()(model.get_input_embeddings()(tiny_text(1)))
    elif family == "mllama":
        vision = model.config.vision_config
        pictures = torch.zeros(1, 1, vision.max_num_tiles, 3, vision.image_size, vision.image_size)
        tiles = torch.ones(1, 1, vision.max_num_tiles, dtype=torch.long)
        model.model.vision_model(pictures, tiles[..., 0], tiles)
    elif family == "idefics":
        model.model.vision_model(torch.zeros(1, 3, 16, 16))
    else:
        model.perceiver(model.vision_encoder(torch.zeros(1, 3, 12, 12))[1][:, None, None])


@pytest.mark.parametrize("family", REFUSED)
def test_inner_modules_refuse_calls_outside_of_a_pass(family: str) -> None:
    model = model_of(family)
    models = [model, model_of(family)]
    before = {name: list(vars(module)) for name, module in model.named_modules()}
    run_loopback(2, lambda comm: patch_model(models[comm.rank], group=comm))
    for path in REFUSED[family]:
        with pytest.raises(
            AdapterError, match=r"was called outside of the patched forward.* on 2 ranks.*unpatch_model"
        ):
            model.get_submodule(path)()
    allowed(family, model)
    unpatch_model(model)
    assert before == {name: list(vars(module)) for name, module in model.named_modules()}
    patch_model(model)  # one rank computes what the unpatched model computes
    with pytest.raises(TypeError):
        model.get_submodule(REFUSED[family][-1])()


def test_forward_replaced_after_patching_cannot_run_unsharded() -> None:
    """Liger and TRL install a forward of their own, which calls the decoder and fuses the head with the loss."""
    models = [tiny_model() for _ in range(2)]
    run_loopback(2, lambda comm: patch_model(models[comm.rank], group=comm))
    models[0].forward = lambda ids: models[0].language_model.model(input_ids=ids)  # type: ignore[method-assign]
    with pytest.raises(AdapterError, match=r"language_model.model \(HyperQwen2Model\) was called outside"):
        models[0](tiny_text(1))


def test_forward_replaced_before_patching_is_not_dropped() -> None:
    model = tiny_model()
    model.forward = lambda *args: nn.Module.forward  # type: ignore[method-assign]
    with pytest.raises(AdapterError, match="was replaced by something else already.*Patch first, then prepare"):
        patch_model(model)
