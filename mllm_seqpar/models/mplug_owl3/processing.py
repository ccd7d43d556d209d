"""The processor: conversations, images and videos to model inputs."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.feature_extraction_utils import BatchFeature
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.models.processor import NativeProcessor

from . import chat
from .chat import IMAGE, TEMPLATES, VIDEO, Message, Piece
from .checkpoint import hub_options, processor_options
from .configuration import MPlugOwl3Config
from .image_processing import Frame, Grid, ImageOptions, MPlugOwl3ImageProcessor, frame_list, to_tensor

_END_OF_DOCUMENT = "<|endoftext|>"
_OPTIONS = ("video_span", "cut_enable", "cut_template")
_IMAGE_OPTIONS = tuple(ImageOptions.__annotations__)


class MPlugOwl3Processor(NativeProcessor):
    """Tokenize text with placeholders and preprocess frames.

    Prompts equal those of the published processors token for token: media are expanded in the text, the text is split
    at `<|image|>`, and each piece is tokenized separately. `media_offset` contains the positions of the placeholders,
    (B, N), padded with -1, a form that models of all generations accept. The position of a placeholder is that of its
    first token: published tokenizers encode it as five ordinary tokens.

    The published processor of 7B-240728 writes the grid of the first of several still images for all of them. Here each
    image has its own grid. That model was not trained on several cut images; `cut_enable=False` passes them whole.

    Attributes:
        tokenizer: any tokenizer with ChatML's marks.
        video_span: put the frames of a video between `<|start_video_frame|>` and `<|end_video_frame|>`, as in the
            training of later published models.
        cut_enable: cut still images into tiles, each of which is a frame. Frames of videos are never cut.
        cut_template: "v2" or "v3", the form of the text that stands for a cut image.

    Raises:
        ConfigError: an unknown template.
    """

    model_type = MPlugOwl3Config.model_type
    saved_options = _OPTIONS

    def __init__(
        self,
        image_processor: MPlugOwl3ImageProcessor,
        tokenizer: Any,
        video_span: bool = False,
        cut_enable: bool = True,
        cut_template: str = "v2",
    ) -> None:
        if cut_template not in TEMPLATES:
            raise ConfigError(f"cut_template is {cut_template!r}; expected one of {', '.join(TEMPLATES)}")
        self.video_span, self.cut_enable, self.cut_template = video_span, cut_enable, cut_template
        super().__init__(image_processor, tokenizer)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """Load tokenizer and options from a directory or hub repository, saved or published.

        Published directories hold neither preprocessor_config.json nor processor_config.json. Options that no file
        states are those of the generation that the names of the weights identify (`checkpoint.processor_options`).

        Args:
            **kwargs: options of the processor (`video_span`, `cut_enable`, `cut_template`) and of its image processor
                (`image_size`, `image_mean`, `image_std`), which take precedence over files and weights; further
                arguments are passed to the tokenizer.

        Raises:
            DataError: an option is not stated anywhere, and no weights identify the generation.
        """
        explicit = {name: kwargs.pop(name) for name in (*_OPTIONS, *_IMAGE_OPTIONS) if name in kwargs}
        files = {IMAGE_PROCESSOR_NAME: _IMAGE_OPTIONS, PROCESSOR_NAME: _OPTIONS}
        options = processor_options(pretrained_model_name_or_path, files, explicit, **hub_options(kwargs))
        tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs)
        image_options = {name: options.pop(name) for name in _IMAGE_OPTIONS if name in options}
        return cls(MPlugOwl3ImageProcessor(**image_options), tokenizer, **options)

    @property
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "media_offset", "pixel_values"]

    def image_grid(self, height: int, width: int) -> Grid | None:
        """Return the grid that a still image of this size is cut into; None if `cut_enable` is False."""
        return self.image_processor.grid(height, width) if self.cut_enable else None

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        chat_template: None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        images: Sequence[Frame] | Frame | None = None,
        videos: Sequence[Sequence[Frame] | np.ndarray | Tensor] | np.ndarray | Tensor | None = None,
        **kwargs: Any,
    ) -> str | BatchFeature:
        """Return one conversation as text, or, with `tokenize`, as model inputs with its media.

        Args:
            conversation: messages; parts may contain their media: {"type": "video", "video": frames},
                {"type": "image", "image": picture}. A final assistant message of empty content is the beginning of an
                answer, as published; with `return_labels` it is an empty answer.
            chat_template: must be None; there is only one format.
            add_generation_prompt: end with the beginning of an answer.
            images, videos: with `tokenize`, used in place of the media in the parts, in the form of `__call__`.
            **kwargs: with `tokenize`, arguments of `__call__`, and `return_labels`.
        """
        if chat_template is not None:
            raise DataError("chat_template is not None; mPLUG-Owl3 has one built-in format: leave it out")
        pieces = self._conversation(conversation, add_generation_prompt, kwargs.get("return_labels", False))
        if not tokenize:
            return "".join(piece.text for piece in pieces)
        images = chat.media_of(conversation, "image") if images is None else images
        videos = chat.media_of(conversation, "video") if videos is None else videos
        return self._call([pieces], images, videos, **kwargs)

    def __call__(
        self,
        images: Sequence[Frame] | Frame | None = None,
        text: str | Sequence[str] | None = None,
        videos: Sequence[Sequence[Frame] | np.ndarray | Tensor] | np.ndarray | Tensor | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Return formatted text and its media as model inputs.

        Args:
            images: one for each `<|image|>` of the texts, in order.
            text: one formatted sample or several, with the placeholders `<|image|>` and `<|video|>`.
            videos: the frames of each `<|video|>` of the texts, in order.
            **kwargs: `padding_side`; `cut_enable`, in place of the processor's.

        Returns:
            `input_ids` and `attention_mask` (B, L), `media_offset` (B, N), and with frames `pixel_values` (F, 3, H, W)
            in the order of the placeholders.

        Raises:
            DataError: the numbers of placeholders and media differ.
        """
        if text is None:
            raise DataError("text is None; pass text with a placeholder for each image and video")
        samples = [chat.text_pieces(sample) for sample in ([text] if isinstance(text, str) else text)]
        return self._call(samples, images, videos, **kwargs)

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
        return self._encode(self._expand(samples, frames_per_video, image_grids), return_labels, padding_side)

    def _conversation(self, messages: Sequence[Message], add_generation_prompt: bool, training: bool) -> list[Piece]:
        end = _END_OF_DOCUMENT if _END_OF_DOCUMENT in self.tokenizer.get_vocab() else ""
        return chat.conversation_pieces(
            messages, add_generation_prompt=add_generation_prompt, end_of_document=end, training=training
        )

    def _call(
        self,
        samples: list[list[Piece]],
        images: Any,
        videos: Any,
        *,
        cut_enable: bool | None = None,
        padding_side: str | None = None,
        return_labels: bool = False,
        **unknown: Any,
    ) -> BatchFeature:
        self.check_arguments(unknown)
        if isinstance(videos, (np.ndarray, Tensor)) and videos.ndim == 4:
            videos = [videos]  # a single video
        videos = [] if videos is None else list(videos)
        images = [] if images is None else frame_list(images)
        pictures = [to_tensor(image, number) for number, image in enumerate(images)]
        kinds = chat.placeholders(samples)
        if (wanted := kinds.count(IMAGE)) != len(pictures):
            raise DataError(f"the text has {wanted} {IMAGE} and {len(pictures)} images were passed; pass one for each")
        cut = self.cut_enable if cut_enable is None else cut_enable
        grids = [self.image_processor.grid(*picture.shape[1:]) if cut else None for picture in pictures]
        expanded = self._expand(samples, [len(video) for video in videos], grids)
        encoded = self._encode(expanded, return_labels, padding_side)
        tiles = self.image_processor.tiles
        stills = ([x] if grid is None else tiles(x, grid) for x, grid in zip(pictures, grids, strict=True))
        media = {VIDEO: iter(videos), IMAGE: stills}
        frames: list[Frame] = [frame for kind in kinds for frame in next(media[kind])]
        if frames:
            encoded["pixel_values"] = self.image_processor(frames)["pixel_values"]
        return encoded

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

    def _encode(self, samples: list[list[Piece]], return_labels: bool, padding_side: str | None) -> BatchFeature:
        rows = [self._row(sample) for sample in samples]
        side = padding_side or getattr(self.tokenizer, "padding_side", "right")
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        length, most = (max((len(row[part]) for row in rows), default=0) for part in (0, 2))
        data = {
            "input_ids": torch.full((len(rows), length), pad),
            "attention_mask": torch.zeros(len(rows), length, dtype=torch.long),
            "media_offset": torch.full((len(rows), most), -1),
        }
        if return_labels:
            data["labels"] = torch.full((len(rows), length), -100)
        for sample, (ids, labels, positions) in enumerate(rows):
            start = length - len(ids) if side == "left" else 0
            columns = slice(start, start + len(ids))
            data["input_ids"][sample, columns] = torch.tensor(ids, dtype=torch.long)
            data["attention_mask"][sample, columns] = 1
            data["media_offset"][sample, : len(positions)] = torch.tensor(positions, dtype=torch.long) + start
            if return_labels:
                data["labels"][sample, columns] = torch.tensor(labels, dtype=torch.long)
        return BatchFeature(data)

    def _row(self, pieces: Iterable[Piece]) -> tuple[list[int], list[int], list[int]]:
        """Return the tokens of a sample, its labels, and where the placeholders begin."""
        ids: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        placeholder = self._tokens(IMAGE)
        for piece in pieces:
            for number, text in enumerate(piece.text.split(IMAGE)):
                if number:
                    positions.append(len(ids))
                    ids += placeholder
                ids += self._tokens(text) if text else []
            added = ids[len(labels) :]
            labels += added if piece.is_target else [-100] * len(added)
        return ids, labels, positions

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
