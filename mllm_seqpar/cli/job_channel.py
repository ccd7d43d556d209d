"""Jobs from rank 0 to the other ranks of a program that waits for its user, perhaps for days.

A rank that waits in a collective fails when the timeout of the process group has passed. Here, ranks poll a store on
rank 0 for a job instead, and increment a counter in it as their heartbeat. A rank whose connection to rank 0 breaks
raises immediately. Rank 0 raises if a rank has missed `LOST` heartbeats.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist

from mllm_seqpar.comm import Communicator
from mllm_seqpar.errors import TransferError

HEARTBEAT = 10.0
"""Seconds between the heartbeats of a waiting rank."""
POLL = 0.02
"""Seconds between two polls of the store."""
LOST = 6
_END, _CLOSED = "", "closed"


class JobChannel:
    """Sends texts from rank 0 to all other ranks. Every rank creates it; rank 0 calls `send`, the others `receive`.

    Args:
        comm: the ranks.
        heartbeat: seconds between heartbeats.
    """

    def __init__(self, comm: Communicator, heartbeat: float = HEARTBEAT) -> None:
        self._comm, self.heartbeat, self._number = comm, heartbeat, 0
        self._beats: dict[int, tuple[int, float]] = {}
        if comm.size == 1:
            return
        host, limit = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=300)
        if comm.rank == 0:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        port = int(comm.gather_texts(str(self._store.port) if comm.rank == 0 else "")[0])
        if comm.rank:
            self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)

    def send(self, job: str) -> None:
        """Send a job, which is not empty, to all other ranks."""
        if self._comm.size == 1:
            return
        self._store.set(f"job/{self._number}", job)
        self._store.delete_key(f"job/{self._number - 2}")  # every rank has taken part in a later job
        self._number += 1
        self._beats.clear()

    def close(self) -> None:
        """Make `receive` return None on all other ranks, and wait until they have read it, but not for a lost rank."""
        self.send(_END)
        deadline = time.monotonic() + self.heartbeat
        while self._comm.size > 1 and self._store.add(_CLOSED, 0) < self._comm.size - 1:
            if time.monotonic() > deadline:
                return
            time.sleep(POLL)

    def receive(self) -> str | None:
        """Wait for the next job without a time limit. Return None after `close`.

        Raises:
            TransferError: rank 0 has ended.
        """
        key, beat = f"job/{self._number}", time.monotonic()
        try:
            while not self._store.check([key]):  # a wait with a timeout would log warnings
                time.sleep(POLL)
                if time.monotonic() - beat > self.heartbeat:
                    beat = time.monotonic()
                    self._store.add(f"alive/{self._comm.rank}", 1)
            self._number += 1
            job = self._store.get(key).decode()
            if job == _END:
                self._store.add(_CLOSED, 1)
            return job or None
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise TransferError(f"rank 0 does not answer ({error})") from error

    def require_alive(self) -> None:
        """Raise TransferError if a waiting rank has had no heartbeat for a while. Rank 0 calls this between jobs."""
        now = time.monotonic()
        for rank in range(1, self._comm.size):
            count = self._store.add(f"alive/{rank}", 0)
            last, since = self._beats.get(rank, (-1, now))
            self._beats[rank] = (count, since if count == last else now)
            if now - self._beats[rank][1] > LOST * self.heartbeat:
                raise TransferError(f"rank {rank} has not answered for {now - since:.0f} s while it waited for a job")
