"""Layer: one process. `generate` against a full forward pass per token without a cache."""

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, StaticCache

from mllm_seqpar import FrameShard, frame_range, patch_model
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.models.mplug_owl3.media import cached_frames
from model_copies import tiny_model
from selections import slow_unless
from tiny_models.mplug_owl3 import GATES, IMAGE_TOKEN, tiny_frames, tiny_text

NEW = 5


def padded() -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, attention mask and frames of three samples of uneven length with 3, 0 and 2 frames."""
    samples = [tiny_text(3, length=11, seed=1), tiny_text(0, length=7, seed=2), tiny_text(2, length=9, seed=3)]
    ids = torch.zeros(3, 11, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, 11 - sample.shape[1] :], mask[row, 11 - sample.shape[1] :] = sample[0], 1
    return ids, mask, tiny_frames(5)


def generate(model: Any, ids: Tensor, **options: Any) -> Any:
    return model.generate(ids, **{"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False} | options)


def generate_without_cache(model: Any, ids: Tensor, mask: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
    """Return greedy tokens and their logits from a full pass per token; eos is excluded, as by `min_new_tokens`."""
    logits = []
    for _ in range(NEW):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits.append(model(ids, frames, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1])
        scores = logits[-1].clone()
        scores[:, 2] = -torch.inf
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return ids, torch.stack(logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "attention", "samples"),  # one sample: no padding and therefore no mask; assisted generation needs it
    [
        ({}, "sdpa", 3),
        ({}, "eager", 3),
        ({"cache_implementation": "static"}, "sdpa", 3),
        ({"cache_implementation": "static"}, "eager", 1),
        ({"prompt_lookup_num_tokens": 2}, "sdpa", 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("gate", GATES)
@torch.no_grad()
def test_greedy_tokens_equal_full_passes(gate: str | None, attention: str, options: dict, samples: int) -> None:
    model = tiny_model(gate)
    model.set_attn_implementation(attention)
    ids, mask, frames = padded()
    ids, mask, frames = ids[:samples], mask[:samples], frames if samples == 3 else frames[:3]
    expected, logits = generate_without_cache(model, ids, mask, frames)
    options = options | {"output_logits": True, "return_dict_in_generate": True}
    found = generate(model, ids, attention_mask=mask, pixel_values=frames, **options)
    assert torch.equal(found.sequences, expected)
    assert (torch.stack(found.logits) - logits).abs().max() < 1e-4


FILE = {"do_sample": True, "repetition_penalty": 9.0, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
IDS = {"bos_token_id": 1, "eos_token_id": [2, 1], "pad_token_id": 1}
GREEDY = {"do_sample": False, "repetition_penalty": 1.0, "eos_token_id": [2, 1], "pad_token_id": 0}


@torch.no_grad()
def test_generation_config_file_sets_only_token_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The published `generate` does not read generation_config.json. Unpatched, and patched on two ranks."""
    fresh, ids, frames = tiny_model(), tiny_text(3), tiny_frames(3)
    fresh.save_pretrained(tmp_path / "published")
    (tmp_path / "published/generation_config.json").write_text(json.dumps(FILE | IDS))
    loaded = type(fresh).from_pretrained(tmp_path / "published").eval()
    assert "says do_sample=True, repetition_penalty=9.0, temperature=0.7, top_k=20, top_p=0.8;" in caplog.text
    inputs: dict[str, Any] = {"pixel_values": frames, "max_new_tokens": 12}
    expected = fresh.generate(ids, **inputs, **GREEDY)
    assert torch.equal(loaded.generate(ids, **inputs), expected)
    # Options that are passed take precedence, and change the tokens.
    asked = GenerationConfig.from_pretrained(tmp_path / "published", do_sample=False, top_k=None, top_p=None)
    penalised = fresh.generate(ids, **inputs, **GREEDY | {"repetition_penalty": 9.0})
    assert not torch.equal(penalised, expected)
    assert torch.equal(loaded.generate(ids, generation_config=asked, **inputs), penalised)
    assert torch.equal(loaded.generate(ids, repetition_penalty=9.0, **inputs), penalised)
    given = type(fresh).from_pretrained(tmp_path / "published", generation_config=asked).eval()
    assert torch.equal(given.generate(ids, **inputs), penalised)

    def patched(comm: Communicator) -> Tensor:
        return patch_model(copy.deepcopy(loaded), "lv-xattn", group=comm).generate(ids, **inputs)

    assert all(torch.equal(found, expected) for found in run_loopback(2, patched))
    # A saved checkpoint states the options that are used, so loading it gives no warning.
    caplog.clear()
    loaded.save_pretrained(tmp_path / "saved")
    again = type(fresh).from_pretrained(tmp_path / "saved").generation_config
    assert (again.eos_token_id, again.pad_token_id, again.do_sample) == ([2, 1], 0, None)
    assert "generation_config" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("gate", GATES)
def test_samples_do_not_affect_each_other_and_beams_share_frames(gate: str | None, options: dict) -> None:
    """The references are generation without a cache, and each sample on its own."""
    model, (ids, mask, frames), results = tiny_model(gate), padded(), []
    for cached in (True, False):
        torch.manual_seed(3)
        results.append(generate(model, ids, attention_mask=mask, pixel_values=frames, use_cache=cached, **options))
    assert torch.equal(*results)
    if not options.get("do_sample"):
        for row, part in enumerate((frames[:3], None, frames[3:])):
            alone = generate(model, ids[row : row + 1, mask[row].bool()], pixel_values=part, **options)
            assert torch.equal(alone[:, -NEW:], results[0][2 * row : 2 * row + 2, -NEW:])


@pytest.mark.parametrize("gate", GATES)
@torch.no_grad()
def test_features_offsets_and_embeddings_replace_pixels_and_ids(gate: str | None) -> None:
    model, (ids, mask, frames) = tiny_model(gate), padded()
    expected = generate(model, ids, attention_mask=mask, pixel_values=frames)[:, -NEW:]
    inputs: dict[str, Any] = {"image_embeds": model.encode_frames(frames), "attention_mask": mask}
    assert torch.equal(generate(model, ids, **inputs)[:, -NEW:], expected)
    inputs["media_offset"] = [(row == IMAGE_TOKEN).nonzero().flatten() for row in ids]
    model.config.image_token_id = None
    for text in ({"inputs": ids}, {"inputs": None, "inputs_embeds": model.get_input_embeddings()(ids)}):
        assert torch.equal(generate(model, text.pop("inputs"), **text, **inputs)[:, -NEW:], expected)


def test_frames_are_encoded_and_projected_once() -> None:
    model, calls = tiny_model(None), []
    layers = model.language_model.model.layers
    for module in (model.vision2text_model, layers[0].self_attn.v_kv_proj, layers[2].self_attn.v_kv_proj):
        module.register_forward_hook(lambda called, *_: calls.append(called))
    ids, mask, frames = padded()
    generate(model, ids, attention_mask=mask, pixel_values=frames)
    assert calls == [model.vision2text_model, layers[0].self_attn.v_kv_proj, layers[2].self_attn.v_kv_proj]


@pytest.mark.parametrize("frames", [3, 0])
@pytest.mark.parametrize("gate", GATES)
def test_generated_placeholder_adds_no_frame(gate: str | None, frames: int) -> None:
    model, ids = tiny_model(gate), tiny_text(frames)
    pixels = {"pixel_values": tiny_frames(frames)} if frames else {}
    second = ids.shape[1] + 1

    def allowed(_: int, tokens: Tensor) -> list[int]:
        return [IMAGE_TOKEN] if len(tokens) == second else [*range(256)]

    results = [
        generate(model, ids, prefix_allowed_tokens_fn=allowed, use_cache=cached, **pixels) for cached in (True, False)
    ]
    assert results[0][0, second] == IMAGE_TOKEN
    assert torch.equal(*results)


@pytest.mark.parametrize("gate", GATES)
def test_conversation_continues_with_its_cache(gate: str | None) -> None:
    model, ids, frames = tiny_model(gate), tiny_text(3), tiny_frames(3)
    first = generate(model, ids, pixel_values=frames, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, torch.tensor([[5, 6, 7, 8]])], dim=1)
    expected = generate(model, longer, pixel_values=frames, use_cache=False)
    for again in ({"pixel_values": frames}, {}):
        cache = copy.deepcopy(cache_of(first))
        assert torch.equal(generate(model, longer, **cache_argument(cache), **again), expected)


@pytest.mark.parametrize("gate", GATES)
def test_frames_may_follow_cached_text(gate: str | None) -> None:
    model, ids, frames = tiny_model(gate), tiny_text(0, seed=4), tiny_frames(2)
    cache = cache_of(model(ids))
    for more, pixels in ((tiny_text(2, seed=5), frames), (tiny_text(0, length=3, seed=6), None)):
        ids = torch.cat([ids, more], dim=1)
        whole = model(ids, frames).logits[:, -more.shape[1] :]
        assert (model(more, pixels, **cache_argument(cache)).logits - whole).abs().max() < 1e-4


def test_new_frames_without_placeholders_are_refused_over_a_cache() -> None:
    model, ids = tiny_model("per_head"), tiny_text(3)
    cache = cache_of(model(ids, tiny_frames(3)))
    with pytest.raises(ShapeError, match="placeholders for 1 frames .* 4 were passed"):
        model(tiny_text(1), tiny_frames(4), **cache_argument(cache))
    with pytest.raises(ShapeError, match="the cache holds 3 frames and 4 were passed"):
        generate(model, torch.cat([ids, tiny_text(1)], dim=1), pixel_values=tiny_frames(4), **cache_argument(cache))


def test_reset_cache_has_no_frames() -> None:
    model, text = tiny_model("vector"), tiny_text(0, seed=9)
    cache = StaticCache(config=model.config, max_cache_len=20)
    model(tiny_text(3), tiny_frames(3), **cache_argument(cache))
    assert cached_frames(cache) is not None
    cache.reset()
    assert (model(text, **cache_argument(cache)).logits - model(text).logits).abs().max() < 1e-4
    assert cached_frames(cache) is None


def text_model() -> Any:
    """Return a language model with the vocabulary of the tiny models."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **ids, num_key_value_heads=2)).eval()


ASSISTANTS: dict[str, Callable[[str | None], Any]] = {
    "the model itself": tiny_model,
    "another generation, narrower": lambda gate: tiny_model(
        "vector" if gate is None else None, hidden_size=32, num_attention_heads=2, num_key_value_heads=1
    ),
    "a language model": lambda gate: text_model(),
}


@pytest.mark.parametrize(
    ("assistant", "gate"),
    slow_unless(
        lambda row: row in (("the model itself", GATES[0]), ("a language model", GATES[0])),
        itertools.product(ASSISTANTS, GATES),
    ),
)
@torch.no_grad()
def test_assisted_tokens_equal_greedy_ones(gate: str | None, assistant: str) -> None:
    """Unpatched, and patched on one and two ranks, with an assistant that is not patched."""
    model, ids, inputs = tiny_model(gate), tiny_text(3), {"pixel_values": tiny_frames(3), "max_new_tokens": 12}
    expected, helper = generate(model, ids, **inputs), ASSISTANTS[assistant](gate)

    def assisted(target: Any) -> tuple[bool, int]:
        lengths: list[int] = []
        target.register_forward_pre_hook(lambda *call: lengths.append(call[2]["input_ids"].shape[1]), with_kwargs=True)
        found = generate(target, ids, assistant_model=copy.deepcopy(helper), **inputs)
        return torch.equal(found, expected), len(lengths)

    def patched(comm: Communicator) -> tuple[bool, int]:
        return assisted(patch_model(copy.deepcopy(model), group=comm))

    for equal, passes in (assisted(copy.deepcopy(model)), *run_loopback(1, patched), *run_loopback(2, patched)):
        assert equal
        # An assistant that attends to the same frames drafts at least one token for each pass, and all are accepted.
        assert passes <= 6 or assistant != "the model itself"


@torch.no_grad()
def test_patched_assistant_takes_the_frames_of_each_rank() -> None:
    model, ids, frames, limit = tiny_model(), tiny_text(3), tiny_frames(3), {"max_new_tokens": 12}
    expected = generate(model, ids, pixel_values=frames, **limit)

    def run(comm: Communicator) -> Tensor:
        target, assistant = (patch_model(copy.deepcopy(model), group=comm) for _ in range(2))
        shard = frame_range(3, comm)
        local = {
            "pixel_values": frames[shard.start : shard.stop],
            "visual_shard": FrameShard(shard.start, shard.stop, 3),
        }
        with pytest.raises(ValueError, match="visual_shard"):
            generate(target, ids, assistant_model=model, **local, **limit)
        return generate(target, ids, assistant_model=assistant, **local, **limit)

    assert all(torch.equal(found, expected) for found in run_loopback(2, run))


def test_early_exit_is_refused() -> None:
    with pytest.raises(ConfigError, match="assistant_early_exit: not supported"):
        generate(tiny_model(), tiny_text(1), pixel_values=tiny_frames(1), assistant_early_exit=2)
