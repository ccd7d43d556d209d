"""A data set of conversations about videos and images, whose samples name their frames without decoding them.

`records` reads data sets by path, and `forms` describes what their records may look like.
"""

import os
from collections.abc import Hashable, Sequence
from functools import lru_cache, partial
from typing import Any

from torch.utils.data import Dataset

from mllm_seqpar.digests import digest_of
from mllm_seqpar.errors import ConfigError, DataError, VideoError, placed
from mllm_seqpar.videos.frame_choice import FrameChoice
from mllm_seqpar.videos.media_files import is_remote, media_size

from .batch import ChatBatch, ChatSample, MediaError, collate
from .chat import Chat
from .chat_family import chat_family
from .clip import Clip, FrameSource, VideoSource
from .forms import read_record
from .frame_store import FrameStore
from .multiple_choice import DEFAULT_TEMPLATE, check_template
from .records import open_records

ON_BAD_MEDIA = ("fail", "skip")
"""What training does if media cannot be read: stop, or use another sample instead."""


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
        media_root, template: see `records.open_records` and `multiple_choice.DEFAULT_TEMPLATE`.
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
            chat = self.chat(index)
            for number, turn in enumerate(chat.turns if on_bad_media == "fail" else ()):
                with placed(f"{self.records.place(index)}: message {number} ({turn.role})", VideoError, DataError):
                    for medium in turn.media:
                        self.identify(index, medium)
        # Each video is probed once, not once per epoch.
        store = None if frame_store is None else FrameStore.open(frame_store)
        reading: dict[str, Any] = {"threads": threads, "decoder": decoder, "frame_store": store}
        self._open_video = lru_cache(maxsize=65_536)(partial(VideoSource.open, **reading))

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> ChatSample:
        chat, place = self.chat(index), self.records.place(index)
        with placed(place, VideoError):
            return ChatSample(place, chat, tuple(self.source(index, medium) for medium in chat.media))

    def chat(self, index: int, *, answered: bool = True) -> Chat:
        """Return the conversation of a record, see `read_record`; DataError names its place."""
        marks = self._chat_format.marks if self._chat_format else ()
        with placed(self.records.place(index), DataError):
            record = self.records.record(index)
            return read_record(record, template=self._template, marks=marks, answered=answered)

    def messages(self, index: int) -> list[dict[str, Any]]:
        """Return the messages of a record, see `chat`."""
        return self.chat(index).to_json()

    def identify(self, index: int, medium: Clip) -> Hashable:
        """Return a key that is equal for media with equal files and equal sampling; nothing is downloaded.

        Raises:
            VideoError: a file is missing.
        """
        return tuple(self.records.identify(index, name) for name in medium.files), medium.kind, medium.frames

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
        media = []
        for index in range(len(self)):
            for name in [name for medium in self.chat(index).media for name in medium.files]:
                try:
                    file = self.records.identify(index, name)
                    # A URL, or a file inside a table, has no size of its own.
                    size = -2 if isinstance(file, tuple) or is_remote(file) else media_size(file)
                except VideoError:  # it is missing
                    size = -1
                media.append(f"{name} {size}")
        return digest_of("\n".join([self.digest, *media]))

    def source(self, index: int, medium: Clip) -> FrameSource:
        """Return the frames of a medium of record `index`; VideoError if the file is missing or unreadable."""
        locate = partial(self.records.locate, index)
        return medium.open(self._chat_format, frames=self._frames, locate=locate, video=self._open_video)
