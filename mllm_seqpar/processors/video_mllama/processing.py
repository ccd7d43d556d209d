"""The processor of MOSS-Video-Preview: texts, images and videos to model inputs."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MllamaProcessor
from transformers.feature_extraction_utils import BatchFeature

from mllm_seqpar.chats.clip import VideoSource
from mllm_seqpar.errors import DataError, require_one_of
from mllm_seqpar.models.auto_classes import LocalCode
from mllm_seqpar.processors.base import flattened, texts_of
from mllm_seqpar.videos.media_files import local_media
from mllm_seqpar.videos.video import probe, scan

VIDEO = "<|video|>"
_IMAGE_INPUTS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")


class VideoMllamaProcessor(LocalCode, MllamaProcessor):
    """`MllamaProcessor` with frames of one tile, for videos too.

    `<|video|>` in a text becomes one `<|image|>` for each frame of the video.
    """

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        image_processor.max_image_tiles = 1

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        videos: Any = None,
        *,
        video_fps: float = 1.0,
        video_minlen: int = 8,
        video_maxlen: int = 256,
        return_tensors: str = "pt",
        **kwargs: Any,
    ) -> BatchFeature:
        """Return texts and their media as model inputs.

        Args:
            images: one for each `<|image|>` of the texts, in order, or a list of them for each text.
            text: one text or several, with the marks `<|image|>` and `<|video|>`.
            videos: one for each `<|video|>` of the texts, in order, or a list of them for each text: a path or URL, or
                a list of frames.
            video_fps, video_minlen, video_maxlen: which frames of a file are used, see `frame_numbers`.
            return_tensors: "pt".
            **kwargs: arguments of the tokenizer. Texts are padded by default if there are several. The tokenizer adds
                its special tokens unless every text contains the one that begins a text.

        Returns:
            `input_ids` and `attention_mask` (B, L); with media also `pixel_values`, `aspect_ratio_ids`,
            `aspect_ratio_mask`, `cross_attention_mask` and the positions that `frame_arguments` returns.

        Raises:
            DataError: the numbers of marks and media differ.
        """
        texts = texts_of(text)
        require_one_of("return_tensors", return_tensors, ["pt"], kind=DataError)
        choice = {"fps": video_fps, "least": video_minlen, "most": video_maxlen}
        stills = iter(_listed(images, texts, self.image_token))
        clips = iter([_frames(video, **choice) for video in _listed(videos, texts, VIDEO)])
        samples, expanded = list[list[Any]](), []
        for sample in texts:
            frames, parts = list[Any](), []
            for part in re.split(f"({re.escape(self.image_token)}|{re.escape(VIDEO)})", sample):
                shown = [next(stills)] if part == self.image_token else next(clips) if part == VIDEO else []
                frames += shown
                parts.append(self.image_token * len(shown) if part in (self.image_token, VIDEO) else part)
            samples.append(frames)
            expanded.append("".join(parts))
        begun = bool(self.bos_token) and all(self.bos_token in sample for sample in expanded)
        options = {"padding": len(texts) > 1, "add_special_tokens": not begun} | kwargs
        encoded = self.tokenizer(expanded, return_tensors="pt", return_token_type_ids=False, **options)
        counts = [len(frames) for frames in samples]
        return BatchFeature(
            {**encoded}
            | self.frame_arguments(encoded["input_ids"], encoded["attention_mask"], max(counts))
            | self._pixels(samples)
        )

    def frame_arguments(self, ids: Tensor, attention_mask: Tensor, frames: int) -> dict[str, Tensor]:
        """Return the mask and the positions of frames for token ids and their mask (B, L); nothing without frames.

        A row attends to all frames whose tokens are at or before it, and the position of a frame is that of its token.
        If padding precedes a text, `position_ids` counts from its first token. Frames that pad a sample to `frames`
        have position 0.
        """
        if not frames:
            return {}
        marks = (ids == self.image_token_id) & attention_mask.bool()
        seen = marks.cumsum(1).masked_fill(attention_mask == 0, 0)
        arguments = {"cross_attention_mask": (torch.arange(frames) < seen[..., None]).long()[..., None]}
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        if bool((attention_mask[:, 0] == 0).any()):
            arguments["position_ids"] = positions
        of_frames = torch.zeros(len(ids), frames, dtype=torch.long)
        for sample, places in enumerate(marks):
            where = positions[sample, places][:frames]
            of_frames[sample, : len(where)] = where
        return arguments | {"vision_position_ids": of_frames}

    def pixels(self, frames: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return frames as (n, 1, 3, S, S), their aspect ratio ids (n,), and their aspect ratio mask (n, 1)."""
        processed = self.image_processor([list(frames)], max_image_tiles=1, return_tensors="pt")
        return tuple(processed[name][0] for name in _IMAGE_INPUTS)

    def blank(self) -> tuple[Tensor, ...]:
        """Return the frame that pads a sample: zeros with aspect ratio id 0."""
        side = int(self.image_processor.size["height"])
        ratio_mask = torch.ones(1, 1, dtype=torch.long)
        return torch.zeros(1, 1, 3, side, side), torch.zeros(1, dtype=torch.long), ratio_mask

    def _pixels(self, samples: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        most = max(map(len, samples))
        if not most:
            return {}
        rows = []
        for frames in samples:
            parts = [*([self.pixels(frames)] if frames else []), *[self.blank()] * (most - len(frames))]
            rows.append([torch.cat(column) for column in zip(*parts, strict=True)])
        columns = (torch.stack(column) for column in zip(*rows, strict=True))
        return dict(zip(_IMAGE_INPUTS, columns, strict=True))

    @property
    def model_input_names(self) -> list[str]:
        return [*super().model_input_names, "vision_position_ids"]


def frame_numbers(frames: int, rate: float, *, fps: float = 1.0, least: int = 8, most: int = 256) -> list[int]:
    """Return which frames of a video are used, counted from 0.

    These are `fps` frames a second, the last part of a second included. Where that gives fewer than `least` or more
    than `most`, or more than the video has, the nearest allowed number of frames is evenly spaced from the first to the
    last.
    """
    wanted = math.ceil(frames / rate * fps - 1e-6)
    count = min(max(wanted, least), most, frames)
    if count == wanted:
        return [min(int(number * rate / fps), frames - 1) for number in range(count)]
    return [int(x) for x in torch.linspace(0, frames - 1, count, dtype=torch.float64)]


def _frames(video: Any, **choice: Any) -> list[Any]:
    """Return the frames of a video: those that were passed, or those of a file that `frame_numbers` chooses."""
    if not isinstance(video, (str, os.PathLike)):
        return list(video)
    info = probe(local_media(video))
    ticks = info.ticks if info.ticks is not None else scan(info.path).ticks
    if not ticks:
        raise DataError(f"{video}: no frame can be found in it")
    numbers = frame_numbers(len(ticks), len(ticks) / info.duration, **choice)
    source = VideoSource(info.plan(ticks[number] for number in numbers))
    return [frame for batch in source.read(0, len(source)) for frame in batch]


def _listed(media: Any, texts: Sequence[str], mark: str) -> list[Any]:
    """Return the media of all texts in one list; raise DataError unless there is one for each mark."""
    counts = [sample.count(mark) for sample in texts]
    single = media is not None and not isinstance(media, (list, tuple))
    whole_clip = mark == VIDEO and sum(counts) == 1 and isinstance(media, list) and len(media) != 1
    listed = [media] if single or whole_clip else list(media or ())
    nested = any(isinstance(item, (list, tuple)) for item in listed)
    if mark == VIDEO:  # a video may be a list of frames
        nested = nested and [len(item) for item in listed] == counts and len(listed) == len(texts) > 1
    return flattened(listed, counts, mark, "media", nested)
