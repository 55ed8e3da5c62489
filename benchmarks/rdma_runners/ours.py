"""Runner of reads and writes of this project's RDMABuffer. `ours.py ordinary|mapped BYTES [ADDRESS]`.

The owner is a process of this host, or of the daemon at ADDRESS. The environment variables determine the route.
OWNER_DEVICES names the owner's NICs.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from _runner import Calls, serve
from _timing import Call, check, fill
from _verbs_floor import below, sleeps

from monarch_backend import rdma
from monarch_backend._rdma.registrations import registry
from monarch_backend._rdma.routes.protocol import cancel_scope
from monarch_backend._rdma.transfers.engine import engine
from monarch_backend._verbs import Region
from monarch_backend._verbs.providers.provider import READ, WRITE, Work
from monarch_backend._verbs.registrations.cache import allocation_of
from monarch_backend.actor import Actor, endpoint, this_host
from monarch_backend.rdma import RDMAAction, RDMABuffer

IN_FLIGHT = 16
OURS = 1 << 48  # number of our work requests; the engine does not use such numbers


class Owner(Actor):
    """Actor that owns the memory."""

    @endpoint
    def own(self, mapped: bool, nbytes: int) -> RDMABuffer:
        torch.set_num_threads(1)
        self.memory = rdma.empty(nbytes, dtype=torch.uint8) if mapped else torch.empty(nbytes, dtype=torch.uint8)
        fill(self.memory)
        return RDMABuffer(self.memory)

    @endpoint
    def clear(self, nbytes: int) -> None:
        self.memory[:nbytes].zero_()

    @endpoint
    def check(self, nbytes: int) -> None:
        check(self.memory[:nbytes], "write")


class Ours:
    """The process that reads and writes."""

    verbs: Any = None  # the verbs engine, if it is not that of the process

    def __init__(self, kind: str, nbytes: int, address: str | None) -> None:
        if address is None:
            devices = os.environ.get("OWNER_DEVICES")
            env = {"MONARCH_RDMA_DEVICES": devices} if devices else None
            procs = this_host().spawn_procs({"gpus": 1}, env=env, name="owner")
        else:
            from monarch_backend.hosts import attach_to_workers

            procs = attach_to_workers([address]).spawn_procs({"gpus": 1}, name="owner").slice(hosts=0)
        self.owner: Any = procs.spawn("owner", Owner).slice(gpus=0)
        self.whole = self.owner.own.call_one(kind == "mapped", nbytes).get()
        self.into = torch.zeros(nbytes, dtype=torch.uint8)

    def about(self) -> str:
        """Return the route, or for the same host the copy method."""
        self.whole[:8].read_into(self.into[:8]).get()
        if self.whole.backend != "same host":
            return str(self.whole.backend)
        return str(engine().routes._same_host.copy_method(self.whole._handle))

    def engine(self) -> Any:
        """Return the verbs engine."""
        return self.verbs or engine().routes.verbs._engine

    def ready(self, case: str, size: int) -> Call:
        """Return the call of a case, as `Calls` needs it."""
        made: Call = getattr(self, f"_{case}")(self.whole[:size], self.into[:size])
        return made

    def _read(self, buffer: RDMABuffer, into: torch.Tensor) -> Call:
        return lambda: buffer.read_into(into).get()

    def _read_again(self, buffer: RDMABuffer, into: torch.Tensor) -> Call:
        action = RDMAAction().read_remote(into, buffer)
        return lambda: action.submit().get()

    def _write(self, buffer: RDMABuffer, into: torch.Tensor) -> Call:
        fill(into)
        self.owner.clear.call_one(len(into)).get()
        buffer.write_from(into).get()
        self.owner.check.call_one(len(into)).get()
        return lambda: buffer.write_from(into).get()

    def _read_many(self, buffer: RDMABuffer, into: torch.Tensor) -> Call:
        return lambda: [future.get() for future in [buffer.read_into(into) for _ in range(IN_FLIGHT)]]

    def _write_many(self, buffer: RDMABuffer, into: torch.Tensor) -> Call:
        fill(into)
        return lambda: [future.get() for future in [buffer.write_from(into) for _ in range(IN_FLIGHT)]]

    def _read_turns(self, buffer: RDMABuffer, into: torch.Tensor) -> Call:
        """Return a call that reads into two tensors in turns."""
        turns = itertools.cycle((into, torch.zeros_like(into)))
        return lambda: buffer.read_into(next(turns)).get()

    def _write_turns(self, buffer: RDMABuffer, into: torch.Tensor) -> Call:
        self._write(buffer, into)
        turns = itertools.cycle((into, into.clone()))
        return lambda: buffer.write_from(next(turns)).get()

    def _write_again(self, buffer: RDMABuffer, into: torch.Tensor) -> Call:
        self._write(buffer, into)
        action = RDMAAction().write_remote(buffer, into)
        return lambda: action.submit().get()

    def _bare(self, buffer: RDMABuffer, into: torch.Tensor) -> Call:
        """Return the part of a read below Python: the compiled call. With verbs, return a bare work request."""
        handle, waits = buffer._handle, cancel_scope(None)
        segments = [(handle.offset, into.data_ptr(), len(into))]
        if buffer.backend == "same host":
            native = registry().native
            return lambda: native.move(handle.token, handle.ticket, False, segments, waits)
        if buffer.backend == "verbs":
            return self._bare_verbs(buffer, into, READ)
        client = engine().routes._tcp._clients[handle.token][0]
        return lambda: client.move(handle.ticket, False, segments, waits)

    def _write_bare(self, buffer: RDMABuffer, into: torch.Tensor) -> Call:
        self._write(buffer, into)
        return self._bare_verbs(buffer, into, WRITE)

    def _bare_verbs(self, buffer: RDMABuffer, into: torch.Tensor, opcode: int) -> Call:
        """Return a call that posts a work request on the existing queue pair and polls for its completion."""
        buffer.read_into(into).get()  # connects and registers
        verbs = self.engine()
        lane = verbs._links[buffer._handle.token].lanes[0]
        record, nic = Region.from_bytes(buffer._handle.verbs), lane.device.nic
        entry = lane.device.cache.take(allocation_of(into), writable=True)
        remote = record.address + buffer._handle.offset
        key = record.keys[lane.their_nic]
        works = [Work(OURS, opcode, True, into.data_ptr(), len(into), entry.lkey, remote, key)]

        def call() -> None:
            with verbs._lock:  # keeps other threads from polling
                lane.pair.post(works)
                while not nic.poll(1):
                    pass

        return call


def times_of(ours: Ours, calls: Calls) -> Callable[[str, int, int], list[float]]:
    """Return ``times`` for `serve`. It also handles the cases "below CASE" and "sleeps CASE" (_verbs_floor.py)."""

    def times(case: str, count: int, size: int) -> list[float]:
        kind, _, of = case.partition(" ")
        if not of:
            return calls.times(case, count, size)
        call = calls.call(of, size)
        return sleeps(call, count) if kind == "sleeps" else below(ours.engine(), call, count)

    return times


if __name__ == "__main__":
    torch.set_num_threads(1)
    ours = Ours(sys.argv[1], int(sys.argv[2]), sys.argv[3] if sys.argv[3:] else None)
    about = ours.about()  # also connects
    serve(about, times_of(ours, Calls(ours.into, ours.ready, one_by_one=about != "verbs")))
