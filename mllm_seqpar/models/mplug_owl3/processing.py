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
from transformers.utils import PROCESSOR_NAME, cached_file

from mllm_seqpar.errors import DataError

from .chat import IMAGE, VIDEO, Message, Piece, conversation_pieces, expand_videos, media_parts, text_pieces
from .image_processing import Frame, MPlugOwl3ImageProcessor, frame_list

_END_OF_DOCUMENT = "<|endoftext|>"
_OPTIONS = ("video_span",)


class MPlugOwl3Processor(ProcessorMixin):
    """Text with placeholders, and frames.

    Placeholders are tokenised apart from the text around them. `media_offset` is given as their positions, (B, N) with
    -1 where a sample has fewer, which models of both variants take; it also serves tokenizers that have no single token
    for a placeholder.

    Attributes:
        image_processor: makes `pixel_values` of frames.
        tokenizer: any, with ChatML's marks.
        video_span: whether the frames of a video stand between `<|start_video_frame|>` and `<|end_video_frame|>`, as
            later published models were trained.
    """

    def __init__(self, image_processor: MPlugOwl3ImageProcessor, tokenizer: Any, video_span: bool = False) -> None:
        self.video_span = video_span
        super().__init__(image_processor, tokenizer)

    @classmethod
    def get_attributes(cls) -> list[str]:
        """The parts that are saved on their own."""
        return ["image_processor", "tokenizer"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """Loads tokenizer, image processor and options of a directory or hub repository, published ones too."""
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        file = cached_file(
            pretrained_model_name_or_path,
            PROCESSOR_NAME,
            _raise_exceptions_for_missing_entries=False,
            **{name: kwargs[name] for name in ("cache_dir", "revision", "token", "subfolder") if name in kwargs},
        )
        if file is not None:
            with open(file, encoding="utf-8") as stream:
                saved = json.load(stream)
            options = {name: saved[name] for name in _OPTIONS if name in saved} | options
        tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs)
        image_processor = MPlugOwl3ImageProcessor.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return cls(image_processor, tokenizer, **options)

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
    def image_token_id(self) -> int | None:
        """The placeholder's token, or None where the tokenizer needs several for it."""
        ids = self._tokens(IMAGE)
        return ids[0] if len(ids) == 1 else None

    @property
    def model_input_names(self) -> list[str]:
        """Names of what a call returns for the model."""
        return ["input_ids", "attention_mask", "media_offset", "pixel_values"]

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        chat_template: None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        **kwargs: Any,
    ) -> str | BatchFeature:
        """One conversation as text, or, with `tokenize`, as what the model takes, with the media that its parts hold.

        Args:
            conversation: messages; parts may hold their media: {"type": "video", "video": frames},
                {"type": "image", "image": picture}.
            chat_template: this format is the only one.
            add_generation_prompt: ends with the beginning of an answer.
            tokenize: whether to return tensors.
            **kwargs: with `tokenize`, for the call.
        """
        if chat_template is not None:
            raise DataError("chat_template was passed; mPLUG-Owl3 is trained with one format, which is built in")
        pieces = self._conversation(conversation, add_generation_prompt)
        if not tokenize:
            return "".join(piece.text for piece in pieces)
        images, videos = media_parts(conversation, "image"), media_parts(conversation, "video")
        return self._call([pieces], images, videos, **kwargs)

    def __call__(
        self,
        images: Sequence[Frame] | Frame | None = None,
        text: str | Sequence[str] | None = None,
        videos: Sequence[Sequence[Frame] | np.ndarray | Tensor] | np.ndarray | Tensor | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Formatted text and its media as what the model takes.

        Args:
            images: one for each `<|image|>` of the texts, in order.
            text: one sample or several, formatted already, with `<|image|>` and `<|video|>` where media stand.
            videos: the frames of each `<|video|>` of the texts, in order.
            **kwargs: `padding_side`.

        Returns:
            `input_ids` and `attention_mask` (B, L), `media_offset` (B, N), and with frames `pixel_values` (F, 3, H, W)
            in the order of the placeholders.

        Raises:
            DataError: placeholders and media that do not fit.
        """
        if text is None:
            raise DataError("text is None; pass text with a placeholder for each image and video")
        samples = [text_pieces(sample) for sample in ([text] if isinstance(text, str) else text)]
        pictures = [] if images is None else frame_list(images)
        if isinstance(videos, (np.ndarray, Tensor)) and videos.ndim == 4:
            videos = [videos]  # one video, not as many as it has frames
        return self._call(samples, pictures, [] if videos is None else list(videos), **kwargs)

    def encode(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        frames_per_video: Sequence[int] = (),
        add_generation_prompt: bool = False,
        return_labels: bool = False,
        padding_side: str | None = None,
    ) -> BatchFeature:
        """The text part alone, for frames that are elsewhere: on several ranks, on a disk, or encoded already.

        Args:
            conversations: one (a list of messages) or several.
            frames_per_video: frames of each video of all conversations, in order; an image is one frame.
            add_generation_prompt: ends each with the beginning of an answer.
            return_labels: adds `labels`: the answers' tokens and their ends, -100 elsewhere.
            padding_side: "left" or "right"; the tokenizer's when None.

        Returns:
            `input_ids`, `attention_mask` and, on request, `labels`, (B, L), and `media_offset` (B, N): sample b has as
            many frames as its row has numbers that are not negative.

        Raises:
            DataError: malformed conversations, or a number of videos that is not that of the placeholders.
        """
        batch: Any = [conversations] if conversations and "role" in conversations[0] else conversations
        samples = [self._conversation(messages, add_generation_prompt) for messages in batch]
        return self._encode(samples, frames_per_video, return_labels, padding_side)

    def batch_decode(self, *args: Any, **kwargs: Any) -> list[str]:
        """The tokenizer's."""
        return self.tokenizer.batch_decode(*args, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """The tokenizer's."""
        return self.tokenizer.decode(*args, **kwargs)

    def _conversation(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[Piece]:
        known = _END_OF_DOCUMENT in self.tokenizer.get_vocab()
        return conversation_pieces(
            messages,
            add_generation_prompt=add_generation_prompt,
            end_of_document=_END_OF_DOCUMENT if known else "",
        )

    def _call(
        self,
        samples: list[list[Piece]],
        images: list[Frame],
        videos: list[Any],
        padding_side: str | None = None,
        return_labels: bool = False,
        **unknown: Any,
    ) -> BatchFeature:
        # transformers' own callers pass these; what comes out is always padded tensors.
        left_over = set(unknown) - {"return_tensors", "return_dict", "padding", "add_special_tokens"}
        if left_over:
            raise DataError(f"unknown arguments: {', '.join(sorted(left_over))}")
        wanted = [piece.text for sample in samples for piece in sample if piece.text == IMAGE]
        if len(wanted) != len(images):
            raise DataError(f"the text has {len(wanted)} {IMAGE} and {len(images)} images were passed; pass as many")
        encoded = self._encode(samples, [len(video) for video in videos], return_labels, padding_side)
        image, video = iter(images), iter(videos)
        frames: list[Frame] = []
        for piece in (piece for sample in samples for piece in sample):
            if piece.text == IMAGE:
                frames.append(next(image))
            elif piece.text == VIDEO:
                frames.extend(next(video))
        if frames:
            encoded["pixel_values"] = self.image_processor(frames)["pixel_values"]
        return encoded

    def _encode(
        self,
        samples: Iterable[Iterable[Piece]],
        frames_per_video: Sequence[int],
        return_labels: bool,
        padding_side: str | None,
    ) -> BatchFeature:
        counts = iter(frames_per_video)
        rows = [self._row(expand_videos(sample, counts, span=self.video_span)) for sample in samples]
        if (rest := len(list(counts))) > 0:
            used = len(frames_per_video) - rest
            raise DataError(f"{len(frames_per_video)} videos were passed and the text has {used} {VIDEO}")
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
        """Tokens of a sample, which of them are learned, and where the placeholders begin."""
        ids: list[int] = []
        learned: list[bool] = []
        positions: list[int] = []
        placeholder = self._tokens(IMAGE)
        for piece in pieces:
            if piece.text == IMAGE:
                positions.append(len(ids))
            tokens = placeholder if piece.text == IMAGE else self._tokens(piece.text)
            ids += tokens
            learned += [piece.learned] * len(tokens)
        return ids, learned, positions

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
