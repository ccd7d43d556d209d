"""Conversations, images and videos to what the model takes."""

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME

from mllm_seqpar.errors import ConfigError, DataError

from .chat import (
    IMAGE,
    VIDEO,
    Message,
    Piece,
    conversation_pieces,
    expand_media,
    media_parts,
    placeholders,
    text_pieces,
    video_text,
)
from .cutting import TEMPLATES, Grid, image_text
from .generations import processor_options
from .image_processing import Frame, ImageOptions, MPlugOwl3ImageProcessor, as_tensor, frame_list

_END_OF_DOCUMENT = "<|endoftext|>"
_OPTIONS = ("video_span", "cut_enable", "cut_template")
_IMAGE_OPTIONS = tuple(ImageOptions.__annotations__)
_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


class MPlugOwl3Processor(ProcessorMixin):
    """Text with placeholders, and frames.

    Prompts are token for token those of the published processors: media are expanded in the text, which is then cut at
    `<|image|>` alone, and each piece is tokenized by itself. `media_offset` is given as the positions of the
    placeholders, (B, N) with -1 where a sample has fewer, which models of all generations take. The position of a
    placeholder is that of its first token: published tokenizers make five ordinary tokens of it.

    A published processor of 7B-240728 that is given several still images writes the grid of another one for each but
    the first. Here each has its own grid. That model was not trained to see several images cut; `cut_enable=False`
    passes them whole.

    Attributes:
        image_processor: makes `pixel_values` of frames.
        tokenizer: any, with ChatML's marks.
        video_span: whether the frames of a video stand between `<|start_video_frame|>` and `<|end_video_frame|>`, as
            later published models were trained.
        cut_enable: whether still images are cut into tiles (`cutting`), each a frame. Frames of videos never are.
        cut_template: "v2" or "v3", the text that stands for an image that is cut.

    Raises:
        ConfigError: a template that does not exist.
    """

    def __init__(
        self,
        image_processor: MPlugOwl3ImageProcessor,
        tokenizer: Any,
        video_span: bool = False,
        cut_enable: bool = True,
        cut_template: str = "v2",
    ) -> None:
        if cut_template not in TEMPLATES:
            raise ConfigError(f"cut_template is {cut_template!r}; it is one of {', '.join(TEMPLATES)}")
        self.video_span = video_span
        self.cut_enable = cut_enable
        self.cut_template = cut_template
        super().__init__(image_processor, tokenizer)

    @classmethod
    def get_attributes(cls) -> list[str]:
        """The parts that are saved on their own."""
        return ["image_processor", "tokenizer"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """Load tokenizer and options from a directory or hub repository, published ones too.

        Published directories hold neither preprocessor_config.json nor processor_config.json. What no file states is
        that of the generation that the names of the weights show (`generations`).

        Args:
            pretrained_model_name_or_path: directory or hub repository.
            **kwargs: options of the processor (`video_span`, `cut_enable`, `cut_template`) and of its image processor
                (`image_size`, `image_mean`, `image_std`), which win over files and weights; the rest to the tokenizer.

        Raises:
            DataError: an option that nothing states, without weights that show the generation.
        """
        explicit = {name: kwargs.pop(name) for name in (*_OPTIONS, *_IMAGE_OPTIONS) if name in kwargs}
        hub = {name: kwargs[name] for name in _HUB if kwargs.get(name) is not None}
        files = {IMAGE_PROCESSOR_NAME: _IMAGE_OPTIONS, PROCESSOR_NAME: _OPTIONS}
        options = processor_options(pretrained_model_name_or_path, files, explicit, **hub)
        tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs)
        image_options = {name: options.pop(name) for name in _IMAGE_OPTIONS if name in options}
        return cls(MPlugOwl3ImageProcessor(**image_options), tokenizer, **options)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> list[str]:
        """Writes tokenizer, image processor and options beside a model's files."""
        if push_to_hub:
            raise DataError("push_to_hub is True; save to a directory and upload that")
        os.makedirs(save_directory, exist_ok=True)
        written = [*self.tokenizer.save_pretrained(save_directory, **kwargs)]
        written += self.image_processor.save_pretrained(save_directory)
        written.append(os.path.join(save_directory, PROCESSOR_NAME))
        options = {"processor_class": type(self).__name__} | {name: getattr(self, name) for name in _OPTIONS}
        with open(written[-1], "w", encoding="utf-8") as stream:
            json.dump(options, stream, indent=2)
            stream.write("\n")
        return written

    @property
    def model_input_names(self) -> list[str]:
        """Names of what a call returns for the model."""
        return ["input_ids", "attention_mask", "media_offset", "pixel_values"]

    def image_grid(self, height: int, width: int) -> Grid | None:
        """Return the (rows, columns) that a still image of that size is cut into; None if `cut_enable` is False."""
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
        """Return one conversation as text, or, with `tokenize`, as what the model takes, with its media.

        Args:
            conversation: messages; parts may hold their media: {"type": "video", "video": frames},
                {"type": "image", "image": picture}. A final assistant message of empty content is the beginning of an
                answer, as published; with `return_labels` it is an empty answer.
            chat_template: this format is the only one.
            add_generation_prompt: ends with the beginning of an answer.
            tokenize: whether to return tensors.
            images, videos: with `tokenize`, in place of what the parts hold; as for a call.
            **kwargs: with `tokenize`, for the call; `return_labels` too.
        """
        if chat_template is not None:
            raise DataError("chat_template was passed; mPLUG-Owl3 is trained with one format, which is built in")
        pieces = self._conversation(conversation, add_generation_prompt, kwargs.get("return_labels", False))
        if not tokenize:
            return "".join(piece.text for piece in pieces)
        images = media_parts(conversation, "image") if images is None else images
        videos = media_parts(conversation, "video") if videos is None else videos
        return self._call([pieces], images, videos, **kwargs)

    def __call__(
        self,
        images: Sequence[Frame] | Frame | None = None,
        text: str | Sequence[str] | None = None,
        videos: Sequence[Sequence[Frame] | np.ndarray | Tensor] | np.ndarray | Tensor | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Return formatted text and its media as what the model takes.

        Args:
            images: one for each `<|image|>` of the texts, in order.
            text: one sample or several, formatted already, with `<|image|>` and `<|video|>` where media stand.
            videos: the frames of each `<|video|>` of the texts, in order.
            **kwargs: `padding_side`; `cut_enable`, in place of the processor's.

        Returns:
            `input_ids` and `attention_mask` (B, L), `media_offset` (B, N), and with frames `pixel_values` (F, 3, H, W)
            in the order of the placeholders.

        Raises:
            DataError: placeholders and media that do not fit.
        """
        if text is None:
            raise DataError("text is None; pass text with a placeholder for each image and video")
        samples = [text_pieces(sample) for sample in ([text] if isinstance(text, str) else text)]
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
        """Return the text part alone, for frames that are elsewhere: on several ranks, on a disk, or encoded already.

        Args:
            conversations: one (a list of messages) or several.
            frames_per_video: frames of each video of all conversations, in order.
            image_grids: what each still image of all conversations is cut into, in order (`image_grid`): rows * columns
                + 1 frames, or one frame where it is None. Needed where there are images, unless `cut_enable` is False.
            add_generation_prompt: ends each with the beginning of an answer.
            return_labels: adds `labels`: the answers' tokens and their ends, -100 elsewhere.
            padding_side: "left" or "right"; the tokenizer's when None.

        Returns:
            `input_ids`, `attention_mask` and, on request, `labels`, (B, L), and `media_offset` (B, N): sample b has as
            many frames as its row has numbers that are not negative.

        Raises:
            DataError: malformed conversations, or numbers of videos or images that are not those of the placeholders.
        """
        batch: Any = [conversations] if conversations and "role" in conversations[0] else conversations
        samples = [self._conversation(messages, add_generation_prompt, return_labels) for messages in batch]
        return self._encode(samples, frames_per_video, image_grids, return_labels, padding_side)

    def batch_decode(self, *args: Any, **kwargs: Any) -> list[str]:
        """The tokenizer's."""
        return self.tokenizer.batch_decode(*args, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """The tokenizer's."""
        return self.tokenizer.decode(*args, **kwargs)

    def _conversation(self, messages: Sequence[Message], add_generation_prompt: bool, training: bool) -> list[Piece]:
        known = _END_OF_DOCUMENT in self.tokenizer.get_vocab()
        return conversation_pieces(
            messages,
            add_generation_prompt=add_generation_prompt,
            end_of_document=_END_OF_DOCUMENT if known else "",
            training=training,
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
        # transformers' own callers pass these; what comes out is always padded tensors.
        left_over = set(unknown) - {"return_tensors", "return_dict", "padding", "add_special_tokens"}
        if left_over:
            raise DataError(f"unknown arguments: {', '.join(sorted(left_over))}")
        if isinstance(videos, (np.ndarray, Tensor)) and videos.ndim == 4:
            videos = [videos]  # one video, not as many as it has frames
        videos = [] if videos is None else list(videos)
        pictures = [
            as_tensor(image, number) for number, image in enumerate([] if images is None else frame_list(images))
        ]
        kinds = [kind for sample in samples for kind in placeholders(sample)]
        if (wanted := kinds.count(IMAGE)) != len(pictures):
            raise DataError(f"the text has {wanted} {IMAGE} and {len(pictures)} images were passed; pass as many")
        cut = self.cut_enable if cut_enable is None else cut_enable
        grids = [self.image_processor.grid(*picture.shape[1:]) if cut else None for picture in pictures]
        encoded = self._encode(samples, [len(video) for video in videos], grids, return_labels, padding_side)
        image, video = iter(zip(pictures, grids, strict=True)), iter(videos)
        frames: list[Frame] = []
        for kind in kinds:
            if kind == VIDEO:
                frames.extend(next(video))
            else:
                picture, grid = next(image)
                frames.extend([picture] if grid is None else self.image_processor.tiles(picture, grid))
        if frames:
            encoded["pixel_values"] = self.image_processor(frames)["pixel_values"]
        return encoded

    def _expanded(
        self, samples: list[list[Piece]], frames_per_video: Sequence[int], image_grids: Sequence[Grid | None] | None
    ) -> list[list[Piece]]:
        """Return the samples with a placeholder for each frame."""
        kinds = [kind for sample in samples for kind in placeholders(sample)]
        videos, images = kinds.count(VIDEO), kinds.count(IMAGE)
        if videos != len(frames_per_video):
            raise DataError(
                f"{len(frames_per_video)} videos were passed and the text has {videos} {VIDEO}; pass as many"
            )
        if image_grids is None and images and self.cut_enable:
            raise DataError(
                f"the text has {images} {IMAGE}, and cut_enable is True: pass image_grids, one "
                "image_grid(height, width) for each image, or use a processor with cut_enable=False"
            )
        if image_grids is not None and images != len(image_grids):
            raise DataError(f"image_grids has {len(image_grids)} grids and the text has {images} {IMAGE}; pass as many")
        texts = {
            VIDEO: (video_text(count, span=self.video_span) for count in frames_per_video),
            IMAGE: (
                image_text(grid, self.cut_template)
                for grid in ([None] * images if image_grids is None else image_grids)
            ),
        }
        return [expand_media(sample, texts) for sample in samples]

    def _encode(
        self,
        samples: list[list[Piece]],
        frames_per_video: Sequence[int],
        image_grids: Sequence[Grid | None] | None,
        return_labels: bool,
        padding_side: str | None,
    ) -> BatchFeature:
        rows = [self._row(sample) for sample in self._expanded(samples, frames_per_video, image_grids)]
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
        for sample, (ids, learned, positions) in enumerate(rows):
            start = length - len(ids) if side == "left" else 0
            own = slice(start, start + len(ids))
            data["input_ids"][sample, own] = torch.tensor(ids, dtype=torch.long)
            data["attention_mask"][sample, own] = 1
            data["media_offset"][sample, : len(positions)] = torch.tensor(positions, dtype=torch.long) + start
            if return_labels:
                kept = [token if is_learned else -100 for token, is_learned in zip(ids, learned, strict=True)]
                data["labels"][sample, own] = torch.tensor(kept, dtype=torch.long)
        return BatchFeature(data)

    def _row(self, pieces: Iterable[Piece]) -> tuple[list[int], list[bool], list[int]]:
        """Return the tokens of a sample, which of them are learned, and where the placeholders begin."""
        ids: list[int] = []
        learned: list[bool] = []
        positions: list[int] = []
        placeholder = self._tokens(IMAGE)
        for piece in pieces:
            for number, text in enumerate(piece.text.split(IMAGE)):
                if number:
                    positions.append(len(ids))
                    ids += placeholder
                ids += self._tokens(text) if text else []
            learned += [piece.learned] * (len(ids) - len(learned))
        return ids, learned, positions

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
