"""Encoding of a video on several ranks: each rank reads and encodes its frames in batches of bounded size.

All ranks proceed in rounds of one batch each. A round begins with one small gather of the number of frames that each
rank has encoded, for the progress bar, and of whether a rank has failed. A damaged part of the file therefore stops
all ranks within one batch. A thread reads and prepares the next batch while one is encoded, so at most two batches of
pixels exist, whatever the length of the video. A batch is copied to a CUDA device from pinned memory, on a separate
stream, while the previous one is encoded. The result is the features of this rank's frames.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mllm_seqpar.chats.chat_family import ChatFamily, chat_family
from mllm_seqpar.chats.clip import Clip, FrameSource, ranges_by_source
from mllm_seqpar.cli.progress import Clock
from mllm_seqpar.comm import Group, transfer_communicator
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.errors import ConfigError, DivergedError, SeqParError, VideoError
from mllm_seqpar.runtime.host_copies import HostCopies
from mllm_seqpar.sharding import APPENDED, FrameShard, FrameSizes, span_length
from mllm_seqpar.videos.prefetch import read_ahead

Pixels = tuple[Tensor, ...]
"""Preprocessed frames of a chat format: pixels, and further tensors with one entry per frame."""

Progress = Callable[[int, int], object]
"""Called with the number of frames that all ranks have encoded so far, and the number of all frames."""

PARTS = ("decode frames", "transfer", "encode", "wait for frames")
"""The parts of the time that a rank takes to encode a video. The first three overlap; in the fourth, encoding waits."""


class Interrupted(SeqParError):
    """The user ended the encoding of the frames."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """The visual features of a video, or of several videos and images, sharded over the ranks of a group.

    Attributes:
        features: (f, tokens, hidden), of this rank's frames, as the chat format's `encode` returns them. If they have
            different numbers of tokens, they are one after another, (tokens of all, hidden).
        shard: the frames of the video that `features` covers.
        sizes: the tokens of each frame of the whole video, if the chat format states them (`frame_sizes`).
        source: the frames, used only for their number and sizes; None if only their number is known.
        seconds: of this rank, for each of `PARTS`; empty if it has not encoded the video.
    """

    features: Tensor
    shard: FrameShard
    source: FrameSource | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    sizes: Sequence[int] | None = None

    @property
    def frames(self) -> int:
        """The number of frames of the whole video."""
        return self.shard.total

    @property
    def visual_tokens(self) -> int:
        """The number of visual tokens of this rank's frames."""
        return self.features.shape[:-1].numel()


def encode(
    model: nn.Module,
    processor: Any,
    source: FrameSource | Clip | Sequence[FrameSource | Clip],
    *,
    group: Group = None,
    batch: int = 8,
    progress: Progress | None = None,
    on_host: bool = False,
    interrupted: Callable[[], bool] | None = None,
    held: Sequence[int] | None = None,
) -> Encoded:
    """Read and encode this rank's frames of videos and images. Every rank of the group calls this with the same ones.

    Args:
        model: of a supported family, or with a method `encode_frames` as the native mPLUG-Owl3; patched or not. If its
            parameters are sharded (FSDP2), all ranks must be in the group.
        processor: the model's; its chat format converts uint8 frames (b, 3, H, W) to pixels.
        source: a clip, or its frames, a `VideoSource` for example; of several, one after the other.
        group: the ranks that share the frames, as for `patch_model`.
        batch: number of frames read and encoded at once.
        progress: called after each round.
        on_host: collect the features in host memory, for a model with `visual_offload="cpu"`.
        interrupted: the encoding ends on all ranks when it returns True on this one.
        held: see `FrameShard.of`, if the frames follow others.

    Raises:
        VideoError: if this rank's part of the video cannot be read.
        Interrupted: if `interrupted` returned True.
        AgreementError: if another rank raised one of these; its message is quoted.
    """
    chat_format = chat_family(processor)
    chat_format.check(model)
    given = tuple(source) if isinstance(source, Sequence) else (source,)
    sources = tuple(x.open(chat_format) if isinstance(x, Clip) else x for x in given)
    groups = [chat_format.frame_groups(each) for each in sources]
    total = sum(map(len, groups))
    if total == 0:
        raise VideoError("encode: the source has no frames; give a source with at least one frame")
    comm = transfer_communicator(group)
    if batch < 1:
        raise ConfigError(f"batch: {batch} is not allowed; give 1 or more")
    sizes, layout = chat_format.frame_sizes(sources), chat_format.frame_layout
    shard = FrameShard.of(total, comm, layout, sizes, held)
    by_rank = FrameSizes(total, sizes, held).spans(comm.size, layout if held is None else APPENDED)
    counts = [span_length(spans) for spans in by_rank]
    encoder = _Encoder(model, chat_format, len(shard), on_host)
    with torch.no_grad(), closing(_batches(groups, shard.ranges, batch, chat_format, encoder)) as batches:
        while True:
            pixels = encoder.read(batches)
            if interrupted is not None and interrupted():
                encoder.error = encoder.error or Interrupted("interrupted while the frames were encoded")
            _, rows = agree(comm, "reading the video", error=encoder.error, numbers=lambda _: [encoder.done])
            done = [encoded for (encoded,) in rows]
            if progress is not None:
                progress(sum(done), total)
            if done == counts:
                break
            encoder.encode(pixels)
            del pixels  # the thread reads a further batch only when this one is freed
        features = encoder.features()
        seconds = dict.fromkeys(PARTS, 0.0) | encoder.clock.seconds()
        return Encoded(features, shard, sources[0] if len(sources) == 1 else None, seconds, sizes)


def _batches(
    sources: Sequence[FrameSource], ranges: Sequence[range], batch: int, chat_format: ChatFamily, encoder: _Encoder
) -> Generator[Pixels, None, None]:
    """Yield the preprocessed frames of ranges, each batch of at most `batch` of one source, reading one batch ahead."""
    reader = chain.from_iterable(
        source.read_ranges(parts, batch=batch) for source, _, parts in ranges_by_source(sources, ranges)
    )

    def read_next(_: int) -> Pixels | None:
        with encoder.clock.measure("decode frames"):
            frames = next(reader, None)
            return None if frames is None else encoder.prepared(chat_format.pixels(frames))

    # A source ends a batch early if the image size changes, so the number of batches is not known in advance.
    with closing(read_ahead(count(), read_next)) as ahead:
        while (pixels := next(ahead)) is not None:
            yield pixels
            del pixels


class _Encoder:
    """The features of this rank's frames so far, and the error that stopped this rank, if any."""

    def __init__(self, model: Any, chat_format: ChatFamily, frames: int, on_host: bool) -> None:
        weight = next(model.parameters())
        self._chat_format, self._device, self._dtype = chat_format, weight.device, weight.dtype
        self._encode_pixels = encoder_of(model, chat_format)
        # FSDP gathers parameters in each module's forward, so a rank without frames in a round must run it too.
        self._collective = any(isinstance(module, FSDPModule) for module in model.modules())
        self._frames, self._on_host = frames, on_host
        self._features: Tensor | None = None
        self._uneven: list[Tensor] = []
        self._on_cuda = self._device.type == "cuda"
        self._copies = torch.cuda.Stream(self._device) if self._on_cuda else None
        self.clock = Clock(self._device)
        self.done = 0
        self.error: Exception | None = None

    def prepared(self, pixels: Pixels) -> Pixels:
        """Return the pixels in the dtype of the model, in memory that the device can copy from while it computes."""
        cast = tuple(x.to(self._dtype) if x.is_floating_point() else x for x in pixels)
        return tuple(x.pin_memory() for x in cast) if self._on_cuda else cast

    def _moved(self, pixels: Pixels) -> Pixels:
        """Return the pixels on the device, and start copying them."""
        with torch.cuda.stream(self._copies), self.clock.measure_device("transfer"):
            return tuple(x.to(self._device, non_blocking=self._on_cuda) for x in pixels)

    def read(self, batches: Iterator[Pixels]) -> Pixels | None:
        """Return the next batch on the device, or None at the end or on failure, which `error` then holds."""
        if self.error is not None:
            return None
        try:
            with self.clock.measure("wait for frames"):
                pixels = next(batches, None)
            if pixels is None and self.done < self._frames:
                raise VideoError(
                    f"the video ended after {self.done} of {self._frames} frames; check that the file is complete"
                )
            return pixels if pixels is None else self._moved(pixels)
        except Exception as error:  # noqa: BLE001 - raised on all ranks in the next round
            self.error = error
            return None

    def encode(self, pixels: Pixels | None) -> None:
        """Encode a batch; without one, only join the collectives of the other ranks."""
        try:
            if self._collective or pixels is not None:
                self._run(pixels)
        except Exception as error:  # noqa: BLE001 - raised on all ranks in the next round
            if self._collective:  # the other ranks are in a gather of parameters, so agreement is impossible
                raise DivergedError(f"a rank cannot encode its frames with sharded weights: {error}") from error
            self.error = error

    def features(self) -> Tensor:
        """Return (f, tokens, hidden), the features of all frames of this rank."""
        if self._features is None:  # this rank has no frames; encoding a blank one gives the shape
            self._run(None)
        assert self._features is not None and self.done == self._frames
        return torch.cat([self._features, *self._uneven]) if self._uneven else self._features

    def _run(self, pixels: Pixels | None) -> None:
        inputs = self._moved(self.prepared(self._chat_format.blank())) if pixels is None else pixels
        if self._copies is not None:  # the current stream waits for them, and their memory stays until it has used them
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._copies)
            for x in inputs:
                x.record_stream(current)
        with self.clock.measure_device("encode"):
            encoded = self._encode_pixels(*inputs)
        if self._features is None:
            shape = self._frames, *encoded.shape[1:]
            copies = HostCopies(self._device)
            self._features = copies.host_empty(shape, encoded.dtype) if self._on_host else encoded.new_empty(shape)
        if pixels is None:
            return
        if self._uneven or encoded.shape[1:] != self._features.shape[1:]:
            if not self._uneven:
                self._features = self._features[: self.done].flatten(0, 1)
            self._uneven.append(encoded.flatten(0, 1).to(self._features.device))
        else:
            self._features[self.done : self.done + encoded.shape[0]] = encoded
        self.done += encoded.shape[0]


def encoder_of(model: Any, chat_format: ChatFamily) -> Callable[..., Tensor]:
    """Return the function from images to features: the model's `encode_frames` if it has one, else the chat format's.

    `shard_weights` adds a method of that name to the model, because FSDP must wrap it.
    """
    method = getattr(model, "encode_frames", None)
    return partial(chat_format.encode, model) if method is None else method
