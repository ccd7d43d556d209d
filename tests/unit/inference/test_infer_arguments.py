"""Layer: pure Python. The command line of the inference script, and text that is streamed during generation."""

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mllm_seqpar.comm import as_communicator
from mllm_seqpar.data import FrameChoice
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.inference.arguments import parse
from mllm_seqpar.inference.generation import GeneratedText, Sampling
from tiny_models.mplug_owl3 import tiny_tokenizer

ASK = ["--model", "m", "--video", "v.mp4", "--question", "Why?"]
ENCODE = ["--model", "m", "--video", "v.mp4", "--save_features", "f"]
SET = ["--model", "m", "--questions", "q.jsonl", "--output", "a.jsonl"]


def test_options_become_settings() -> None:
    args = parse([*ASK, "--question", "When?", "--no_progress", "--self_attention", "star"])
    assert args.question == ("Why?", "When?") and not args.progress
    assert parse([*ASK, "--end", "2.5"]).frame_choice() == FrameChoice(end=2.5)
    assert parse([*ASK, "--num_frames", "9"]).frame_choice() == FrameChoice(num_frames=9)
    assert args.decoding() == {"threads": None, "decoder": "pyav", "frame_store": None}
    assert parse([*ASK, "--decode_threads", "1"]).decoding() == {"threads": 1, "decoder": "pyav", "frame_store": None}
    assert args.sampling() == Sampling(max_new_tokens=256, temperature=0.0, top_p=1.0, seed=0)
    assert args.config().self_attention == "star"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "m", "--question", "Why?"], "no video to ask about: give --video FILE, --features DIR"),
        (["--model", "m", "--video", "v.mp4"], "nothing to do: give --question"),
        ([*ASK, "--question", " "], "--question: the question is empty"),
        ([*ASK, "--fps", "2", "--num_frames", "5"], "--fps: 2, but num_frames is 5; give one"),
        ([*ASK, "--features", "f", "--save_features", "g"], "not written again"),
        ([*ASK, "--kernel", "magic"], "--kernel: 'magic' is not allowed; give one of auto"),
        ([*ASK, "--decode_threads", "0"], "--decode_threads: 0 is not allowed; give 1 or more"),
        ([*ASK, "--decoder", "ffmpeg"], "--decoder: 'ffmpeg' is not allowed; give one of pyav, torchcodec"),
        ([*ASK, "--dtype", "int8"], "--dtype: 'int8' is not allowed; give one of auto"),
        ([*ASK, "--top_p", "0"], "top_p: 0.0 is not allowed; give more than 0 and at most 1"),
        ([*ASK, "--temperature", "inf"], "--temperature: inf is not allowed; give 0 or more"),
        ([*ASK, "--seed", "3"], "--seed 3 would have no effect: without --temperature above 0"),
        ([*ASK, "--num_frames", "9", "--max_frames", "4"], "--max_frames 4 would have no effect: --num_frames"),
        ([*ENCODE, "--max_new_tokens", "9"], "--max_new_tokens 9 would have no effect: there is no question"),
        ([*ENCODE, "--strategy", "ring"], "--strategy ring would have no effect: there is no question"),
        ([*ASK, "--output", "a.jsonl"], "--output a.jsonl would have no effect: it belongs to --questions"),
        ([*ASK, "--start", "-1"], "--start: -1.0 is not allowed; give 0 or more"),
        ([*ASK, "--start", "3", "--end", "3"], "--end: 3 is not after the start of the clip, 3; give a later time"),
        ([*SET, "--start", "3"], "--start 3.0 would have no effect: --questions names the videos"),
        ([*SET, "--template", "Letter?"], "it has no {question}"),
        ([*SET, "--video", "v.mp4"], "--video v.mp4 would have no effect: --questions names the videos"),
        (SET[:4], "--questions needs --output FILE"),
        ([*SET, "--choices", "--max_new_tokens", "9"], "--choices generates no text"),
        ([*ASK, "--video", "w.mp4", "--features", "f"], "--features and several --video"),
        ([*SET, "--sp", "0"], "--sp: 0 is not allowed"),
        ([*ENCODE, "--evidence", "3"], "--evidence 3 would have no effect: there is no question"),
        ([*ASK, "--evidence", "-1"], "--evidence: -1 is not allowed; give 0 or more"),
    ],
)
def test_invalid_arguments_are_one_sentence(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(argv)
    assert message.replace("-", "_") in str(error.value).replace("-", "_") and "\n" not in str(error.value)


def streamed(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> list[str]:
    pieces: list[str] = []
    streamer = GeneratedText(tokenizer, as_communicator("self"), pieces.append)
    streamer.put(torch.tensor([[5, 6, 7]]))  # the prompt, which is not written
    for token in tokens:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert streamer.prefill_seconds > 0 and streamer.decode_seconds >= 0
    assert "".join(pieces) == streamer.text
    return pieces


def test_text_is_streamed_without_prompt_and_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer("ab\nc", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    pieces = streamed(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True) and len(pieces) > 2


def test_a_character_of_several_tokens_is_written_at_once() -> None:
    from tokenizers import Tokenizer, decoders, models

    values = {f"<0x{byte:02X}>": number for number, byte in enumerate("aé\nz€".encode())}
    backend = Tokenizer(models.WordLevel(values, unk_token="<0x61>"))
    backend.decoder = decoders.ByteFallback()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokens = list(range(len(values)))
    assert streamed(tokenizer, tokens) == ["a", "é", "\n", "z", "€"]
    # the last character stays incomplete
    assert streamed(tokenizer, tokens[:-1]) == ["a", "é", "\n", "z", "\N{REPLACEMENT CHARACTER}" * 2]
