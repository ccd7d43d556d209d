"""The processor: conversations, images and videos to model inputs.

Samples become rows of token ids (`token_rows`): pieces of text are tokenized one by one, then truncated and padded.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import VideosKwargs
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME

from mllm_seqpar.chats.clip import VideoSource
from mllm_seqpar.errors import DataError, require_one_of
from mllm_seqpar.models.hub import hub_options
from mllm_seqpar.models.mplug_owl3.checkpoint import processor_options
from mllm_seqpar.models.mplug_owl3.configuration import MPlugOwl3Config
from mllm_seqpar.processors.base import (
    PARTS,
    TEXT_ARGUMENTS,
    NativeProcessor,
    flattened,
    frame_list,
    is_video,
    returned,
    texts_of,
)

from . import chat
from .chat import IMAGE, TEMPLATES, VIDEO, Message, Piece
from .image_processing import Grid, ImageOptions, MPlugOwl3ImageProcessor

_END_OF_DOCUMENT = "<|endoftext|>"
_OPTIONS = ("video_span", "cut_enable", "cut_template")
_IMAGE_OPTIONS = tuple(ImageOptions.__annotations__)


_OF_VIDEOS = {"fps", "num_frames", "do_sample_frames"}

SUPPORTED = {
    "text_kwargs": TEXT_ARGUMENTS,
    "images_kwargs": {"cut_enable", *_IMAGE_OPTIONS},
    "videos_kwargs": _OF_VIDEOS | (set(_IMAGE_OPTIONS) & set(VideosKwargs.__annotations__) - {"input_data_format"}),
}
"""The arguments that a call takes, by modality; the format has no special tokens that a tokenizer adds."""


class MPlugOwl3Processor(NativeProcessor):
    """Tokenize text with placeholders and preprocess frames.

    Prompts equal those of the published processors token for token: media are expanded in the text, the text is split
    at `<|image|>`, and each piece is tokenized separately. `media_offset` contains the positions of the placeholders,
    (B, N), padded with -1, a form that models of all generations accept. The position of a placeholder is the position
    of its first token: published tokenizers encode it as five ordinary tokens.

    The published processor of 7B-240728 writes the grid of the first of several still images for all of them. Here each
    image has its own grid. That model was not trained on several cut images; `cut_enable=False` passes them whole.

    Attributes:
        tokenizer: any tokenizer with ChatML's marks.
        video_span: put the frames of a video between `<|start_video_frame|>` and `<|end_video_frame|>`, as in the
            training of later published models.
        cut_enable: cut still images into tiles, each of which is a frame. Frames of videos are never cut.
        cut_template: "v2" or "v3", the form of the text that stands for a cut image.
        chat_template: Jinja; the published format by default. It writes `<|image|>` for an image and `<|video|>` for a
            video, and has each answer in a `{% generation %}` block.

    Raises:
        ConfigError: an unknown template.
    """

    model_type = MPlugOwl3Config.model_type
    saved_options = _OPTIONS
    supported_arguments = SUPPORTED
    image_token, video_token = IMAGE, VIDEO

    def __init__(
        self,
        image_processor: MPlugOwl3ImageProcessor,
        tokenizer: Any,
        video_span: bool = False,
        cut_enable: bool = True,
        cut_template: str = "v2",
        chat_template: Any = None,
    ) -> None:
        require_one_of("cut_template", cut_template, TEMPLATES)
        self.video_span, self.cut_enable, self.cut_template = video_span, cut_enable, cut_template
        super().__init__(image_processor, tokenizer, chat_template)

    @classmethod
    def published_chat_template(cls, tokenizer: Any) -> str:
        return chat.chat_template(_END_OF_DOCUMENT if _END_OF_DOCUMENT in tokenizer.get_vocab() else "")

    def check_conversation(self, messages: Sequence[Message]) -> None:
        chat.check_conversation(messages)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """Load tokenizer and options from a directory or hub repository, saved or published.

        Published directories hold neither preprocessor_config.json nor processor_config.json. Options that are in
        no file follow from the generation that the names of the weights identify (`checkpoint.processor_options`).

        Args:
            **kwargs: options of the processor (`video_span`, `cut_enable`, `cut_template`, `chat_template`) and of its
                image processor (`image_size`, `do_normalize` and the others), which take precedence over files and
                weights; `tokenizer` and `image_processor` replace those of the directory; further arguments are passed
                to the tokenizer.

        Raises:
            DataError: an option is not stated anywhere, and no weights identify the generation.
        """
        explicit = {name: kwargs.pop(name) for name in (*_OPTIONS, *_IMAGE_OPTIONS) if name in kwargs}
        files = {IMAGE_PROCESSOR_NAME: _IMAGE_OPTIONS, PROCESSOR_NAME: _OPTIONS}
        hub = hub_options(kwargs)
        parts = {name: kwargs.pop(name, None) for name in PARTS}
        options = processor_options(pretrained_model_name_or_path, files, explicit, **hub)
        image_options = {x: options.pop(x) for x in _IMAGE_OPTIONS if x in options}
        images = partial(MPlugOwl3ImageProcessor, **image_options)
        return cls._of_directory(pretrained_model_name_or_path, parts, images, options=options, hub=hub, **kwargs)

    @property
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "media_offset", "pixel_values"]

    def image_grid(self, height: int, width: int) -> Grid | None:
        """Return the grid that a still image of this size is cut into; None if `cut_enable` is False."""
        return self.image_processor.grid(height, width) if self.cut_enable else None

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        videos: Any = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Return formatted text and its media as model inputs.

        Args:
            images: one for each `<|image|>` of the texts, in order, or a list of them for each text: images, arrays,
                tensors, paths or URLs.
            text: one formatted sample or several, with the placeholders `<|image|>` and `<|video|>`.
            videos: one for each `<|video|>` of the texts, in order, or a list of them for each text. A video is a list
                of frames, an array of them, or a path or URL; the frames of a file are chosen by `fps`, 1 by default,
                or `num_frames`.
            **kwargs: `cut_enable`, instead of the processor's; of transformers' arguments of texts `padding` (True by
                default), `padding_side`, `pad_to_multiple_of`, `max_length`, `truncation`, `return_offsets_mapping`
                (ranges in `text`) and `return_tensors` ("pt" by default); the options of the image processor, instead
                of its own. `text_kwargs`, `images_kwargs` and `videos_kwargs` may contain them.

        Returns:
            `input_ids` and `attention_mask` (B, L), `media_offset` (B, N), and with frames `pixel_values` (F, 3, H, W)
            in the order of the placeholders.

        Raises:
            DataError: the numbers of placeholders and media differ, or an argument is unknown or not supported.
        """
        texts, arguments = texts_of(text), self._arguments(kwargs)
        return self._call([chat.text_pieces(sample) for sample in texts], images, videos, arguments)

    def encode(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        frames_per_video: Sequence[int] = (),
        image_grids: Sequence[Grid | None] | None = None,
        add_generation_prompt: bool = False,
        return_labels: bool = False,
        padding_side: str | None = None,
    ) -> BatchFeature:
        """Tokenize conversations without their frames, which may be sharded over ranks, on disk, or already encoded.

        Args:
            conversations: one (a list of messages) or several.
            frames_per_video: number of frames of each video of all conversations, in order.
            image_grids: the grid of each still image of all conversations, in order (`image_grid`): an image has
                rows * columns + 1 frames, or one frame if its grid is None. Required if there are images, unless
                `cut_enable` is False.
            add_generation_prompt: end each conversation with the beginning of an answer.
            return_labels: add `labels`: the tokens of the answers and their ends, -100 elsewhere.

        Returns:
            `input_ids`, `attention_mask` and, on request, `labels`, (B, L), and `media_offset` (B, N), whose row has
            one non-negative position for each frame of the sample.

        Raises:
            DataError: malformed conversations, or the numbers of videos or images are not those of the placeholders.
        """
        batch: Any = [conversations] if conversations and "role" in conversations[0] else conversations
        samples = [self._conversation(messages, add_generation_prompt, return_labels) for messages in batch]
        expanded = self._expand(samples, frames_per_video, image_grids)
        return BatchFeature(self._tokenized(expanded, return_labels=return_labels, padding_side=padding_side))

    def _conversation(self, messages: Sequence[Message], add_generation_prompt: bool, training: bool) -> list[Piece]:
        self.check_conversation(messages)
        (text,), spans = self._render(
            [messages], marked=training, training=training, add_generation_prompt=add_generation_prompt
        )
        return chat.text_pieces(text, spans[0] if spans else ())

    def _call(
        self, samples: list[list[Piece]], images: Any, videos: Any, arguments: Mapping[str, Mapping[str, Any]]
    ) -> BatchFeature:
        counts = {kind: [chat.placeholders([sample]).count(kind) for sample in samples] for kind in (IMAGE, VIDEO)}
        if isinstance(videos, (str, os.PathLike)) or (isinstance(videos, (np.ndarray, Tensor)) and videos.ndim == 4):
            videos = [videos]  # a single video
        clips = [] if videos is None else videos_of(videos, counts[VIDEO], arguments["videos_kwargs"])
        processor, stills, grids = self._stills(images, counts[IMAGE], arguments["images_kwargs"])
        expanded = self._expand(samples, [len(clip) for clip in clips], grids)
        options, tensors = row_options(arguments["text_kwargs"]), arguments["text_kwargs"].get("return_tensors")
        if options["padding"] or tensors is not None:
            encoded = self._tokenized(expanded, **options)
        else:  # lists of several lengths
            rows = [self._tokenized([sample], **options) for sample in expanded]
            encoded = {name: [row[name][0].tolist() for row in rows] for name in rows[0]}
        videos = self.image_processor.with_options(frame_options(arguments["videos_kwargs"]))
        tiles = ([x] if grid is None else processor.tiles(x, grid) for x, grid in zip(stills, grids, strict=True))
        media = {VIDEO: map(videos, clips), IMAGE: map(processor, tiles)}
        pixels = [next(media[kind])["pixel_values"] for kind in chat.placeholders(samples)]
        if len(sizes := {tuple(x.shape[2:]) for x in pixels if len(x)}) > 1:
            raise DataError(f"the options give frames of the sizes {sorted(sizes)}; pass options that give one size")
        if pixels:
            encoded["pixel_values"] = torch.cat(pixels)
        return returned(encoded, tensors)

    def _stills(
        self, images: Any, counts: Sequence[int], options: Mapping[str, Any]
    ) -> tuple[MPlugOwl3ImageProcessor, list[Tensor], list[Grid | None]]:
        """Return the image processor of these options, the still images (3, H, W), and their grids."""
        processor, layout = self.image_processor.with_options(frame_options(options)), options.get("input_data_format")
        listed = flattened(None if images is None else frame_list(images), counts, IMAGE, "images")
        stills = [processor.process_image(x, input_data_format=layout, number=n) for n, x in enumerate(listed)]
        cut = options.get("cut_enable")
        cut = self.cut_enable if cut is None else cut
        if cut and stills and not processor.do_resize:
            raise DataError("do_resize is False and cut_enable is True, which resizes images; pass cut_enable=False")
        return processor, stills, [processor.grid(*image.shape[1:]) if cut else None for image in stills]

    def _expand(
        self, samples: list[list[Piece]], frames_per_video: Sequence[int], image_grids: Sequence[Grid | None] | None
    ) -> list[list[Piece]]:
        """Return the samples with one placeholder for each frame."""
        kinds = chat.placeholders(samples)
        videos, images = kinds.count(VIDEO), kinds.count(IMAGE)
        if videos != len(frames_per_video):
            raise DataError(
                f"{len(frames_per_video)} videos were passed and the text has {videos} {VIDEO}; pass one for each"
            )
        if image_grids is None and images and self.cut_enable:
            raise DataError(
                f"the text has {images} {IMAGE}, and cut_enable is True: pass image_grids, one "
                "image_grid(height, width) for each image, or use a processor with cut_enable=False"
            )
        if image_grids is not None and images != len(image_grids):
            raise DataError(
                f"image_grids has {len(image_grids)} grids and the text has {images} {IMAGE}; pass one for each"
            )
        grids = [None] * images if image_grids is None else image_grids
        texts = {
            VIDEO: (chat.video_text(count, span=self.video_span) for count in frames_per_video),
            IMAGE: (chat.image_text(grid, self.cut_template) for grid in grids),
        }
        return [chat.expand_media(sample, texts) for sample in samples]

    def _tokenized(self, samples: list[list[Piece]], *, padding_side: str | None, **options: Any) -> dict[str, Any]:
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        side = str(padding_side or getattr(self.tokenizer, "padding_side", "right"))
        return token_rows(self.tokenizer, samples, pad=pad, padding_side=side, **options)


def frame_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the image processor among the arguments of images or of videos."""
    return {
        name: arguments[name]
        for name in set(_IMAGE_OPTIONS) - {"return_tensors", "input_data_format"}
        if name in arguments
    }


def row_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `token_rows` for those of transformers' tokenizers."""
    padding, longest = arguments.get("padding"), arguments.get("max_length")
    to_longest = padding in (True, "longest", "max_length")
    if padding == "max_length" and longest is None:
        raise DataError("padding is 'max_length' and max_length is not given; pass max_length")
    truncated = arguments.get("truncation") in (True, "longest_first", "only_first")
    return {
        "padding": to_longest,
        "padding_side": arguments.get("padding_side"),
        "padded_length": longest if padding == "max_length" else None,
        "multiple_of": arguments.get("pad_to_multiple_of"),
        "most_tokens": longest if truncated else None,
        "return_offsets": bool(arguments.get("return_offsets_mapping")),
    }


def videos_of(videos: Any, counts: Sequence[int], options: Mapping[str, Any]) -> list[Any]:
    """Return the frames of each video in one list; files are decoded."""
    videos = list(videos)
    nested = bool(videos) and all(isinstance(x, (list, tuple)) and (not x or is_video(x[0])) for x in videos)
    videos = flattened(videos, counts, VIDEO, "videos", nested)
    sampling = {name: options[name] for name in ("fps", "num_frames") if options.get(name)}
    if sampling and (decoded := [x for x in videos if not isinstance(x, (str, os.PathLike))]):
        raise DataError(
            f"{', '.join(sampling)}: {len(decoded)} of the videos are frames already; choose the frames before, or "
            "pass the path of the file"
        )
    return [_decoded(x, sampling) if isinstance(x, (str, os.PathLike)) else x for x in videos]


def _decoded(path: str | os.PathLike, sampling: Mapping[str, Any]) -> Tensor:
    """Return the frames (n, 3, H, W) of a video file or URL, by the rules of all commands of this package."""
    source = VideoSource.open(path, **(sampling or {"fps": 1.0}))
    return torch.cat(list(source.read(0, len(source))))


class _Row(NamedTuple):
    """A tokenized sample.

    Attributes:
        ids: the tokens.
        labels: the tokens of the answers, -100 elsewhere.
        positions: where the placeholders begin.
        offsets: for each token its range in the formatted text, if requested.
    """

    ids: list[int]
    labels: list[int]
    positions: list[int]
    offsets: list[tuple[int, int]]


def token_rows(
    tokenizer: Any,
    samples: Sequence[Iterable[Piece]],
    *,
    pad: int,
    padding_side: str,
    padding: bool = True,
    padded_length: int | None = None,
    multiple_of: int | None = None,
    most_tokens: int | None = None,
    return_labels: bool = False,
    return_offsets: bool = False,
) -> dict[str, Any]:
    """Return `input_ids` and `attention_mask` (B, L), `media_offset` (B, N), and what else is requested.

    Args:
        tokenizer: tokenizes a piece without special tokens.
        samples: pieces with one placeholder for each frame.
        pad: the padding token; labels are padded with -100, positions with -1.
        padding: False requires texts of equal length.
        padded_length: the minimum length of the rows.
        multiple_of: the length of the rows is a multiple of this number.
        most_tokens: longer samples are truncated on the tokenizer's `truncation_side`.
        return_labels: add `labels` (B, L).
        return_offsets: add `offset_mapping` (B, L, 2).

    Raises:
        DataError: truncation would cut placeholders off, or the texts have several lengths and are not padded.
    """
    placeholder: list[int] = tokenizer(IMAGE, add_special_tokens=False)["input_ids"]
    rows = [_row(tokenizer, pieces, placeholder, return_offsets) for pieces in samples]
    if most_tokens is not None:
        from_left = getattr(tokenizer, "truncation_side", "right") == "left"
        rows = [_truncated(*row, len(placeholder), most_tokens, from_left) for row in enumerate(rows)]
    lengths = [len(row.ids) for row in rows]
    length = max([padded_length or 0, *lengths])
    length += -length % (multiple_of or 1)
    if not padding:
        if len(set(lengths)) > 1:
            raise DataError(f"the texts have {lengths} tokens, and padding is off; pass padding=True")
        length = lengths[0] if lengths else 0
    most = max((len(row.positions) for row in rows), default=0)
    data: dict[str, Any] = {
        "input_ids": torch.full((len(rows), length), pad),
        "attention_mask": torch.zeros(len(rows), length, dtype=torch.long),
        "media_offset": torch.full((len(rows), most), -1),
    }
    if return_labels:
        data["labels"] = torch.full((len(rows), length), -100)
    if return_offsets:
        data["offset_mapping"] = torch.zeros(len(rows), length, 2, dtype=torch.long)
    for sample, row in enumerate(rows):
        start = length - len(row.ids) if padding_side == "left" else 0
        columns = slice(start, start + len(row.ids))
        data["input_ids"][sample, columns] = torch.tensor(row.ids, dtype=torch.long)
        data["attention_mask"][sample, columns] = 1
        data["media_offset"][sample, : len(row.positions)] = torch.tensor(row.positions, dtype=torch.long) + start
        if return_labels:
            data["labels"][sample, columns] = torch.tensor(row.labels, dtype=torch.long)
        if row.offsets:
            data["offset_mapping"][sample, columns] = torch.tensor(row.offsets, dtype=torch.long)
    return data


def _row(tokenizer: Any, pieces: Iterable[Piece], placeholder: list[int], with_offsets: bool) -> _Row:
    row = _Row([], [], [], [])
    for piece in pieces:
        at = 0
        for number, text in enumerate(piece.text.split(IMAGE)):
            if number:
                row.positions.append(len(row.ids))
                row.ids.extend(placeholder)
                if with_offsets:
                    row.offsets.extend([piece.formatted_range(at, at + len(IMAGE))] * len(placeholder))
                at += len(IMAGE)
            if text:
                encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=with_offsets)
                row.ids.extend(encoded["input_ids"])
                if with_offsets:
                    row.offsets.extend(piece.formatted_range(at + x, at + y) for x, y in encoded["offset_mapping"])
            at += len(text)
        added = row.ids[len(row.labels) :]
        row.labels.extend(added if piece.is_target else [-100] * len(added))
    return row


def _truncated(number: int, row: _Row, placeholder: int, most: int, from_left: bool) -> _Row:
    """Return at most `most` tokens of a sample; `placeholder` is the number of tokens of a placeholder."""
    cut = len(row.ids) - most
    if cut <= 0:
        return row
    first = cut if from_left else 0
    lost = sum(not first <= position <= first + most - placeholder for position in row.positions)
    if lost:
        raise DataError(
            f"text {number} has {len(row.ids)} tokens, and max_length={most} cuts off {lost} of its "
            f"{len(row.positions)} placeholders of frames; raise max_length, or pass truncation=False"
        )
    kept = slice(first, first + most)
    return _Row(row.ids[kept], row.labels[kept], [p - first for p in row.positions], row.offsets[kept])
