"""A directory from the parts that are published: a language model, a CLIP, and what OpenFlamingo trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mllm_seqpar.errors import ConfigError

from .configuration import OpenFlamingoConfig
from .processing import END_OF_CHUNK, IMAGE, OpenFlamingoProcessor
from .weights import set_weights

Location = str | os.PathLike[str]


def convert(
    output: Location,
    *,
    language_model: Location,
    vision_model: Location,
    checkpoint: Location | None = None,
    cross_attn_every_n_layers: int = 1,
    only_attend_immediate_media: bool = True,
) -> None:
    """Writes an OpenFlamingo directory.

    Args:
        output: the directory.
        language_model: directory of a causal language model of transformers, with its tokenizer.
        vision_model: directory of a CLIP, or of its vision tower; with its image processor.
        checkpoint: published checkpoint.pt; None for untrained cross-attention, whose gates are closed.
        cross_attn_every_n_layers: as the checkpoint was trained.
        only_attend_immediate_media: likewise.

    Raises:
        ConfigError: parts that do not fit together.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    from .modeling import ClipTower, OpenFlamingo

    tokenizer = AutoTokenizer.from_pretrained(language_model)
    tokenizer.add_tokens([END_OF_CHUNK, IMAGE], special_tokens=True)  # in the order of the published checkpoints
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "<PAD>"})
    text: Any = AutoModelForCausalLM.from_pretrained(language_model)
    text.resize_token_embeddings(len(tokenizer))
    tower = ClipTower.from_pretrained(vision_model)
    config = OpenFlamingoConfig(
        text_config=text.config,
        vision_config=tower.config,
        media_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        eoc_token_id=tokenizer.convert_tokens_to_ids(END_OF_CHUNK),
        cross_attn_every_n_layers=cross_attn_every_n_layers,
        only_attend_immediate_media=only_attend_immediate_media,
    )
    model = OpenFlamingo(config, text, tower)
    if checkpoint is not None:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        state = state.get("model_state_dict", state)
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
        missing = [name for name in set_weights(model, state) if "gated_cross" in name or name.startswith("perceiver")]
        if missing:
            raise ConfigError(f"{checkpoint}: lacks {len(missing)} trained weights, among them {missing[0]}")
    model.save_pretrained(output)
    OpenFlamingoProcessor(CLIPImageProcessorPil.from_pretrained(vision_model), tokenizer).save_pretrained(Path(output))
