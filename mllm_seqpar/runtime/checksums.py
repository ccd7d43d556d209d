"""Short values by which tensors are compared: between ranks, and with those of an earlier pass."""

from __future__ import annotations

import ctypes
import math
import zlib

import torch
from torch import Tensor

_SAMPLED = 4096


def sampling_step(x: Tensor, count: int) -> int:
    """Return the distance of about `count` values that are spread over x, and over all rows and columns of its last two
    dims: the left column of two videos may be the same black border."""
    step, plane = max(1, x.numel() // count), math.prod(x.shape[-2:])
    while math.gcd(step, plane) > 1:
        step += 1
    return step


def sampled_bits(x: Tensor, count: int = _SAMPLED) -> Tensor:
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
