"""Conversion of the published parts (a language model, a CLIP, a checkpoint.pt) to one model directory."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.errors import ConfigError, first_line
from mllm_seqpar.models.auto_classes import NATIVE_MODELS
from mllm_seqpar.models.hub import local_directory
from mllm_seqpar.models.loading import require_clean

from .configuration import END_OF_CHUNK, IMAGE, OpenFlamingoConfig
from .weights import cast, load_complete, set_weights

Location = str | os.PathLike[str]

# The tensors of a CLIP outside its vision tower.
_NOT_THE_TOWER = r"^(text_model|text_projection|visual_projection)\.|^logit_scale$|position_ids$"
_GATE = re.compile(r"(?:\.(\d+)\.gated_cross_attn_layer|\.gated_cross_attn_layers\.(\d+))\.attn_gate$")
# Buffers that transformers saved in 2023 and computes now. `_check_frequencies` compares the rotary frequencies.
_FREQUENCIES = re.compile(r"^lang_encoder\..*rotary_emb\.inv_freq$")
_CAUSAL_MASKS = re.compile(r"^lang_encoder\..*\.attention\.(masked_)?bias$")


def convert(
    output: Location,
    *,
    language_model: Location,
    vision_model: Location,
    checkpoint: Location | None = None,
    cross_attn_every_n_layers: int | None = None,
    only_attend_immediate_media: bool = True,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write an OpenFlamingo directory.

    Args:
        language_model: directory, or id on the Hub, of a published causal language model with its tokenizer.
        vision_model: directory of a CLIP, or of its vision tower, with its image processor.
        checkpoint: the published checkpoint.pt; None for untrained cross-attention with closed gates.
        cross_attn_every_n_layers: the checkpoint's value; None reads it from the checkpoint, and is 1 without one.
        only_attend_immediate_media: the checkpoint's value.
        dtype: dtype of the written weights. The parts are combined in float32, as in the authors' loader.

    Raises:
        ConfigError: the parts do not fit together.
        DataError: weights are missing, unexpected or of another shape.
    """
    from transformers import CLIPVisionModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    from .language import fit_vocabulary, load_language_model
    from .modeling import ClipTower, OpenFlamingo

    language_model, vision_model = local_directory(language_model), local_directory(vision_model)
    state = None if checkpoint is None else _read(checkpoint)
    every = _interval(checkpoint, state, cross_attn_every_n_layers)
    text = load_language_model(language_model)
    weight = text.get_input_embeddings().weight
    embedding = "lang_encoder." + next(name for name, parameter in text.named_parameters() if parameter is weight)
    rows = None if state is None else _rows(checkpoint, state, embedding)
    tokenizer, length = _tokenizer(language_model, rows)
    fit_vocabulary(text, length)
    tower = load_complete(CLIPVisionModel, vision_model, _NOT_THE_TOWER)
    tower.__class__ = ClipTower
    images = CLIPImageProcessorPil.from_pretrained(vision_model)
    crop = images.crop_size
    if not crop["height"] == crop["width"] == tower.config.image_size:
        raise ConfigError(
            f"{vision_model}: preprocessor_config.json crops images to {crop['height']} x {crop['width']}, but the "
            f"vision tower takes {tower.config.image_size} x {tower.config.image_size}"
        )
    config = OpenFlamingoConfig(
        text_config=text.config,
        vision_config=tower.config,
        media_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        eoc_token_id=tokenizer.convert_tokens_to_ids(END_OF_CHUNK),
        cross_attn_every_n_layers=every,
        only_attend_immediate_media=only_attend_immediate_media,
    )
    model = OpenFlamingo(config, text, tower)
    if state is not None:
        _fill(model, state, embedding, checkpoint)
    cast(model, dtype)
    text.config.dtype = tower.config.dtype = dtype
    model.save_pretrained(output)
    processor = NATIVE_MODELS["open_flamingo"].named("OpenFlamingoProcessor")
    processor(images, tokenizer).save_pretrained(Path(output))


def _read(checkpoint: Any) -> dict[str, Tensor]:
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"checkpoint={checkpoint}: {first_line(error)}") from error
    state = state.get("model_state_dict", state)
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def _interval(checkpoint: Any, state: dict[str, Tensor] | None, asked: int | None) -> int:
    if state is None:
        return asked or 1
    gated = {int(match[1] or match[2]) for match in map(_GATE.search, state) if match}
    if not gated:
        raise ConfigError(f"{checkpoint}: has no weights of gated cross-attention; pass an OpenFlamingo checkpoint")
    every = min(gated) + 1
    if asked not in (None, every):
        raise ConfigError(
            f"cross_attn_every_n_layers={asked}, but {checkpoint} has {every}; pass that, or leave it out"
        )
    return every


def _rows(checkpoint: Any, state: dict[str, Tensor], embedding: str) -> int:
    if embedding not in state:
        raise ConfigError(
            f"{checkpoint}: expected {embedding}, the trained embedding of this language model; it is not there. "
            "Pass the language model that the checkpoint was trained over"
        )
    return state[embedding].shape[0]


def _tokenizer(directory: Location, rows: int | None) -> tuple[Any, int]:
    """Return the tokenizer with the authors' tokens in the authors' order, and its number of tokens.

    `<PAD>` is added if the published tokenizer states no pad token, or if the checkpoint's embedding has a row for it.
    """
    tokenizer = _published_tokenizer(directory)
    tokenizer.add_tokens([END_OF_CHUNK, IMAGE], special_tokens=True)
    length = len(tokenizer)
    if tokenizer.pad_token is None or rows == length + 1:
        tokenizer.add_special_tokens({"pad_token": "<PAD>"})
    if rows not in (None, len(tokenizer)):
        raise ConfigError(
            f"the checkpoint's embedding has {rows} rows, but the tokenizer in {directory} has {length} tokens with "
            f"{END_OF_CHUNK} and {IMAGE}, and {length + 1} with <PAD>; pass the language model and tokenizer that the "
            "checkpoint was trained over"
        )
    return tokenizer, len(tokenizer)


def _published_tokenizer(directory: Location) -> Any:
    """Return the tokenizer of the files, not the one that a class of transformers 5 builds from their vocabulary.

    Those classes add a pad token that GPT-NeoX does not state, and omit the space that LLaMA's tokenizers of 2023 put
    after each special token, with which the models were trained.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if (Path(directory) / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(directory)
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, legacy=True)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"language_model={directory}: its tokenizer cannot be read: {error}") from error
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **special)


def _fill(model: Any, state: dict[str, Tensor], embedding: str, checkpoint: Any) -> None:
    """Set the model's weights to the checkpoint's, which must include all weights that the authors trained."""
    _check_frequencies(model, state, checkpoint)
    state = {name: x for name, x in state.items() if not (_FREQUENCIES.match(name) or _CAUSAL_MASKS.match(name))}
    missing = set_weights(model, state, checkpoint)
    trained = [name for name in missing if "gated_cross_attn_layer" in name or name.startswith("perceiver.")]
    # The authors save every name that contains "embed", and therefore GPT-NeoX's untied embed_out.
    weight = model.lang_encoder.get_output_embeddings().weight
    heads = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor is weight]
    if model.lang_encoder.config.model_type == "gpt_neox" and any(name in missing for name in heads):
        trained.append("lang_encoder.embed_out.weight")
    expected = "the perceiver, the gated cross-attention blocks and the embeddings of this model"
    require_clean({"missing_keys": trained}, str(checkpoint), expected=expected)


def _check_frequencies(model: Any, state: dict[str, Tensor], checkpoint: Any) -> None:
    """Raise ConfigError unless the rotary frequencies in the checkpoint equal those of the language model."""
    computed = next((m.inv_freq for m in model.lang_encoder.modules() if hasattr(m, "inv_freq")), None)
    for name in filter(_FREQUENCIES.match, state):
        saved = state[name].float()
        if computed is None or computed.shape != saved.shape or not torch.allclose(computed.float(), saved, rtol=1e-2):
            raise ConfigError(
                f"{checkpoint}: {name} has other rotary frequencies than the language model; pass the language model "
                "that the checkpoint was trained over"
            )
