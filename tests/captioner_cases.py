"""Compares the example of tests/example_adapter, patched, with the unpatched model. `captioner` must be importable."""

import copy
from typing import Any

import torch

from mllm_seqpar import patch_model, unpatch_model
from mllm_seqpar.comm import as_communicator
from outcomes import error

TOLERANCE = 1e-5
CASES = {  # samples, tokens, frames of each sample
    "uneven": (2, 13, 3),
    "one frame, short text": (1, 3, 1),
    "long": (1, 33, 9),
}


def compare(samples: int, tokens: int, frames: int, group: Any = None, **options: Any) -> None:
    """Compare loss, logits and mean gradients, and the logits after `unpatch_model`."""
    from captioner import Captioner

    comm = as_communicator(group)
    generator = torch.Generator().manual_seed(3)
    model = Captioner()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    reference = copy.deepcopy(model)
    ids = torch.randint(0, 64, (samples, tokens), generator=generator)
    labels = ids.masked_fill(torch.rand(samples, tokens, generator=generator) < 0.2, -100)
    video = torch.randn(samples, frames, 5, 12, generator=generator)
    logits, expected = reference(ids, video).detach(), reference(ids, video, labels)
    expected.backward()

    patch_model(model, group=group, **options)
    with torch.no_grad():
        assert error(model(ids, video), logits) < TOLERANCE
    loss = model(ids, video, labels)
    loss.backward()
    assert error(loss, expected) < TOLERANCE
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, name
        mean = comm.all_reduce(ours.grad.contiguous()) / comm.size
        if not name.endswith("k.bias"):  # zero but for rounding: it changes all scores of a row alike
            assert error(mean, theirs.grad) < TOLERANCE, name
    unpatch_model(model)
    assert torch.equal(model(ids, video), logits)
