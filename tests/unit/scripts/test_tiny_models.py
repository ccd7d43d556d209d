"""Layer: one process. Models of given sizes: the same names of sizes for all families with cross-attention."""

import importlib.util

import pytest
import torch

from tiny_models import Sizes, tiny_model

SIZES = Sizes(width=48, mlp=56, layers=6, heads=4, kv_heads=2, cross_layers=(1, 4), vocabulary=300, tower_width=16)


CROSS_LAYERS = {
    "idefics": "IdeficsGatedCrossAttentionLayer",
    "mllama": "MllamaCrossAttentionDecoderLayer",
    "mplug_owl3": "HyperDecoderLayer",
    "open_flamingo": "GatedCrossAttentionBlock",
}


@pytest.mark.parametrize("family", CROSS_LAYERS)
def test_model_has_the_sizes_and_always_the_same_weights(family: str) -> None:
    if family == "open_flamingo" and importlib.util.find_spec("open_flamingo") is None:
        pytest.skip("open_flamingo is installed with --no-deps by scripts/test.sh")
    model, same = tiny_model(family, SIZES), tiny_model(family, SIZES)
    decoder = model.lang_encoder if family == "open_flamingo" else model
    config = decoder.config.get_text_config()
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (48, 56, 300)
    assert (config.num_hidden_layers, config.num_attention_heads) == (6, 4)
    assert sum(type(module).__name__ == CROSS_LAYERS[family] for module in model.modules()) == 2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
