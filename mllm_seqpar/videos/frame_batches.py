"""Tensors of frames that several threads fill with images."""

import math
import threading
import weakref
from collections.abc import Iterable, Iterator
from itertools import groupby, islice

import numpy as np
import torch
from torch import Tensor


class FrameBatches:
    """Tensors that several threads fill with images, each of which is copied once.

    Writing to new memory takes longer than writing to memory that has been used. The memory of a tensor that no longer
    exists is therefore used again. New memory comes from NumPy, which asks the kernel for huge pages.
    """

    def __init__(self, total: int, batch: int) -> None:
        self._total, self._batch = total, batch
        self._arrays: dict[int, np.ndarray] = {}
        self._others: dict[int, np.ndarray] = {}  # images of another size than the first that their batch received
        self._unused: list[np.ndarray] = []  # the memory of tensors that no longer exist
        self._lock = threading.Lock()
        self._finished = self._next = 0

    def write(self, position: int, image: np.ndarray) -> None:
        """Copy an image (height, width, 3) to its position among all images, with its channels first."""
        image = image.transpose(2, 0, 1)
        number, row = divmod(position, self._batch)
        with self._lock:
            if number not in self._arrays:
                shape = (min(self._batch, self._total - number * self._batch), *image.shape)
                memory = self._unused.pop() if self._unused else np.empty(0, np.uint8)
                if memory.size < math.prod(shape):
                    memory = np.empty(math.prod(shape), np.uint8)
                self._arrays[number] = np.ndarray(shape, np.uint8, memory)
                weakref.finalize(self._arrays[number], self._unused.append, memory)
        array = self._arrays[number]
        if image.shape == array.shape[1:]:
            array[row] = image
        else:
            self._others[position] = image.copy()

    def finish(self, count: int) -> Iterator[Tensor]:
        """Yield the tensors that are complete now that the next `count` images have been written."""
        self._finished += count
        while self._next in self._arrays:
            first = self._next * self._batch
            if first + len(self._arrays[self._next]) > self._finished:
                return
            array = self._arrays.pop(self._next)
            self._next += 1
            if self._others:
                images = (self._others.pop(first + row, array[row]) for row in range(len(array)))
                yield from stacked(map(torch.from_numpy, images), self._batch)
            else:
                yield torch.from_numpy(array)


def stacked(images: Iterable[Tensor], batch: int) -> Iterator[Tensor]:
    """Yield images in tensors of at most `batch`; a change of size starts a new tensor."""
    for _, group in groupby(images, key=lambda image: image.shape):
        while part := list(islice(group, batch)):
            yield torch.stack(part)
