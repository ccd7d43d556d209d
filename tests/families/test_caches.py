"""Layer: one process, loopback ranks. K and V stored beside a cache follow its rows, its copies and its end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from family_cases import FUSED, MOSS, QWENS
from family_harness import TOLERANCE, check_exact, inputs_of, model_of, on_ranks, settings, slow_unless
from generation_cases import SHARDED
from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar._compat import cache_argument, cache_of
from mllm_seqpar.comm import run_loopback
from mllm_seqpar.errors import AgreementError, ConfigError, MaskError, ShapeError
from mllm_seqpar.integrations.transformers import tower
from model_copies import tiny_model
from outcomes import error, worst_gradient
from tiny_models.idefics import Case as Idefics
from tiny_models.mllama import Case as Mllama
from tiny_models.mplug_owl3 import Case as Owl
from tiny_models.mplug_owl3 import tiny_frames, tiny_text
from tiny_models.video_mllama import Case as Preview

NEW = torch.tensor([[7, 8, 9], [10, 11, 12]])
OTHER = torch.tensor([[13, 14, 15], [16, 17, 18]])
PROMPTS: dict[str, tuple[str, Any]] = {
    "mllama": ("mllama", Mllama(frames=((2, 3, 1), (1,)), labels=None)),
    "video_mllama": ("video_mllama", Preview(frames=(3, 2), labels=None)),
    "idefics": ("idefics", Idefics(frames=(3, 2), mask="before", labels=None)),
    "gated": ("mplug_owl3", Owl(frames=(3, 2), length=12, labels=None)),
    "fused": ("mplug_owl3", Owl(frames=(3, 2), length=12, labels=None, model=FUSED)),
    "moss_vl": ("moss_vl", replace(MOSS, mask="counts", labels=None)),
    **{family: (family, replace(case, labels=None)) for family, case in QWENS.items()},
}
"""A prompt of two samples for each family; the two kinds of mPLUG-Owl3 differ in what their placeholders see."""
NATIVE = ("gated", "fused", "moss_vl")

MOVES: dict[str, tuple[Callable[[Any], None], list[int]]] = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
}
"""Operations on the rows of a cache, and which of two rows the cache holds afterwards."""


class Conversation:
    """A prompt of two samples with frames, and passes that continue it."""

    def __init__(self, name: str) -> None:
        self.family, self.case = PROMPTS[name]
        self.model = model_of(self.family, self.case)
        self.prompt = inputs_of(self.family, self.case, self.model)

    def masks(self, rows: list[int], start: int, stop: int) -> dict[str, Tensor]:
        """Return the frame masks of new tokens, which attend to what the last does; the Llamas' have all tokens."""
        found = {}
        for name in {"cross_attention_mask", "image_attention_mask"} & self.prompt.keys():
            prompt = self.prompt[name][rows]
            whole = torch.cat([prompt, prompt[:, -1:].expand(-1, stop, *prompt.shape[2:])], dim=1)
            found[name] = whole if name == "cross_attention_mask" else whole[:, start - stop :]
        return found

    def prompt_and(self, ids: Tensor) -> dict[str, Any]:
        given = self.prompt | {"input_ids": torch.cat([self.prompt["input_ids"], ids], dim=1)}
        if "mm_token_type_ids" in given:
            given["mm_token_type_ids"] = torch.nn.functional.pad(given["mm_token_type_ids"], (0, ids.shape[1]))
        return given | self.masks([0, 1], -self.prompt["input_ids"].shape[1], ids.shape[1])

    def fill(self, cache: Any = None) -> Any:
        filled = cache_of(self.model(**self.prompt, **cache_argument(cache), use_cache=True))
        if self.family in QWENS:
            self.model.model.rope_deltas += 5  # as if another prompt came between
        return filled

    def resume(self, cache: Any, ids: Tensor, rows: list[int], **more: Any) -> Tensor:
        """Return the logits of two tokens, then of one, of these rows of the prompt."""
        parts = []
        for start, stop in ((0, 2), (2, 3)):
            given = {"input_ids": ids[rows, start:stop], **self.masks(rows, start, stop), **more}
            parts.append(self.model(**given, **cache_argument(cache)).logits)
        return torch.cat(parts, dim=1)

    def reordered(self, cache: Any, **more: Any) -> Tensor:
        """Exchange the rows of the cache and return the logits of the new tokens."""
        cache.reorder_cache(torch.tensor([1, 0]))
        return self.resume(cache, NEW, [1, 0], **more)

    def uncached(self, ids: Tensor, rows: list[int]) -> Tensor:
        """Return the same logits from one pass over the whole text."""
        return self.model(**self.prompt_and(ids), use_cache=False).logits[rows, -ids.shape[1] :]

    def moved(self, move: str) -> tuple[Tensor, Tensor]:
        """Return the logits over a copy of the cache after a move, then over the original with another text."""
        apply, rows = MOVES[move]
        cache = self.fill()
        copied = copy.deepcopy(cache)
        apply(copied)
        return self.resume(copied, NEW, rows), self.resume(cache, OTHER, [0, 1])


@contextmanager
def patched(model: Any, **options: Any) -> Iterator[None]:
    patch_model(model, **options)
    try:
        yield
    finally:
        unpatch_model(model)


@torch.no_grad()
def check_move(name: str, move: str, found: tuple[Tensor, Tensor]) -> None:
    """Compare with transformers' cache if that holds the images, otherwise with passes without a cache."""
    conversation, rows = Conversation(name), MOVES[move][1]
    expected = conversation.moved(move)[0] if "mllama" in name else conversation.uncached(NEW, rows)
    assert error(found[0], expected) < TOLERANCE, move
    assert error(found[1], conversation.uncached(OTHER, [0, 1])) < TOLERANCE, (move, "the original")


@pytest.mark.parametrize("name", PROMPTS)
@torch.no_grad()
def test_cache_is_taken_by_either_name(name: str) -> None:
    """transformers 5.24 renamed `past_key_values` to `cache`; no pass warns (`filterwarnings` in pyproject.toml)."""
    conversation = Conversation(name)
    natively = name in NATIVE
    for patches in [False] * natively + [True]:
        with patched(conversation.model) if patches else nullcontext():
            cache, token = conversation.fill(), {"input_ids": NEW[:, :1], **conversation.masks([0, 1], 0, 1)}
            logits = [
                conversation.model(**token, **{argument: copy.deepcopy(cache)}).logits
                for argument in ("cache", "past_key_values")
            ]
            assert torch.equal(*logits)
            with pytest.raises(ConfigError, match="cache and past_key_values are two names of one argument"):
                conversation.model(**token, cache=cache, past_key_values=cache)
            whole = conversation.prompt_and(NEW)
            tokens = [
                conversation.model.generate(**whole, **{argument: copy.deepcopy(cache)}, **settings())
                for argument in ("cache", "past_key_values")
            ]
            assert torch.equal(*tokens)


ROWS = [(3, SHARDED, name) for name in PROMPTS]
ROWS += [(size, {}, name) for first, size in enumerate((1, 3)) for name in list(PROMPTS)[first::2]]


@pytest.mark.parametrize(
    ("ranks", "options", "name"),
    slow_unless(
        lambda row: row in ((3, SHARDED, "idefics"), (0, {}, "fused")),
        ROWS + [(0, {}, name) for name in NATIVE],
    ),
)
def test_stored_frames_follow_rows_of_the_cache(ranks: int, options: dict[str, Any], name: str) -> None:
    """A copy of a cache is independent of the original: each continues with a text of its own. 0 ranks: unpatched."""

    @torch.no_grad()
    def run(comm: Any = None) -> dict[str, tuple[Tensor, Tensor]]:
        conversation = Conversation(name)
        if comm is not None:
            patch_model(conversation.model, group=comm, **options)
        return {move: conversation.moved(move) for move in MOVES}

    for found in run_loopback(ranks, run) if ranks else [run()]:
        for move in MOVES:
            check_move(name, move, found[move])


@torch.no_grad()
@pytest.mark.parametrize("family", QWENS)
def test_prompt_with_positions_of_the_caller_follows_a_larger_batch(family: str) -> None:
    conversation = Conversation(family)
    ids = conversation.prompt["input_ids"][:1, :4]
    expected = conversation.model(input_ids=ids, use_cache=False).logits
    with patched(conversation.model):
        conversation.fill()
        first = conversation.model(input_ids=ids[:, :3], position_ids=torch.arange(3).expand(3, 1, 3), use_cache=True)
        last = conversation.model(
            input_ids=ids[:, 3:], position_ids=torch.full((3, 1, 1), 3), **cache_argument(cache_of(first))
        )
    assert error(torch.cat([first.logits, last.logits], 1), expected) < TOLERANCE


@pytest.mark.parametrize("family", slow_unless(lambda family: family == "qwen2_5_vl", QWENS))
def test_pass_with_a_cache_and_no_sharded_keys_has_exact_gradients(family: str) -> None:
    case = QWENS[family]
    check_exact(family, 2, replace(case, arguments={**case.arguments, "use_cache": True}))


def test_gradients_of_a_pass_with_a_cache_are_refused_over_sharded_frames() -> None:
    case = Idefics(arguments={"use_cache": True})
    with pytest.raises(ConfigError, match="use_cache: a pass with a cache has no backward pass"):
        on_ranks(2, "idefics", case, lambda model, inputs, comm: model(**inputs))


@torch.no_grad()
@pytest.mark.parametrize("name", PROMPTS)
def test_static_cache_is_reordered_and_copied(name: str) -> None:
    conversation = Conversation(name)
    expected = conversation.uncached(NEW, [1, 0])
    with patched(conversation.model):
        cache = copy.deepcopy(conversation.fill(StaticCache(config=conversation.model.config, max_cache_len=64)))
        assert error(conversation.reordered(cache), expected) < TOLERANCE


@torch.no_grad()
def test_idefics_uses_images_passed_with_a_reordered_cache() -> None:
    """The unpatched model projects the images in every pass."""
    conversation = Conversation("idefics")
    pixels = conversation.prompt["pixel_values"]
    for given in (pixels[[1, 0]], pixels, pixels + 1):
        expected = conversation.reordered(conversation.fill(), pixel_values=given)
        with patched(conversation.model):
            assert error(conversation.reordered(conversation.fill(), pixel_values=given), expected) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("length", [2, 5, 9])
def test_cropping_a_prompt_removes_its_frames(native: str, length: int) -> None:
    """The result is that of the shorter prompt with the frames whose placeholders it still has."""
    model, ids, frames = tiny_model(PROMPTS[native][1].model.get("gate", "per_head")), tiny_text(5), tiny_frames(5)
    short = torch.cat([ids[:, :length], NEW[:1]], dim=1)
    count = int((ids[:, :length] == model.config.image_token_id).sum())
    expected = model(short, frames[:count] if count else None, use_cache=False).logits[:, -3:]
    for is_patched in (False, True):
        with patched(model) if is_patched else torch.no_grad():
            cache = cache_of(model(ids, frames, use_cache=True))
            cache.crop(length - ids.shape[1])
            found = [model(part, **cache_argument(cache)).logits for part in (NEW[:1, :2], NEW[:1, 2:])]
        assert error(torch.cat(found, dim=1), expected) < TOLERANCE, is_patched


def two_passes(conversation: Conversation, frames: dict[str, Any], prompt_too: bool) -> dict[str, Any]:
    """Return the gradients of the losses of a prompt and of a text over its cache, or of the text's loss alone."""
    labels = conversation.prompt["input_ids"].clone()
    labels[labels >= conversation.model.get_output_embeddings().weight.shape[0]] = -100  # Llama's image token
    with torch.set_grad_enabled(prompt_too):
        first = conversation.model(**conversation.prompt, labels=labels, use_cache=True)
    masks = conversation.masks([0, 1], 0, 3)
    second = conversation.model(input_ids=NEW, labels=NEW, **cache_argument(cache_of(first)), **masks, **frames)
    (2 * second.loss + first.loss * prompt_too).backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in conversation.model.named_parameters()}
    conversation.model.zero_grad(set_to_none=True)
    return grads


@pytest.mark.parametrize("prompt_too", [True, False])
@pytest.mark.parametrize("name", PROMPTS)
def test_one_rank_trains_through_a_cache(name: str, prompt_too: bool) -> None:
    conversation = Conversation(name)
    frames = {"pixel_values": conversation.prompt["pixel_values"]} if name == "idefics" else {}
    expected = two_passes(conversation, frames, prompt_too)
    with patched(conversation.model):
        found = two_passes(conversation, frames, prompt_too)
    value, where = worst_gradient(found, expected)
    assert value < TOLERANCE, (value, where)


@torch.no_grad()
@pytest.mark.parametrize("native", NATIVE)
def test_native_and_patched_model_share_caches_on_one_rank(native: str) -> None:
    conversation = Conversation(native)
    expected, cache = conversation.uncached(NEW, [1, 0]), conversation.fill()
    with patched(conversation.model):
        of_patched = conversation.fill()
        assert error(conversation.reordered(cache), expected) < TOLERANCE
    assert error(conversation.reordered(of_patched), expected) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("first_is_patched", [False, True])
def test_native_and_patched_model_take_turns_on_a_cropped_cache(native: str, first_is_patched: bool) -> None:
    """The second model crops the prompt to its first placeholder; the first one must not attend to the later frames."""
    model, ids, frames = tiny_model(PROMPTS[native][1].model.get("gate", "per_head")), tiny_text(5), tiny_frames(5)
    length = int((ids[0] == model.config.image_token_id).nonzero()[0]) + 1
    later = torch.arange(20, 34)[None]  # more tokens than the prompt had
    expected = model(torch.cat([ids[:, :length], later, NEW[:1]], 1), frames[:1], use_cache=False).logits[:, -3:]

    def run(is_patched: bool, text: Tensor, images: Tensor | None = None, cache: Any = None) -> Any:
        with patched(model) if is_patched else torch.no_grad():
            return model(text, images, **cache_argument(cache), use_cache=True)

    cache = cache_of(run(first_is_patched, ids, frames))
    cache.crop(length - ids.shape[1])
    run(not first_is_patched, later, cache=cache)
    for copied in (cache, copy.deepcopy(cache)):
        assert error(run(first_is_patched, NEW[:1], cache=copied).logits, expected) < TOLERANCE
        cache.crop(-3)


@torch.no_grad()
@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("first_is_patched", [False, True])
def test_frames_of_the_other_model_follow_text(native: str, first_is_patched: bool) -> None:
    """A cache of text gets frames by the second model, loses them by a crop of the first, and gets others by either."""
    model, ids, frames = tiny_model(PROMPTS[native][1].model.get("gate", "per_head")), tiny_text(2), tiny_frames(4)
    text = NEW[:1]

    def run(is_patched: bool, ids: Tensor, images: Tensor | None = None, cache: Any = None) -> Any:
        with patched(model) if is_patched else torch.no_grad():
            return model(ids, images, **cache_argument(cache), use_cache=True)

    def check(is_patched: bool, images: Tensor | None, *texts: Tensor) -> None:
        expected = model(torch.cat([text, *texts], 1), images, use_cache=False).logits[:, -3:]
        assert error(run(is_patched, texts[-1], cache=cache).logits, expected) < TOLERANCE

    second_is_patched = not first_is_patched
    cache = cache_of(run(first_is_patched, text))
    run(second_is_patched, ids, frames[:2], cache)
    check(first_is_patched, frames[:2], ids, OTHER[:1])
    check(second_is_patched, frames[:2], ids, OTHER[:1], OTHER[:1])
    cache.crop(text.shape[1] - cache.get_seq_length())
    check(first_is_patched, None, OTHER[:1])
    check(second_is_patched, None, OTHER[:1], OTHER[:1])
    cache.crop(text.shape[1] - cache.get_seq_length())
    run(second_is_patched, ids, frames[2:], cache)
    check(first_is_patched, frames[2:], ids, OTHER[:1])


@torch.no_grad()
def test_mllama_cache_with_images_is_refused_across_patching() -> None:
    conversation = Conversation("mllama")
    unpatched = conversation.fill()
    with patched(conversation.model):
        of_patched = conversation.fill()
        text = cache_of(conversation.model(OTHER, use_cache=True))
        with pytest.raises(ConfigError, match="the cache holds K and V of images that an unpatched model comp"):
            conversation.resume(unpatched, NEW, [0, 1])
    mask = torch.nn.functional.pad(conversation.prompt["cross_attention_mask"], (0, 0, 0, 0, OTHER.shape[1], 0))
    conversation.model(**conversation.prompt | {"cross_attention_mask": mask}, **cache_argument(text))
    with (
        patched(conversation.model),
        pytest.raises(ConfigError, match="the cache holds K and V of images that an unpatched model comp"),
    ):
        conversation.model(NEW, **cache_argument(text))
    with pytest.raises(ConfigError, match="in the form of the patched model that filled it; the K and V of the frames"):
        conversation.resume(of_patched, NEW, [0, 1])
    of_patched.reset()
    if not of_patched.get_seq_length():  # older versions of transformers only fill a dynamic cache with zeros
        found, expected = (conversation.resume(x, NEW, [0, 1]) for x in (conversation.fill(of_patched), unpatched))
        assert torch.equal(found, expected)


def refusal(conversation: Conversation, cache: Any) -> str:
    frames = {"pixel_values": conversation.prompt["pixel_values"]} if conversation.family == "idefics" else {}
    with pytest.raises(ConfigError) as caught:
        conversation.resume(cache, NEW, [0, 1], **frames)
    return str(caught.value)


@pytest.mark.parametrize(("name", "options"), [("gated", {}), ("idefics", SHARDED)])
def test_cache_of_several_ranks_is_refused_elsewhere(name: str, options: dict[str, Any]) -> None:

    @torch.no_grad()
    def run(comm: Any) -> None:
        conversation = Conversation(name)
        native = conversation.fill()
        with patched(conversation.model, group=comm, **options):
            cache = conversation.fill()
            if name == "gated":
                assert f"rank 0 of 1 ranks, and is continued on rank {comm.rank} of 2" in refusal(conversation, native)
        of_rank = f"rank {comm.rank} of 2 ranks, and is continued on rank 0 of 1"
        local = of_rank if name == "gated" else "each rank holds only its own"
        assert local in refusal(conversation, cache)
        with patched(conversation.model, group="self"):
            assert of_rank in refusal(conversation, cache)

    run_loopback(2, run)


def test_text_cached_by_two_ranks_gets_frames_on_one() -> None:
    """Every rank has all K and V of a short text, so a group of one may continue it, more than once."""

    @torch.no_grad()
    def run(comm: Any) -> float:
        model, ids, frames = tiny_model("per_head"), tiny_text(2), tiny_frames(2)
        expected = model(torch.cat([NEW[:1], ids, OTHER[:1]], 1), frames, use_cache=False).logits[:, -3:]
        with patched(model, group=comm):
            cache = cache_of(model(NEW[:1], use_cache=True))
        with patched(model, group="self"):
            model(ids, frames, **cache_argument(cache))
            return error(model(OTHER[:1], **cache_argument(cache)).logits, expected)

    assert max(run_loopback(2, run)) < TOLERANCE


@torch.no_grad()
def test_frames_may_follow_a_prompt_with_an_empty_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose prompt has no frames encodes an empty one if another group under the same FSDP2 has frames."""
    monkeypatch.setattr(tower, "agree_on_frames", lambda model, runs, pixels, features: (max(runs, 1), features))
    model, ids, frames = tiny_model("per_head"), tiny_text(2), tiny_frames(2)
    expected = model(torch.cat([NEW[:1], ids, OTHER[:1]], 1), frames, use_cache=False).logits[:, -3:]
    with patched(model):
        cache = cache_of(model(NEW[:1], use_cache=True))
        model(ids, frames, **cache_argument(cache))
        assert error(model(OTHER[:1], **cache_argument(cache)).logits, expected) < TOLERANCE


def test_cropped_frames_do_not_bind_a_cache_to_its_ranks() -> None:
    """Text before frames continues on other ranks once the frames are cropped; also that of the unpatched model."""

    @torch.no_grad()
    def run(comm: Any) -> float:
        model, ids, frames = tiny_model("per_head"), tiny_text(2), tiny_frames(2)
        text, errors = NEW[:1], []
        expected = model(torch.cat([text, OTHER[:1]], 1), use_cache=False).logits[:, -3:]
        for filled, continued in (
            (nullcontext(), patched(model, group=comm)),
            (patched(model, group=comm), nullcontext()),
        ):
            with filled:
                cache = cache_of(model(text, use_cache=True))
                model(ids, frames, **cache_argument(cache))
            cache.crop(text.shape[1] - cache.get_seq_length())
            with continued:
                errors.append(error(model(OTHER[:1], **cache_argument(cache)).logits, expected))
        return max(errors)

    assert max(run_loopback(2, run)) < TOLERANCE


@pytest.mark.parametrize("name", ["gated", "mllama", "moss_vl", "video_mllama", "qwen3_vl"])
def test_prompt_whose_frames_cannot_be_encoded_leaves_the_cache_unused(name: str) -> None:
    """The unpatched model may then fill it, also if the text would have been sharded."""

    @torch.no_grad()
    def run(comm: Any) -> float:
        conversation = Conversation(name)
        cache, frames = DynamicCache(config=conversation.model.config), conversation.prompt["pixel_values"]
        with patched(conversation.model, group=comm, **SHARDED):
            with pytest.raises((RuntimeError, ShapeError)):
                conversation.model(**conversation.prompt | {"pixel_values": frames[..., :-1]}, **cache_argument(cache))
        expected = conversation.model(OTHER, use_cache=False).logits
        return error(conversation.model(OTHER, **cache_argument(cache)).logits, expected)

    assert max(run_loopback(2, run)) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("images", [True, False])
def test_idefics_refuses_masks_of_other_tokens_in_later_passes_too(images: bool) -> None:
    conversation = Conversation("idefics")
    given = {"pixel_values": conversation.prompt["pixel_values"]} if images else {}
    with patched(conversation.model):
        cache = conversation.fill()
        for mask in ({}, {"image_attention_mask": torch.ones(2, 1)}, {"image_attention_mask": torch.ones(2, 2, 3)}):
            with pytest.raises(ShapeError, match="image_attention_mask .*; expected .2, 1, images of a"):
                conversation.model(NEW[:, :1], **given, **mask, **cache_argument(cache))


@pytest.mark.parametrize("name", ["mllama", "video_mllama", "moss_vl", "gated"])
def test_generate_accepts_a_prefix_cache_with_the_whole_prompt(name: str) -> None:
    """As transformers documents it, the prompt's frames are passed again and equal those of the cache."""
    conversation = Conversation(name)
    given = conversation.prompt_and(NEW)
    expected = conversation.model.generate(**given, **settings())
    with patched(conversation.model):
        with torch.no_grad():
            prefix = conversation.fill()
        found = conversation.model.generate(**given, **cache_argument(copy.deepcopy(prefix)), **settings())
        assert torch.equal(found, expected)
        with pytest.raises(ShapeError, match="differ from those stored in the cache|others already"):
            others = given | {"pixel_values": given["pixel_values"] + 1}
            conversation.model.generate(**others, **cache_argument(prefix), **settings())


@torch.no_grad()
@pytest.mark.parametrize("name", PROMPTS)
def test_call_with_other_rows_than_the_cache_is_refused(name: str) -> None:
    conversation = Conversation(name)
    with patched(conversation.model), pytest.raises(ShapeError, match="the cache has 2 rows and the call has 1"):
        conversation.resume(conversation.fill(), NEW, [1])


def test_configs_keep_their_identity_and_are_saved_unchanged() -> None:
    for name in PROMPTS:
        model = Conversation(name).model
        before = {name: vars(m).get("config") for name, m in model.named_modules()}
        saved = model.config.to_json_string()
        with patched(model):
            assert model.get_decoder().config is model.config.get_text_config()
            changed = {name for name, m in model.named_modules() if vars(m).get("config") is not before[name]}
            assert changed and all(name.endswith("self_attn") for name in changed), changed
            assert model.config.to_json_string() == saved
            twin = type(model)(model.config)  # of the same config object
            assert twin.config._attn_implementation == "sdpa" and "mllm_seqpar" not in repr(twin.config)


@torch.no_grad()
def test_ranks_encode_passed_tower_outputs_together_or_not_at_all() -> None:
    """Outputs of the tower are not compared bit by bit, so one rank alone may find that they have changed."""
    case = Idefics(frames=(2,), labels=None, features="encoder", model={"use_resampler": True})

    @torch.no_grad()
    def run(model: Any, inputs: dict[str, Any], comm: Any) -> list[int]:
        encoded: list[None] = []
        model.model.perceiver_resampler.register_forward_pre_hook(lambda *_: encoded.append(None))
        cache, counts = cache_of(model(**inputs, use_cache=True)), []
        name = "image_encoder_embeddings"
        for factor in (1, 1 + 1e-6 * comm.rank):
            counts.append(-len(encoded))
            mask = inputs["image_attention_mask"][:, -1:]
            token = inputs | {"input_ids": inputs["input_ids"][:, -1:], "image_attention_mask": mask}
            model(**token | {name: inputs[name] * factor}, **cache_argument(cache))
            counts[-1] += len(encoded)
        return counts

    assert on_ranks(2, "idefics", case, run) == [[0, 1], [0, 1]]


def test_ranks_with_different_caches_or_cached_features_raise_together() -> None:
    """Both decide what a pass communicates, and neither is a tensor that the ranks compare."""

    @torch.no_grad()
    def run(comm: Any) -> list[str]:
        model = patch_model(tiny_model("per_head"), group=comm, shard_prompt_from=1)
        ids, features = tiny_text(3), torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(1))
        cache = cache_of(model(ids, image_embeds=features, use_cache=True))
        static = StaticCache(config=model.config, max_cache_len=64) if comm.rank else None
        given: list[tuple[Tensor, dict[str, Any]]] = [
            (ids, {"image_embeds": features, **cache_argument(static)}),
            (NEW[:1], {"image_embeds": features + comm.rank, **cache_argument(cache)}),
        ]
        found = []
        for text, arguments in given:
            with pytest.raises((AgreementError, ShapeError)) as raised:
                model(text, use_cache=True, **arguments)
            found.append(str(raised.value))
        return found

    for of_cache, of_features in run_loopback(2, run):
        assert "class of the cache supports sharded text" in of_cache and "placeholders for 0 frames" in of_features


@pytest.mark.parametrize("masked", [lambda mask: mask[:, None, None], lambda mask: {"full_attention": mask}])
def test_decoding_over_sharded_text_refuses_prepared_masks(masked: Any) -> None:
    @torch.no_grad()
    def run(comm: Any) -> Tensor:
        model = patch_model(tiny_model("per_head"), group=comm, shard_prompt_from=1)
        ids, longer = NEW.view(1, 6), torch.ones(1, 9, dtype=torch.bool)
        cache = cache_argument(cache_of(model(ids, use_cache=True)))
        with pytest.raises(MaskError, match=r"a padding mask of shape \(1, 7\), got (\(1, 1, 1, 7\)|dict)"):
            model(NEW[:1, :1], attention_mask=masked(longer[:, :7]), use_cache=True, **cache)
        return model(NEW[:1, :1], attention_mask=longer, use_cache=True, **cache).logits

    expected = tiny_model("per_head")(torch.cat([NEW.view(1, 6), NEW[:1, :1]], 1)).logits[:, -1:]
    for found in run_loopback(2, run):
        torch.testing.assert_close(found, expected)
