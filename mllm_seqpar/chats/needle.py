"""The visual needle task: one frame of a noisy video shows a coloured square, and the question asks for its colour.

Only that frame contains the answer, so a correct answer shows that the model found it among all frames. The videos are
real files that the real reader reads. Every frame is noise around a random brightness. The marker is large and
saturated, so it survives video compression.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mllm_seqpar.errors import ConfigError
from mllm_seqpar.videos.video_writer import write_video

COLOURS = {
    "red": (230, 30, 30),
    "green": (30, 210, 40),
    "blue": (40, 60, 235),
    "yellow": (235, 225, 30),
    "purple": (190, 30, 210),
    "white": (250, 250, 250),
}
_H264 = {"preset": "veryfast", "crf": "20", "g": "30", "bf": "0"}
"""With B-frames, x264 makes another file of the same frames about once in 5,000 times."""

_MPEG4 = {"qmin": "2", "qmax": "4", "g": "30"}
QUESTION = "Which colour is the marker?"


@dataclass(frozen=True, kw_only=True)
class NeedleVideo:
    """One video of the task: `colour` is the answer, `marker` the index of the frame that shows the marker."""

    path: str
    colour: str
    frames: int
    marker: int

    def sample(self, folder: Path) -> dict[str, Any]:
        """Return the question about this video as a line of a chat file in `folder`."""
        video = {"type": "video", "path": os.path.relpath(self.path, folder)}
        question = {"role": "user", "content": [video, {"type": "text", "text": QUESTION}]}
        answer = {"role": "assistant", "content": self.colour}
        return {"messages": [question, answer], "frames": self.frames, "marker": self.marker}


def make_needle_videos(
    directory: str | os.PathLike[str],
    count: int,
    *,
    frames: tuple[int, int],
    size: int = 32,
    colours: Sequence[str] = tuple(COLOURS),
    rate: int = 1,
    seed: int = 0,
) -> list[NeedleVideo]:
    """Write videos in which all colours are equally frequent and the marker has a random position.

    Args:
        directory: created if it does not exist; the files are `00000.mp4` and so on.
        frames: (fewest, most) frames of a video; lengths are uniform on a logarithmic scale.
        size: height and width; even, at least 8.
        colours: at least two names from `COLOURS`.
        rate: frames per second. At 1, sampling at 1 fps selects every frame.
        seed: the same arguments with the same seed give the same videos.
    """
    unknown = [name for name in colours if name not in COLOURS]
    if unknown or len(colours) < 2:
        raise ConfigError(f"colours is {list(colours)}; pass at least two of {', '.join(COLOURS)}")
    fewest, most = frames
    if not 1 <= fewest <= most or count < 1 or size < 8 or size % 2:
        raise ConfigError(f"count={count}, frames={frames}, size={size}: needs 1 <= fewest <= most, an even size >= 8")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    videos = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        length = round(math.exp(rng.uniform(math.log(fewest), math.log(most))))
        colour = colours[number % len(colours)]
        marker = int(rng.integers(length))
        path = folder / f"{number:05d}.mp4"
        frames_of = _frames(rng, length, size, marker, COLOURS[colour])
        write_video(path, frames_of, rate=rate, options=_H264, fallback=_MPEG4, threads=1)
        videos.append(NeedleVideo(path=str(path), colour=colour, frames=length, marker=marker))
    return videos


def make_tokenizer(texts: Sequence[str] = ()) -> Any:
    """Return a word-level PreTrainedTokenizerFast for the task and any further `texts`.

    Its special tokens are `<|im_start|>`, `<|im_end|>` (ends a turn and generation), `<|image|>`, `<|video|>`,
    `<|endoftext|>` (padding) and `<unk>`. A space belongs to the word after it, so decoding restores the text.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import Fuse
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<unk>", "<|im_start|>", "<|im_end|>", "<|image|>", "<|video|>"]
    split = pre_tokenizers.Split(Regex(r"\n| ?\w+| ?[^\w\s]| "), behavior="isolated")
    known = [QUESTION, *COLOURS, "system\nuser\nassistant\n", *texts]
    bare = {word.strip(" ") for text in known for word, _ in split.pre_tokenize_str(text)}
    words = {form for word in bare | {""} for form in (word, f" {word}")} - {""}
    vocabulary = {word: number for number, word in enumerate([*special, *sorted(words - set(special))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>", "<|image|>", "<|video|>"],
        clean_up_tokenization_spaces=False,
    )


def _frames(rng: np.random.Generator, count: int, size: int, marker: int, colour: tuple[int, int, int]) -> Any:
    """Yield (size, size, 3) uint8 frames."""
    for number in range(count):
        base = rng.uniform(70, 170)
        frame = rng.normal(base, 25, (size, size, 3))
        if number == marker:
            side = int(rng.integers(size * 5 // 8, size * 7 // 8 + 1))
            top, left = rng.integers(0, size - side + 1, 2)
            frame[top : top + side, left : left + side] = rng.normal(colour, 8, (side, side, 3))
        yield frame.clip(0, 255).astype(np.uint8)
