"""Runner of torchmonarch's RDMABuffer over its TCP fallback, in .envs/peer-torchmonarch. `... BYTES`."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import torch
from _runner import serve
from _timing import check, fill, timed
from monarch.actor import Actor, endpoint, this_host
from monarch.config import configure
from monarch.rdma import RDMABuffer, get_rdma_backend


class Owner(Actor):
    """Actor that owns the memory. A torchmonarch buffer has no sub-ranges, so each size gets its own buffer."""

    def __init__(self, nbytes: int) -> None:
        torch.set_num_threads(1)
        configure(rdma_allow_tcp_fallback=True)
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        fill(self.memory)

    @endpoint
    def own(self, size: int) -> RDMABuffer:
        return RDMABuffer(self.memory[:size])


class Reader(Actor):
    """Actor that reads. It measures in its own process, so that times do not include the call of an actor."""

    def __init__(self, nbytes: int) -> None:
        torch.set_num_threads(1)
        configure(rdma_allow_tcp_fallback=True)
        self.into = torch.zeros(nbytes, dtype=torch.uint8)

    @endpoint
    def read(self, buffer: RDMABuffer, size: int, count: int) -> list[float]:
        into = self.into[:size]
        into.zero_()
        times = timed(lambda: buffer.read_into(into).get(), count)
        check(into, "read")
        return times


class Torchmonarch:
    """The owner's and the reader's processes."""

    def __init__(self, nbytes: int) -> None:
        configure(rdma_allow_tcp_fallback=True)
        self.owner: Any = this_host().spawn_procs(per_host={"gpus": 1}).spawn("owner", Owner, nbytes)
        self.reader: Any = this_host().spawn_procs(per_host={"gpus": 1}).spawn("reader", Reader, nbytes)
        self.buffers: dict[int, Any] = {}

    def times(self, _: str, count: int, size: int) -> list[float]:
        """Return the seconds of ``count`` reads, measured in the reader's process. Use it as ``times`` of `serve`."""
        if size not in self.buffers:
            self.buffers[size] = self.owner.own.call_one(size).get()
        found: list[float] = self.reader.read.call_one(self.buffers[size], size, count).get()
        return found


if __name__ == "__main__":
    both = Torchmonarch(int(sys.argv[1]))
    serve(f"torchmonarch {version('torchmonarch')}, backend {get_rdma_backend()}", both.times)
