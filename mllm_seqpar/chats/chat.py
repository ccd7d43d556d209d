"""Micro-batches of conversations about videos and images, of which each rank decodes only its own frames.

Before any frame is decoded, every rank has the number of frames of a micro-batch. The frames of all samples form one
flat list in the order of the placeholders in the text. A rank decodes its range of that list. `records` reads
data sets, and `formats` describes what their records may look like.
"""

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mllm_seqpar.errors import ConfigError, DataError, LengthError, VideoError
from mllm_seqpar.sharding import join_spans
from mllm_seqpar.videos.files import digest_of
from mllm_seqpar.videos.frame_choice import DEFAULT_FRAMES, FrameChoice
from mllm_seqpar.videos.media_files import is_remote, media_size

from .chat_family import ChatFamily, ChatText, chat_family
from .formats import DEFAULT_TEMPLATE, check_record, check_template, media_parts, part_files, to_chat
from .frame_store import FrameStore
from .records import open_records
from .sources import FrameSource, ImageListSource, VideoSource, ranges_by_source

ON_BAD_MEDIA = ("fail", "skip")
"""What training does if media cannot be read: stop, or use another sample instead."""


class MediaError(VideoError):
    """The media of one sample of a batch cannot be read.

    Attributes:
        sample: the number of the sample in its batch.
    """

    def __init__(self, message: str, sample: int) -> None:
        super().__init__(message)
        self.sample = sample


@dataclass(frozen=True)
class ChatSample:
    """One conversation with the source of each media part; nothing is decoded.

    Attributes:
        place: the place of its record, for messages; FILE:LINE of JSONL.
    """

    place: str
    messages: Sequence[Mapping[str, Any]]
    sources: tuple[FrameSource, ...]

    @property
    def frames(self) -> int:
        return sum(len(source) for source in self.sources)


@dataclass(frozen=True, kw_only=True)
class ChatBatch:
    """A micro-batch: padded text, and the sources of its frames.

    Attributes:
        text: tokens and labels (B, L); labels are -100 except at the answers and their ends.
        sources: the sources of all samples, in the order of the flat list of frames.
        places: the places of the samples, for messages; FILE:LINE of JSONL.
        owners: for each source, the number of its sample in the batch.
    """

    text: ChatText
    sources: tuple[FrameSource, ...]
    places: tuple[str, ...]
    owners: tuple[int, ...]

    @property
    def frames(self) -> int:
        """Length of the flat list of frames."""
        return sum(len(source) for source in self.sources)

    @property
    def input_ids(self) -> Tensor:
        return self.text.input_ids

    @property
    def attention_mask(self) -> Tensor:
        return self.text.attention_mask

    @property
    def labels(self) -> Tensor:
        assert self.text.labels is not None  # `collate` asks for labels
        return self.text.labels

    @property
    def targets(self) -> int:
        """Number of tokens that the loss counts."""
        return int((self.labels[:, 1:] != -100).sum())

    @property
    def tokens(self) -> int:
        """Number of text tokens without padding."""
        return int(self.attention_mask.sum())


class ChatDataset(Dataset[ChatSample]):
    """The conversations of a data set. Opening it validates all records; a sample's videos are opened on access.

    Args:
        path: a data set that `records.open_records` opens.
        processor: the model's processor; its chat format (`chat_family`) turns conversations into tokens. None reads
            samples without a model, for checks; batches are then not available.
        fps, num_frames, max_frames: the frames of each video, see `FrameChoice`. `fps` and `num_frames` override what a
            record states; of several `max_frames`, the smallest applies. Images have no times: of a video that is a
            list of images, `num_frames` and `max_frames` choose.
        max_length: the largest number of tokens of a sample; a longer sample is refused.
        context: the largest number that the model can take; likewise.
        on_bad_media: "fail" checks here that all local files exist; "skip" leaves missing and damaged files to the
            reader of the samples (`training.batches`).
        media_root, template: see `records.open_records` and `formats.to_chat`.
        validate: False validates a record only when it is accessed.
        threads, decoder: how videos are decoded, see `read_frames`.
        frame_store: directory of a `FrameStore` that is read instead of the videos.

    Raises:
        DataError: a malformed record; names its place and the problem.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        processor: Any,
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        max_frames: int | None = None,
        max_length: int | None = None,
        context: int | None = None,
        on_bad_media: str = "fail",
        media_root: str | os.PathLike[str] | None = None,
        template: str = DEFAULT_TEMPLATE,
        validate: bool = True,
        threads: int | None = None,
        decoder: str = "pyav",
        frame_store: str | os.PathLike[str] | None = None,
    ) -> None:
        if on_bad_media not in ON_BAD_MEDIA:
            raise ConfigError(f"on_bad_media: {on_bad_media!r} is not allowed; give {' or '.join(ON_BAD_MEDIA)}")
        check_template(template)
        self.records = open_records(path, media_root=media_root)
        self.path, self.digest = self.records.path, self.records.digest
        self.on_bad_media, self._template, self.threads = on_bad_media, template, threads
        self.processor = processor
        self._chat_format = None if processor is None else chat_family(processor)
        self.max_length, self.context = max_length, context
        self._frames = FrameChoice(fps=fps, num_frames=num_frames, max_frames=max_frames)
        for index in range(len(self.records) if validate else 0):
            self.messages(index, check_files=on_bad_media == "fail")
        # Each video is probed once, not once per epoch.
        store = None if frame_store is None else FrameStore.open(frame_store)
        reading: dict[str, Any] = {"threads": threads, "decoder": decoder, "frame_store": store}
        self._open_video = lru_cache(maxsize=65_536)(partial(VideoSource.open, **reading))

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> ChatSample:
        messages, place = self.messages(index), self.records.place(index)
        try:
            sources = tuple(self.source(index, part) for part in media_parts(messages))
        except VideoError as error:
            raise VideoError(f"{place}: {error}") from error
        return ChatSample(place, messages, sources)

    def messages(self, index: int, check_files: bool = False) -> list[Mapping[str, Any]]:
        """Return the validated messages of a record; DataError names its place."""
        files = partial(self.records.identify, index) if check_files else None
        marks = self._chat_format.marks if self._chat_format else ()
        try:
            return check_record(to_chat(self.records.record(index), template=self._template), files, marks)
        except DataError as error:
            raise DataError(f"{self.records.place(index)}: {error}") from error

    def identify(self, index: int, part: Mapping[str, Any]) -> Hashable:
        """Return a key that is equal for media parts with equal files and equal sampling; nothing is downloaded.

        Raises:
            VideoError: a file is missing.
        """
        sampling = sorted((name, value) for name, value in part.items() if name not in ("path", "images"))
        return tuple(self.records.identify(index, name) for name in part_files(part)), tuple(sampling)

    def batch(self, indices: Sequence[int]) -> ChatBatch:
        """Return the samples with these indices as one micro-batch; nothing is decoded.

        Raises:
            DataError: a sample is longer than `max_length` or the context, or none has a target token.
            MediaError: a video cannot be opened.
        """
        samples = []
        for number, index in enumerate(indices):
            try:
                samples.append(self[index])
            except VideoError as error:
                raise MediaError(str(error), number) from error
        batch = self.collate(samples)
        if batch.targets == 0:
            raise DataError(f"{', '.join(batch.places)}: no target tokens; add a message of the assistant")
        return batch

    def collate(self, samples: Sequence[ChatSample]) -> ChatBatch:
        """Return samples of this data set as one micro-batch; see `collate` of this module."""
        return collate(samples, self.processor, self.max_length, self.context)

    def content_digest(self) -> str:
        """Return a hash of the records, and of the names and sizes of the media files that they name."""
        files = (
            (index, name)
            for index in range(len(self))
            for part in media_parts(self.messages(index))
            for name in part_files(part)
        )
        media = [f"{name} {self._size(index, name)}" for index, name in files]
        return digest_of("\n".join([self.digest, *media]))

    def _size(self, index: int, name: str) -> int:
        """Return the number of bytes of a file; -1 if it is missing, and -2 for a URL or a file inside a table."""
        try:
            found = self.records.identify(index, name)
        except VideoError:
            return -1
        return -2 if isinstance(found, tuple) or is_remote(found) else media_size(found)

    def source(self, index: int, part: Mapping[str, Any]) -> FrameSource:
        """Return the frames of a media part of record `index`; VideoError if the file is missing or unreadable."""
        locate = partial(self.records.locate, index)
        if part["type"] == "image":
            name = locate(part["path"])
            return self._chat_format.image_source(name) if self._chat_format else ImageListSource([name])
        if "images" in part:
            names = self._frames.without_times().over(FrameChoice.of(part)).sampled(part["images"])
            return ImageListSource([locate(name) for name in names])
        chosen = self._frames.over(FrameChoice.of(part)).over(DEFAULT_FRAMES)
        return self._open_video(locate(part["path"]), **vars(chosen))


def collate(
    samples: Sequence[ChatSample], processor: Any, max_length: int | None = None, context: int | None = None
) -> ChatBatch:
    """Return the samples, at least one, as one micro-batch, padded on the right.

    Raises:
        DataError: a sample has more than `max_length` tokens, or the chat format cannot tokenize it; names its place.
        LengthError: a sample has more tokens than `context`, the context of the model.
        MediaError: the size of a video is needed and cannot be read.
    """
    try:
        text = chat_family(processor).text(
            [sample.messages for sample in samples],
            [sample.sources for sample in samples],
            labels=True,
            padding_side="right",
        )
    except DataError as error:
        raise DataError(f"{', '.join(sample.place for sample in samples)}: {error}") from error
    except VideoError as error:  # a chat format may decode one frame to find the size of a video
        if len(samples) == 1:
            raise MediaError(f"{samples[0].place}: {error}", 0) from error
        for number, sample in enumerate(samples):
            try:
                collate([sample], processor)
            except MediaError as found:
                raise MediaError(str(found), number) from error
        raise
    chat_format, lengths = chat_family(processor), text.attention_mask.sum(1).tolist()
    for sample, length in zip(samples, lengths, strict=True):
        if max_length is not None and length > max_length:
            raise DataError(
                f"{sample.place}: {length} tokens ({sample.frames} of them are placeholders of frames), more than "
                f"max_length = {max_length}; raise it, or use fewer frames"
            )
        if context is not None and length > context:
            raise LengthError(
                f"{sample.place}: {length} tokens ({sample.frames} of them are placeholders of frames), more than the "
                f"{context} of the model's context; use fewer frames, or shorten the text"
            )
    return ChatBatch(
        text=text,
        sources=tuple(chat_format.units(source) for sample in samples for source in sample.sources),
        places=tuple(sample.place for sample in samples),
        owners=tuple(number for number, sample in enumerate(samples) for _ in sample.sources),
    )


def load_local_images(
    batch: ChatBatch, slots: range | Sequence[range], chat_format: ChatFamily, *, at_once: int = 32
) -> tuple[Tensor, ...]:
    """Decode this rank's images of the model's flat list; return tensors (slots, ...) as `chat_format.pixels` does.

    `slots` is this rank's range of `batch.text.slots`, `frame_range(len(batch.text.slots), group)`, or its
    `frame_ranges`. Padding images among them are not decoded; at most `at_once` decoded frames are held in addition
    to the result.
    """
    ranges = [slots] if isinstance(slots, range) else slots
    numbers = [batch.text.slots[slot] for slot in chain(*ranges)]
    frames = [range(*span) for span in join_spans((number, number + 1) for number in numbers if number >= 0)]
    if chat_format.ragged:  # none of them pads
        return chat_format.joined([chat_format.pixels(decoded) for decoded in _decode(batch, frames, at_once)])
    real = torch.tensor([index for index, number in enumerate(numbers) if number >= 0], dtype=torch.long)
    if not len(real):
        return tuple(x.repeat(len(numbers), *[1] * (x.dim() - 1)) for x in chat_format.blank())
    pixels: tuple[Tensor, ...] = ()
    done = 0
    for decoded in _decode(batch, frames, at_once):
        part = chat_format.pixels(decoded)
        if not pixels:
            pixels = tuple(x.new_empty(len(numbers), *x.shape[1:]) for x in part)
            if len(real) < len(numbers):
                for target, x in zip(pixels, chat_format.blank(), strict=True):
                    target[:] = x
        positions = real[done : done + len(decoded)]
        for target, x in zip(pixels, part, strict=True):
            target[positions] = x
        done += len(decoded)
    return pixels


def _decode(batch: ChatBatch, frames: Sequence[range], at_once: int) -> Iterator[Tensor]:
    """Yield ranges of a batch's frames as uint8 tensors (at most `at_once`, 3, H, W), each of one size.

    Raises:
        MediaError: a frame cannot be decoded; names the place of its sample.
    """
    for source, place, ranges in ranges_by_source(batch.sources, frames):
        owner = batch.owners[place]
        try:
            yield from source.read_ranges(ranges, batch=at_once)
        except VideoError as error:
            raise MediaError(f"{batch.places[owner]}: {error}", owner) from error
