"""RDMABuffer between two processes with a NIC each: a cut link, and requests that the NIC refuses.

test_connection_failures.py tests the engine alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from monarch_backend._verbs import Region
from monarch_backend.actor import ActorError, ActorMesh, endpoint, this_host
from monarch_backend.rdma import DroppedError, RDMABuffer, RDMAError
from tests.actor.actors import until
from tests.rdma import pretended_gpu
from tests.rdma.actors import Process, as_tensor, nics, pattern, take, two_processes
from tests.rdma.verbs.peers import crossed, lock_at_most

pytestmark = [pytest.mark.verbs, pytest.mark.usefixtures("faults")]

Pair = tuple[ActorMesh, ActorMesh]
MIB = 1 << 20


class Stream:
    """Reads a buffer repeatedly, on a thread of its own."""

    def __init__(self, buffer: RDMABuffer) -> None:
        self._buffer, self._into = buffer, torch.zeros(buffer.size(), dtype=torch.uint8)
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._run)
        self.right, self.failed = 0, 0
        self.wrong: list[str] = []
        self._thread.start()

    def _run(self) -> None:
        expected = pattern(self._buffer.size())
        while not self._stop.is_set():
            self._into.zero_()
            try:
                self._buffer.read_into(self._into, timeout=60).get()
            except RDMAError:
                self.failed += 1
            except BaseException as error:
                self.wrong.append(repr(error))
            else:
                self.right += 1
                if not torch.equal(self._into, expected):
                    self.wrong.append("other bytes")

    def end(self) -> list[str]:
        self._stop.set()
        self._thread.join()
        return self.wrong


class Tried(Process):
    """A process that reports the results of transfers."""

    stream: Stream

    @endpoint
    def begin_stream(self, buffer: RDMABuffer) -> None:
        self.stream = Stream(buffer)

    @endpoint
    def progress(self) -> tuple[int, int]:
        return self.stream.right, self.stream.failed

    @endpoint
    def end_stream(self) -> list[str]:
        return self.stream.end()

    @endpoint
    def own_again(self) -> RDMABuffer:
        """Register the last registered memory again."""
        return RDMABuffer(self.last)

    @endpoint
    def read_good_and_bad(self, good: RDMABuffer, bad: RDMABuffer) -> list[str]:
        """Start eight reads at the same time, the fourth with the bad handle. Return their results."""
        buffers = [bad if number == 3 else good for number in range(8)]
        into = [self.mine("tensor", each.size()) for each in buffers]
        futures = [each.read_into(there, timeout=60) for each, there in zip(buffers, into, strict=True)]
        found = []
        for future, there in zip(futures, into, strict=True):
            error = future.exception(60)
            right = torch.equal(as_tensor(there), pattern(good.size()))
            found.append(f"{type(error).__name__}: {error}" if error else "right" if right else "other bytes")
        return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield from two_processes("verbs", Tried)


@pytest.mark.parametrize("route", ["verbs", "gpu verbs"])
@pytest.mark.usefixtures("cable")
def test_transfers_use_the_link(route: str) -> None:
    if route != "verbs":
        pretended_gpu.library()
    size = 8 * MIB
    for owner, reader in two_processes(route):
        buffer = owner.own.call_one("tensor", size).get()
        before = crossed("rx")
        assert reader.read.call_one(buffer).get(60)
        assert crossed("rx") - before >= size
        before = crossed("tx")
        reader.write.call_one(buffer, "tensor", 9).get(60)
        assert crossed("tx") - before >= size
        assert owner.shows.call_one(size, 9).get()


def test_a_cable_is_cut_during_a_stream_of_reads(pair: Pair, cable: Callable[[str], None]) -> None:
    """Cut the link briefly, then until a read fails. A read is correct or raises, and is correct after the repair."""
    owner, reader = pair
    buffer = owner.own.call_one("tensor", 2 * MIB).get()
    reader.begin_stream.call_one(buffer).get()

    def goes_on() -> None:
        """Wait for reads that started after this call."""
        right, _ = reader.progress.call_one().get()
        until(lambda: reader.progress.call_one().get()[0] > right + 2, "reads come through", 60)

    goes_on()
    cable("down")
    cable("up")
    goes_on()
    _, failed = reader.progress.call_one().get()
    cable("down")
    until(lambda: reader.progress.call_one().get()[1] > failed, "somebody is told", 60)
    cable("up")
    goes_on()
    assert reader.end_stream.call_one().get(60) == []
    reader.write.call_one(buffer, "tensor", 3).get(60)
    assert owner.shows.call_one(2 * MIB, 3).get()


def with_other_keys(buffer: RDMABuffer) -> RDMABuffer:
    """Change the keys of a handle, as a forger would."""
    region = Region.from_bytes(buffer._handle.verbs)
    region.keys[:] = [key ^ 0x5A00 for key in region.keys]
    return RDMABuffer._of(buffer._handle._replace(verbs=region.to_bytes()))


def test_a_wrong_key_is_refused_and_harms_no_other(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own.call_one("tensor", MIB).get()
    forged = with_other_keys(buffer)
    assert reader.read.call_one(buffer).get(60), "they have met"
    found = reader.read_good_and_bad.call_one(buffer, forged).get(60)
    assert found.pop(3).startswith("RDMAError: ")
    assert found == ["right"] * 7
    for call in (reader.write.call_one(forged), reader.add.call_one(forged, 1)):
        is_refused(call, "remote access error")
    assert owner.shows.call_one(MIB, 1).get()
    assert reader.read.call_one(buffer).get(60)


def test_handle_of_dropped_memory_is_refused(pair: Pair) -> None:
    """The old handle is refused although the same memory is registered again at the same address."""
    owner, reader = pair
    stale = owner.own.call_one("tensor", MIB).get()
    assert reader.read.call_one(stale).get(60)
    owner.drop.call_one(stale).get()
    fresh = owner.own_again.call_one().get()
    for call in (reader.read.call_one(stale), reader.write.call_one(stale), reader.add.call_one(stale, 1)):
        with pytest.raises(ActorError, match="not registered any more") as raised:
            call.get(60)
        assert isinstance(raised.value.__cause__, DroppedError)
    assert owner.shows.call_one(MIB, 1).get()
    assert reader.read.call_one(fresh).get(60)


def limited(device: str, nbytes: int) -> None:
    """Bootstrap a process that may lock this much memory."""
    take("verbs", device)
    lock_at_most(nbytes)


@pytest.fixture
def start_limited_process() -> Iterator[Callable[[str], ActorMesh]]:
    """Yield ``start_limited_process(device)``, which starts a process on the device that may lock 4 MiB."""
    made = []

    def make(device: str) -> ActorMesh:
        made.append(this_host().spawn_procs({"gpus": 1}, bootstrap=functools.partial(limited, device, 4 * MIB)))
        return made[-1].spawn("limited", Tried, "verbs")

    yield make
    for procs in made:
        procs.stop().get(30)


def is_refused(call: Any, text: str) -> None:
    with pytest.raises(ActorError, match=text) as raised:
        call.get(60)
    assert isinstance(raised.value.__cause__, RDMAError)


def is_right(owner: ActorMesh, reader: ActorMesh, buffer: RDMABuffer, seed: int) -> None:
    """Write the buffer, read it back, and run an atomic on it. Check each result."""
    reader.write.call_one(buffer, "tensor", seed).get(60)
    assert owner.shows.call_one(buffer.size(), seed).get(60)
    assert reader.read.call_one(buffer, "tensor", seed).get(60)
    first = int.from_bytes(bytes(pattern(8, seed).numpy()), "little", signed=True)
    assert reader.add.call_one(buffer, 0).get(60) == [first]


def test_a_reader_that_may_lock_little(pair: Pair, start_limited_process: Callable[[str], ActorMesh]) -> None:
    """A transfer beyond the limit raises an error that names the limit, each time. Transfers within the limit are
    correct.
    """
    owner, reader = pair[0], start_limited_process(nics("verbs")[1])
    large, small = (owner.own.call_one("tensor", size).get(60) for size in (16 * MIB, MIB))
    for seed in (2, 3):
        for call in (reader.read.call_one(large), reader.write.call_one(large, "tensor", 5)):
            is_refused(call, "cannot register 16777216 bytes .*limit is 4194304 bytes: raise it .*ulimit -l")
        is_right(owner, reader, small, seed)
    assert pair[1].read.call_one(large).get(60), "nothing was written to it"


def test_an_owner_that_may_lock_little(pair: Pair, start_limited_process: Callable[[str], ActorMesh]) -> None:
    """Memory beyond the limit cannot be accessed over verbs. Memory within the limit can."""
    owner, reader = start_limited_process(nics("verbs")[0]), pair[1]
    large, small = (owner.own.call_one("tensor", size).get(60) for size in (16 * MIB, MIB))
    for seed in (2, 3):
        for call in (reader.read.call_one(large), reader.write.call_one(large)):
            is_refused(call, "can't be reached by verbs.* its owner has not registered it with a NIC")
        is_right(owner, reader, small, seed)
