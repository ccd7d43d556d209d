"""The visual needle task: in a noisy video one frame shows a coloured square; which colour?

It is what a demonstration needs: no frame but one helps, so the answer shows that the model found that frame among all
others, and real files go through the real reader. Every frame is coloured noise around its own brightness; the marker
is large and saturated, which video compression leaves recognisable.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mllm_seqpar.errors import ConfigError

from .video import require_av

COLOURS = {
    "red": (230, 30, 30),
    "green": (30, 210, 40),
    "blue": (40, 60, 235),
    "yellow": (235, 225, 30),
    "purple": (190, 30, 210),
    "white": (250, 250, 250),
}
QUESTION = "Which colour is the marker?"


@dataclass(frozen=True, kw_only=True)
class NeedleVideo:
    """One video of the task.

    Attributes:
        path: the file.
        colour: the answer, a key of `COLOURS`.
        frames: how many it has.
        marker: number of the frame that shows the marker.
    """

    path: str
    colour: str
    frames: int
    marker: int

    def sample(self, folder: Path) -> dict[str, Any]:
        """The line of a chat file in `folder` that asks about this video."""
        video = {"type": "video", "path": os.path.relpath(self.path, folder)}
        question = {"type": "text", "text": QUESTION}
        return {
            "messages": [
                {"role": "user", "content": [video, question]},
                {"role": "assistant", "content": self.colour},
            ],
            "frames": self.frames,
            "marker": self.marker,
        }


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
    """Writes `count` videos, with colours in equal shares and the marker anywhere.

    Args:
        directory: made if it does not exist; files are `00000.mp4` and so on.
        count: how many.
        frames: (fewest, most) frames of a video; lengths are even on a logarithmic scale, so that short ones are
            frequent.
        size: height and width; even.
        colours: names from `COLOURS`.
        rate: frames per second. At 1, a script that takes one frame a second takes every frame.
        seed: of everything; the same arguments give the same videos.
    """
    unknown = [name for name in colours if name not in COLOURS]
    if unknown or len(colours) < 2:
        raise ConfigError(f"colours {list(colours)}: give at least two of {', '.join(COLOURS)}")
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
        _write(path, _frames(rng, length, size, marker, COLOURS[colour]), size, rate)
        videos.append(NeedleVideo(path=str(path), colour=colour, frames=length, marker=marker))
    return videos


def write_needle_jsonl(path: str | os.PathLike[str], videos: Sequence[NeedleVideo]) -> None:
    """Writes the chat file that asks about each of `videos`, with paths relative to it."""
    target = Path(path)
    with target.open("w") as file:
        for video in videos:
            file.write(json.dumps(video.sample(target.parent)) + "\n")


def make_tokenizer(texts: Sequence[str] = ()) -> Any:
    """A word-level tokenizer for the task and any further `texts`, as a PreTrainedTokenizerFast with ChatML's tokens.

    Its own are `<|im_start|>`, `<|im_end|>` (end of a turn and of generation), `<|image|>`, `<|video|>`,
    `<|endoftext|>` (padding) and `<unk>`. A space belongs to the word after it, so that decoding gives the text back.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import Fuse
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<unk>", "<|im_start|>", "<|im_end|>", "<|image|>", "<|video|>"]
    split = pre_tokenizers.Split(Regex(r"\n| ?\w+| ?[^\w\s]| "), behavior="isolated")
    known = [QUESTION, *COLOURS, "system\nuser\nassistant\n", *texts]
    found = {word.strip(" ") for text in known for word, _ in split.pre_tokenize_str(text)}
    words = {form for word in found | {""} for form in (word, f" {word}")} - {""}  # at a start, and after a space
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
    """Yields (size, size, 3) uint8 frames."""
    for number in range(count):
        base = rng.uniform(70, 170)
        frame = rng.normal(base, 25, (size, size, 3))
        if number == marker:
            side = int(rng.integers(size * 5 // 8, size * 7 // 8 + 1))
            top, left = rng.integers(0, size - side + 1, 2)
            frame[top : top + side, left : left + side] = rng.normal(colour, 8, (side, side, 3))
        yield frame.clip(0, 255).astype(np.uint8)


def _write(path: Path, frames: Any, size: int, rate: int) -> None:
    av = require_av()
    codec, options = "libx264", {"preset": "veryfast", "crf": "20", "g": "30"}
    try:
        av.codec.Codec(codec, "w")
    except ValueError:  # a build without it; every build has mpeg4
        codec, options = "mpeg4", {"qmin": "2", "qmax": "4", "g": "30"}
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=rate, options=options)
        stream.height = stream.width = size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        for image in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        file.mux(stream.encode())
