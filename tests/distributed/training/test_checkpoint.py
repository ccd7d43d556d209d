"""Layer: one process and gloo ranks. A checkpoint restores training bit for bit; a crash leaves the previous one."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from mllm_seqpar.errors import ConfigError, DataError
from mllm_seqpar.training import checkpoint
from mllm_seqpar.training.checkpoint import Progress, find_checkpoint, list_checkpoints, read_progress
from ranks import ranks


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.unused = nn.Linear(5, 3)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gate = nn.Parameter(torch.ones(5))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.head(self.frozen(torch.tanh(self.inner(self.embed(ids)))) * self.gate)


def build(world: int) -> tuple[Tied, torch.optim.AdamW]:
    torch.manual_seed(1)
    model = Tied()
    if world > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.inner)
        fully_shard(model)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> list[float]:
    losses = []
    for _ in range(number):
        ids = torch.randint(7, (2, 4))  # from the generator that the checkpoint restores
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def progress(step: int, **conditions: object) -> Progress:
    return Progress(step=step, epoch=0, batch=step, dp=1, sp=1, conditions=dict(conditions))


def save_and_resume(rank: int, world: int, folder: str) -> tuple[list[float], list[float], list[str]]:
    model, optimizer = build(world)
    torch.manual_seed(5)
    steps(model, optimizer, 3)
    saved = checkpoint.save_checkpoint(Path(folder), progress(3), model, optimizer, keep=2)
    uninterrupted = steps(model, optimizer, 3)
    names = [name for name, p in model.named_parameters() if p not in optimizer.state and p.requires_grad]
    model, optimizer = build(world)
    torch.manual_seed(99)
    checkpoint.load_checkpoint(saved, model, optimizer)
    return uninterrupted, steps(model, optimizer, 3), names


def load_and_continue(rank: int, world: int, folder: str) -> list[float]:
    model, optimizer = build(world)
    checkpoint.load_checkpoint(Path(folder), model, optimizer)
    torch.manual_seed(3)
    return steps(model, optimizer, 3)


def test_training_continues_bit_for_bit_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    for uninterrupted, resumed, without_state in ranks(2).run(save_and_resume, str(tmp_path)):
        assert uninterrupted == resumed
        assert without_state == ["unused.weight", "unused.bias"]
    saved = tmp_path / "checkpoint-00000003"
    assert {path.name for path in saved.iterdir()} == {"shards", "progress.json", "random-0.pt", "random-1.pt"}
    two_ranks = ranks(2).run(load_and_continue, str(saved))[0]
    assert load_and_continue(0, 1, str(saved)) == pytest.approx(two_ranks, rel=1e-5)
    uninterrupted, resumed, _ = save_and_resume(0, 1, str(tmp_path / "one-rank"))
    assert uninterrupted == resumed


def test_a_complete_checkpoint_replaces_older_ones(tmp_path: Path) -> None:
    model, optimizer = build(1)
    steps(model, optimizer, 1)
    checkpoint.save_checkpoint(tmp_path, progress(1), model, optimizer, keep=1)
    with mock.patch.object(checkpoint.dcp, "save", side_effect=OSError("full")), pytest.raises(OSError, match="full"):
        checkpoint.save_checkpoint(tmp_path, progress(2), model, optimizer, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000001"]
    assert find_checkpoint("auto", tmp_path) == tmp_path / "checkpoint-00000001"
    for step in (2, 3):
        checkpoint.save_checkpoint(tmp_path, progress(step), model, optimizer, keep=2)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000002", "checkpoint-00000003"]
    # a run that is resumed from an earlier checkpoint keeps its own
    for step in (6, 1):
        assert checkpoint.save_checkpoint(tmp_path, progress(step), model, optimizer, keep=2).is_dir()
    assert [int(path.name[-1]) for path in list_checkpoints(tmp_path)] == [1, 3, 6]


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, optimizer = build(1)
    assert find_checkpoint(None, tmp_path) is None and find_checkpoint("auto", tmp_path) is None
    with pytest.raises(DataError, match="not a complete checkpoint"):
        find_checkpoint(str(tmp_path), tmp_path)
    saved = checkpoint.save_checkpoint(tmp_path, progress(0, lr=0.1, betas=(1, 2)), model, optimizer, keep=1)
    assert read_progress(saved, {"lr": 0.1, "betas": (1, 2)}).step == 0
    with pytest.raises(ConfigError, match=r"lr was 0\.1 and is 0\.2 now"):
        read_progress(saved, {"lr": 0.2, "betas": (1, 2)})
    with pytest.raises(DataError, match=r"missing \['model/more\.bias', 'model/more\.weight'\] \(2 in all\)"):
        model.more = nn.Linear(2, 2)
        checkpoint.load_checkpoint(saved, model, optimizer)
    (saved / "progress.json").write_text(json.dumps({"step": 1}))
    with pytest.raises(DataError, match="damaged"):
        read_progress(saved, {})
