"""Layer: one process. Images that threads write in any order come out in tensors, in order."""

import numpy as np
import torch
from torch import Tensor

from mllm_seqpar.videos.frame_batches import FrameBatches


def images(*sizes: tuple[int, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in sizes]


def channels_first(image: np.ndarray) -> Tensor:
    return torch.from_numpy(image.transpose(2, 0, 1).copy())


def test_a_tensor_is_yielded_when_all_its_images_are_written() -> None:
    given = images(*[(4, 6)] * 5)
    batches = FrameBatches(5, batch=2)
    for position in (4, 2, 1, 0, 3):
        batches.write(position, given[position])
    found = [list(batches.finish(count)) for count in (1, 1, 3)]
    assert [[len(tensor) for tensor in part] for part in found] == [[], [2], [2, 1]]
    assert torch.equal(torch.cat([*found[1], *found[2]]), torch.stack([*map(channels_first, given)]))


def test_a_change_of_size_starts_a_new_tensor() -> None:
    given = images((4, 6), (4, 6), (6, 4), (4, 6), (4, 6))
    batches = FrameBatches(5, batch=3)
    for position, image in enumerate(given):
        batches.write(position, image)
    found = list(batches.finish(5))
    assert [tuple(tensor.shape) for tensor in found] == [(2, 3, 4, 6), (1, 3, 6, 4), (2, 3, 4, 6)]
    for image, stored in zip(given, [image for tensor in found for image in tensor], strict=True):
        assert torch.equal(stored, channels_first(image))


def test_memory_is_used_again_only_after_its_tensor() -> None:
    given = images(*[(4, 6)] * 8)
    batches = FrameBatches(8, batch=2)

    def read(number: int) -> Tensor:
        for position in (2 * number, 2 * number + 1):
            batches.write(position, given[position])
        (tensor,) = batches.finish(2)
        return tensor

    first = read(0)
    place = first.data_ptr()
    kept, other = first[1], read(1)  # a view keeps the memory in use
    del first
    assert read(2).data_ptr() not in (place, other.data_ptr())
    assert torch.equal(kept, channels_first(given[1]))
    del kept
    assert read(3).data_ptr() == place
