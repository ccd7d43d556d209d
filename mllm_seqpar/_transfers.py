"""Copies between the host and the device that let the host run ahead of the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the CPU, read in one copy from each device, for which the host waits once.

    Tensors that are on the CPU are returned themselves.
    """
    found = [x.detach() for x in tensors]
    for device in {x.device for x in found if x.device.type != "cpu"}:
        # Wide entries come first, so that every part of the bytes begins at a multiple of the size of its entries.
        places = sorted((i for i, x in enumerate(found) if x.device == device), key=lambda i: -found[i].element_size())
        flat = [found[i].contiguous().view(-1).view(torch.uint8) for i in places]
        parts = torch.cat(flat).cpu().split([x.numel() for x in flat])
        for i, part in zip(places, parts, strict=True):
            found[i] = part.view(found[i].dtype).view(found[i].shape)
    return found


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on `device`. To a CUDA device it is copied from pinned memory, for which the host does not wait."""
    if x.device.type == "cpu" and device.type == "cuda" and x.numel():
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
