"""The attention over frames of an answer, by dense float64 attention from the unpatched model's own projections.

Decoder-only models return the weights of their attention themselves.

The unpatched model reads the prompt and the answer in one pass without a cache. Hooks on its projections yield the
queries and keys of every cross-attention layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mllm_seqpar.models.video_mllama.modeling import rotated
from tiny_models.moss_vl import MERGE

Layers = list[tuple[Tensor, Tensor, Tensor | None]]
"""Per layer: q (H, L, D), k (G, keys, D), and the keys of the text (G, L, D) that share the softmax, or None."""


def expected_shares(
    family: str, model: Any, inputs: dict[str, Any], answer: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (frames (T, F), text (T,)) of an answer (T,), given which units (tiles, frames) its rows see, (U,) bool.

    The layers are those of `model`, which is unpatched and in float64.
    """
    if family.startswith("qwen"):
        return _token_shares(model, inputs, answer)
    layers, length = LAYERS[family](model, inputs, answer), inputs[PROMPT.get(family, "input_ids")].shape[1]
    rows = range(length - 1, length - 1 + len(answer))
    counts = torch.full((len(visible),), layers[0][1].shape[1] // len(visible))
    if family == "moss_vl":  # whose frames differ in size
        frames, height, width = inputs["grid_thw"].unbind(1)
        counts = (height * width // MERGE**2 + 1).repeat_interleave(frames)
    unit = torch.arange(len(visible)).repeat_interleave(counts)
    found = [_layer_shares(*layer, rows, visible, unit) for layer in layers]
    frames, text = (torch.stack(x).mean(0) for x in zip(*found, strict=True))
    return frames, text


PROMPT = {"open_flamingo": "lang_x"}


def _token_shares(model: Any, inputs: dict[str, Any], answer: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the weights that the eager attention of a decoder-only model returns, by frame."""
    from tiny_models.qwen2_5_vl import GRIDS, IMAGE, VIDEO

    model.set_attn_implementation("eager")
    ids = torch.cat([inputs["input_ids"], answer[None]], 1)
    given = inputs | {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long() + 2 * (ids == VIDEO).long()}
    if "attention_mask" in inputs:
        given["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, len(answer)), value=1)
    with torch.no_grad():
        weights = model(**given, output_attentions=True, use_cache=False).attentions
    frames, units = torch.full((ids.shape[1],), -1), list[tuple[int, Tensor]]()
    for token, (_, name) in zip((IMAGE, VIDEO), GRIDS, strict=True):
        places = (ids[0] == token).nonzero().flatten()
        for time, height, width in inputs[name].tolist() if name in inputs else ():
            for _ in range(time):
                own, places = places.tensor_split([height * width // MERGE**2])
                units.append((int(own[0]), own))
    for number, (_, own) in enumerate(sorted(units, key=lambda unit: unit[0])):
        frames[own] = number
    rows = torch.stack(weights)[:, 0].double().mean((0, 1))[inputs["input_ids"].shape[1] - 1 : -1]  # (T, tokens)
    found = torch.stack([rows[:, frames == number].sum(1) for number in range(len(units))], 1)
    return found, rows[:, frames == -1].sum(1)


def _layer_shares(
    q: Tensor, k: Tensor, text: Tensor | None, rows: range, visible: Tensor, unit: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the probabilities (T, U) and (T,) of one layer, averaged over heads; `unit` is that of each key."""
    q = q.double()
    frames, texts = [], []
    for row in rows:
        scores = _scores(q[:, row], k)
        scores[:, ~visible[unit]] = -torch.inf
        if text is not None:
            scores = torch.cat([scores, _scores(q[:, row], text)[:, : row + 1]], dim=1)
        p = scores.softmax(1)
        keys = k.shape[1]
        frames.append(torch.zeros(len(visible), dtype=p.dtype).index_add(0, unit, p[:, :keys].mean(0)))
        texts.append(p[:, keys:].sum(1).mean())
    return torch.stack(frames), torch.stack(texts)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    k = k.double().repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    return (k @ q[:, :, None])[:, :, 0] * q.shape[1] ** -0.5


def _outputs(modules: list[nn.Module], run: Any) -> list[Tensor]:
    """Return the first output of each module while `run` runs."""
    found: dict[int, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda m, _, out, n=n: found.setdefault(n, out.detach()))
        for n, module in enumerate(modules)
    ]
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return [found[n] for n in range(len(modules))]


def _pairs(x: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x[::2], x[1::2], strict=True))


def _owl(model: Any, inputs: dict[str, Any], answer: Tensor) -> Layers:
    layers: Layers = []
    attentions = [model.language_model.model.layers[number - 1].self_attn for number in model.config.hyper_layers]
    for attention in attentions:
        project, visual_projection = attention.project, attention.visual_projection

        def text(*args: Any, a: Any = attention, unpatched: Any = project) -> Any:
            q, k, v = unpatched(*args)
            a.seen = [q[0], k[0] if a.fused else None]
            return q, k, v

        def visual(norm: Any, a: Any = attention, unpatched: Any = visual_projection) -> Any:
            def keys_values(*args: Any) -> Any:
                k, v = unpatched(norm)(*args)
                a.seen.append(k[0])
                return k, v

            return keys_values

        attention.project, attention.visual_projection = text, visual
    ids = torch.cat([inputs["input_ids"], answer[None]], 1)
    with torch.no_grad():
        model(**inputs | {"input_ids": ids}, use_cache=False)
    for attention in attentions:
        q, k_text, k = attention.seen
        layers.append((q, k, k_text))
    return layers


def _heads(x: Tensor, heads: int) -> Tensor:
    """(L, heads * D) -> (heads, L, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


def _idefics(model: Any, inputs: dict[str, Any], answer: Tensor) -> Layers:
    attentions = [block.cross_attn for block in model.model.gated_cross_attn_layers]
    mask = inputs["image_attention_mask"]
    inputs = inputs | {
        "input_ids": torch.cat([inputs["input_ids"], answer[None]], 1),
        "image_attention_mask": torch.cat([mask, mask[:, -1:].expand(-1, len(answer), -1)], 1),
    }
    modules = [module for a in attentions for module in (a.q_layer_norm, a.k_layer_norm)]
    found = _outputs(modules, lambda: model(**inputs, use_cache=False))
    return [(q[0], k[0], None) for q, k in _pairs(found)]


def _mllama(model: Any, inputs: dict[str, Any], answer: Tensor) -> Layers:
    decoder, mask = model.model.language_model, inputs["cross_attention_mask"]
    attentions = [decoder.layers[number].cross_attn for number in decoder.cross_attention_layers]
    inputs = inputs | {
        "input_ids": torch.cat([inputs["input_ids"], answer[None]], 1),
        "cross_attention_mask": torch.cat([mask, mask[:, -1:].expand(-1, len(answer), -1, -1)], 1),
    }
    modules = [module for a in attentions for module in (a.q_norm, a.k_norm)]
    found = _outputs(modules, lambda: model(**inputs, use_cache=False))
    return [(q[0], k[0], None) for q, k in _pairs(found)]


def _video_mllama(model: Any, inputs: dict[str, Any], answer: Tensor) -> Layers:
    found = _mllama(model, inputs, answer)
    rows = torch.arange(found[0][0].shape[1])[None]
    rotation = model.model.language_model.rotary_emb(found[0][0], rows)
    return [(rotated(q[None], rotation)[0], k, text) for q, k, text in found]


def _flamingo(model: Any, inputs: dict[str, Any], answer: Tensor) -> Layers:
    attentions = [block.attn for block in model.lang_encoder.gated_cross_attn_layers if block is not None]
    ids = torch.cat([inputs["lang_x"], answer[None]], 1)
    modules = [module for a in attentions for module in (a.to_q, a.to_kv)]
    found = _outputs(modules, lambda: model(inputs["vision_x"], ids, torch.ones_like(ids)))
    heads = attentions[0].heads
    return [(_heads(q[0], heads), _heads(kv.flatten(0, -2).chunk(2, -1)[0], heads), None) for q, kv in _pairs(found)]


def _moss(model: Any, inputs: dict[str, Any], answer: Tensor) -> Layers:
    layers: Layers = []
    attentions = [layer.cross_attn for layer in model.model.language_model.layers if hasattr(layer, "cross_attn")]
    for attention in attentions:
        queries, project = attention.queries, attention.visual_projection

        def seen_queries(*args: Any, a: Any = attention, unpatched: Any = queries) -> Any:
            a.seen = [unpatched(*args)[0]]
            return a.seen[0][None]

        def seen_keys(a: Any = attention, unpatched: Any = project) -> Any:
            def projection(*args: Any) -> Any:
                k, v = unpatched()(*args)
                a.seen.append(k[0])
                return k, v

            return projection

        attention.queries, attention.visual_projection = seen_queries, seen_keys
    with torch.no_grad():
        model(**inputs | {"input_ids": torch.cat([inputs["input_ids"], answer[None]], 1)}, use_cache=False)
    for attention in attentions:
        q, k = attention.seen
        layers.append((q, k, None))
    return layers


LAYERS = {"mplug_owl3": _owl, "idefics": _idefics, "mllama": _mllama, "moss_vl": _moss, "open_flamingo": _flamingo}
LAYERS["video_mllama"] = _video_mllama
