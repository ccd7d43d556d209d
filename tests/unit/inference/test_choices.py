"""Layer: one process. Log-likelihoods of letters equal those of the unpatched model's logits; the ranks are threads."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_conversation import Case, says, user
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mllm_seqpar import patch_model
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.data import VideoSource, chat_family
from mllm_seqpar.inference import Conversation
from mllm_seqpar.inference.choices import accuracy_table, continuation, letter_log_likelihoods, spellings
from mllm_seqpar.models.loading import load_processor
from model_copies import load_model

LETTERS = ("A", "B", "C")


def tokenizer_of(*words: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose tokens are these words, the letters of the alphabet, and a space."""
    vocabulary = [*dict.fromkeys((*map(chr, range(33, 127)), "Ġ", *words))]
    merges = []
    for word in words:
        merges += [(word[:size], word[size]) for size in range(1, len(word))]
    vocabulary = [*dict.fromkeys((*vocabulary, *(a + b for a, b in merges)))]
    backend = Tokenizer(models.BPE({word: number for number, word in enumerate(vocabulary)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_letter_is_spelled_as_the_tokenizer_would_after_the_prompt() -> None:
    def spelled(tokenizer: Any, prompt: str) -> list[list[str]]:
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        return [tokenizer.convert_ids_to_tokens(tokens) for tokens in spellings(tokenizer, ids, "A")]

    assert spelled(tokenizer_of("ĠA"), "so:") == [["A"], ["ĠA"]]  # a token with the space in front
    assert spelled(tokenizer_of(), "so:") == [["A"], ["Ġ", "A"]]  # several tokens
    assert spelled(tokenizer_of(":A"), "so:") == [["Ġ", "A"]]  # without a space, it would not follow this prompt
    assert spelled(tokenizer_of(":A", ":Ġ"), "so:") == [["A"]]  # nor with one; the letter's own token remains
    tokenizer = tokenizer_of(":A")
    assert continuation(tokenizer, tokenizer.encode("so:"), "A") is None


def scored(comm: Communicator, case: Case, questions: list[Any], **options: Any) -> list[dict[str, float]]:
    model, processor = load_model(str(case[0])).eval(), load_processor(str(case[0]))
    source = VideoSource.open(case[1], num_frames=3)
    conversation = Conversation(patch_model(model, group=comm, **options), processor, [source], batch=2)
    prompts = [conversation.prompt(messages) for messages in questions]
    return [letter_log_likelihoods(conversation, prompt, processor.tokenizer, LETTERS) for prompt in prompts]


@torch.no_grad()
def unpatched(case: Case, messages: list[Any]) -> dict[str, float]:
    """Sum the log-probabilities of each spelling in one forward pass of the unpatched model over prompt and letter."""
    processor, model = load_processor(str(case[0])), load_model(str(case[0])).eval()
    chat_format, source = chat_family(processor), VideoSource.open(case[1], num_frames=3)
    pictures = chat_format.unsharded(source)
    text = chat_format.text([messages], [[source]], add_generation_prompt=True)
    ids, found = text.input_ids[0].tolist(), {}
    for letter in LETTERS:
        totals = []
        for spelling in ((letter,), (" ", letter)):  # the tiny tokenizers have a token for each character
            tokens = processor.tokenizer.convert_tokens_to_ids([*spelling])
            arguments = chat_format.arguments(text)
            for _ in tokens:
                arguments = {name: _longer(name, value, len(ids)) for name, value in arguments.items()}
            row = torch.tensor([ids + tokens])
            arguments |= {chat_format.ids_name: row, "attention_mask": torch.ones_like(row)}
            logits = model(**arguments, **pictures).logits[0].double().log_softmax(-1)
            totals.append(sum(float(logits[len(ids) - 1 + n, token]) for n, token in enumerate(tokens)))
        found[letter] = math.log(sum(map(math.exp, totals)))
    return found


def _longer(name: str, value: Any, length: int) -> Any:
    """Repeat the last row of masks over text positions, or the last of the types of tokens."""
    if name == "mm_token_type_ids":
        return torch.cat([value, value[:, -1:]], 1)
    if value.dim() >= 3 and value.shape[1] >= length:
        return torch.cat([value, value[:, -1:]], 1)
    return value


def test_letters_score_as_in_a_forward_of_the_unpatched_model(case: Case) -> None:
    questions = [
        [user("Which one?", "video")],
        [user("Which one?", "video"), says("This."), user("And which colour?")],
    ]
    expected = [unpatched(case, messages) for messages in questions]
    for world, options in ((1, {}), (3, {"shard_prompt_from": 4})):
        for found in run_loopback(world, lambda comm, options=options: scored(comm, case, questions, **options)):
            for scores, reference in zip(found, expected, strict=True):
                assert scores == pytest.approx(reference, abs=2e-4), (world, scores, reference)


def test_accuracy_is_reported_by_category() -> None:
    def line(correct: bool, **categories: str) -> dict[str, Any]:
        return {"correct": correct, "categories": categories}

    lines = [line(True, duration="short", domain="art"), line(False, duration="long", domain="art")]
    lines += [line(True, duration="long"), {"answer": "A", "log_likelihoods": {}}, {"error": "no such file"}]
    assert accuracy_table(lines).splitlines() == [
        "accuracy          66.67% (2 of 3)",
        "duration  long    50.00% (1 of 2)",
        "duration  short  100.00% (1 of 1)",
        "domain    art     50.00% (1 of 2)",
    ]
    assert "no question has a correct answer" in accuracy_table(lines[3:])


def test_choices_write_scores_and_print_accuracy(
    inference_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mllm_seqpar.inference.ask import ask

    rows = [
        {"videoID": "clip", "question": f"Which? {n}", "options": ["A. x", "B. y"], "answer": "AB"[n]} for n in (0, 1)
    ]
    rows = [row | {"question_id": f"q{n}", "duration": "short", "task_type": "t"} for n, row in enumerate(rows)]
    rows.append({"videoID": "clip", "question": "Why?"})
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--model", inference_files / "gated", "--questions", tmp_path / "q.jsonl", "--output", tmp_path / "a.jsonl"]
    argv += ["--choices", "--num_frames", 3, "--media_root", inference_files, "--no_progress"]
    ask([*map(str, argv)])
    first, second, third = (json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines())
    for line, letter in ((first, "A"), (second, "B")):
        scores = line["log_likelihoods"]
        assert line["answer"] == max(scores, key=scores.get) and line["correct"] is (line["answer"] == letter)
        assert line["categories"] == {"duration": "short", "task_type": "t"} and line["id"] in ("q0", "q1")
    assert third["error"] == "the question has no options to choose from"
    out, err = capsys.readouterr()
    assert out.startswith("accuracy") and "task_type" in out
    assert "2 of 3 questions are answered; errors: 1" in err
