"""The chat format of Qwen2.5-VL and Qwen3-VL: the processor's chat template, and images of any size.

A rank encodes a temporal patch as a whole: two frames of a video, or an image. The size that frames are resized to
follows from the size and the number of all frames, so every rank computes it, and the number of tokens, without
decoding more than the first frame. The processor writes the placeholders, with timestamps where it has them. Pixels are
resized as its torchvision backend does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.video_utils import VideoMetadata

from mllm_seqpar.adapting import (
    VIDEO_MARK,
    ChatFamily,
    ChatText,
    DataError,
    FeatureFrames,
    FrameShard,
    FrameSource,
    ImageListSource,
    Messages,
    answer_spans,
    media_of,
    media_parts,
    tokenize,
)
from mllm_seqpar.patches.qwen_vl import FEATURES, GRIDS, PIXELS

_MARKS = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")


class StillImage(ImageListSource):
    """A still image, one temporal patch; a list of images as a video is not one."""

    def __init__(self, image: ImageListSource) -> None:
        """Take the images of another source, which has checked their files."""
        object.__setattr__(self, "images", image.images)


@dataclass(frozen=True)
class TemporalPatches(FrameSource):
    """The temporal patches of a source, each of `frames` frames side by side: (n, frames * 3, height, width).

    The last frame is repeated if the number of frames does not divide.
    """

    source: FrameSource
    frames: int
    size: tuple[int, int]

    def __len__(self) -> int:
        return -(-len(self.source) // self.frames)

    def key(self) -> str:
        height, width = self.size
        return f"{self.source.key()} as {height} x {width} x {self.frames}"

    def read(self, start: int, stop: int, *, size: Any = None, batch: int = 16) -> Iterator[Tensor]:
        """Yield the patches start <= i < stop, resized; at most `batch` frames are decoded at once."""
        last = min(stop * self.frames, len(self.source))
        held: list[Tensor] = []
        for decoded in self.source.read(start * self.frames, last, batch=max(batch, self.frames)):
            held.append(F.interpolate(decoded, self.size, mode="bicubic", antialias=True))
            ready = torch.cat(held)
            whole = len(ready) // self.frames * self.frames
            held = [ready[whole:]]
            if whole:
                yield ready[:whole].unflatten(0, (-1, self.frames)).flatten(1, 2)
        if held and len(held[0]):
            missing = self.frames - len(held[0])
            yield torch.cat([held[0], held[0][-1:].expand(missing, -1, -1, -1)]).flatten(0, 1)[None]


class QwenVLChats(ChatFamily):
    """The processors of both families.

    Attributes:
        budget_of_video: whether the limits of pixels of the video processor are those of all frames together.
        passes_times: whether the model's positions take the seconds of a temporal patch of each video.
        fps_of_pictures: frames per second of a list of images that is a video; by default the one that the processors
            sample with.
    """

    frame_names = PIXELS
    marks = (*map("<|{}|>".format, _MARKS), VIDEO_MARK)
    feature_weights = ("model.visual.", "visual.")
    tower = ("model.visual", "forward")
    always_sharded = False
    ragged = True
    stores_tower = False
    budget_of_video = False
    passes_times = False
    fps_of_pictures = 2.0

    def still_frames(self, image: ImageListSource) -> FrameSource:
        return StillImage(image)

    def frame_groups(self, source: FrameSource) -> FrameSource:
        frames = 1 if isinstance(source, StillImage) else self._videos.temporal_patch_size
        return TemporalPatches(source, frames, self._size(source))

    @property
    def _images(self) -> Any:
        return self.processor.image_processor

    @property
    def _videos(self) -> Any:
        return self.processor.video_processor

    def _size(self, source: FrameSource) -> tuple[int, int]:
        """Return (height, width) of the frames of a source after they are resized."""
        height, width = size_of(source)
        image = isinstance(source, StillImage)
        config = self._images if image else self._videos
        factor = config.patch_size * config.merge_size
        least, most = config.size["shortest_edge"], config.size["longest_edge"]
        if image:
            return smart_resize(height, width, factor, least, most)
        return self._video_size(max(len(source), config.temporal_patch_size), height, width, factor, least, most)

    def _video_size(self, frames: int, height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
        videos, capped = self._videos, getattr(self._videos, "cap_pixels_per_frame", None)
        floor = int(least * 1.05)
        if not self.budget_of_video:
            if capped:
                total = int(videos.max_video_tokens * factor * factor * 0.9)
                most = max(min(most, total * videos.temporal_patch_size // frames), floor)
            return smart_resize(height, width, factor, least, most)
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_video

        if capped:
            most = frames * max(min(videos.max_video_tokens * factor * factor, most // frames), floor)
        limits = {"factor": factor, "min_pixels": least, "max_pixels": most}
        return resize_video(frames, height, width, temporal_factor=videos.temporal_patch_size, **limits)

    def text(
        self,
        conversations: Sequence[Messages],
        media: Sequence[Sequence[FrameSource]],
        *,
        add_generation_prompt: bool = False,
        labels: bool = False,
        padding_side: str | None = None,
    ) -> ChatText:
        grids: dict[str, list[list[int]]] = {name: [] for name in GRIDS}
        times: list[float] = []
        texts, spans = [], []
        for messages, sources in zip(conversations, media, strict=True):
            shown = [self._placeholder(source, grids, times) for _, source in media_of(messages, sources)]
            write = partial(self._write, [text for text, _ in shown], [text for _, text in shown])
            texts.append(write(list(messages), add_generation_prompt))
            spans.append(answer_spans([dict(message) for message in messages], write) if labels else [])
        ids, mask, targets = tokenize(
            self.tokenizer, texts, spans if labels else None, padding_side=padding_side, add_special_tokens=True
        )
        kinds = (ids == self.processor.image_token_id).long() + 2 * (ids == self.processor.video_token_id).long()
        extras = {name: torch.tensor(grid) for name, grid in grids.items() if grid}
        for kind, (name, mark) in enumerate(zip(GRIDS, ("image", "video"), strict=True), 1):
            wanted = sum(t * h * w for t, h, w in grids[name]) // self._images.merge_size**2
            if (tokens := int((kinds == kind).sum())) != wanted:
                token = getattr(self.processor, f"{mark}_token")
                raise DataError(
                    f"the {mark}s have {wanted} tokens, but the text has {tokens} of {token}; the tokenizer must have "
                    f"{token} as one special token, and the chat template must write it once for each {mark}"
                )
        extras["mm_token_type_ids"] = kinds
        if self.passes_times and times:
            extras["second_per_grid_ts"] = torch.tensor(times)
        total = sum(grid[0] for grid in (*grids[GRIDS[0]], *grids[GRIDS[1]]))
        return ChatText(input_ids=ids, attention_mask=mask, labels=targets, slots=range(total), extras=extras)

    def _placeholder(self, source: FrameSource, grids: dict[str, Any], times: list[float]) -> tuple[str, str]:
        """Add the grid of a source, and return what stands for it in the text: of an image, and of a video."""
        groups = self.frame_groups(source)
        assert isinstance(groups, TemporalPatches)
        image = isinstance(source, StillImage)
        patch = (self._images if image else self._videos).patch_size
        grid = [len(groups), groups.size[0] // patch, groups.size[1] // patch]
        grids[GRIDS[0] if image else GRIDS[1]].append(grid)
        if image:
            return self.processor.replace_image_token({GRIDS[0]: torch.tensor([grid])}, 0), ""
        seconds = self.seconds(source)
        spacing = (seconds[-1] - seconds[0]) / (len(seconds) - 1) if len(seconds) > 1 else 1 / self.fps_of_pictures
        times.append(self._videos.temporal_patch_size * spacing)
        metadata = VideoMetadata(total_num_frames=len(seconds), fps=1.0, frames_indices=seconds)
        given = {GRIDS[1]: torch.tensor([grid]), "video_metadata": [metadata]}
        return "", self.processor.replace_video_token(given, 0)

    def seconds(self, source: FrameSource) -> list[float]:
        """Return the times of the frames."""
        times = (source.seconds(index) for index in range(len(source)))
        return [index / self.fps_of_pictures if time is None else time for index, time in enumerate(times)]

    def marked(self, messages: Sequence[Any], open_answer: bool) -> str:
        """Return the text of messages, with the mark of the chat template for each medium."""
        shown = [
            message
            if isinstance(message["content"], str)
            else {**message, "content": [_shown(part) for part in message["content"]]}
            for message in messages
        ]
        text: str = self.processor.apply_chat_template(shown, add_generation_prompt=open_answer, tokenize=False)
        return text

    def _write(self, images: list[str], videos: list[str], messages: Sequence[Any], open_answer: bool) -> str:
        """Return the text of messages, with the placeholders of their media, which are the first of all."""
        count, text = len(media_parts(messages)), self.marked(messages, open_answer)
        image, video = (list(filter(None, given[:count])) for given in (images, videos))
        (written,), _ = self.processor.get_text_with_replacements([text], image, video)
        return written

    def pixels(self, frames: Tensor) -> tuple[Tensor, ...]:
        """Return temporal patches (n, 3 or frames * 3, height, width), normalised."""
        config = self._images if frames.shape[1] == 3 else self._videos
        scale = 1.0 / config.rescale_factor
        mean, deviation = (
            (torch.tensor(x) * scale).repeat(frames.shape[1] // 3)[:, None, None]
            for x in (config.image_mean, config.image_std)
        )
        return ((frames.float() - mean) / deviation,)

    def joined(self, parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the rows of patches of images and those of videos."""
        width = 3 * self._videos.temporal_patch_size * self._videos.patch_size**2
        rows: tuple[list[Tensor], list[Tensor]] = ([torch.empty(0, width)], [torch.empty(0, width)])
        for (frames,) in parts:
            if len(frames):
                rows[frames.shape[1] != 3].append(self._patches(frames).flatten(0, 1))
        return tuple(torch.cat(kind) for kind in rows)

    def _patches(self, frames: Tensor) -> Tensor:
        """(n, 3 or time * 3, height, width) -> (n, patches, width), the patches of a token one after another."""
        time, patch, merge = self._videos.temporal_patch_size, self._videos.patch_size, self._videos.merge_size
        if frames.shape[1] == 3:
            frames = frames.repeat(1, time, 1, 1)
        count, _, height, width = frames.shape
        grid = (height // patch // merge, merge, patch, width // patch // merge, merge, patch)
        return frames.reshape(count, time, 3, *grid).permute(0, 3, 6, 4, 7, 2, 1, 5, 8).flatten(5).flatten(1, 4)

    def blank(self) -> tuple[Tensor, ...]:
        side = self._videos.patch_size * self._videos.merge_size
        return (torch.zeros(1, 3 * self._videos.temporal_patch_size, side, side),)

    def encode(self, model: Any, *frames: Tensor) -> Tensor:
        """Return the embeddings (n, tokens, width), those of deepstack beside them."""
        (given,) = frames
        patch = self._videos.patch_size
        grid = torch.tensor([[len(given), given.shape[2] // patch, given.shape[3] // patch]])
        features: Tensor = self.family(model, None).encode(self._patches(given).flatten(0, 1), grid)
        return features.unflatten(0, (len(given), -1))

    def feature_arguments(self, model: Any, features: Tensor, shard: FrameShard) -> dict[str, Any]:
        return {FEATURES: features.flatten(0, -2), "visual_shard": shard}

    def frame_metadata(self, source: FrameSource) -> dict[str, Any]:
        """Return the size and the times of the frames, which determine the placeholders of a prompt."""
        return {"frame_size": list(size_of(source)), "frame_seconds": self.seconds(source)}

    def stored_frames(self, count: int, metadata: Mapping[str, Any]) -> FrameSource:
        height, width = metadata["frame_size"]
        return FeatureFrames(len(metadata["frame_seconds"]), (height, width), metadata["frame_seconds"])


def _shown(part: Any) -> dict[str, Any]:
    return {"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": part["type"]}


def size_of(source: FrameSource) -> tuple[int, int]:
    """Return (height, width) of all frames of a source."""
    sizes = set(source.sizes())
    if len(sizes) != 1:
        raise DataError(f"a video has frames of several sizes, {sorted(sizes)}; give images of one size")
    return sizes.pop()


class Qwen2_5_VLChats(QwenVLChats):
    """`Qwen2_5_VLProcessor` and `Qwen2_5_VLForConditionalGeneration`."""

    processors = ("Qwen2_5_VLProcessor",)
    passes_times = True


class Qwen3VLChats(QwenVLChats):
    """`Qwen3VLProcessor` and `Qwen3VLForConditionalGeneration`."""

    processors = ("Qwen3VLProcessor",)
    budget_of_video = True
