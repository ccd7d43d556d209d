"""The processor of MOSS-VL: texts, images and videos to model inputs, as the published processor makes them.

The text has one mark for each medium, `<|image|>` or `<|video|>`. A mark of an image becomes one placeholder. That of a
video becomes a placeholder for each frame, after the frame's time, between the marks that begin and end a video.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.feature_extraction_utils import BatchFeature
from transformers.utils import IMAGE_PROCESSOR_NAME

from mllm_seqpar.chats.clip import VideoSource
from mllm_seqpar.errors import DataError, require_one_of
from mllm_seqpar.models.hub import hub_options
from mllm_seqpar.models.moss_vl.configuration import MossVLConfig
from mllm_seqpar.processors.base import (
    TENSORS,
    TEXT_ARGUMENTS,
    NativeProcessor,
    flattened,
    frame_list,
    is_video,
    texts_of,
    to_tensor,
)
from mllm_seqpar.processors.mplug_owl3.chat import IM_END, IMAGE, MEDIA, VIDEO, Piece, expand_media
from mllm_seqpar.videos.media_files import local_media
from mllm_seqpar.videos.video import scan

from .image_processing import MossVLImageProcessor
from .media import FPS_OF_FRAMES, ImagePixelOptions, Size, VideoPixelOptions, resized_patches

PLACEHOLDER = "<|image_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
TIME_START, TIME_END = "<|time_start|>", "<|time_end|>"
RESERVED = (PLACEHOLDER, "<|video_pad|>")
VIDEO_FILE = "video_preprocessor_config.json"
BLANK_SIDE = 128
"""Height and width of the image that a text without media gets, to which no token attends."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}{%- set content = message.content -%}
{%- else -%}{%- set content -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '<|image|>' }}
{%- elif part.type == 'video' -%}{{ '<|video|>' }}
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endset -%}{%- endif -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{ content + '<|im_end|>' }}{%- endgeneration -%}
{%- else -%}{{ content + '<|im_end|>' }}{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""The format of the published models without tools: ChatML, without a system message of its own."""


_OF_PIXELS = {"size", "min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size"}
_OF_PIXELS |= {"image_mean", "image_std", "return_tensors", "do_resize", "do_rescale", "do_normalize", "do_convert_rgb"}

SUPPORTED = {
    "text_kwargs": TEXT_ARGUMENTS | {"return_token_type_ids"},
    "images_kwargs": _OF_PIXELS | {"multi_image_max_pixels"},
    "videos_kwargs": _OF_PIXELS
    | {"video_max_pixels", "video_fps", "min_frames", "max_frames", "num_extract_threads", "video_metadata"}
    | {"do_sample_frames", "return_metadata"},
}
"""The arguments that a call takes, by modality."""


@dataclass(frozen=True)
class TimedFrames:
    """A video, or a segment of one.

    Attributes:
        source: a frame source of the project's reader, or its frames (n, 3, H, W), uint8.
        times: the seconds of each frame.
    """

    source: Any
    times: Sequence[float]

    def __len__(self) -> int:
        return len(self.times)

    @property
    def size(self) -> Size:
        if isinstance(self.source, Tensor):
            return int(self.source.shape[2]), int(self.source.shape[3])
        height, width = self.source.sizes()[0]
        return height, width

    def frames(self) -> Iterator[Tensor]:
        yield from (self.source,) if isinstance(self.source, Tensor) else self.source.read(0, len(self))


class MediumInputs(NamedTuple):
    """An image or a video in the order of the texts: its patches, its grid, and the text that stands for it."""

    patches: Tensor
    grid: list[int]
    text: str


class MossVLProcessor(NativeProcessor):
    """Tokenize text with marks of media, and preprocess images and videos.

    Attributes:
        image_processor: see `MossVLImageProcessor`.
        tokenizer: Qwen3's, with `<|time_start|>` and `<|time_end|>`.
        videos: the options of videos.
        chat_template: Jinja; that of the directory, or `CHAT_TEMPLATE`.

    Raises:
        DataError: the tokenizer lacks a special token.
    """

    model_type = MossVLConfig.model_type
    supported_arguments = SUPPORTED
    text_kwargs = {"padding": False}
    image_token = PLACEHOLDER

    def __init__(
        self,
        image_processor: MossVLImageProcessor,
        tokenizer: Any,
        videos: VideoPixelOptions | None = None,
        chat_template: Any = None,
    ) -> None:
        self.videos = VideoPixelOptions() if videos is None else videos
        marks = (PLACEHOLDER, IM_END, VISION_START, VISION_END)
        vocabulary = tokenizer.get_vocab()
        if missing := [mark for mark in marks if mark not in vocabulary]:
            raise DataError(f"the tokenizer has no token {', '.join(missing)}; use that of MOSS-VL")
        self.image_token_id, self._end, self._open, self._close = (vocabulary[mark] for mark in marks)
        super().__init__(image_processor, tokenizer, chat_template)

    @classmethod
    def published_chat_template(cls, tokenizer: Any) -> str:
        return CHAT_TEMPLATE

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """Load tokenizer, options and chat template from a directory or a repository of the Hub.

        Args:
            **kwargs: `tokenizer`, `image_processor`, `videos` and `chat_template` replace those of the directory;
                further arguments are passed to the tokenizer.

        Raises:
            DataError: a file of the processor is missing.
        """
        path = pretrained_model_name_or_path
        names = ("tokenizer", "image_processor", "videos", "chat_template")
        parts = {name: kwargs.pop(name, None) for name in names}
        kwargs.pop("trust_remote_code", None)
        hub = hub_options(kwargs)
        tokenizer = parts["tokenizer"] or AutoTokenizer.from_pretrained(path, **kwargs)
        images = parts["image_processor"] or MossVLImageProcessor(
            **asdict(ImagePixelOptions.from_file(path, IMAGE_PROCESSOR_NAME, **hub))
        )
        videos = parts["videos"] or VideoPixelOptions.from_file(path, VIDEO_FILE, **hub)
        return cls(images, tokenizer, videos, parts["chat_template"] or tokenizer.chat_template)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> list[str]:
        files = super().save_pretrained(save_directory, push_to_hub, **kwargs)
        path = Path(save_directory, VIDEO_FILE)
        path.write_text(json.dumps(asdict(self.videos), indent=2) + "\n", encoding="utf-8")
        return [*files, str(path)]

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as transformers prints them."""
        return {**super().to_dict(), "videos": asdict(self.videos)}

    @property
    def model_input_names(self) -> list[str]:
        names = ["input_ids", "attention_mask", "pixel_values", "grid_thw", "cross_attention_mask"]
        return [*names, "media_nums_per_sample"]

    def apply_chat_template(self, conversation: Any, *args: Any, tokenize: bool = False, **kwargs: Any) -> Any:
        """See `NativeProcessor.apply_chat_template`; with `tokenize`, texts are padded and tensors returned."""
        defaults: dict[str, Any] = {"padding": True, "return_tensors": "pt"} if tokenize else {}
        given: dict[str, Any] = defaults | kwargs | {"tokenize": tokenize}
        return super().apply_chat_template(conversation, *args, **given)

    def __call__(
        self,
        text: str | Sequence[str] | None = None,
        images: Any = None,
        videos: Any = None,
        labels_spans: Any = None,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> BatchFeature:
        """Return texts and their media as model inputs.

        Args:
            text: one text or several, with the marks `<|image|>` and `<|video|>`.
            images: one for each `<|image|>` of the texts, in order, or a list of them for each text.
            videos: one for each `<|video|>`. A video is a path or URL; {"video_path": path, "segments": segments}, in
                which each segment [start, end] or [time] in seconds is a video of its own; or its frames, whose times
                follow from `video_metadata` (`fps` and `frames_indices`), one for each video.
            labels_spans: the character ranges [start, end) of the answers in the text, or in each of several texts;
                adds `labels`: the tokens of the answers, `ignore_index` elsewhere, at placeholders, and within videos.
            **kwargs: arguments of transformers' tokenizers, by default without padding and without `return_tensors`;
                options of images and videos (`ImagePixelOptions`, `VideoPixelOptions`, `min_pixels`, `max_pixels`).

        Returns:
            `input_ids` and `attention_mask`; `pixel_values` (patches, values) and `grid_thw` (media, 3) of all media in
            the order of the text; `media_nums_per_sample`; and `cross_attention_mask` (B, 1, L, frames of a sample)
            bool, True where a frame is hidden. A text without media has a blank image, which is hidden.

        Raises:
            DataError: the numbers of marks and media differ, a medium has a size that is not supported, truncation cuts
                a placeholder off, or an argument is unknown or not supported.
        """
        texts = texts_of(text)
        if not all(map(str.strip, texts)):
            raise DataError(f"text is {text!r:.80}; pass a text, or a list of texts, none of them blank")
        for number, each in enumerate(texts):
            if tokens := [token for token in RESERVED if token in each]:
                raise DataError(f"text {number} contains {tokens[0]}; write {IMAGE} or {VIDEO} where a medium is shown")
        options = self._arguments(kwargs)
        marks = [MEDIA.findall(each) for each in texts]
        media = self._media(marks, images, videos, options["images_kwargs"], options["videos_kwargs"])
        spans = _spans_by_text(labels_spans, len(texts))
        expanded = [
            self.expand(each, [medium.text for medium in shown], ranges)
            for each, shown, ranges in zip(texts, media, spans, strict=True)
        ]
        return self._encoded(expanded, media, options["text_kwargs"], ignore_index, labels_spans is not None)

    def _encoded(
        self,
        expanded: Sequence[tuple[Piece, list[tuple[int, int]]]],
        media: Sequence[Sequence[MediumInputs]],
        text_kwargs: Mapping[str, Any],
        ignored: int,
        with_labels: bool,
    ) -> BatchFeature:
        arguments = {"return_token_type_ids": False} | dict(text_kwargs)
        tensors, keeps_offsets = arguments.pop("return_tensors", None), arguments.get("return_offsets_mapping", False)
        require_one_of("return_tensors", tensors, TENSORS, kind=DataError)
        arguments["return_offsets_mapping"] = keeps_offsets or with_labels
        data: dict[str, Any] = dict(self.tokenizer([piece.text for piece, _ in expanded], **arguments))
        ids = data["input_ids"]
        if with_labels:
            rows = zip(ids, data["offset_mapping"], (ranges for _, ranges in expanded), strict=True)
            data["labels"] = [self._labels(*row, ignored) for row in rows]
        offsets = data.pop("offset_mapping", None)
        if keeps_offsets:  # ranges of the caller's text
            data["offset_mapping"] = [
                [piece.formatted_range(*span) for span in row]
                for row, (piece, _) in zip(offsets, expanded, strict=True)
            ]
        if tensors is not None and len(set(map(len, ids))) > 1:
            raise DataError(f"the texts have {list(map(len, ids))} tokens, and padding is off; pass padding=True")
        shown = [list(sample) or [self.blank()] for sample in media]
        frames = [sum(medium.grid[0] for medium in sample) for sample in media]
        counts = [row.count(self.image_token_id) for row in ids]
        if counts != frames:
            raise DataError(
                f"the texts have {counts} placeholders for {frames} frames; max_length must not cut placeholders off, "
                "and the tokenizer must have them as one special token"
            )
        every = [medium for sample in shown for medium in sample]
        data["cross_attention_mask"] = hidden_frames(
            ids, data.get("attention_mask"), self.image_token_id, [max(1, count) for count in frames]
        )
        data["pixel_values"] = torch.cat([medium.patches for medium in every])
        data["grid_thw"] = torch.tensor([medium.grid for medium in every])
        data["media_nums_per_sample"] = [len(sample) for sample in shown]
        return BatchFeature(data, tensor_type=tensors, skip_tensor_conversion=["media_nums_per_sample"])

    def _labels(self, ids: list[int], offsets: Any, spans: Sequence[tuple[int, int]], ignored: int) -> list[int]:
        labels = [ignored] * len(ids)
        for start, stop in spans:
            within_video = False
            for number, (token, (first, last)) in enumerate(zip(ids, offsets, strict=True)):
                if last <= start or first >= stop:
                    continue
                if token in (self._open, self._close):
                    within_video = token == self._open
                elif not within_video and token != self.image_token_id:
                    labels[number] = token
        return labels

    def _media(
        self,
        marks: Sequence[Sequence[str]],
        images: Any,
        videos: Any,
        image_kwargs: Mapping[str, Any],
        video_kwargs: Mapping[str, Any],
    ) -> list[list[MediumInputs]]:
        """Return the media of each text in the order of its marks."""
        counts = {kind: [sample.count(kind) for sample in marks] for kind in (IMAGE, VIDEO)}
        of_images = self.image_processor.options.with_options(image_kwargs)
        of_videos = self.videos.with_options(video_kwargs)
        stills = flattened(None if images is None else frame_list(images), counts[IMAGE], IMAGE, "images")
        clips = [] if videos is None else clips_of(videos, of_videos, video_kwargs.get("video_metadata"))
        clips = flattened(clips, counts[VIDEO], VIDEO, "videos or segments", nested=False)
        encoded = self.image_processor.encoded(stills, of_images)
        shown = (MediumInputs(patches, grid, PLACEHOLDER) for patches, grid in encoded)
        inputs: dict[str, Iterator[MediumInputs]] = {IMAGE: shown, VIDEO: _videos(clips, of_videos)}
        return [[next(inputs[mark]) for mark in sample] for sample in marks]

    def blank(self) -> MediumInputs:
        """Return the image of a text without media: zeros, and no placeholder."""
        options = self.image_processor.options
        side = -(-BLANK_SIDE // options.factor) * options.factor // options.patch_size
        return MediumInputs(torch.zeros(side**2, 3 * options.patch_size**2), [1, side, side], "")

    @staticmethod
    def video_text(times: Sequence[float]) -> str:
        """Return the text of a video with frames at these seconds."""
        frames = (f"{TIME_START}{seconds:.1f} seconds{TIME_END}{PLACEHOLDER}" for seconds in times)
        return f"{VISION_START}{''.join(frames)}{VISION_END}"

    @staticmethod
    def expand(
        text: str, replacements: Sequence[str], spans: Sequence[tuple[int, int]] = ()
    ) -> tuple[Piece, list[tuple[int, int]]]:
        """Return the text with its marks replaced in order, and character ranges of it in the new text."""
        texts = iter(replacements)
        (piece,) = expand_media([Piece(text)], {IMAGE: texts, VIDEO: texts})

        def moved(place: int) -> int:
            longer = (stop - begin - end + start for begin, stop, start, end in piece.replaced if start < place)
            return place + sum(longer)

        return piece, [(moved(start), moved(stop)) for start, stop in spans]


def hidden_frames(ids: Sequence[Sequence[int]], mask: Any, placeholder: int, frames: Sequence[int]) -> Tensor:
    """Return (B, 1, L, most frames) bool, True where a frame is hidden: a row attends to the frames up to its place.

    Args:
        ids: the tokens of each text; shorter texts end before the others.
        mask: 0 at padding, whose rows attend to nothing; None without padding.
        placeholder: the token that stands for a frame.
        frames: the number of frames of each text.
    """
    length = max(map(len, ids))
    shown = torch.zeros(len(ids), length, dtype=torch.long)
    for number, row in enumerate(ids):
        count = (torch.tensor(row) == placeholder).long().cumsum(0)
        shown[number, : len(row)] = count if mask is None else count * (torch.tensor(mask[number]) == 1)
    return (shown[..., None] <= torch.arange(max(frames)))[:, None]


def _videos(clips: Sequence[TimedFrames], options: VideoPixelOptions) -> Iterator[MediumInputs]:
    sizes = options.sizes([(len(clip), *clip.size) for clip in clips])
    for clip, size in zip(clips, sizes, strict=True):
        patches = torch.cat([resized_patches(frames, size, options).flatten(0, 1) for frames in clip.frames()])
        yield MediumInputs(patches, [len(clip), *options.grid(size)], MossVLProcessor.video_text(clip.times))


def clips_of(videos: Any, options: VideoPixelOptions, metadata: Any = None) -> list[TimedFrames]:
    """Return the videos of a call; a video with segments gives one clip for each.

    Args:
        videos: see `MossVLProcessor.__call__`.
        options: which frames of a file are used.
        metadata: of videos that are given as frames, one for each video.
    """
    videos = [videos] if _is_file(videos) or getattr(videos, "ndim", 0) == 4 else list(videos)
    if videos and all(isinstance(x, (list, tuple)) and x and is_video(x[0]) for x in videos):
        videos = [video for sample in videos for video in sample]
    files = {
        number: scan(local_media(video["video_path"] if isinstance(video, Mapping) else video))
        for number, video in enumerate(videos)
        if _is_file(video)
    }
    most = dict(zip(files, options.frames_of_videos([info.duration for info in files.values()] or [0]), strict=False))
    clips: list[TimedFrames] = []
    for number, video in enumerate(videos):
        if number in files:
            segments = video.get("segments") if isinstance(video, Mapping) else None
            clips += _clips_of_file(files[number], segments, options, most[number])
        else:
            clips.append(_clip_of_frames(video, None if metadata is None else metadata[number]))
    return clips


def _is_file(video: Any) -> bool:
    return isinstance(video, (str, os.PathLike, Mapping))


def _clips_of_file(info: Any, segments: Any, options: VideoPixelOptions, most: int) -> list[TimedFrames]:
    ticks = info.ticks
    if segments is None:
        numbers = options.frame_numbers(info.frames, info.duration, most)
        source = VideoSource(info.plan(ticks[number] for number in numbers))
        return [TimedFrames(source, [number / info.fps for number in numbers])]
    begin = float(info.start * info.time_base)
    last = max(begin, min((info.frames - 1) / info.fps + begin, begin + info.duration - 1e-6))
    clips = []
    for wanted in options.with_options({"max_frames": most}).segment_times(segments):
        times = [max(begin, min(float(seconds), last)) for seconds in wanted]
        # A time that is a rounded number of seconds stands for the frame at exactly this time.
        places = [int((Fraction(seconds) + Fraction(1, 10**9)) / info.time_base) for seconds in times]
        clips.append(TimedFrames(VideoSource(info.plan(places)), times))
    return clips


def _clip_of_frames(video: Any, metadata: Any) -> TimedFrames:
    """Return frames as a clip: their times follow from the frame numbers and the rate in the metadata."""
    frames = torch.stack([to_tensor(frame, number) for number, frame in enumerate(frame_list(video))])
    if frames.dtype != torch.uint8:
        raise DataError(f"a video has frames of {frames.dtype}; pass levels from 0 to 255 as uint8")
    given = metadata if isinstance(metadata, Mapping) else vars(metadata) if metadata is not None else {}
    numbers, fps = given.get("frames_indices"), given.get("fps") or FPS_OF_FRAMES
    numbers = list(range(len(frames))) if numbers is None else [int(number) for number in numbers]
    if len(numbers) != len(frames):
        raise DataError(f"a video has {len(frames)} frames, and its metadata has {len(numbers)} frames_indices")
    return TimedFrames(frames, [number / fps for number in numbers])


def _spans_by_text(spans: Any, texts: int) -> list[list[tuple[int, int]]]:
    """Return the ranges of each text; those of a single text may be given without a list around them."""
    if spans is None:
        return [[] for _ in range(texts)]
    if spans and len(spans[0]) == 2 and isinstance(spans[0][0], int):
        spans = [spans]
    if len(spans) != texts:
        raise DataError(f"labels_spans has the ranges of {len(spans)} texts, and {texts} texts were passed")
    return [[(int(start), int(stop)) for start, stop in ranges] for ranges in spans]
