"""The synthetic image and video of the checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mllm_seqpar.data.sources import FrameSource

SIZE = (288, 512)
"""Height and width."""


@dataclass(frozen=True)
class Frames(FrameSource):
    """Frames in memory, (n, 3, H, W) uint8."""

    frames: Tensor

    def __len__(self) -> int:
        return self.frames.shape[0]

    def sizes(self) -> list[tuple[int, int]]:
        return [(self.frames.shape[2], self.frames.shape[3])] * len(self)

    def read(self, start: int, stop: int, *, size: Any = None, batch: int = 16) -> Iterator[Tensor]:
        yield self.frames[start:stop]


def disc(x: float, y: float, colour: tuple[int, int, int]) -> Tensor:
    """Return an image (3, H, W) of a disc on grey; `x` and `y` are its centre as fractions of width and height."""
    height, width = SIZE
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    inside = (columns - x * width) ** 2 + (rows - y * height) ** 2 < (height / 5) ** 2
    image = torch.full((3, height, width), 200, dtype=torch.uint8)
    return torch.where(inside, torch.tensor(colour, dtype=torch.uint8)[:, None, None], image)


def image_file(folder: Path) -> Path:
    """Write a red disc on grey to a file in `folder`; return its path."""
    from PIL import Image

    path = folder / "disc.png"
    Image.fromarray(disc(0.5, 0.5, (220, 30, 30)).permute(1, 2, 0).numpy()).save(path)
    return path


def drawn_video(frames: int) -> Frames:
    return Frames(torch.stack([disc(x, 0.5, (30, 60, 220)) for x in torch.linspace(0.2, 0.8, frames).tolist()]))
