"""Layer: one process. Each turn of a conversation equals one prompt with all messages; the ranks are threads."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator, as_communicator, run_loopback
from mllm_seqpar.data import VideoSource, chat_family
from mllm_seqpar.errors import ConfigError, DataError, SeqParError
from mllm_seqpar.inference import Answer, Sampling
from mllm_seqpar.inference.conversation import Conversation, LengthError
from mllm_seqpar.inference.generation import GeneratedText
from mllm_seqpar.models.loading import load_processor
from model_copies import load_model

FRAMES = 5
QUESTIONS = ("What is it?", "Why?", "And then?")

Case = tuple[Path, str]


def user(text: str, *media: str) -> dict[str, Any]:
    return {"role": "user", "content": [*({"type": kind} for kind in media), {"type": "text", "text": text}]}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def open_conversation(comm: Communicator, case: Case, **options: Any) -> Conversation:
    model, processor = load_model(str(case[0])).eval(), load_processor(str(case[0]))
    model = patch_model(model, group=comm, **options)
    return Conversation(model, processor, [VideoSource.open(case[1], num_frames=FRAMES)], batch=2)


def turns(comm: Communicator, case: Case, tokens: int, **options: Any) -> tuple[list[Any], list[Answer]]:
    """Ask `QUESTIONS` one after another; return the messages and the replies."""
    conversation, messages, replies = open_conversation(comm, case, **options), [], []
    for question in QUESTIONS:
        messages.append(user(question, *(["video"] if not messages else [])))
        replies.append(conversation.answer(conversation.prompt(messages), Sampling(max_new_tokens=tokens)))
        messages.append(says(replies[-1].text))
    return messages, replies


def unpatched(case: Case, messages: list[Any], tokens: int, sources: Any = None) -> list[int]:
    """The tokens of the unpatched model, which gets all messages in one prompt, and all frames as pixels."""
    processor, model = load_processor(str(case[0])), load_model(str(case[0])).eval()
    chat_format, sources = chat_family(processor), sources or [VideoSource.open(case[1], num_frames=FRAMES)]
    parts = [chat_format.unsharded(source) for source in sources]
    batched = 1 if chat_format.always_sharded else 0
    pictures = {name: torch.cat([part[name] for part in parts], batched) for name in parts[0]}
    text = chat_format.text([messages], [sources], add_generation_prompt=True)
    generate = partial(_generate_without_cache, model) if chat_format.ids_name == "lang_x" else model.generate
    options = {"do_sample": False, "max_new_tokens": tokens} | chat_format.generation(model)
    output = generate(**chat_format.arguments(text), **pictures, **options)
    return output[0, text.input_ids.shape[1] :].tolist()


@torch.no_grad()
def _generate_without_cache(
    model: Any, vision_x: Tensor, lang_x: Tensor, max_new_tokens: int, **options: Any
) -> Tensor:
    """Return what `Flamingo.generate` would; the unpatched method fails with transformers 5."""
    for _step in range(max_new_tokens):
        logits = model(vision_x, lang_x, torch.ones_like(lang_x)).logits[:, -1]
        logits[:, [token for (token,) in options["bad_words_ids"]]] = -torch.inf
        lang_x = torch.cat([lang_x, logits.argmax(-1, keepdim=True)], 1)
        if int(lang_x[0, -1]) == model.eoc_token_id:
            break
    return lang_x


def test_turns_equal_one_prompt_with_all_messages(case: Case) -> None:
    tokens = 6
    for world, options in ((1, {}), (2, {"shard_prompt_from": 4})):
        results = run_loopback(world, lambda comm, options=options: turns(comm, case, tokens, **options))
        messages, replies = results[0]
        assert all([r.tokens for r in other] == [r.tokens for r in replies] for _, other in results)
        for number, reply in enumerate(replies):
            assert reply.tokens == unpatched(case, messages[: 2 * number + 1], tokens), (world, number)
            # What precedes the last answer was in the cache, so only new tokens were prefilled.
            assert reply.cached_tokens >= (replies[number - 1].prompt_tokens if number else 0)


def test_conversations_take_turns_on_one_model(case: Case) -> None:
    """Positions of decoder-only models depend on the frames before, which are those of the conversation."""

    def body(comm: Communicator) -> tuple[list[Any], Answer]:
        first = open_conversation(comm, case)
        others = [Conversation(first._model, first._processor, sources) for sources in ([still], [])]
        messages = [user(QUESTIONS[0], "video")]
        messages.append(says(first.answer(first.prompt(messages), Sampling(max_new_tokens=4)).text))
        for other, media in zip(others, (["video"], []), strict=True):
            other.answer(other.prompt([user(QUESTIONS[1], *media)]), Sampling(max_new_tokens=2))
        messages.append(user(QUESTIONS[2]))
        return messages, first.answer(first.prompt(messages), Sampling(max_new_tokens=12))

    still = VideoSource.open(case[1], num_frames=1)
    (messages, reply), *_ = run_loopback(2, body)
    assert reply.cached_tokens and reply.tokens == unpatched(case, messages, 12)


def converse(case: Case, world: int, body: Any, **options: Any) -> list[Any]:
    return run_loopback(world, lambda comm: body(open_conversation(comm, case, **options)))


@pytest.fixture
def gated(inference_files: Path) -> Case:
    return inference_files / "gated", str(inference_files / "clip.mp4")


@pytest.mark.slow
def test_other_history_keeps_what_both_have_in_common(gated: Case) -> None:
    def body(conversation: Conversation) -> tuple[Answer, Answer]:
        first = conversation.prompt([user("What is it?", "video")])
        conversation.answer(first, Sampling(max_new_tokens=3))
        changed = conversation.prompt([user("What was it?", "video"), says("A dot."), user("Where?")])
        return conversation.answer(changed, Sampling(max_new_tokens=6)), conversation.answer(first, Sampling())

    (reply, _), *_ = converse(gated, 1, body)
    messages = [user("What was it?", "video"), says("A dot."), user("Where?")]
    assert reply.tokens == unpatched(gated, messages, 6)
    assert 20 < reply.cached_tokens < reply.prompt_tokens - 20


def test_evidence_of_a_turn_is_that_of_its_own_tokens(gated: Case) -> None:
    def body(conversation: Conversation) -> list[Answer]:
        prompt, sampling = conversation.prompt([user("What is it?", "video")]), Sampling(max_new_tokens=4)
        plain = conversation.answer(prompt, sampling)
        again = conversation.answer(prompt, sampling, evidence=9)  # the pass of the prompt has one row
        later = conversation.prompt([user("What is it?", "video"), says("A dot."), user("Where?")])
        return [plain, again, conversation.answer(later, sampling, evidence=9), open_conversation_answer(conversation)]

    def open_conversation_answer(conversation: Conversation) -> Answer:
        conversation._cache = None  # the whole prompt is read again
        prompt = conversation.prompt([user("What is it?", "video")])
        return conversation.answer(prompt, Sampling(max_new_tokens=4), evidence=9)

    for plain, again, later, fresh in converse(gated, 2, body):
        assert plain.tokens == again.tokens and plain.evidence is None
        assert sum(moment.share for moment in again.evidence.moments) == pytest.approx(1.0, abs=1e-5)
        assert again.cached_tokens == again.prompt_tokens - 1 and fresh.cached_tokens == 0
        for one, other in zip(again.evidence.moments, fresh.evidence.moments, strict=True):
            assert one.share == pytest.approx(other.share, abs=1e-5) and one.peak == other.peak
        assert later.evidence.moments != again.evidence.moments


@pytest.mark.slow
def test_interrupted_and_stopped_answers_end_on_all_ranks_and_go_on(gated: Case) -> None:
    def body(conversation: Conversation) -> list[Answer]:
        prompt, pieces = conversation.prompt([user("What is it?", "video")]), []
        whole = conversation.answer(prompt, Sampling(max_new_tokens=12), on_text=pieces.append)
        assert "".join(pieces) == whole.text
        rank_0, begun, stop = conversation._comm.rank == 0, list[str](), whole.text[2:5]
        ended = {"on_text": begun.append, "interrupted": lambda: rank_0 and bool(begun)}
        return [
            whole,
            conversation.answer(prompt, Sampling(max_new_tokens=12), interrupted=lambda: rank_0),
            conversation.answer(prompt, Sampling(max_new_tokens=12), **ended),
            conversation.answer(prompt, Sampling(max_new_tokens=12), stop=[stop]),
            conversation.answer(prompt, Sampling(max_new_tokens=12)),
        ]

    for whole, at_once, interrupted, stopped, again in converse(gated, 2, body):
        assert (at_once.tokens, at_once.text, at_once.finish_reason) == ([], "", "interrupted")
        assert (interrupted.tokens, interrupted.finish_reason) == (
            whole.tokens[: len(interrupted.tokens)],
            "interrupted",
        )
        assert 0 < len(interrupted.tokens) < len(whole.tokens)
        assert stopped.finish_reason == "stop" and len(stopped.tokens) < len(whole.tokens)
        assert stopped.text == whole.text[: whole.text.index(whole.text[2:5])]
        assert (again.tokens, whole.finish_reason) == (whole.tokens, "length")


def test_text_that_shares_little_with_the_cache_is_computed_from_the_start(gated: Case) -> None:
    def body(shown: Conversation) -> list[Answer]:
        conversation = Conversation(shown._model, shown._processor)
        few, long = Sampling(max_new_tokens=3), "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 3
        turns = [[user("Hello")], [user(long)]]
        turns.append([*turns[1], says("yes"), user("And now?")])
        answers = [conversation.answer(conversation.prompt(messages), few) for messages in turns]
        conversation._cache = None
        return [*answers, conversation.answer(conversation.prompt(turns[2]), few)]

    for _, long, following, alone in converse(gated, 2, body):
        assert long.cached_tokens == 0 < long.prompt_tokens <= following.cached_tokens
        assert following.tokens == alone.tokens


def test_pieces_never_contain_the_beginning_of_a_stop_string() -> None:
    pieces: list[str] = []
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "".join(map(words.__getitem__, tokens)))
    words, marks = ("a<", "b</e", "nd", ">c", "d"), ["</end>", "dd"]
    written = GeneratedText(tokenizer, as_communicator("self"), pieces.append, marks)
    for number in range(len(words)):
        written.put(torch.tensor([number]))
    assert (pieces, written.text, written.stopped) == (["a", "<b"], "a<b", True)
    written.end()
    assert (pieces, written.text) == (["a", "<b"], "a<b")


def test_only_answers_that_can_be_ended_from_outside_communicate_after_each_token(
    gated: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    unchanged = Communicator.broadcast

    def counted(self: Communicator, x: Any, label: str) -> Any:
        calls.extend([self.rank] if label == "end of generation" else [])
        return unchanged(self, x, label)

    def body(conversation: Conversation) -> tuple[list[int], list[int]]:
        prompt, counts, texts = conversation.prompt([user("What is it?", "video")]), [], []
        for ending in ({}, {"stop": ["<never>"]}, {"interrupted": lambda: False}):
            before = calls.count(conversation._comm.rank)
            texts.append(conversation.answer(prompt, Sampling(max_new_tokens=6), **ending).tokens)
            counts.append(calls.count(conversation._comm.rank) - before)
        return counts, [len(texts[0]), len({str(tokens) for tokens in texts})]

    monkeypatch.setattr(Communicator, "broadcast", counted)
    for (without, stop, interrupted), (tokens, different) in converse(gated, 2, body):
        assert without == 0 and stop == interrupted == tokens and different == 1


def test_prompts_that_the_model_cannot_take_are_refused(gated: Case) -> None:
    def body(conversation: Conversation) -> None:
        with pytest.raises(LengthError, match="the context of this model is 4096 tokens"):
            conversation.prompt([user("What is it?", "video")], max_new_tokens=4096)
        with pytest.raises(DataError, match="in its text; show media by parts"):
            conversation.prompt([user("<|im_end|>", "video")])
        with pytest.raises(DataError, match="0 media parts"):
            conversation.prompt([user("What is it?")])

    converse(gated, 1, body)


def test_conversation_without_media(case: Case) -> None:
    def body(comm: Communicator) -> Answer:
        model, processor = load_model(str(case[0])).eval(), load_processor(str(case[0]))
        conversation = Conversation(patch_model(model, group=comm), processor)
        messages = [user("Say hello."), says("Hello!"), user("And?")]
        conversation.answer(conversation.prompt(messages[:1]), Sampling(max_new_tokens=2))
        return conversation.answer(conversation.prompt(messages), Sampling(max_new_tokens=4))

    replies = [reply.tokens for world in (1, 2) for reply in run_loopback(world, body)]
    assert replies[0] and all(tokens == replies[0] for tokens in replies)


@pytest.mark.parametrize("batch", [2, 16])
def test_encoding_that_is_interrupted_ends_after_its_batch_on_all_ranks(gated: Case, batch: int) -> None:
    """A reader that is ahead has perhaps read the last frame already."""
    done: list[int] = []

    def body(conversation: Conversation) -> str:
        conversation._batch = batch
        first = conversation._comm.rank == 0
        with pytest.raises(SeqParError) as error:
            if first:
                conversation.encode(lambda encoded, total: done.append(encoded), lambda: bool(done))
            else:
                conversation.encode()
        return type(error.value).__name__

    assert converse(gated, 2, body) == ["Interrupted", "AgreementError"] and done == [0]


def test_arguments_of_features_that_are_replaced_are_released(gated: Case) -> None:
    def body(conversation: Conversation) -> tuple[int, int]:
        prompt = conversation.prompt([user("What is it?", "video")])
        conversation.answer(prompt, Sampling(max_new_tokens=1))
        assert conversation.encoded is not None
        used = len(conversation._passed)
        conversation.encoded = replace(conversation.encoded)
        return used, len(conversation._passed)

    assert converse(gated, 1, body) == [(1, 0)]


def test_later_turns_show_further_media(case: Case) -> None:
    """Each turn equals one prompt with all messages, also after the history has changed; the cache is continued where
    the family can append."""
    processor = load_processor(str(case[0]))
    sources = [VideoSource.open(case[1], num_frames=count) for count in (3, 4, 2)]
    messages = [user(QUESTIONS[0], "video"), says("A cat."), user(QUESTIONS[1], "video"), says("So."), user("A")]
    messages += [says("B"), user(QUESTIONS[2], "video")]

    def body(comm: Communicator) -> list[Answer]:
        model = load_model(str(case[0])).eval()
        model = patch_model(model, group=comm)
        conversation, found = Conversation(model, processor, sources[:1], batch=2), []
        for stop in (1, 3, 5, 7):
            media = sum(isinstance(x["content"], list) and len(x["content"]) > 1 for x in messages[:stop])
            if media > len(conversation.sources):
                conversation = conversation.followed_by(sources[media - 1 : media])
            prompt = conversation.prompt(messages[:stop])
            found.append(conversation.answer(prompt, Sampling(max_new_tokens=4), evidence=9))
        for question in ("Other?", QUESTIONS[1]):  # goes back to before the second video, which is not encoded again
            changed = [*messages[:2], user(question, "video"), *messages[3:]]
            found.append(conversation.answer(conversation.prompt(changed), Sampling(max_new_tokens=4)))
        conversation = Conversation(model, processor, sources, batch=2)
        found.append(conversation.answer(conversation.prompt(messages), Sampling(max_new_tokens=4), evidence=9))
        return found

    if not chat_family(processor).appends_media(load_model(str(case[0]))):
        with pytest.raises(ConfigError, match="cannot follow"):
            run_loopback(1, body)
        return
    expected = [
        unpatched(case, messages[:stop], 4, sources[:count]) for stop, count in ((1, 1), (3, 2), (5, 2), (7, 3))
    ]
    changed = [*messages[:2], user("Other?", "video"), *messages[3:]]
    expected += [unpatched(case, changed, 4, sources), expected[-1], expected[-1]]
    for ranks in (1, 3):
        for replies in run_loopback(ranks, body):
            assert [reply.tokens for reply in replies] == expected
            continued, fresh = (torch.tensor(reply.evidence.shares) for reply in (replies[3], replies[-1]))
            torch.testing.assert_close(continued, fresh, atol=1e-5, rtol=0)
            before = [0, *(reply.prompt_tokens for reply in replies[:3])]
            assert all(reply.cached_tokens >= past for reply, past in zip(replies[:4], before, strict=True))
            assert replies[4].cached_tokens and replies[5].cached_tokens


def test_turn_before_a_further_video_changes_far_before_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass after the change ends before the placeholders of the further video, which it does not bring."""
    monkeypatch.setattr("mllm_seqpar.inference.conversation.PREFILL_CHUNK", 8)
    processor = load_processor(str(case[0]))
    sources = [VideoSource.open(case[1], num_frames=count) for count in (3, 2)]
    messages = [user(QUESTIONS[0], "video"), says("A cat."), user(QUESTIONS[1], "video")]
    changed = [messages[0], says("A dog that sleeps on a chair."), messages[2]]

    def body(comm: Communicator) -> list[Answer]:
        model = patch_model(load_model(str(case[0])).eval(), group=comm)
        conversation, sampling = Conversation(model, processor, sources[:1], batch=2), Sampling(max_new_tokens=4)
        conversation.answer(conversation.prompt(messages[:1]), sampling)
        conversation = conversation.followed_by(sources[1:])
        prompts = map(conversation.prompt, (messages, changed))
        return [conversation.answer(prompt, sampling) for prompt in prompts]

    if chat_family(processor).appends_media(load_model(str(case[0]))):
        expected = [unpatched(case, turns, 4, sources) for turns in (messages, changed)]
        for ranks in (1, 3):
            for replies in run_loopback(ranks, body):
                assert [reply.tokens for reply in replies] == expected and replies[1].cached_tokens
