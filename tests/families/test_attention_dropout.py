"""Layer: one process, loopback ranks. Every family refuses dropout on attention weights in training."""

from typing import Any

import pytest

from family_cases import BATCHES
from family_harness import family_module, inputs_of, model_of
from mllm_seqpar import patch_model
from mllm_seqpar.comm import run_loopback

REFUSED = "dropout on attention weights is not supported"


def with_attention_dropout(family: str, model: Any) -> Any:
    if family == "idefics":
        for block in model.model.gated_cross_attn_layers:
            block.cross_attn.dropout = 0.1
    elif family == "mllama":
        for layer in model.model.language_model.layers:
            if hasattr(layer, "cross_attn"):
                layer.cross_attn.dropout = 0.1
    elif family == "open_flamingo":
        for block in model.lang_encoder.transformer.blocks:
            getattr(block, "decoder_layer", block).attn.attn_dropout_p = 0.1
    return model.train()


@pytest.mark.parametrize("family", ["mplug_owl3", "idefics", "mllama", "open_flamingo"])
def test_attention_dropout_is_refused_in_training_only(family: str) -> None:
    family_module(family)
    case = BATCHES[family]
    case = case.with_model(attention_dropout=0.1) if family == "mplug_owl3" else case
    models = [with_attention_dropout(family, model_of(family, case)) for _ in range(2)]
    inputs = inputs_of(family, case, models[0])

    def run(comm: Any) -> None:
        model = patch_model(models[comm.rank], group=comm)
        for arguments in ({}, {"use_cache": True}) if family == "mplug_owl3" else ({},):
            with pytest.raises(ValueError, match=REFUSED):
                model(**inputs, **arguments)
        if family == "open_flamingo":
            model.lang_encoder.clear_conditioned_layers()
        model.eval()(**inputs)

    run_loopback(2, run)
