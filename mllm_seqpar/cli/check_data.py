"""The command `mllm-seqpar check-data`: opens all media of a data set, and reports what would stop training.

Of each video and image, the first, the middle and the last frame that training would use are decoded, in threads:
PyAV and Pillow release the interpreter lock, and frames are not passed between processes. Damage elsewhere in a file is
not found; training then stops or skips the sample (`on_bad_media`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from mllm_seqpar.chats.batch import ChatSample
from mllm_seqpar.chats.chat import Chat
from mllm_seqpar.chats.clip import Clip, FrameSource, VideoSource
from mllm_seqpar.chats.data_set import ChatDataset
from mllm_seqpar.chats.frame_store import FrameStore
from mllm_seqpar.chats.multiple_choice import DEFAULT_TEMPLATE
from mllm_seqpar.errors import ConfigError, DataError, SeqParError
from mllm_seqpar.videos.decode_cost import frames_to_decode
from mllm_seqpar.videos.video import probe

from .options import option, parse_options
from .shared_options import StoredFrameOptions

BROKEN = 1
"""The exit status if a sample is broken."""

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class CheckDataOptions(StoredFrameOptions):
    """The options of `mllm-seqpar check-data`: those of training, and what is written and reported."""

    data: tuple[str, ...] = option(
        "JSONL, JSON, CSV, parquet, arrow, tar shards, a directory of them, or an id on the Hub; may be several"
    )
    model: str | None = option("directory or Hub id of a model, whose processor counts the tokens too", None)
    num_frames: int | None = option("number of frames per video, instead of --fps", None, least=1)
    decode_threads: int | None = option(
        "threads that decode one video; default: 1, because --workers files are read at once", None, least=1
    )
    max_length: int | None = option(
        "maximum number of text tokens, as in training; longer samples are broken; needs --model; default: the model's "
        "context",
        None,
        least=1,
    )
    media_root: str | None = option("directory that relative paths start from; default: that of the data", None)
    template: str = option("text of multiple-choice questions, with {question} and {options}", DEFAULT_TEMPLATE)
    long: float = option("report videos longer than this many seconds", 3600.0, above=0)
    workers: int = option("files opened at once, by default one for each processor", os.cpu_count() or 1, least=1)
    store: str | None = option(
        "directory to write the frames to that training would use, for --frame_store; a run that stopped is continued",
        None,
    )
    store_quality: int | None = option(
        "store JPEG images of this quality, 1 to 100; default: lossless", None, least=1, most=100
    )
    store_size: int | None = option(
        "scale stored frames so that their shorter side has at most this many pixels; default: not scaled",
        None,
        least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length and not self.model:
            raise ConfigError("--max_length needs --model, whose processor counts the tokens")
        for name in ("store_quality", "store_size") if self.store is None else ():
            self._refuse_unused(name, "it belongs to --store DIR, the directory of the frames")
        if self.store is not None:
            self._refuse_unused("frame_store", "--store writes the frames of the videos; give one of them")


def check(argv: Sequence[str]) -> int:
    """Check all data sets of the command line `argv`; return its exit status."""
    args = parse_options(
        CheckDataOptions,
        argv,
        prog="mllm-seqpar check-data",
        description="Read all samples of data sets, and decode the first, middle and last frame of their media.\n"
        "The exit status is 1 if a sample is broken.",
        example="mllm-seqpar check-data train.jsonl --model my-model --fps 1",
    )
    processor, context = None, None
    if args.model:
        from mllm_seqpar.models.loading import context_length, load_config, load_processor

        processor, context = load_processor(args.model), context_length(load_config(args.model))
    broken, store = 0, None
    if args.store is not None:
        store = FrameStore.create(args.store, quality=args.store_quality, shorter_side=args.store_size)
    for path in args.data:
        names = ("fps", "num_frames", "max_frames", "max_length", "media_root", "template")
        options = {name: getattr(args, name) for name in names}
        options |= args.decoding() | {"threads": args.decode_threads or 1}
        dataset = ChatDataset(path, processor, **options, context=context, on_bad_media="skip", validate=False)
        totals = Totals()
        for line in check_dataset(dataset, totals, long=args.long, workers=args.workers, store=store):
            # A name from JSON may have half of a surrogate pair, which is in no encoding.
            sys.stdout.write(f"{line}\n".encode(errors="backslashreplace").decode())
            sys.stdout.flush()
        sys.stdout.write(totals.text(str(path), args.model) + "\n")
        broken += totals.broken
    if store is not None:
        store.finish()
        sys.stdout.write(f"{args.store}: frames are stored {store.description}; read them with --frame_store\n")
    return BROKEN if broken else 0


@dataclass
class Totals:
    """The contents of a data set, without its broken samples."""

    samples: int = 0
    broken: int = 0
    long: int = 0
    videos: int = 0
    images: int = 0
    frames: int = 0
    tokens: int = 0
    targets: int = 0
    video_frames: int = 0
    decoded: int = 0
    core_seconds: float = 0.0
    longest: list[tuple[int, str]] = field(default_factory=list)

    def add(self, sample: ChatSample, media: Sequence[_Checked]) -> None:
        self.video_frames += sum(len(medium.source) for medium in media if medium.decoded)
        self.decoded += sum(medium.decoded for medium in media)
        self.core_seconds += sum(medium.core_seconds for medium in media)
        self.frames += sample.frames
        videos = sum(medium.kind == "video" for medium in sample.chat.media)
        self.videos, self.images = self.videos + videos, self.images + len(sample.sources) - videos
        self.longest = sorted([*self.longest, (sample.frames, sample.place)], key=lambda row: -row[0])[:_SHOWN]

    def text(self, name: str, model: str | None) -> str:
        lines = [
            f"{name}: {self.samples:,} samples, {self.broken:,} broken, {self.long:,} long videos; "
            f"the good samples have {self.videos:,} videos and {self.images:,} images with {self.frames:,} frames"
        ]
        if model:
            lines.append(f"text tokens: {self.tokens:,}, of which {self.targets:,} are targets")
            if keys := _keys_per_frame(model):
                lines[-1] += f"; visual tokens: {self.frames * keys:,}, {keys:,} for each frame"
        if self.frames:
            lines.append("most frames: " + ", ".join(f"{place} ({frames:,})" for frames, place in self.longest))
        if self.video_frames:
            seconds = self.core_seconds
            hours = f"{seconds / 3600:.1f} hours" if seconds >= 360 else f"{seconds:.1f} seconds"
            lines.append(
                f"decoding: {self.decoded / self.video_frames:.1f} frames of the videos for each frame that is used, "
                f"about {hours} of one core"
            )
        return "\n".join(lines)


def _keys_per_frame(model: str) -> int | None:
    """Return the visual tokens of each frame; None if they depend on its size, or the planner lacks the family."""
    from mllm_seqpar.planner.model_sizes import read_model

    try:
        sizes = read_model(model)
    except SeqParError:
        return None
    return None if sizes.keys_vary else sizes.vision.keys


@dataclass(frozen=True)
class _Checked:
    """What was found in one video or image."""

    source: FrameSource
    seconds: float
    decoded: int = 0  # frames of the file, for the frames that are used
    core_seconds: float = 0.0  # to decode them


_Row = tuple[Chat, list[Future[_Checked]], list[str]]
"""A conversation, its media that are being checked, and what is wrong with the record."""


def check_dataset(
    dataset: ChatDataset, totals: Totals, *, long: float, workers: int, store: FrameStore | None
) -> Iterator[str]:
    """Check all samples in `workers` threads, yield a line for each fault and each video of more than `long` seconds,
    in order, and count into `totals`. The frames of videos are written to `store`.

    `dataset` was opened with `on_bad_media="skip"` and `validate=False`; without a processor, tokens are not counted.
    """
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="check-data")
    rows: list[_Row] = []
    submitted: dict[Hashable, Future[_Checked]] = {}
    try:
        for index in range(len(dataset)):
            try:
                chat = dataset.chat(index)
            except DataError as error:
                rows.append((Chat(()), [], [str(error)]))
                continue
            futures = []
            for medium in chat.media:
                try:  # equal files with equal sampling are opened once
                    key = dataset.identify(index, medium)
                except SeqParError:  # a file is missing, which opening it reports
                    key = index, medium
                if key not in submitted:
                    submitted[key] = pool.submit(_check_medium, dataset, index, medium, store)
                futures.append(submitted[key])
            rows.append((chat, futures, []))
        for index, row in enumerate(rows):
            yield from _report(dataset, index, row, totals, long)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, no further files are opened


def _report(dataset: ChatDataset, index: int, row: _Row, totals: Totals, long: float) -> Iterator[str]:
    """Yield the lines of a sample, and count it."""
    place, (chat, futures, faults), media = dataset.records.place(index), row, list[_Checked]()
    for medium, future in zip(chat.media, futures, strict=True):
        try:
            checked = future.result()
        except (DataError, ConfigError):  # an error of the store or the installation, not of the sample
            raise
        except SeqParError as error:
            faults.append(str(error))
            continue
        except Exception as error:  # an error of a decoder, such as Pillow's for very large images
            faults.append(f"{medium.files[0]}: {type(error).__name__}: {error}")
            continue
        media.append(checked)
        if checked.seconds > long:
            totals.long += 1
            clock, frames = _clock(checked.seconds), len(checked.source)
            yield f"{place}: long: {medium.files[0]} has {clock}, {frames:,} frames are used"
    if not faults:
        sample = ChatSample(place, chat, tuple(checked.source for checked in media))
        faults = _count(dataset, sample, totals, media)
    totals.samples, totals.broken = totals.samples + 1, totals.broken + bool(faults)
    for fault in faults:
        yield f"{place}: broken: {fault.removeprefix(f'{place}: ')}"


def _clock(seconds: float) -> str:
    """Return a duration in hours, minutes and seconds, also above a day."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _count(dataset: ChatDataset, sample: ChatSample, totals: Totals, media: Sequence[_Checked]) -> list[str]:
    """Count a sample with valid media; return what is wrong with its text."""
    if dataset.processor is not None:
        try:
            batch = dataset.collate([sample])
        except SeqParError as error:
            return [str(error)]
        if batch.targets == 0:
            return ["no target tokens; add a message of the assistant"]
        totals.tokens, totals.targets = totals.tokens + batch.tokens, totals.targets + batch.targets
    totals.add(sample, media)
    return []


def _check_medium(dataset: ChatDataset, index: int, medium: Clip, store: FrameStore | None) -> _Checked:
    source = dataset.source(index, medium)
    plan = source.plan if isinstance(source, VideoSource) else None  # a store has frames of videos
    if store is not None and plan is not None and not store.has(plan):

        def frames() -> Iterator[Tensor]:  # decoding begins inside `write`, which stores why it fails
            size = None if store.shorter_side is None else store.frame_size(*source.sizes()[0])
            yield from source.read(0, len(source), size=size)

        store.write(plan, frames())
    last = len(source) - 1
    numbers = sorted({0, last // 2, last})
    begin = time.thread_time()
    for number in numbers:
        for _ in source.read(number, number + 1):
            pass
    core_seconds = time.thread_time() - begin
    if plan is None:
        return _Checked(source, 0.0)
    decoded = frames_to_decode(plan)
    here = sum(frames_to_decode(plan.only(number)) for number in numbers)
    return _Checked(source, probe(plan.path).duration, decoded, core_seconds * decoded / max(1, here))
