"""Layer: pure Python. The command line of the inference script, and text that is written as it is generated."""

import re

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.inference.arguments import parse
from mllm_seqpar.inference.generation import Sampling, TextPieces
from mllm_seqpar.patches.mplug_owl3.testing import tiny_tokenizer

NEEDED = ["--model", "m", "--video", "v.mp4", "--question", "Why?"]
ENCODE = ["--model", "m", "--video", "v.mp4", "--save-features", "f"]


def test_defaults_and_repeated_questions() -> None:
    args = parse([*NEEDED, "--question", "When?", "--no-progress"])
    assert args.question == ("Why?", "When?")
    assert args.frame_options() == {"fps": None, "num_frames": None, "max_frames": None}
    assert args.frames_of_video() == {"fps": 1.0, "num_frames": None, "max_frames": None}
    assert parse([*NEEDED, "--num-frames", "9"]).frames_of_video()["fps"] is None
    assert args.sampling() == Sampling(max_new_tokens=256, temperature=0.0, top_p=1.0, seed=0)
    assert not args.progress and not args.shard_weights and args.seqpar_config().strategy == "lv-xattn"
    assert parse([*NEEDED, "--self-attention", "star"]).seqpar_config().self_attention == "star"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "m", "--question", "Why?"], "no video to ask about: give --video FILE, or --features"),
        (["--model", "m", "--video", "v.mp4"], "nothing to do: give --question"),
        (["--video", "v.mp4", "--question", "Why?"], "arguments are required: --model"),
        ([*NEEDED, "--question", " "], "--question: an empty one"),
        ([*NEEDED, "--fps", "0"], "--fps: 0.0 is not allowed; give more than 0"),
        ([*NEEDED, "--fps", "fast"], "--fps: invalid float value"),
        ([*NEEDED, "--fps", "2", "--num-frames", "5"], "--fps 2 and --num-frames 5: give one"),
        ([*NEEDED, "--features", "f", "--save-features", "g"], "not written again"),
        ([*NEEDED, "--strategy", "rings"], "strategy: 'rings' is unknown; choose one of lv-xattn, ring"),
        ([*NEEDED, "--kernel", "magic"], "--kernel: 'magic' is unknown; choose auto"),
        ([*NEEDED, "--dtype", "int8"], "--dtype: 'int8' is not allowed; give one of auto"),
        ([*NEEDED, "--device", "tpu"], "--device: 'tpu' is not allowed"),
        ([*NEEDED, "--top-p", "0"], "top_p: 0.0 is not allowed; give more than 0 and at most 1"),
        ([*NEEDED, "--temperature", "-1"], "temperature: -1.0 is not allowed"),
        ([*NEEDED, "--temperature", "inf"], "--temperature: inf is not allowed; give a finite number"),
        ([*NEEDED, "--top-p", "0.5"], "--top-p 0.5 would have no effect: without --temperature above 0"),
        ([*NEEDED, "--seed", "3"], "--seed 3 would have no effect: without --temperature above 0"),
        ([*NEEDED, "--num-frames", "9", "--max-frames", "4"], "--max-frames 4 would have no effect: --num-frames"),
        ([*ENCODE, "--strategy", "ring"], "--strategy ring would have no effect: nothing is asked"),
        ([*ENCODE, "--quest", "Why?"], "unrecognized arguments: --quest Why?"),
        ([*NEEDED, "--speed", "3"], "unrecognized arguments: --speed 3"),
    ],
)
def test_bad_use_is_one_sentence(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        parse(argv)
    assert "\n" not in str(error.value)


def written(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> list[str]:
    pieces: list[str] = []
    stream = TextPieces(tokenizer, pieces.append)
    stream.put(torch.tensor([[5, 6, 7]]))  # the prompt, which is not written
    for token in tokens:
        stream.put(torch.tensor([token]))
    stream.end()
    assert stream.prefill_seconds > 0 and stream.decode_seconds >= 0
    return pieces


def test_text_is_written_token_by_token_without_prompt_and_marks() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer("ab\nc", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    assert "".join(written(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(written(tokenizer, tokens)) > 2


def test_a_character_of_several_tokens_is_written_whole() -> None:
    from tokenizers import Tokenizer, decoders, models

    values = {f"<0x{byte:02X}>": number for number, byte in enumerate("aé\nz€".encode())}
    backend = Tokenizer(models.WordLevel(values, unk_token="<0x61>"))
    backend.decoder = decoders.ByteFallback()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokens = list(range(len(values)))
    assert written(tokenizer, tokens) == ["a", "é", "\n", "z", "€"]
    assert written(tokenizer, tokens[:-1]) == ["a", "é", "\n", "z", "\N{REPLACEMENT CHARACTER}" * 2]  # it ends inside
