"""Short values by which data are compared: digests name files and texts; checksums of tensors are compared between
ranks and with those of an earlier pass."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_SAMPLED_VALUES = 4096


def digest_of(content: str | bytes) -> str:
    """Return the digest of a text or of bytes, 32 hexadecimal digits."""
    return hashlib.blake2b(content.encode() if isinstance(content, str) else content, digest_size=16).hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return a digest of the size and of samples of a file, 32 hexadecimal digits."""
    digest = hashlib.blake2b(str(os.path.getsize(path)).encode(), digest_size=16)
    for sample in file_samples(path):
        digest.update(sample)
    return digest.hexdigest()


def file_samples(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield evenly spaced parts of a file, so that a long video or a large model is not read whole."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        for sample in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)


def fingerprint(text: str) -> int:
    """Return 63 bits of a hash of `text`, to compare texts across ranks."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def sampling_step(x: Tensor, count: int) -> int:
    """Return the distance of about `count` values that are spread over x, and over all rows and columns of its last two
    dims: the left column of two videos may be the same black border."""
    step, plane = max(1, x.numel() // count), math.prod(x.shape[-2:])
    while math.gcd(step, plane) > 1:
        step += 1
    return step


def sampled_bits(x: Tensor, count: int = _SAMPLED_VALUES) -> Tensor:
    """Return the bits of about `count` values that are spread over x; those of two videos differ."""
    x, step = x.detach(), sampling_step(x, count)
    if x.is_contiguous():
        return x.view(-1)[::step].float().view(torch.int32)
    # Flattening frames of another memory format (channels last) would copy the whole video.
    places = torch.arange(0, x.numel(), step, device=x.device)
    return x[torch.unravel_index(places, x.shape)].float().view(torch.int32)


def checksum(*tensors: Tensor | None) -> int:
    """Return the CRC-32 of the bytes of tensors on the CPU, one after the other; 0 without any."""
    number = 0
    for x in tensors:
        if x is not None and x.numel():
            x = x.detach().contiguous()
            # Not `x.numpy()`, after which the storage cannot be resized: FSDP2 frees gathered parameters in this way.
            data = (ctypes.c_char * (x.numel() * x.element_size())).from_address(x.data_ptr())
            number = zlib.crc32(data, number)
    return number


def fingerprint_of(frames: Tensor, sample: Tensor | None = None) -> tuple[int, ...]:
    """Return the shape of frames and a checksum of their `sampled_bits`, to recognise frames that were passed before.

    `sample` is a copy of the `sampled_bits` on the CPU, if there is one.
    """
    return (*frames.shape, checksum(sampled_bits(frames).cpu() if sample is None else sample))
