"""From schedules to panels of a drawing: what each rank computes and sends is read from what the executor runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from grid import Cell, Chip, Leaving, Panel
from torch import Tensor

from mllm_seqpar.comm import Communicator, Pending, Recv, Send
from mllm_seqpar.comm.base import ExchangeCollectives
from mllm_seqpar.schedules import Schedule, Transfer, schedule_for
from mllm_seqpar.schedules.head_sharding import HeadShards

Tile = tuple[int, int]
Share = Callable[[int, int], float]
"""(row, column) -> share of the block's scores that the mask lets see."""

MEANING = {
    "Q": "Q: queries",
    "O": "O: partial output and its log-sum-exp",
    "KV": "KV: keys and values",
    "Q+": "Q+: Q, O, dO and the log-sum-exp of rows",
    "dQ": "dQ: partial gradient of Q",
    "dKV": "dKV: partial gradients of K and V",
}


def piece_of(move: Transfer, backward: bool) -> str:
    """What a move carries, in short."""
    if move.kind == "input":
        return "KV" if move.axis == "kv" else "Q+" if backward else "Q"
    return "dKV" if move.axis == "kv" else "dQ" if backward else "O"


def legend_of(names: Sequence[str]) -> str:
    """What the short names mean that a drawing uses."""
    return "; ".join(words for name, words in MEANING.items() if name in names) + "."


def of_schedule(
    title: str, tile: Tile, *, backward: bool, direct: bool = False, share: Share | None = None, spares: bool = False
) -> tuple[Panel, set[str]]:
    """A pass of a tile, and the short names of what travels.

    Args:
        title: of the panel.
        tile: (a, b).
        backward: which pass.
        direct: rows do not go round.
        share: what a mask lets see; None: everything.
        spares: what sees nothing of a rank does not travel to it.
    """
    size, names, rows = tile[0] * tile[1], set(), []
    for rank in range(size):
        cells = []
        for step in schedule_for(tile, rank, backward=backward, direct=direct):
            chips = [_chip(b.q_shard, b.kv_shard, b.part, b.parts, share) for b in step.blocks]
            leaving = []
            for move in step.transfers:
                computed = (move.send_shard, move.dst if move.kind == "input" else rank)
                if spares and share is not None and share(*computed) == 0:
                    continue
                name = piece_of(move, backward)
                names.add(name)
                leaving.append(Leaving(f"{name}{move.send_shard}", move.send_shard, str(move.dst)))
            cells.append(Cell(chips, leaving))
        rows.append((f"rank {rank}", cells))
    return Panel(title, [f"step {i + 1}" for i in range(len(rows[0][1]))], rows), names


def _chip(row: int, column: int, part: int, parts: int, share: Share | None) -> Chip:
    seen = 1.0 if share is None else share(row, column)
    note = f"{seen:.0%}" if 0 < seen < 1 else ""
    own = row == column
    return Chip(f"Q{row}", f"KV{column}", [row], [column], part, parts, own=own, hidden=seen == 0, note=note)


def of_heads(title: str, size: int, heads: int, kv_heads: int, tile: Tile = (1, 1)) -> Panel:
    """The forward pass of heads dealt to `size` ranks at a time, and of a tile between the groups that do so."""
    groups, shares = tile[0] * tile[1], HeadShards(heads, kv_heads, size)
    rows = []
    for rank in range(size * groups):
        group, place = divmod(rank, size)
        first = group * size
        dealt = [
            Leaving(
                f"Q{rank} {_of(shares.query_heads_of(p))}, KV{rank} {_of(shares.kv_heads_of(p))}", rank, str(first + p)
            )
            for p in range(size)
            if p != place
        ]
        back = [
            Leaving(f"O{first + p} {_of(shares.query_heads_of(place))}", first + p, str(first + p))
            for p in range(size)
            if p != place
        ]
        cells = [Cell((), dealt)]
        schedule: Schedule = schedule_for(tile, group, backward=False)
        for step in schedule:
            chips = [
                Chip(
                    f"Q{_ranks(b.q_shard, size)}",
                    f"KV{_ranks(b.kv_shard, size)} {_of(shares.query_heads_of(place))}",
                    range(b.q_shard * size, (b.q_shard + 1) * size),
                    range(b.kv_shard * size, (b.kv_shard + 1) * size),
                    b.part,
                    b.parts,
                    own=b.q_shard == b.kv_shard,
                )
                for b in step.blocks
            ]
            moves = [
                Leaving(
                    f"{piece_of(m, False)}{_ranks(m.send_shard, size)}", m.send_shard * size, str(m.dst * size + place)
                )
                for m in step.transfers
            ]
            cells.append(Cell(chips, moves))
        rows.append((f"rank {rank}", [*cells, Cell((), back)]))
    count = len(rows[0][1]) - 2
    middle = ["compute"] if count == 1 else [f"step {i + 1}" for i in range(count)]
    return Panel(title, ["all-to-all", *middle, "all-to-all"], rows)


def _of(heads: range) -> str:
    return f"h{heads.start}" if len(heads) == 1 else f"h{heads.start}-{heads.stop - 1}"


def _ranks(group: int, size: int) -> str:
    return f"{group * size}-{group * size + size - 1}"


class Recorder(ExchangeCollectives):
    """A rank's communicator that remembers what was sent: of every exchange, (to, how many rows, of which tensor)."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank, self.size, self.bytes = comm, comm.rank, comm.size, comm.bytes
        self.exchanges: list[list[tuple[int, Tensor]]] = []

    @property
    def identity(self) -> object:
        """The communicator's."""
        return self.comm.identity

    def exchange(self, sends: Sequence[Send], recvs: Sequence[Recv]) -> Pending:
        """The communicator's, noted."""
        self.exchanges.append([(send.peer, send.tensor) for send in sends])
        return self.comm.exchange(sends, recvs)

    def leaving(self, index: int, piece: str, share: str) -> list[Leaving]:
        """What left in one exchange: one tensor for all others is `piece`, a tensor for each is a `share` for it."""
        sent = self.exchanges[index]
        assert sent
        if len({tensor.data_ptr() for _, tensor in sent}) == 1:
            assert sorted(peer for peer, _ in sent) == [r for r in range(self.size) if r != self.rank]
            return [Leaving(piece.format(self.rank), self.rank, "all")]
        return [Leaving(share.format(self.rank, peer), self.rank, str(peer)) for peer, _ in sent]


def causal_share(positions: Sequence[Tensor]) -> Share:
    """That of causal attention, with the places in the text of each rank's tokens."""

    def share(row: int, column: int) -> float:
        rows, keys = positions[row], positions[column]
        return float((torch.as_tensor(rows)[:, None] >= torch.as_tensor(keys)[None, :]).double().mean())

    return share
