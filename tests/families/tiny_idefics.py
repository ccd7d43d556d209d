"""A tiny IDEFICS for tests: the real class, random weights, and nothing left at a value that hides a mistake."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from harness import FamilyCase
from torch import Tensor, nn
from transformers import IdeficsConfig, IdeficsForVisionText2Text

from mllm_seqpar import FrameShard, frame_range
from outcomes import Outcome, run_case

VOCABULARY = 128


@dataclass(frozen=True)
class Case(FamilyCase):
    """With IDEFICS' own choices.

    Attributes:
        mask: what rows see: "last" image, all "before", "holes", "nothing" at all.
        features: `image_encoder_embeddings` in place of `pixel_values`; or "perceiver".
        embeds: `inputs_embeds` in place of `input_ids`.
    """

    mask: str = "last"
    features: str | None = None
    embeds: bool = False


def _build(overrides: tuple[tuple[str, Any], ...]) -> IdeficsForVisionText2Text:
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "additional_vocab_size": 0,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "cross_layer_interval": 2,
        "qk_layer_norms": True,
        "use_resampler": False,
        "alpha_type": "vector",
        "alpha_initializer": "ones",
        "dropout": 0.0,
        "freeze_text_layers": False,
        "freeze_vision_layers": False,
        "freeze_lm_head": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vision_config": {
            "embed_dim": 24,
            "image_size": 16,
            "patch_size": 8,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "perceiver_config": {
            "resampler_depth": 2,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
            "resampler_n_latents": 3,
            "qk_layer_norms_perceiver": True,
        },
    }
    model = IdeficsForVisionText2Text(IdeficsConfig(**fields | dict(overrides))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if "alpha" in name:
                weight.copy_(drawn)
            elif "norm" in name and name.endswith("weight"):
                weight.copy_(1 + 0.2 * drawn)
            elif name.endswith("bias"):
                weight.copy_(0.3 * drawn)
            elif "embed" in name or "latents" in name:
                weight.copy_(0.5 * drawn)
            else:
                weight.copy_(drawn * weight[0].numel() ** -0.5)
    return model


_model = functools.cache(_build)


def fresh_model() -> Any:
    """A new model to be trained."""
    return _build(()).train()


def shard_units(model: Any) -> list[nn.Module]:
    """What FSDP2 shards as units: decoder layers, cross-attention blocks, the tower's layers."""
    inner = model.model
    return [*inner.layers, *inner.gated_cross_attn_layers, *inner.vision_model.encoder.layers]


lora_targets = r"model\.(layers\.\d+\.self_attn|gated_cross_attn_layers\.\d+\.cross_attn)\.(q|k|v|o)_proj"


def model_of(case: Case) -> Any:
    """The case's model, kept between cases: patching it must leave no trace."""
    model = _model(tuple(sorted(case.model.items())))
    model.zero_grad(set_to_none=True)
    return model.eval()


def image_mask(case: Case) -> Tensor:
    """(B, L, I) of 0 and 1: which row sees which of its sample's images; the first rows see none, but for "all"."""
    batch, images = len(case.images), max(case.images)
    generator = torch.Generator().manual_seed(5)
    mask = torch.zeros(batch, case.length, images, dtype=torch.long)
    for sample, count in enumerate(case.images):
        starts = sorted(torch.randperm(case.length - 2, generator=generator)[:count].add(1).tolist())
        for image, start in enumerate(starts):
            stop = case.length
            if case.mask == "last" and image + 1 < count:
                stop = starts[image + 1]
            mask[sample, start:stop, image] = 1
    if case.mask == "holes":
        mask &= torch.rand(mask.shape, generator=generator) < 0.6
    elif case.mask == "nothing":
        mask.zero_()
    return mask


def inputs_of(case: Case, model: nn.Module) -> dict[str, Any]:
    """The arguments of the unpatched model's forward."""
    generator = torch.Generator().manual_seed(1)
    batch, images = len(case.images), max(case.images)
    additional = case.model.get("additional_vocab_size", 0)
    ids = torch.randint(3, VOCABULARY, (batch, case.length), generator=generator)
    ids[:, -additional - 1 : -1] = torch.arange(VOCABULARY, VOCABULARY + additional)
    inputs: dict[str, Any] = {"input_ids": ids, "image_attention_mask": image_mask(case), **case.arguments}
    real = case.real()
    if real is not None:
        ids.masked_fill_(~real, 0)
        inputs["attention_mask"] = real.long()
    if case.labels:
        labels = ids.clone()
        labels[:, :2] = -100
        inputs["labels"] = labels if real is None else labels.masked_fill(~real, -100)
    size = 16 if not case.arguments.get("interpolate_pos_encoding") else 24
    pixels = torch.randn(batch, images, 3, size, size, generator=generator)
    if case.features == "encoder":
        inputs["image_encoder_embeddings"] = torch.randn(batch, images, 5, 24, generator=generator)
    elif case.features == "perceiver":
        inputs["perceiver_embeddings"] = torch.randn(batch, images, 3, 24, generator=generator)
    else:
        inputs["pixel_values"] = pixels
    if case.embeds:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()  # type: ignore[operator]
    for name in case.wants_grad:
        inputs[name].requires_grad_()
    return inputs


def local_frames(inputs: dict[str, Any], group: Any = None) -> dict[str, Any]:
    """The same inputs as a rank passes them that holds only its own images."""
    names = ("pixel_values", "image_encoder_embeddings", "perceiver_embeddings")
    name = next(n for n in names if n in inputs)
    flat = inputs[name].flatten(0, 1)
    own = frame_range(flat.shape[0], group)
    shard = FrameShard(own.start, own.stop, flat.shape[0])
    return inputs | {name: flat[own.start : own.stop], "visual_shard": shard}


def run_unpatched(model: Any, inputs: dict[str, Any]) -> Outcome:
    """Run the reference; its loss is computed here, because transformers' fails where there are additional tokens."""
    labels = inputs.get("labels")
    if labels is None or not model.config.additional_vocab_size:
        return run_case(model, inputs)
    outcome = model(**inputs | {"labels": None}, output_hidden_states=True)
    rows = outcome.logits[:, :-1].double()
    loss = nn.functional.cross_entropy(rows.flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    states = [state.detach() for state in outcome.hidden_states]
    return Outcome(loss.item(), outcome.logits.detach(), states, grads, {})


RESAMPLER = {"use_resampler": True}
BASE, INSTRUCT = {"additional_vocab_size": 2}, {"additional_vocab_size": 3}
"""As published: the base and the instruct models have more columns of logits than `vocab_size`."""
EVERYWHERE = {
    "one sample": Case(model=INSTRUCT),
    "two samples, uneven": Case(images=(4, 1), model=BASE).with_options(logits="local"),
    "resampler, all before": Case(images=(2, 3), mask="before", model=RESAMPLER),
    "holes": Case(images=(5, 3), mask="holes"),
    "one image, short text": Case(images=(1,), length=4),
    "left padding": Case(images=(2, 3, 1), padding="left", mask="before"),
}
"""For 1 to 4 ranks."""

ONCE = {
    "no row sees anything": Case(images=(2,), mask="nothing"),
    "no norms of q and k": Case(model={"qk_layer_norms": False}),
    "a scalar gate": Case(model={"alpha_type": "float"}, double=True),
    "block before every layer": Case(model={"cross_layer_interval": 1}),
    "gradients of pixels": Case(images=(2, 1), wants_grad=("pixel_values",)),
    "features of the tower": Case(images=(2, 1), features="encoder", wants_grad=("image_encoder_embeddings",)),
    "features of the tower, resampled": Case(images=(2, 1), features="encoder", model=RESAMPLER),
    "latents": Case(images=(2, 1), features="perceiver", model=RESAMPLER, wants_grad=("perceiver_embeddings",)),
    "embeddings": Case(images=(2, 1), embeds=True, wants_grad=("inputs_embeds",)),
    "another picture size": Case(arguments={"interpolate_pos_encoding": True}),
    "own images only": Case(images=(3, 2), local_frames=True),
    "own latents only": Case(images=(3, 2), local_frames=True, features="perceiver", model=RESAMPLER),
    "items counted by the caller": Case(images=(2, 1), arguments={"num_items_in_batch": 37}),
    "ring": Case(images=(3, 2), mask="before").with_options(strategy="ring"),
    "ring, nothing recomputed": Case(images=(3, 2)).with_options(strategy="ring", recompute_visual=False),
    "striped": Case(images=(3, 2), padding="left").with_options(text_layout="striped"),
    "contiguous, nothing recomputed": Case().with_options(text_layout="contiguous", recompute_visual=False),
    "local text": Case(images=(3, 2), padding="left").with_options(self_attention="local"),
    "full logits in training": Case(images=(2, 1), model=INSTRUCT).with_options(logits="full"),
    "no labels": Case(images=(2, 1), labels=False),
}
"""Each with one number of ranks, 2 to 4 in turn."""

ONE = Case(images=(4,), mask="before", labels=False, model=INSTRUCT)
TWO = Case(images=(3, 1), padding="left", labels=False)
LATENTS = Case(images=(2, 3), mask="holes", model=RESAMPLER, labels=False)
DEALT = {"shard_prompt_from": 2}
GENERATED: dict[str, tuple[Case, dict[str, Any]]] = {
    "greedy": (ONE, {}),
    "greedy, padded batch": (TWO, {}),
    "resampler": (LATENTS, {}),
    "sampled": (TWO, {"do_sample": True, "temperature": 1.3, "top_k": 50}),
    "beams": (ONE, {"num_beams": 3}),
    "beams, padded batch": (TWO, {"num_beams": 2, "num_return_sequences": 2}),
    "no cache": (TWO, {"use_cache": False}),
    "no cache, beams": (LATENTS, {"use_cache": False, "num_beams": 2}),
    "local text": (TWO.with_options(self_attention="local"), {}),
    "ring": (LATENTS.with_options(strategy="ring"), {}),
    "dealt prompt": (TWO.with_options(**DEALT), {}),
    "dealt prompt, beams": (LATENTS.with_options(**DEALT), {"num_beams": 3}),
    "looked up": (ONE, {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12}),
    "dealt prompt, looked up": (ONE.with_options(**DEALT), {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12}),
    "own images only": (Case(images=(3, 2), labels=False, local_frames=True), {}),
    "own images only, beams": (Case(images=(3, 2), labels=False, local_frames=True), {"num_beams": 2}),
}
