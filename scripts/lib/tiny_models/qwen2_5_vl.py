"""A tiny Qwen2.5-VL: the real class with random weights. See `tiny_models`.

Qwen3-VL's module has the same batches, with timestamps before each temporal patch.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling

from mllm_seqpar import FrameShard, frame_range

from . import SPECIAL_TOKENS, TinyCase, random_model

VOCABULARY = 96
START, END, IMAGE, VIDEO = 90, 91, 92, 93
FIRST, LAST = 3, 89
"""The range of token ids of text."""
PATCH, MERGE = 4, 2
PIXELS = 3 * 2 * PATCH**2
TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": VOCABULARY}
VISION = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64, "patch_size": PATCH}
GRIDS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
TAKES_EMBEDDINGS = "mm_encoder_outputs" in inspect.signature(Qwen2_5_VLForConditionalGeneration.forward).parameters
"""Whether the unpatched models of this version of transformers can be given the embeddings of `visual_embeds`."""
LORA_TARGETS = r"model\.language_model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj"


def tiny_config(**text: Any) -> Qwen2_5_VLConfig:
    """Return a config: 4 layers of width 64, 4 heads, 2 KV heads; a tower of 3 layers, two with windows."""
    fields: dict[str, Any] = TEXT | SPECIAL_TOKENS
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    window = {"window_size": 2 * MERGE * PATCH, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLConfig(vision_config=VISION | window | {"depth": 3}, text_config=fields | text, **TOKENS)


def tiny_model(seed: int = 0, attn_implementation: str = "sdpa", **text: Any) -> Any:
    """Return a model in eval mode; attention is far from uniform."""
    rules = {"norm.*weight$|ln_q": (1.0, 0.2), "bias$": (0.0, 0.2), "embed_tokens": (0.0, 0.5)}
    return random_model(Qwen2_5_VLForConditionalGeneration, tiny_config(**text), rules, seed, attn_implementation)


@dataclass(frozen=True)
class Case(TinyCase):
    """A batch of Qwen2.5-VL.

    `frames` has the images and videos of each sample: (height, width) of an image in patches, or (time, height, width)
    of a video. `features` is None or "embeddings", those of the vision tower, as `visual_embeds`.
    """

    frames: tuple[tuple[tuple[int, ...], ...], ...] = (((3, 4, 6), (6, 4)),)
    length: int = 44
    packed: tuple[int, ...] = ()  # lengths of sequences in one row, which positions separate; empty: one
    timestamps: bool = False  # whether each temporal patch is a run, behind two tokens of text, as in Qwen3-VL


def inputs_of(case: Case, model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)
    rows, real = [], case.real()
    for sample, media in enumerate(case.frames):
        count = case.length if real is None else int(real[sample].sum())
        row = _text(2, generator)
        for medium in media:
            row += _medium(medium, case.timestamps, generator)
        assert len(row) <= count, (len(row), count)
        rows.append(row + _text(count - len(row), generator))
    ids = torch.zeros(len(rows), case.length, dtype=torch.long)
    valid = torch.ones_like(ids) if real is None else real.long()
    for sample, row in enumerate(rows):
        ids[sample, valid[sample].bool()] = torch.tensor(row)
    kinds = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    inputs: dict[str, Any] = {"input_ids": ids, **case.arguments} | case.targets(ids, kinds > 0)
    if real is not None:
        inputs["attention_mask"] = valid
    if case.packed:
        positions = torch.cat([torch.arange(length) for length in case.packed])[None]
        inputs |= {"position_ids": positions.expand(4, *ids.shape), "use_cache": False}
    for (name, grid_name), size in zip(GRIDS, (2, 3), strict=True):
        grids = [medium for media in case.frames for medium in media if len(medium) == size]
        if grids:
            grid = torch.tensor([(1, *medium)[-3:] for medium in grids])
            pixels = torch.randn(int(grid.prod(1).sum()), PIXELS, generator=generator)
            inputs |= {name: pixels, grid_name: grid, "mm_token_type_ids": kinds}
    if "video_grid_thw" in inputs and not case.timestamps:
        inputs["second_per_grid_ts"] = torch.arange(1, 1 + len(inputs["video_grid_thw"])) * 0.5
    if "shift_labels" in inputs:  # the unpatched model requires labels too, and ignores their values
        inputs["labels"] = torch.full_like(ids, 7)
    if case.features and any(case.frames):
        inputs = _encoded(inputs, model)
    if case.embeds:
        inputs.pop("mm_token_type_ids", None)  # positions are those of text then
    return case.prepared(inputs, model)


def _text(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(FIRST, LAST, (count,), generator=generator).tolist()


def _medium(medium: tuple[int, ...], timestamps: bool, generator: torch.Generator) -> list[int]:
    """Return the tokens of an image or a video, with the marks around it."""
    time, height, width = (1, *medium)[-3:]
    tokens, token = height * width // MERGE**2, IMAGE if len(medium) == 2 else VIDEO
    if not timestamps or len(medium) == 2:
        return [START, *[token] * (time * tokens), END]
    return sum(([*_text(2, generator), START, *[token] * tokens, END] for _ in range(time)), [])


def _encoded(inputs: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return the inputs with the embeddings of all visual tokens, in the order of the text, in place of pixels."""
    ids, rows = inputs["input_ids"], {}
    with torch.no_grad():
        for token, (name, grid) in zip((IMAGE, VIDEO), GRIDS, strict=True):
            if name in inputs:
                out = model.model.visual(inputs.pop(name), grid_thw=inputs[grid], return_dict=True)
                rows[token] = torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or ())], -1)
    found = torch.zeros(*ids.shape, next(iter(rows.values())).shape[-1])
    for token, values in rows.items():
        found[ids == token] = values
    return inputs | {"visual_embeds": found[(ids == IMAGE) | (ids == VIDEO)]}


def _as_encoder_outputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with `visual_embeds` in the form of transformers, `mm_encoder_outputs`."""
    inputs = dict(inputs)
    embeds = inputs.pop("visual_embeds", None)
    if embeds is None:
        return inputs
    ids = inputs["input_ids"]
    kinds, found = ids[(ids == IMAGE) | (ids == VIDEO)], {}
    for token, name, (_, grid) in ((IMAGE, "image", GRIDS[0]), (VIDEO, "video", GRIDS[1])):
        if grid in inputs:
            counts = (inputs[grid].prod(1) // MERGE**2).tolist()
            first, *further = (x.split(counts) for x in embeds[kinds == token].split(64, -1))
            found[name] = BaseModelOutputWithPooling(pooler_output=first)
            if further:
                found[name].deepstack_features = further
    return inputs | {"mm_encoder_outputs": found}


def unpatched_forward(model: Any, inputs: dict[str, Any]) -> Any:
    return model(**_as_encoder_outputs(inputs), output_hidden_states=True)


def unpatched_generate(model: Any, **inputs: Any) -> torch.Tensor:
    return model.generate(**_as_encoder_outputs(inputs))


def local_frames(inputs: dict[str, Any], group: Any = None, layout: str = "contiguous") -> dict[str, Any]:
    """Return the same inputs for a rank that passes only its temporal patches, counted in the order of the text."""
    ids, found, units = inputs["input_ids"].flatten(), dict(inputs), list[tuple[int, str, int]]()
    for token, name, grid in ((IMAGE, *GRIDS[0]), (VIDEO, *GRIDS[1])):
        sizes = inputs[grid] if grid in inputs else torch.zeros(0, 3, dtype=torch.long)
        rows = sizes[:, 1:].prod(1).repeat_interleave(sizes[:, 0])
        places, tokens = (ids == token).nonzero().flatten(), rows // MERGE**2
        units += [
            (int(places[first]), name, int(count)) for first, count in zip(tokens.cumsum(0) - tokens, rows, strict=True)
        ]
    units.sort()
    local = frame_range(len(units), group)
    if "visual_embeds" in inputs:
        units = [(place, "visual_embeds", rows // MERGE**2) for place, _, rows in units]
    for name in {name for _, name, _ in units}:
        before, own = (
            sum(rows for _, kind, rows in units[part] if kind == name)
            for part in (slice(0, local.start), slice(local.start, local.stop))
        )
        found[name] = inputs[name][before : before + own]
    return found | ({"visual_shard": FrameShard(local.start, local.stop, len(units))} if units else {})


def shard_units(model: Any) -> list[Any]:
    return [*model.model.language_model.layers, *model.model.visual.blocks]
