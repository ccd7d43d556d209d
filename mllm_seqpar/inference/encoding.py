"""Encoding a video on several ranks: each reads and encodes its own frames, a bounded number at a time.

All ranks go in rounds of one batch. A round begins with one small gather: how many frames each rank has encoded, which
is what the progress bar shows, and whether one has failed, so that a damaged part of the file stops all ranks within a
batch and not when the others are done. While one batch is encoded, a thread reads and prepares the next: two batches of
pixels exist at most, whatever the length of the video. What remains is the features, of this rank's frames.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mllm_seqpar.comm import Communicator, Group, as_communicator
from mllm_seqpar.comm.collective_check import raise_on_all_ranks
from mllm_seqpar.data.chat_family import ChatFamily, chat_family
from mllm_seqpar.data.prefetch import read_ahead
from mllm_seqpar.data.sources import FrameSource
from mllm_seqpar.errors import ConfigError, VideoError
from mllm_seqpar.sharding import FrameShard, frame_bounds

Pictures = tuple[Tensor, ...]
"""What a family makes of frames: pixels, and what else belongs to each."""


@dataclass(frozen=True)
class EncodedVideo:
    """The visual features of one video, sharded over the ranks of a group.

    Attributes:
        features: (f, tokens, hidden), those of this rank's frames, as the family's `encode` makes them.
        shard: which frames of the video these are.
        source: the frames, of which no more is asked than their number and sizes; None: only their number is known.
    """

    features: Tensor
    shard: FrameShard
    source: FrameSource | None = None

    @property
    def frames(self) -> int:
        """Frames of the whole video."""
        return self.shard.total

    @property
    def visual_tokens(self) -> int:
        """Visual tokens of the whole video."""
        return self.shard.total * self.features.shape[1]


def encode_video(
    model: nn.Module,
    processor: Any,
    source: FrameSource,
    *,
    group: Group = None,
    batch: int = 8,
    progress: Callable[[int], object] | None = None,
) -> EncodedVideo:
    """Reads and encodes this rank's frames of a video. Every rank of the group calls it, with the same source.

    Args:
        model: of a family that `data.families` knows, or with `encode_frames`, as the native mPLUG-Owl3 has; patched or
            not. Where its parameters are sharded (FSDP2), all ranks must be in the group.
        processor: of that model; its family makes pixels of uint8 frames (b, 3, H, W).
        source: the frames, a `VideoSource` for example.
        group: the ranks to share the frames, as for `patch_model`.
        batch: frames read and encoded at once.
        progress: called after each round with the number of frames encoded so far by all ranks.

    Raises:
        VideoError: this rank's part of the video cannot be read.
        AgreementError: another rank's part cannot; its message is quoted.
    """
    comm = as_communicator(group)
    if batch < 1:
        raise ConfigError(f"batch: {batch} frames at once is not possible; give 1 or more")
    family = chat_family(processor)
    family.check(model)
    if len(source) == 0:
        raise VideoError("encode_video: the source has no frames; give one with at least one")
    bounds = frame_bounds(len(source), comm.size)
    start, stop = bounds[comm.rank]
    encoder = _Encoder(model, family, stop - start)
    with torch.no_grad(), closing(_batches(source, start, stop, batch, family)) as batches:
        while True:
            pixels = encoder.attempt(batches)
            done = _agree(comm, encoder)
            if progress is not None:
                progress(sum(done))
            if done == [last - first for first, last in bounds]:
                break
            encoder.take(pixels)
            del pixels  # before the thread goes on to the batch after the next
        return EncodedVideo(encoder.features(), FrameShard(start, stop, len(source)), source)


def _batches(
    source: FrameSource, start: int, stop: int, batch: int, family: ChatFamily
) -> Generator[Pictures, None, None]:
    """Yields what the family makes of a range of frames, at most `batch` of them, one batch read ahead."""
    reader = source.read(start, stop, batch=batch)

    def read_next(_: int) -> Pictures | None:
        frames = next(reader, None)
        return None if frames is None else family.pixels(frames)

    # Where pictures change their size a source gives smaller batches, so their number is not known before.
    with closing(read_ahead(count(), read_next)) as ahead:
        for pixels in ahead:
            if pixels is None:
                return
            yield pixels
            del pixels


class _Encoder:
    """This rank's features as they grow, and what stopped it."""

    def __init__(self, model: Any, family: ChatFamily, frames: int) -> None:
        weight = next(model.parameters())
        self._family, self._device, self._dtype = family, weight.device, weight.dtype
        self._encode_pictures = encoder_of(model, family)
        # FSDP gathers parameters as modules run: a rank that has no frames in a round runs them all the same.
        self._in_step = any(isinstance(module, FSDPModule) for module in model.modules())
        self._frames = frames
        self._features: Tensor | None = None
        self.done = 0
        self.error: Exception | None = None

    def attempt(self, batches: Iterator[Pictures]) -> Pictures | None:
        """The next batch, or None: there is no other, or it cannot be read, of which `error` then tells."""
        if self.error is not None:
            return None
        try:
            pixels = next(batches, None)
            if pixels is None and self.done < self._frames:
                raise VideoError(f"the video gave {self.done} of {self._frames} frames asked of it")
            return pixels
        except Exception as error:  # noqa: BLE001 - raised when the other ranks know
            self.error = error
            return None

    def take(self, pixels: Pictures | None) -> None:
        """Encodes a batch; without one, does what keeps the ranks in step."""
        if self._in_step:  # the others are in the same gathers: nobody would hear of an error before the time limit
            self._encode(pixels)
        elif pixels is not None:
            try:
                self._encode(pixels)
            except Exception as error:  # noqa: BLE001 - raised when the other ranks know
                self.error = error

    def _encode(self, pixels: Pictures | None) -> None:
        given = self._family.blank() if pixels is None else pixels
        encoded = self._encode_pictures(*map(self._moved, given))
        if self._features is None:
            self._features = encoded.new_empty((self._frames, *encoded.shape[1:]))
        if pixels is not None:
            self._features[self.done : self.done + encoded.shape[0]] = encoded
            self.done += encoded.shape[0]

    def features(self) -> Tensor:
        """(f, tokens, hidden) of all frames of this rank."""
        if self._features is None:  # no frames here; their shape is known when one is encoded
            self._encode(None)
        assert self._features is not None and self.done == self._frames
        return self._features

    def _moved(self, x: Tensor) -> Tensor:
        return x.to(device=self._device, dtype=self._dtype if x.is_floating_point() else None)


def encoder_of(model: Any, family: ChatFamily) -> Callable[..., Tensor]:
    """What makes features of pictures: the model's `encode_frames`, or what its family says.

    `shard_weights` puts a method of that name on the model: FSDP must know of it.
    """
    own = getattr(model, "encode_frames", None)
    return partial(family.encode, model) if own is None else own


def _agree(comm: Communicator, encoder: _Encoder) -> list[int]:
    """Frames that each rank has encoded; when a rank has failed, all raise."""
    rows = comm.gather_ints([encoder.done, int(encoder.error is not None)])
    if any(failed for _, failed in rows):
        raise_on_all_ranks(comm, "reading the video", encoder.error)
    return [done for done, _ in rows]
