"""What a chat shows: a clip states which frames of what are looked at, and opening it gives a source that reads them.

A `Clip` is a part of a chat. It names files or holds images, so it can be compared, kept and sent to other ranks, and
only `open` has to find them. A `FrameSource` is an opened clip: the planned frames of a video, a list of images, or
frames of which only the features are stored. It is cheap to pickle; `read` opens the files again.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

from torch import Tensor

from mllm_seqpar.digests import file_digest
from mllm_seqpar.errors import ConfigError, DataError, VideoError, reading
from mllm_seqpar.videos.frame_batches import stacked
from mllm_seqpar.videos.frame_choice import DEFAULT_FRAMES, FrameChoice, plan_frames
from mllm_seqpar.videos.images import image_size, read_image
from mllm_seqpar.videos.media_files import local_media, require_content
from mllm_seqpar.videos.reader import check_range, read_frames
from mllm_seqpar.videos.video import FramePlan, probe, source_meta

from .frame_store import FrameFile, FrameStore

ANY_FRAMES = FrameChoice()


@dataclass(frozen=True)
class Clip:
    """A video, a list of images as a video, or an image, and which of its frames are looked at.

    Attributes:
        kind: "video" or "image".
        source: the name of a file, or an image in memory; of a video also several of them, a tuple if they are opened.
            None: what is shown is passed beside the chat.
        frames: which frames of a video, or of a list of images.
        version: changes with the contents of the file, if they may change while the clip is kept.
        name: the user's name for it, for messages.
    """

    kind: str
    source: Any = None
    frames: FrameChoice = ANY_FRAMES
    version: str = ""
    name: str = field(default="", compare=False)

    @classmethod
    def of_file(cls, kind: str, path: str, frames: FrameChoice | None = None, *, name: str = "") -> "Clip":
        """Return the clip of a file in its current version; raise ConfigError if there is none."""
        with reading(f"{path}: cannot be read", "give the path of a file", ConfigError):
            facts = os.stat(path)
        version = f"{facts.st_size} {facts.st_mtime_ns}"
        return cls(kind, os.path.abspath(path), frames or ANY_FRAMES, version, name or path)

    @property
    def files(self) -> list[str]:
        """The names of its files, as its record writes them."""
        return list(self.source) if isinstance(self.source, (list, tuple)) else [self.source]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Clip":
        source = tuple(values["images"]) if "images" in values else values.get("path")
        return cls(values["type"], source, FrameChoice.of(values), values.get("version", ""), values.get("name", ""))

    def to_json(self) -> dict[str, Any]:
        """Return the part of a message that shows this clip, of files; `from_json` reads it."""
        source: dict[str, Any] = {} if self.source is None else {"path": self.source}
        if isinstance(self.source, (list, tuple)):
            source = {"images": self.files}
        texts = {name: text for name, text in (("version", self.version), ("name", self.name)) if text}
        return {"type": self.kind, **source, **self.frames.given(), **texts}

    def open(
        self,
        chat_format: Any = None,
        *,
        frames: FrameChoice = ANY_FRAMES,
        locate: Callable[[Any], Any] = lambda source: source,
        video: Callable[..., "VideoSource"] | None = None,
        **decoding: Any,
    ) -> "FrameSource":
        """Find the files, and return the source of the frames.

        Args:
            chat_format: of the model, which may cut an image into several; None: one frame for each image.
            frames: a choice of the caller, which precedes that of the clip.
            locate: returns the path for a name in `source`, or the tensor for an image in memory.
            video: opens a video, for example with a cache; default: `VideoSource.open`.
            decoding: its arguments that say how the frames are read.

        Raises:
            VideoError: a file is missing or unreadable.
        """
        if self.kind == "image":
            still = ImageListSource([locate(self.source)])
            return still if chat_format is None else chat_format.still_frames(still)
        if isinstance(self.source, tuple):
            images = frames.without_times().over(self.frames).sampled(self.source)
            return ImageListSource([locate(image) for image in images])
        chosen = frames.over(self.frames).over(DEFAULT_FRAMES)
        return (video or VideoSource.open)(locate(self.source), **vars(chosen), **decoding)


class FrameSource(ABC):
    """Frames 0 to len - 1; any range of them can be read without the others.

    A subclass needs `__len__` and `read`. It overrides the other methods as far as it knows more.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, start: int, stop: int, *, size: tuple[int, int] | None = None, batch: int = 16) -> Iterator[Tensor]:
        """Yield frames start <= i < stop in order, as uint8 tensors (at most `batch`, 3, H, W), each of one size."""

    def read_ranges(
        self, ranges: Sequence[range], *, size: tuple[int, int] | None = None, batch: int = 16
    ) -> Iterator[Tensor]:
        """Yield the frames of ranges in ascending order, as `read` does."""
        for frames in ranges:
            yield from self.read(frames.start, frames.stop, size=size, batch=batch)

    def sizes(self) -> list[tuple[int, int]]:
        """Return (height, width) of each frame. By default, all frames are read to find them."""
        return [(int(x.shape[2]), int(x.shape[3])) for x in self.read(0, len(self)) for _ in x]

    def seconds(self, index: int) -> float | None:
        """Return when a frame is shown, in seconds of the video; None if the frames have no times."""
        return None

    @property
    def name(self) -> str:
        """The path of the file, of the first one of a list; empty if the frames are not in a file."""
        return ""

    def key(self) -> str:
        """Return a text that is equal for the same frames of equal files.

        Raises:
            ConfigError: the frames are not in files, so they cannot be recognised.
        """
        raise ConfigError(f"frames of {type(self).__name__} are not in files, so they cannot be recognised")


def ranges_by_source(
    sources: Iterable[FrameSource], ranges: Sequence[range]
) -> Iterator[tuple[FrameSource, int, list[range]]]:
    """Yield each source that has some of these frames of all sources: source, its place, and ranges of its frames."""
    first = 0
    for place, source in enumerate(sources):
        inside = [range(max(x.start - first, 0), min(x.stop - first, len(source))) for x in ranges]
        if any(inside):
            yield source, place, [part for part in inside if part]
        first += len(source)


@dataclass(frozen=True)
class VideoSource(FrameSource):
    """The planned frames of a video file.

    Attributes:
        plan: the frames.
        threads, decoder: how they are decoded, see `read_frames`; this changes the time, not the frames.
        stored: the frames in a store, which are read instead of the video.
    """

    plan: FramePlan
    threads: int | None = field(default=None, compare=False)
    decoder: str = field(default="pyav", compare=False)
    stored: FrameFile | None = field(default=None, repr=False)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        max_frames: int | None = None,
        start: float | None = None,
        end: float | None = None,
        threads: int | None = None,
        decoder: str = "pyav",
        frame_store: FrameStore | str | os.PathLike[str] | None = None,
    ) -> "VideoSource":
        """Probe `path`, a file or a URL, and plan its frames by the rules of `plan_frames`.

        With `frame_store`, frames are read from this store. DataError is raised if it does not have them.
        """
        info = probe(local_media(path))
        plan = plan_frames(info, fps=fps, num_frames=num_frames, max_frames=max_frames, start=start, end=end)
        if frame_store is not None and not isinstance(frame_store, FrameStore):
            frame_store = FrameStore.open(frame_store)
        return cls(plan, threads, decoder, None if frame_store is None else frame_store.find(plan))

    def __len__(self) -> int:
        return len(self.plan)

    def sizes(self) -> list[tuple[int, int]]:
        """Return (height, width) of each frame. A video has one size; its first frame is decoded to find it."""
        return [_first_size(self) if self.stored is None else self.stored.size] * len(self)

    def seconds(self, index: int) -> float:
        return self.plan.seconds(index)

    @property
    def name(self) -> str:
        return self.plan.path

    def key(self) -> str:
        """Return the digest of the file, the times of the frames, and how stored pixels differ from the file's."""
        meta = source_meta(self.plan)
        facts = [meta[name] for name in ("source_size", "source_digest", "frames", "frame_times")]
        facts += [] if self.stored is None or self.stored.pixels is None else [self.stored.pixels]
        return json.dumps(facts)

    def read(self, start: int, stop: int, *, size: tuple[int, int] | None = None, batch: int = 16) -> Iterator[Tensor]:
        return self.read_ranges([range(start, stop)], size=size, batch=batch)

    def read_ranges(
        self, ranges: Sequence[range], *, size: tuple[int, int] | None = None, batch: int = 16
    ) -> Iterator[Tensor]:
        """Yield the frames of ranges in ascending order, as `read` does; one reader decodes all of them."""
        if self.stored is not None and size in (None, self.stored.size):
            for frames in ranges:
                check_range(frames.start, frames.stop, len(self), batch)
            return self.stored.read([*chain(*ranges)], batch, self.threads)
        options: dict[str, Any] = {"threads": self.threads, "decoder": self.decoder}
        return read_frames(self.plan, size=size, batch=batch, ranges=ranges, **options)


@dataclass(frozen=True)
class ImageListSource(FrameSource):
    """Images as a video, one frame each.

    Attributes:
        images: names of files, and images in memory: uint8 tensors (3, H, W).
    """

    images: tuple[str | Tensor, ...]

    def __init__(self, images: Sequence[str | os.PathLike[str] | Tensor]) -> None:
        object.__setattr__(self, "images", tuple(x if isinstance(x, Tensor) else local_media(x) for x in images))
        if not self.images:
            raise VideoError("an image list without images; pass at least one path")
        for path in self.paths:
            require_content(path, "an image file")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def paths(self) -> tuple[str, ...]:
        """The names of the files."""
        return tuple(image for image in self.images if not isinstance(image, Tensor))

    def sizes(self) -> list[tuple[int, int]]:
        """Return (height, width) of each image; of files, from their headers."""
        return [(x.shape[1], x.shape[2]) if isinstance(x, Tensor) else image_size(x) for x in self.images]

    @property
    def name(self) -> str:
        return next(iter(self.paths), "")

    def key(self) -> str:
        """Return the digests of the files."""
        if len(self.paths) < len(self):
            return super().key()
        return json.dumps([file_digest(path) for path in self.paths])

    def read(self, start: int, stop: int, *, size: tuple[int, int] | None = None, batch: int = 16) -> Iterator[Tensor]:
        """Yield images start <= i < stop; without `size`, a change of size starts a new tensor."""
        check_range(start, stop, len(self), batch)
        for image in self.images[start:stop]:
            if isinstance(image, Tensor) and size not in (None, tuple(image.shape[1:])):
                raise VideoError(f"size is {size}; an image in memory is {tuple(image.shape[1:])}: leave size out")
        images = (x if isinstance(x, Tensor) else read_image(x, size) for x in self.images[start:stop])
        yield from stacked(images, batch)


@dataclass(frozen=True)
class FeatureFrames(FrameSource):
    """The frames of a feature store: a source with a length, and perhaps a size and times, but without pixels.

    Attributes:
        count: the number of frames.
        size: (height, width) of all frames, if it is stored.
        times: the seconds of each frame, if they are stored.
    """

    count: int
    size: tuple[int, int] | None = None
    times: Sequence[float] | None = None

    def __len__(self) -> int:
        return self.count

    def sizes(self) -> list[tuple[int, int]]:
        if self.size is None:
            raise DataError("the feature store has no frame size; encode the video again with --save_features")
        return [self.size] * self.count

    def seconds(self, index: int) -> float | None:
        return None if self.times is None else self.times[index]

    def read(self, start: int, stop: int, *, size: Any = None, batch: int = 16) -> Iterator[Tensor]:
        raise DataError("these frames are stored only as features; give --video too")


@lru_cache(maxsize=4096)
def _first_size(source: VideoSource) -> tuple[int, int]:
    # A phone's rotation is stored with the frames, not in the container, so one frame is decoded.
    height, width = next(iter(source.read(0, 1))).shape[2:]
    return int(height), int(width)
