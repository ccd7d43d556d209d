"""Run by ranks in fresh processes: finds the adapter of the installed package `captioner` by its entry point alone.

Prints what it compared; the unpatched model in the same process is the reference. `PYTHONPATH` has the package.
"""

import copy
import sys

import torch
import torch.distributed as dist
from captioner import Captioner
from torch import Tensor

from mllm_seqpar import patch_model, unpatch_model

TOLERANCE = 1e-5
CASES = {
    # samples, tokens, frames of each sample
    "uneven": (2, 13, 3),
    "one frame, short text": (1, 3, 1),
    "long": (1, 33, 9),
}


def compare(samples: int, tokens: int, frames: int, **options: object) -> float:
    """The largest relative error of loss, logits and gradients, patched against unpatched, on this rank."""
    torch.manual_seed(3)
    model = Captioner()
    reference = copy.deepcopy(model)
    ids = torch.randint(0, 64, (samples, tokens))
    labels = ids.masked_fill(torch.rand(samples, tokens) < 0.2, -100)
    video = torch.randn(samples, frames, 5, 12)
    expected_logits, expected = reference(ids, video).detach(), reference(ids, video, labels)
    expected.backward()

    patch_model(model, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        logits = model(ids, video)
    loss = model(ids, video, labels)
    loss.backward()
    assert "captioner_adapter" in sys.modules, "patched by something else than the adapter"
    found = [relative(loss, expected), relative(logits, expected_logits)]
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None, name
        dist.all_reduce(mine.grad)
        mine.grad /= dist.get_world_size()
        if not name.endswith("k.bias"):  # zero but for rounding: it moves all scores of a row alike
            found.append(relative(mine.grad, theirs.grad))
    unpatch_model(model)
    assert torch.equal(model(ids, video), expected_logits)
    return max(found)


def relative(mine: Tensor, theirs: Tensor) -> float:
    """Error in the Euclidean norm."""
    return ((mine - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()


def main() -> None:
    """Compares all cases on every rank."""
    dist.init_process_group("gloo")
    assert "captioner_adapter" not in sys.modules
    for name, case in CASES.items():
        worst = compare(*case)
        assert worst < TOLERANCE, (name, worst)
        sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {name} equal, {worst:.1e}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
