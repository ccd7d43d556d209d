"""The chat format of MOSS-VL: the processor's chat template, and images of any size.

The size that a frame is resized to follows from the size and the number of frames, so every rank computes it, and the
number of visual tokens, without decoding more than the first frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.adapting import (
    VIDEO_MARK,
    ChatText,
    DataError,
    FrameShard,
    FrameSource,
    Messages,
    answer_spans,
    media_of,
    media_parts,
    tokenize,
)
from mllm_seqpar.patches.moss_vl import FEATURES, GRID, MASK, MEDIA, PIXELS, MossVLFamily

from .qwen_vl import QwenVLChats, StillImage, TemporalPatches, size_of

IMAGE = "<|image|>"
_ENDS = ("<|im_end|>", "<|endoftext|>")


class MossVLChats(QwenVLChats):
    """The chat format of `MossVLProcessor`. A frame has one placeholder; those of videos have their times."""

    processors = ("MossVLProcessor",)
    marks = (
        *(IMAGE, VIDEO_MARK, "<|im_start|>", "<|im_end|>"),
        *("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    )
    frame_names = (PIXELS,)
    feature_weights = ("model.visual.", "model.separator_token")
    tower_weights = MossVLFamily.parts["vision"]
    tower = ("model.visual", "states")
    stores_tower = True
    image_token = "<|image_pad|>"

    @property
    def _images(self) -> Any:
        return self.processor.image_processor.options

    @property
    def _videos(self) -> Any:
        return self.processor.videos

    @property
    def fps_of_pictures(self) -> float:  # type: ignore[override]
        return float(self._videos.video_fps)

    def frame_groups(self, source: FrameSource) -> FrameSource:
        """Return the frames, resized as the processor resizes those of a call with this medium alone."""
        height, width = size_of(source)
        if isinstance(source, StillImage):
            (size,) = self._images.sizes([(height, width)])
        else:
            (size,) = self._videos.sizes([(len(source), height, width)])
        return TemporalPatches(source, 1, size)

    def frame_sizes(self, sources: Sequence[FrameSource]) -> list[int]:
        counts = []
        for source in sources:
            groups = self.frame_groups(source)
            assert isinstance(groups, TemporalPatches)
            height, width = (side // self._images.factor for side in groups.size)
            counts += [height * width + 1] * len(groups)  # with the separator
        return counts

    def text(
        self,
        conversations: Sequence[Messages],
        media: Sequence[Sequence[FrameSource]],
        *,
        add_generation_prompt: bool = False,
        labels: bool = False,
        padding_side: str | None = None,
    ) -> ChatText:
        grids: list[list[int]] = []
        texts, spans = [], []
        for messages, sources in zip(conversations, media, strict=True):
            shown = [self._placeholders(source, grids) for _, source in media_of(messages, sources)]
            chat = [dict(message) for message in messages]
            written = self.marked(chat, add_generation_prompt)
            answers = answer_spans(chat, self.marked) if labels else []
            ends = [(start, len(written[:stop].rstrip("\n"))) for start, stop in answers]  # without the newline
            expanded, moved = self.processor.expand(written, shown, ends)
            texts.append(expanded.text)
            spans.append(moved)
        ids, mask, targets = tokenize(
            self.tokenizer, texts, spans if labels else None, padding_side=padding_side, add_special_tokens=True
        )
        total = sum(grid[0] for grid in grids)
        visible = (ids == self.processor.image_token_id).long().cumsum(1) * mask
        if int(visible.amax(1).sum()) != total:
            raise DataError(
                f"the media have {total} frames, but the text has {visible.amax(1).tolist()} placeholders "
                f"{self.processor.image_token}; the tokenizer must have it as one special token, and the chat template "
                f"must write {IMAGE} or {VIDEO_MARK} once for each medium"
            )
        extras: dict[str, Tensor] = {}
        if grids:
            counts = [len(sources) for sources in media]
            extras = {GRID: torch.tensor(grids), MEDIA: torch.tensor(counts), MASK: visible}
        sizes = self.frame_sizes([source for sources in media for source in sources])
        return ChatText(
            input_ids=ids, attention_mask=mask, labels=targets, slots=range(total), sizes=sizes, extras=extras
        )

    def _placeholders(self, source: FrameSource, grids: list[list[int]]) -> str:
        """Add the grid of a source, and return what stands for it in the text."""
        groups = self.frame_groups(source)
        assert isinstance(groups, TemporalPatches)
        grids.append([len(groups), *self._images.grid(groups.size)])
        if isinstance(source, StillImage):
            return str(self.processor.image_token)
        text: str = self.processor.video_text(self.seconds(source))
        return text

    def marked(self, messages: Sequence[Any], open_answer: bool) -> str:
        text = super().marked(messages, open_answer)
        if (written := text.count(IMAGE) + text.count(VIDEO_MARK)) != (count := len(media_parts(messages))):
            raise DataError(
                f"the chat template wrote {written} of {IMAGE} and {VIDEO_MARK} for {count} images and videos; use one "
                "that writes each once"
            )
        return text

    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """Return (n, 3, height, width), normalised."""
        return (self._images.normalised(frames),)

    def joined(self, parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the rows of patches of all frames."""
        empty = torch.empty(0, 3 * self._images.patch_size**2)
        return (torch.cat([empty, *(self._images.patches(frames).flatten(0, 1) for (frames,) in parts)]),)

    def blank(self) -> tuple[Tensor, ...]:
        side = self._images.factor
        return (torch.zeros(1, 3, side, side),)

    def encode(self, model: Any, *frames: Tensor) -> Tensor:
        """Return the features (n, tokens, C) of normalised frames."""
        (given,) = frames
        grids = [self._images.grid((given.shape[2], given.shape[3]))] * len(given)
        features: Tensor = self.family(model, None).encode(self._images.patches(given).flatten(0, 1), grids)
        return features.reshape(len(given), -1, features.shape[-1])

    def tower_rows(self, source: FrameSource) -> int:
        """Return the number of patches of a frame."""
        assert isinstance(source, TemporalPatches)
        return math.prod(self._images.grid(source.size))

    def tower_states(self, output: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(output), 1)

    def tower_output(self, states: Tensor) -> Sequence[Tensor]:
        return states.unbind(1)

    def appends_media(self, model: Any) -> bool:
        return True

    def arguments_of_media(
        self, arguments: Mapping[str, Tensor], past_length: int, first: int, stop: int
    ) -> Mapping[str, Tensor]:
        if GRID not in arguments:
            return arguments
        grids, frames = arguments[GRID], arguments[GRID][:, 0]
        before, own = int(frames[:first].sum()), int(frames[first:stop].sum())
        visible = (arguments[MASK][:, past_length:] - before).clamp(0, own)
        return {**arguments, GRID: grids[first:stop], MEDIA: torch.tensor([stop - first]), MASK: visible}

    def generation(self, model: Any) -> dict[str, Any]:
        vocabulary = self.tokenizer.get_vocab()
        return {"eos_token_id": [vocabulary[mark] for mark in _ENDS if mark in vocabulary]}

    def feature_arguments(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        return {FEATURES: features.flatten(0, -2), "visual_shard": shard}
