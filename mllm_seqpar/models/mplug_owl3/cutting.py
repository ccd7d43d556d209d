"""How published models cut a still image: which grid, and what the prompt says in its place.

A grid is (rows, columns). The picture is resized to the grid's box, cut row by row, and followed by the whole picture
once more (the global view): rows * columns + 1 tiles, each of which is a frame with a placeholder of its own.
"""

import torch
from torch import Tensor

from .chat import IMAGE

Grid = tuple[int, int]

GRIDS: tuple[Grid, ...] = ((2, 2), (1, 3), (1, 4), (3, 1), (4, 1), (2, 3), (3, 2))

TEMPLATES = ("v2", "v3")


def best_grid(height: int, width: int, size: int) -> Grid:
    """Return the grid that fits a picture best: the closest shape first, then the closest resolution.

    The published code computes in float32 and in whole pixels, which decides near ties, so this does too.

    Args:
        height, width: of the picture.
        size: side of a tile.
    """
    boxes = torch.tensor([(columns * size, rows * size) for rows, columns in GRIDS])
    same_shape = boxes.clone()
    same_shape[:, 1] = height / width * boxes[:, 0]  # cut off to whole pixels
    score = _overlap(boxes, same_shape) * 100 + _overlap(boxes, torch.tensor([[width, height]]))
    return GRIDS[int(score.argmax())]


def _overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the intersection over union of boxes (width, height) that share a corner."""
    intersection = torch.minimum(boxes, others).prod(1)
    return intersection / (boxes.prod(1) + others.prod(1) - intersection + 1e-5)


def tiles_of(grid: Grid | None) -> int:
    """Return the number of frames of an image in that grid; None is an image that is not cut."""
    return 1 if grid is None else grid[0] * grid[1] + 1


def image_text(grid: Grid | None, template: str) -> str:
    """Return the text that stands in a prompt for an image, with a placeholder for each tile."""
    if grid is None:
        return IMAGE
    rows, columns = grid
    if template == "v2":
        lines = (" ".join(f"subimg({row},{column}){IMAGE}" for column in range(columns)) for row in range(rows))
        head, tail = f"Cut to {rows} rows {columns} columns with a global view", f"global_view{IMAGE}"
    else:
        lines = (" ".join([IMAGE] * columns) for _ in range(rows))
        head, tail = f"<|start_cut|>{rows}*{columns}", f"{IMAGE}<|end_cut|>"
    return "\n".join((head, *lines, tail))
