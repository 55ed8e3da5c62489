"""Transfers in flight on fake devices: which thread sees their completion, and every way in which they end."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from monarch_backend._actor.runtime import program
from monarch_backend._rdma import action as action_module
from monarch_backend._rdma.local_memory import memory_of
from monarch_backend._rdma.routes import selection, verbs
from monarch_backend._rdma.routes.protocol import (
    DONE,
    FAILED,
    FETCH_ADD,
    LATE,
    LOST,
    UNREACHABLE,
    AtomicOp,
    ReadWriteOp,
    Result,
    cancel_scope,
)
from monarch_backend._rdma.routes.selection import VerbsWithTcpFallback
from monarch_backend._rdma.routes.verbs import _owners
from monarch_backend._rdma.transfers import engine as transfer_engine
from monarch_backend._rdma.transfers import transfer
from monarch_backend._rdma.transfers.engine import Workers
from monarch_backend._verbs import Settings, VerbsError, completion_poller, open_device, work_requests
from monarch_backend._verbs import engine as engine_module
from monarch_backend._verbs.connections import connection
from monarch_backend._verbs.connections.queue_pair import SendQueuePair
from monarch_backend._verbs.discovery import PortFacts
from monarch_backend._verbs.wire_format import ROCE_V2, ConnectRequest, Gid, pack
from monarch_backend.actor import CancelledError
from monarch_backend.rdma import OwnerLostError, RDMAAction, RDMAError
from tests.rdma.verbs.fabric import Fabric, FakePair
from tests.rdma.verbs.peers import until
from tests.rdma.verbs.remote_owner import MI, FarOwner, Make

KI = 1 << 10
GID = Gid(1, ROCE_V2, bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1]))


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Yield ``far(fabric)``, which makes a connected owner."""
    monkeypatch.setattr(open_device.discovery, "usable", lambda _: [PortFacts("fake0", 1, "ACTIVE", True, (GID,), -1)])
    made: list[FarOwner] = []

    def make(fabric: Fabric | None = None, **options: Any) -> FarOwner:
        made.append(FarOwner(fabric or Fabric(), f"far{len(made)}{abs(hash(request.node.name)):020d}", **options))
        return made[-1].until_up()

    yield make
    for owner in made:
        owner.close()


class Worker:
    """Runs posted work requests on a thread of its own, as a device would."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric, self._stop = fabric, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.0002):
            self._fabric.run(7)

    def __enter__(self) -> Worker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def announced(owner: FarOwner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows each time the device wakes the engine's thread with a completion event."""
    found: list[int] = []
    nic = owner.asking.devices()[0].nic
    take = nic.take_event
    monkeypatch.setattr(nic, "take_event", lambda: (found.append(1), take()))
    return found


def disarm_completion_events(owner: FarOwner) -> None:
    """Disarm the devices, so that the next completion wakes no thread. This is the state after an event and polled
    requests.
    """
    for device in owner.asking.devices():
        with owner.asking._lock:
            device.armed = device.nic.armed = False  # type: ignore[attr-defined]


def moved_by_threads(owner: FarOwner, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    run = owner.route.run
    monkeypatch.setattr(owner.route, "run", lambda *args: (found.append(args), run(*args))[1])
    return found


def test_waiting_thread_polls_without_waking_the_engine(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = far()
    assert owner.buffer[:8].read_into(bytearray(8)).get(10) is None  # consumes a pending completion event
    time.sleep(3 * completion_poller.SWEEP_INTERVAL_S)
    told, by_threads = announced(owner, monkeypatch), moved_by_threads(owner, monkeypatch)
    for nbytes in (1, 8, 64 * KI, MI):
        into = bytearray(nbytes)
        owner.buffer[:nbytes].read_into(into, timeout=10).get()
        assert owner.holds(into, nbytes)
    owner.buffer[:3].write_from(b"abc").get()
    assert bytes(owner.memory.view[:3]) == b"abc"
    assert owner.buffer.fetch_add(5).get() == int.from_bytes(b"abc" + bytes(owner.memory.view[3:8]), "little")
    assert not by_threads
    assert len(told) <= 1, "of the first, at most"


def test_wait_for_a_slow_transfer_sleeps_and_is_woken(far: Make) -> None:
    owner = far(Fabric(at_once=False))
    into = bytearray(64 * KI)
    future = owner.buffer[: 64 * KI].read_into(into)
    with pytest.raises(TimeoutError, match="no answer within"):
        future.get(0.1)
    assert not future.done()
    with Worker(owner.fabric):
        future.get(10)
    assert owner.holds(into, len(into))


def test_spinning_wait_does_not_sleep(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_poller, "SLEEP_COST_S", 10.0)
    monkeypatch.setattr(completion_poller, "SWEEP_INTERVAL_S", 10.0)
    owner = far(Fabric(at_once=False), yields=False)
    owner.buffer[:8].read_into(bytearray(8)).done()
    owner.fabric.run()
    assert until(lambda: not owner.asking._completions._announced)
    owner.asking._look()
    told = announced(owner, monkeypatch)
    began = len(told)
    for _ in range(20):
        into = bytearray(8)
        future = owner.buffer[:8].read_into(into)
        timer = threading.Timer(0.005, owner.fabric.run)
        timer.start()
        future.get(10)
        timer.join()
        assert owner.holds(into, 8)
    assert len(told) - began <= 1


@pytest.mark.parametrize("yields", [False, True])
def test_polling_thread_yields_to_others(far: Make, monkeypatch: pytest.MonkeyPatch, yields: bool) -> None:
    """With one processor the thread yields after every poll. Otherwise it yields after several polls, to release the
    GIL.
    """
    monkeypatch.setattr(completion_poller, "SLEEP_COST_S", 10.0)
    monkeypatch.setattr(completion_poller, "SWEEP_INTERVAL_S", 60.0)
    owner = far(Fabric(at_once=False), yields=yields)
    said: list[str] = []
    look = owner.asking._completions._look_for

    def let_go() -> None:
        said.append("let")
        if said.count("let") == 4:
            owner.fabric.run()

    monkeypatch.setattr(completion_poller.os, "sched_yield", let_go)
    monkeypatch.setattr(
        owner.asking._completions, "_look_for", lambda *of, **how: (said.append("look"), look(*of, **how))[1]
    )
    into = bytearray(8)
    future = owner.buffer[:8].read_into(into)
    disarm_completion_events(owner)
    future.get(10)
    looks = said[said.index("let") : len(said) - said[::-1].index("let")].count("look")
    assert looks == 3 * (1 if yields else completion_poller._LOOKS_WITH_GIL)
    assert owner.holds(into, 8)


def test_only_one_waiting_thread_polls(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread polls. The others sleep until it wakes them."""
    owner = far(Fabric(at_once=False), yields=False)
    completions = owner.asking._completions
    monkeypatch.setattr(completions, "_worth_it", lambda _: 60.0)
    into = [bytearray(8), bytearray(8)]
    futures = [owner.buffer[:8].read_into(each) for each in into]
    threads = [threading.Thread(target=future.get, args=(30,)) for future in futures]
    threads[0].start()
    assert until(completions._spinning.locked)
    threads[1].start()
    assert until(lambda: futures[1]._awaited, 10), "it sleeps"
    assert completions._spinning.locked()
    assert not futures[0]._awaited
    owner.fabric.run()
    for thread in threads:
        thread.join(30)
    assert all(owner.holds(each, 8) for each in into)
    assert not completions._spinning.locked()


def test_polling_time_adapts_to_the_device(far: Make) -> None:
    owner = far(Fabric(at_once=False))
    device, completions = owner.asking.devices()[0], owner.asking._completions
    into = torch.zeros(MI, dtype=torch.uint8)

    def worth(future: Any) -> float:
        return completions._worth_it(future._in_flight.request)

    future = owner.buffer[:MI].read_into(into)
    assert worth(future) == pytest.approx(completion_poller.SLEEP_COST_S + 2 * MI * open_device.FIRST_PACE)
    owner.fabric.run()
    future.get(10)
    device.pace = 1.0  # seconds per byte
    future = owner.buffer[:MI].read_into(into)
    assert worth(future) == completion_poller.SLEEP_COST_S, "beside what this takes a sleep is little"
    owner.fabric.run()
    future.get(10)
    assert device.pace < 1e-3, "it was faster, as somebody has seen"
    pace = device.pace
    device.looked_promptly = True
    device.took(60.0, MI)
    assert device.pace == pytest.approx(pace * open_device.SLOWER), "perhaps who looked was kept from it"


def test_a_device_that_stays_as_fast_is_not_timed_each_time(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, into = far(), torch.zeros(MI, dtype=torch.uint8)
    for _ in range(3):
        owner.buffer[:MI].read_into(into).get(10)  # the memory is registered after this
    device = owner.asking.devices()[0]
    device.took(device.pace * MI, MI)
    looks: list[int] = []
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: (looks.append(threading.get_ident()), clock())[1])
    for _ in range(open_device._UNTIMED):
        owner.buffer[:MI].read_into(into).get(10)
    assert threading.get_ident() not in looks
    device.pace = 1.0
    owner.buffer[:MI].read_into(into).get(10)
    assert threading.get_ident() in looks
    assert device.pace < 1e-3
    assert device.untimed == 0, "it was another pace, so the next one is timed"


def test_late_completions_do_not_change_the_polling_time(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions that the engine's sweep or a caller's first poll finds may be late, so they are not timed."""
    monkeypatch.setattr(completion_poller, "SWEEP_INTERVAL_S", 60.0)
    owner = far(Fabric(at_once=False))
    device, into = owner.asking.devices()[0], torch.zeros(MI, dtype=torch.uint8)
    first = owner.buffer[:MI].read_into(into)  # this transfer also registers the memory
    owner.fabric.run()
    first.get(10)
    disarm_completion_events(owner)
    heard = threading.Event()
    owner.asking.call_soon(heard.set)
    assert heard.wait(10), "and of what it was told before"
    disarm_completion_events(owner)
    completions = owner.asking._completions

    def hear(device: Any) -> None:
        """Poll on an event of another lane. The engine's thread must not time the completions that it finds there."""
        with owner.asking._lock:
            device.nic.take_event()
            device.armed = False
        completions.look(device)

    monkeypatch.setattr(completions, "heard", hear)
    device.pace = pace = 1e-15
    for find in (lambda future: future.done(), lambda _: owner.asking._look()):
        future = owner.buffer[:MI].read_into(into)
        disarm_completion_events(owner)
        owner.fabric.run()
        assert until(lambda find=find, future=future: (find(future), future.ready)[1])
        assert device.pace == pace
    future = owner.buffer[:MI].read_into(into)
    disarm_completion_events(owner)
    # The first polls find nothing.
    monkeypatch.setattr(completion_poller.os, "sched_yield", lambda: owner.fabric.run())
    future.get(10)
    assert device.pace == pytest.approx(pace * open_device.SLOWER)


class Counted:
    """A lock that counts this thread's acquisitions, without those of a lock that it already holds."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._thread, self.taken = lock, threading.get_ident(), 0

    def acquire(self, blocking: bool = True) -> bool:
        free = not self._lock._is_owned()
        got: bool = self._lock.acquire(blocking)
        self.taken += got and free and threading.get_ident() == self._thread
        return got

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_small_transfer_locks_twice_and_reads_no_clock(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In guests without a vdso both are system calls, and each takes as long as the transfer."""
    monkeypatch.setattr(completion_poller, "SWEEP_INTERVAL_S", 60.0)
    owner, into = far(), torch.zeros(8, dtype=torch.uint8)
    action = RDMAAction().read_remote(into, owner.buffer[:8])
    action.submit().get(10)  # registers the memory and schedules the sweep
    engine = owner.asking
    lock = Counted(engine._lock)
    monkeypatch.setattr(engine, "_lock", lock)
    monkeypatch.setattr(engine._completions, "_lock", lock)
    monkeypatch.setattr(engine.devices()[0].cache, "_lock", lock)
    looks: list[int] = []  # threads that read a clock
    for name in ("perf_counter", "monotonic"):
        clock = getattr(time, name)
        monkeypatch.setattr(time, name, lambda clock=clock: (looks.append(threading.get_ident()), clock())[1])
    made = lock.taken
    for _ in range(10):
        owner.buffer[:8].read_into(into).get()
        action.submit().get()
        owner.buffer[:8].write_from(into).get()
    assert 30 < lock.taken - made <= 60
    assert threading.get_ident() not in looks
    assert owner.holds(into.numpy(), 8)


def test_an_action_s_plan_is_made_once(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, into = far(), torch.zeros(64, dtype=torch.uint8)
    planned: list[Any] = []
    plan = owner.route.planned
    monkeypatch.setattr(owner.route, "planned", lambda *args: (planned.append(args), plan(*args))[1])
    action = RDMAAction().read_remote(into, owner.buffer[:64])
    action.submit().get(10)
    made = len(planned)
    for number in range(5):
        owner.memory.view[0] = number
        action.submit().get(10)
        assert into[0] == number
    futures = [action.submit() for _ in range(5)]
    assert [future.get(10) for future in futures] == [None] * 5
    assert len(planned) == made
    into.resize_(1 << 20)  # the tensor has other memory now
    into.zero_()
    action.submit().get(10)
    assert owner.holds(into.numpy(), 64)
    assert len(planned) > made
    owner.asking.give_up(owner.token, "a connection may be gone by then")
    into.zero_()
    action.submit().get(10)
    assert owner.holds(into.numpy(), 64)


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_repeated_transfer_of_a_tensor_reuses_its_plan(far: Make, monkeypatch: pytest.MonkeyPatch, write: bool) -> None:
    """The first two transfers of a tensor make plans, and so does the first after each change of the tensor."""
    owner, mine = far(), torch.zeros(4, 16, dtype=torch.uint8)
    there = torch.frombuffer(owner.memory.view, dtype=torch.uint8)[:64].view(4, 16)
    buffer, planned, plan = owner.buffer[:64], [], owner.route.planned
    monkeypatch.setattr(owner.route, "planned", lambda *of: (planned.append(of), plan(*of))[1])

    def moves(count: int = 1) -> int:
        """Change and move all bytes, ``count`` times. Return the number of plans that were made."""
        before = len(planned)
        for number in range(count):
            source = mine if write else there
            source += number + 1
            (buffer.write_from if write else buffer.read_into)(mine).get(10)
            assert torch.equal(mine, there)
        return len(planned) - before

    assert moves(6) == 3, "the first, and the second, which learns for the third"
    mine.data = torch.zeros(4, 16, dtype=torch.uint8)
    assert moves() == 2
    assert moves(3) == 0
    other = torch.zeros(64, dtype=torch.uint8)
    mine.set_(other.untyped_storage(), 0, (4, 16), (16, 1))
    assert moves() == 2
    mine.t_()
    with pytest.raises(ValueError, match="not contiguous"):
        moves()
    mine.t_()
    mine.data = torch._neg_view(mine)
    with pytest.raises(ValueError, match="resolve_neg"):
        (buffer.write_from if write else buffer.read_into)(mine)
    mine.data = torch._neg_view(mine)
    mine.untyped_storage().resize_(32)
    with pytest.raises(ValueError, match="was freed"):
        (buffer.write_from if write else buffer.read_into)(mine)
    mine.untyped_storage().resize_(1 << 20)  # the memory may have another address
    assert moves(3) <= 2
    assert buffer.read_into(mine, timeout=10).get() is None, "with a timeout it is another kind of transfer"
    owner.asking.give_up(owner.token, "a connection may be gone by then")
    assert moves() <= 2


def test_two_tensors_in_turns(far: Make) -> None:
    owner, tensors = far(), [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    buffer = owner.buffer[:64]
    for number in range(8):
        owner.memory.view[0] = number
        buffer.read_into(tensors[number % 2]).get(10)
        assert tensors[number % 2][0] == number
        buffer.write_from(tensors[1 - number % 2]).get(10)
        assert owner.holds(tensors[1 - number % 2].numpy(), 64)
        owner.memory.view[0] = number
    assert [int(each[0]) for each in tensors] == [6, 7]


def test_a_buffer_keeps_no_tensor_and_no_memory_alive(far: Make) -> None:
    owner = far()
    buffer, mine = owner.buffer[:64], torch.zeros(64, dtype=torch.uint8)
    for _ in range(4):
        buffer.read_into(mine).get(10)
        buffer.write_from(mine).get(10)
    tensor, storage = weakref.ref(mine), weakref.ref(mine.untyped_storage())
    mine.data = torch.zeros(64, dtype=torch.uint8)
    assert storage() is None, "the memory that it had"
    storage = weakref.ref(mine.untyped_storage())
    del mine
    assert tensor() is None
    assert storage() is None
    assert until(lambda: not any(len(device.cache) for device in owner.asking.devices()), 5), "nor its registration"


def test_finished_transfer_keeps_no_objects_alive(far: Make) -> None:
    owner = far()
    gc.collect()
    gc.disable()
    try:
        into = bytearray(8)
        future = owner.buffer[:8].read_into(into)
        future.get(10)
        ended = weakref.ref(future)
        del future
        assert ended() is None
        into.append(1)  # raises BufferError if the transfer still holds the memory
    finally:
        gc.enable()


def test_cancel_races_with_completion(far: Make) -> None:
    """A transfer is either completed or cancelled, by the thread that comes first, and leaves no pending state."""
    owner = far(Fabric(at_once=False))
    outcomes: list[str] = []

    def give_up(future: Any) -> None:
        cancelled = future.cancel()
        if not future.ready:
            outcomes.append("cancel returned too early")
        error = future.exception(10)
        outcomes.append("cancelled" if isinstance(error, CancelledError) else repr(error))
        assert cancelled == isinstance(error, CancelledError)

    with Worker(owner.fabric):
        for _ in range(40):
            future = owner.buffer[:8].read_into(bytearray(8))
            two = [threading.Thread(target=give_up, args=(future,)) for _ in range(2)]
            for thread in two:
                thread.start()
            for thread in two:
                thread.join()
    assert len(outcomes) == 80
    assert set(outcomes) <= {"cancelled", "None"}
    assert until(lambda: not program().pending)


def test_cancel_waits_for_a_completion_in_progress(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sees the completion writes an atomic's value. `cancel` returns only after this write."""
    owner = far(Fabric(at_once=False))
    landing, go_on, put = threading.Event(), threading.Event(), action_module._put

    def kept_from_it(*of: Any) -> None:
        landing.set()
        assert go_on.wait(30)
        put(*of)

    monkeypatch.setattr(action_module, "_put", kept_from_it)
    into = bytearray(8)
    future = RDMAAction().fetch_add(into, owner.buffer[:8], 1).submit()
    looking = threading.Thread(target=lambda: until(future.done))
    owner.fabric.run()
    looking.start()
    assert landing.wait(30)
    said: list[tuple[bool, bool]] = []
    cancelling = threading.Thread(target=lambda: said.append((future.cancel(), future.ready)))
    cancelling.start()
    assert until(lambda: future._awaited or bool(said))
    assert not said, "it has returned, and the memory is written to after that"
    go_on.set()
    for thread in (looking, cancelling):
        thread.join(30)
    assert said == [(False, True)]
    assert any(into)


@pytest.mark.parametrize("timeout", [None, 1000.0])
def test_timeout_of_get_includes_polling_and_sleeping(
    far: Make, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    owner = far(Fabric(at_once=False))
    future = owner.buffer[:8].read_into(bytearray(8), timeout=timeout)
    passed, slept = [0.0], []
    now, wait = time.monotonic, program().wait

    def look(_: Any, __: Any, most: float) -> None:
        assert most <= 5.0
        passed[0] += 2.0

    monkeypatch.setattr(verbs.VerbsInFlight, "help", look)
    monkeypatch.setattr(time, "monotonic", lambda: now() + passed[0])
    monkeypatch.setattr(program(), "wait", lambda what, seconds=None: (slept.append(seconds), wait(what, 0.0))[1])
    with pytest.raises(TimeoutError):
        future.get(5.0)
    monkeypatch.undo()
    assert 0.0 < slept[0] <= 3.0
    owner.fabric.run()
    future.get(10)


def test_cancelled_transfer_holds_no_resources(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory and future are released before CANCEL_GRACE_S, the time for the transfer to end by itself, is over."""
    monkeypatch.setattr(verbs, "CANCEL_GRACE_S", 60.0)
    owner = far(Fabric(at_once=False))
    gc.collect()
    gc.disable()
    try:
        with Worker(owner.fabric):
            into = bytearray(8)
            future = owner.buffer[:8].read_into(into)
            future.cancel()
            assert until(lambda: not _is_held(into), 10)
            ended = weakref.ref(future)
            del future
            assert until(lambda: ended() is None, 10)
    finally:
        gc.enable()


def _is_held(data: bytearray) -> bool:
    try:
        data.append(1)
    except BufferError:
        return True
    return False


def test_completed_atomic_does_not_keep_its_result_array_alive(far: Make) -> None:
    import numpy as np

    owner, into = far(), np.zeros(1, dtype=np.int64)
    held = weakref.ref(into)
    future = RDMAAction().fetch_add(into, owner.buffer, 1).submit()
    future.get(10)
    del into
    gc.collect()
    assert held() is None


def test_owner_that_ends_during_registration_fails_fast(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not connect to the dead owner again, which would take ten seconds to fail."""
    owner, register, dialed = far(Fabric(at_once=False)), engine_module._register, []

    def then_it_is_gone(*of: Any) -> None:
        register(*of)
        monkeypatch.setattr(engine_module, "_register", register)
        peer = program().router.peer(owner.token)
        peer.gone = "killed by signal 9"
        owner.asking.peer_gone(owner.token, "its process is gone")

    monkeypatch.setattr(owner, "connect", lambda: dialed.append(1))
    monkeypatch.setattr(engine_module, "_register", then_it_is_gone)
    future = owner.buffer[:8].read_into(bytearray(8))
    with pytest.raises(OwnerLostError, match="killed by signal 9"):
        future.get(30)
    assert not dialed


def test_fork_does_not_wait_for_transfers(far: Make) -> None:
    owner = far(Fabric(at_once=False))
    future = owner.buffer[:8].read_into(bytearray(8))
    there, back = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends the child if it hangs
        try:
            for ask in (future.cancel, future.get):
                try:
                    ask()
                except RuntimeError as error:
                    os.write(back, b"fork " if "is a fork" in str(error) else repr(error).encode())
        finally:
            os._exit(0)
    os.close(back)
    os.waitpid(child, 0)
    assert os.read(there, 1000) == b"fork fork "
    os.close(there)
    owner.fabric.run()
    future.get(10)


def test_wake_of_a_closed_engine_writes_to_no_reused_descriptor(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """No new descriptor gets the number of the closed one before the wake's write is done."""
    owner, opened, write, written = far(), [], os.eventfd_write, []

    def closed_meanwhile(fd: int, value: int) -> None:
        monkeypatch.setattr(os, "eventfd_write", write)
        owner.asking.close()
        opened.extend(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(8))
        written.append(fd)
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", closed_meanwhile)
    owner.asking._thread.wake()
    try:
        assert written
        assert written[0] not in opened
    finally:
        for each in opened:
            os.close(each)
    owner.asking.call_soon(list)  # the engine is closed: the call is dropped without an error


def test_uncacheable_memory_is_planned_each_time(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, planned = far(), []
    plan = owner.route.planned
    monkeypatch.setattr(owner.route, "planned", lambda *of: (planned.append(of), plan(*of))[1])
    action = RDMAAction().read_remote(bytearray(8), owner.buffer[:8])
    for _ in range(3):
        action.submit().get(10)
    assert len(planned) == 3


def test_unpolled_future_finishes_soon(far: Make) -> None:
    owner = far()
    futures = [owner.buffer[:8].read_into(bytearray(8)) for _ in range(10)]
    assert until(lambda: all(future.ready for future in futures), 5)


def test_done_polls_without_a_thread(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_poller, "SWEEP_INTERVAL_S", 60.0)
    owner = far(Fabric(at_once=False))
    future = owner.buffer[:8].read_into(bytearray(8))
    assert not future.done()
    owner.fabric.run()
    assert until(future.done), "another thread may be looking in that moment"


def test_callbacks_come_at_once_from_another_thread(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_poller, "SWEEP_INTERVAL_S", 60.0)
    owner = far(Fabric(at_once=False))
    called = threading.Event()
    names: list[str] = []
    future = owner.buffer[:8].read_into(bytearray(8))
    future.add_done_callback(lambda _: (names.append(threading.current_thread().name), called.set()))
    owner.fabric.run()
    assert called.wait(10)
    assert names == ["monarch-verbs"]


def test_callback_may_start_but_not_await_a_transfer(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = far()
    left, over = [3000], threading.Event()
    errors: list[BaseException] = []

    def following(_: Any) -> None:
        if not left[0]:
            over.set()
            return
        left[0] -= 1
        owner.buffer[:8].read_into(bytearray(8)).add_done_callback(following)

    following(None)
    assert over.wait(30), "one callback within another would have ended at the limit of recursion"

    slow = far(Fabric(at_once=False))
    first, raised = slow.buffer[:8].read_into(bytearray(8)), threading.Event()

    def waiting(_: Any) -> None:
        try:
            slow.buffer[:8].read_into(bytearray(8)).get()
        except RuntimeError as error:
            errors.append(error)
        raised.set()

    first.add_done_callback(waiting)
    slow.fabric.run()
    assert raised.wait(10)
    assert "use another thread" in str(errors[0])
    slow.fabric.run()

    second = slow.buffer[:8].read_into(bytearray(8))
    looked: list[Any] = []
    monkeypatch.setattr(verbs.VerbsInFlight, "help", lambda *args: looked.append(args))
    raised.clear()

    def looking(_: Any) -> None:
        try:
            second.get()
        except RuntimeError as error:
            errors.append(error)
        raised.set()

    program().call_soon(lambda: looking(None))
    assert raised.wait(10)
    assert "reads messages" in str(errors[1])
    assert not looked, "whether it is refused would depend on what the look finds"
    slow.fabric.run()


@pytest.mark.parametrize("by_thread", [False, True])
def test_a_callback_may_not_cancel_another_one(far: Make, monkeypatch: pytest.MonkeyPatch, by_thread: bool) -> None:
    """A callback runs on the thread that completes transfers, so a wait in it would be a deadlock.

    The same is true if a worker thread runs the transfer.
    """
    monkeypatch.setattr(verbs, "CANCEL_GRACE_S", 0.05)
    slow = far(Fabric(at_once=False))
    first = slow.buffer[:8].read_into(bytearray(8))
    [pair] = [pair for pair in slow.fabric.pairs.values() if pair.posted]
    if by_thread:
        monkeypatch.setattr(slow.route, "begin", lambda *_: None)
    second = slow.buffer[:8].read_into(bytearray(8))
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def cancelling(_: Any) -> None:
        try:
            said.put(second.cancel())
        except RuntimeError as error:
            said.put(str(error))

    first.add_done_callback(cancelling)
    with slow.fabric.lock:
        pair.step()
    assert "hears of completions, and can't wait for a transfer" in said.get(timeout=10)
    assert not second.ready
    program().call_soon(lambda: cancelling(None))
    assert "reads messages, and can't wait for a transfer" in said.get(timeout=10)
    assert not second.ready, "nothing was given up"
    with Worker(slow.fabric):  # the worker may not have started the transfer
        assert second.get(10) is None


def test_cancel_needs_no_timer(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cancel` also ends the transfer if the thread that reads messages and runs timers is stopped."""
    monkeypatch.setattr(transfer, "CANCEL_GRACE_S", 0.05)
    monkeypatch.setattr(verbs, "CANCEL_GRACE_S", 60.0)
    owner = far(Fabric(at_once=False))
    into = bytearray(8)
    future = owner.buffer[:8].read_into(into)
    began = time.monotonic()
    assert future.cancel()
    assert time.monotonic() - began < 10
    owner.fabric.run()
    assert into == bytes(8), "nothing reaches it any more"


def test_await(far: Make) -> None:
    owner = far(Fabric(at_once=False))
    into = [bytearray(64 * KI) for _ in range(8)]

    async def all_of_them() -> None:
        await asyncio.gather(*(owner.buffer[: 64 * KI].read_into(each, timeout=10).as_asyncio() for each in into))

    async def cancelled() -> None:
        task = asyncio.ensure_future(owner.buffer[:8].read_into(bytearray(8)).as_asyncio())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Worker(owner.fabric):
        asyncio.run(all_of_them())
        asyncio.run(cancelled())
    assert all(owner.holds(each, len(each)) for each in into)


def test_many_from_many_threads(far: Make) -> None:
    owner = far(Fabric(at_once=False), yields=False)
    wrong: list[int] = []

    def work(number: int) -> None:
        for i in range(30):
            size = 1 << ((number + i) % 21)
            into = [bytearray(size) for _ in range(3)]
            action = RDMAAction()
            for each in into:
                action.read_remote(each, owner.buffer[:size])
            futures = [action.submit(timeout=30), owner.buffer.fetch_add(1, 3 * MI)]
            for future in futures:
                future.get(30)
            if not all(owner.holds(each, size) for each in into):
                wrong.append(number)

    owner.memory.view[3 * MI : 3 * MI + 8] = bytes(8)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    with Worker(owner.fabric):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert int.from_bytes(owner.memory.view[3 * MI : 3 * MI + 8], "little") == 240
    assert until(lambda: not program().pending)


def test_slow_registration_uses_a_thread_once(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = far()
    by_threads = moved_by_threads(owner, monkeypatch)
    into = torch.zeros(2 * MI, dtype=torch.uint8)
    for _ in range(3):
        into.zero_()
        owner.buffer[: 2 * MI].read_into(into).get(10)
        assert owner.holds(into.numpy(), 2 * MI)
    assert len(by_threads) == 1


# ---- cancellation and timeouts


def test_cancel_returns_after_posted_work_has_ended(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "CANCEL_GRACE_S", 60.0)
    owner = far(Fabric(at_once=False), nbytes=32 * MI)
    into = torch.zeros(32 * MI, dtype=torch.uint8)
    owner.asking.transfer(owner.token, "read", owner.region, [(0, into.data_ptr(), 8)], into, lambda _: None)
    assert until(lambda: owner.fabric.run() >= 0 and not owner.asking._completions._announced)
    future = owner.buffer.read_into(into)
    assert until(lambda: any(pair.posted for pair in list(owner.fabric.pairs.values())))
    returned: list[bool] = []
    cancelling = threading.Thread(target=lambda: returned.append(future.cancel("no more")))
    cancelling.start()
    cancelling.join(0.2)
    assert cancelling.is_alive(), "the device may still write to the memory"
    assert not future.ready
    done = owner.fabric.run()
    cancelling.join(10)
    assert returned == [True]
    with pytest.raises(CancelledError, match="no more"):
        future.get()
    assert 0 < done <= 4, "what was not posted is not done any more"
    assert owner.asking.connected(owner.token), "nobody else is disturbed"


def test_stuck_connection_is_closed(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "CANCEL_GRACE_S", 0.05)
    owner = far(Fabric(at_once=False))
    into = bytearray(8)
    future = owner.buffer[:8].read_into(into)
    assert future.cancel()
    assert isinstance(future.exception(), CancelledError)
    owner.fabric.run()
    assert into == bytes(8), "nothing reaches it any more"
    with Worker(owner.fabric):
        owner.buffer[:8].read_into(into, timeout=10).get()
    assert owner.holds(into, 8)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """``clocks.pop()()`` ends the timeout of the last transfer. It never ends earlier, however busy the machine is."""
    progress, due = program().progress, []
    later = progress.later

    def held(seconds: float, call: Callable[[], None]) -> Any:
        if getattr(call, "__func__", None) is not transfer.Transfer._time_is_over:
            return later(seconds, call)
        due.append(call)
        return later(600, call)  # the transfer cancels this timer when it ends

    monkeypatch.setattr(progress, "later", held)
    return due


@pytest.mark.parametrize("timeout", [0.1, 0.0])
@pytest.mark.parametrize("kind", ["read", "atomic"])
def test_a_timeout(
    far: Make, monkeypatch: pytest.MonkeyPatch, clocks: list[Callable[[], None]], kind: str, timeout: float
) -> None:
    monkeypatch.setattr(verbs, "CANCEL_GRACE_S", 0.05)
    part = far(Fabric(at_once=False)).buffer[:8]
    late = part.read_into(bytearray(8), timeout=timeout) if kind == "read" else part.fetch_add(1, timeout=timeout)
    clocks.pop()()
    with pytest.raises(TimeoutError, match=rf"was not done within {timeout:g} s; a part of it may be"):
        late.get(10)
    assert not program().pending


def test_deadline_before_the_start(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program().progress, "later", lambda _, call: (call(), threading.Timer(0, call))[1])
    buffer = far().buffer
    with pytest.raises(TimeoutError, match=r"was not done at once \(timeout=0\)"):
        buffer[:8].read_into(bytearray(8), timeout=0.0).get(10)
    with pytest.raises(TimeoutError, match=r"was not done within 0\.1 s: a part of it waited for too many others"):
        buffer.fetch_add(1, timeout=0.1).get(10)
    assert not program().pending


def test_a_timeout_while_all_threads_are_taken(
    far: Make, monkeypatch: pytest.MonkeyPatch, clocks: list[Callable[[], None]]
) -> None:
    """Stopped owners may occupy all worker threads. This delays no timeout of other transfers."""
    monkeypatch.setattr(verbs, "CANCEL_GRACE_S", 0.05)
    monkeypatch.setattr("monarch_backend._rdma.routes.verbs.ask", lambda *_: b"\x01")
    slow, bad, go = far(Fabric(at_once=False)), far(), threading.Event()
    bad.owner.release(bad.region)
    for name in ("movers", "menders"):
        monkeypatch.setattr(transfer_engine.engine(), name, Workers(2))
    movers, menders = transfer_engine.engine().movers, transfer_engine.engine().menders
    try:
        for _ in range(4):
            movers.submit(lambda: (go.wait(60), None)[1])
        late = slow.buffer[:8].read_into(bytearray(8), timeout=0.1)
        clocks.pop()()
        with pytest.raises(TimeoutError, match=r"was not done within 0\.1 s; a part of it may be"):
            late.get(10)
        with pytest.raises(RDMAError, match="not registered any more"):
            bad.buffer[:8].read_into(bytearray(8)).get(10)
        bad.until_up()
        for _ in range(4):
            menders.submit(lambda: (go.wait(60), None)[1])
        late = bad.buffer[:8].read_into(bytearray(8), timeout=0.1)
        transfer = late._transfer  # type: ignore[attr-defined]
        assert until(lambda: (transfer.glance(), bool(transfer._queued))[1])
        clocks.pop()()
        with pytest.raises(TimeoutError, match="a part of it waited for too many others"):
            late.get(10)
        bad.until_up()
        late = bad.buffer[:8].read_into(bytearray(8))
        assert late.cancel("no more")
    finally:
        go.set()
        slow.fabric.run()


def test_a_part_that_comes_too_late_waits_for_no_thread(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, go = far(Fabric(at_once=False)), threading.Event()
    monkeypatch.setattr(transfer_engine.engine(), "movers", Workers(1))
    monkeypatch.setattr(verbs, "CANCEL_GRACE_S", 0.05)
    begin, ended = slow.route.begin, threading.Event()
    over = transfer.Transfer._end_flights
    monkeypatch.setattr(transfer.Transfer, "_end_flights", lambda *args: (over(*args), ended.set()))

    def late(*args: Any) -> Any:
        found = begin(*args)
        slow.fabric.run()  # completes this part
        assert ended.wait(10), "its time is over, while the next part is still to be begun"
        return found

    monkeypatch.setattr(slow.route, "begin", late)
    action = RDMAAction()
    for _ in range(2):
        action.read_remote(bytearray(8), slow.buffer[:8])
    try:
        transfer_engine.engine().movers.submit(lambda: (go.wait(60), None)[1])
        with pytest.raises(TimeoutError, match="waited for too many others"):
            action.submit(timeout=0.1).get(10)
    finally:
        go.set()


def test_get_returns_in_time_with_many_under_way(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting thread polls for a limited total time, not for this time per part."""
    monkeypatch.setattr(completion_poller, "SLEEP_COST_S", 0.2)
    monkeypatch.setattr(transfer, "MAX_POLL_S", 0.2)
    slow, action = far(Fabric(at_once=False), yields=False), RDMAAction()
    for _ in range(50):
        action.read_remote(bytearray(8), slow.buffer[:8])
    future = action.submit()
    for timeout, most in ((0.0, 2.0), (0.05, 2.0), (0.3, 3.0)):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            future.get(timeout)
        assert time.monotonic() - began < most, "and not 50 times as long"
    with Worker(slow.fabric):
        future.get(20)


def test_buffers_that_begin_at_one_address(far: Make) -> None:
    owner, data = far(), bytearray(range(64))
    whole, part, within = memoryview(data), memoryview(data)[:8], memoryview(data)[16:24]
    action = RDMAAction().write_remote(owner.buffer[:64], whole).write_remote(owner.buffer[100:108], part)
    action.write_remote(owner.buffer[200:208], within).write_remote(owner.buffer[300:308], memoryview(data)[40:48])
    action.submit().get(10)
    assert bytes(owner.memory.view[:64]) == data
    for at, begin in ((100, 0), (200, 16), (300, 40)):
        assert bytes(owner.memory.view[at : at + 8]) == data[begin : begin + 8]


def test_an_action_looks_up_each_memory_once(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated lookups for each part would take time that grows with the square of the number of parts."""
    owner, count = far(), 2000
    looked = {module: [] for module in (verbs, work_requests)}  # type: dict[Any, list[int]]
    for module, addresses in looked.items():
        find = module.allocation_of

        def looks(each: Any, find: Any = find, addresses: list[int] = addresses) -> Any:
            addresses.append(find(each).address)
            return find(each)

        monkeypatch.setattr(module, "allocation_of", looks)
    into = [torch.zeros(64, dtype=torch.uint8) for _ in range(count)]
    action = RDMAAction()
    for number, each in enumerate(into):
        action.read_remote(each, owner.buffer[number * 64 : number * 64 + 64])
    for _ in range(2):
        action.submit().get(60)
        assert torch.cat(into).numpy().tobytes() == bytes(owner.memory.view[: count * 64])
        for addresses in looked.values():  # one lookup finds the memory of each part, and one registers it
            assert sorted(addresses) == sorted(each.data_ptr() for each in into)
            addresses.clear()


def test_owner_of_an_address_is_the_largest_containing_memory() -> None:
    data = bytearray(100)
    keep = [memory_of(memoryview(data)[start:stop], "it") for start, stop in ((0, 100), (0, 8), (10, 18))]
    base = keep[0].address
    segments = [(0, base, 100), (0, base, 8), (0, base + 10, 8), (0, base + 50, 8), (0, base + 12, 40)]
    assert [len(owner) for owner in _owners(segments, keep)] == [100, 100, 8, 100, 100]


def test_timers_of_transfers_that_are_done_are_taken_back(far: Make) -> None:
    owner, timers = far(), program().progress._timers
    before = timers.cancelled
    for _ in range(5):
        owner.buffer[:8].read_into(bytearray(8), timeout=1000).get()
    assert timers.cancelled >= before + 5 or not [each for each in timers._heap if each[2]._call is not None]


LONG = 20.0
"""Duration in seconds of a sleep that Ctrl-C must end."""


def test_ctrl_c_arrives_between_steps(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, begun = far(), []
    # the handler of a program that has not waited yet
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    post = FakePair.post

    def interrupted(pair: FakePair, works: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        post(pair, works)

    def read_and_stay() -> None:
        monkeypatch.setattr(FakePair, "post", interrupted)
        begun.append(owner.buffer[:8].read_into(bytearray(8)))
        monkeypatch.setattr(FakePair, "post", post)
        time.sleep(LONG)

    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            read_and_stay()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < LONG, "the sleep went on"
    begun[0].get(10)
    assert not program().interrupts.noted


def test_ctrl_c_is_raised_after_the_poll(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_poller, "SWEEP_INTERVAL_S", 60.0)
    owner = far(Fabric(at_once=False))
    before, retire, struck = signal.getsignal(signal.SIGINT), SendQueuePair.retire, []
    future = owner.buffer[:8].read_into(bytearray(8))

    def interrupted(lane: SendQueuePair, id_: int) -> Any:
        found = retire(lane, id_)
        if not struck and threading.current_thread() is threading.main_thread():
            struck.append(1)
            signal.raise_signal(signal.SIGINT)  # if it interrupted retire(), the request would never end
        return found

    def look_and_stay() -> None:
        assert until(lambda: future.done() or bool(struck), 10)
        time.sleep(LONG)

    monkeypatch.setattr(SendQueuePair, "retire", interrupted)
    disarm_completion_events(owner)
    owner.fabric.run()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            look_and_stay()
    finally:
        signal.signal(signal.SIGINT, before)
    assert struck
    assert time.monotonic() - began < LONG, "the sleep went on"
    future.get(10)


def test_an_owner_that_dies_in_the_middle(far: Make) -> None:
    owner = far(Fabric(at_once=False))
    futures = [owner.buffer[:8].read_into(bytearray(8)) for _ in range(100)]
    peer = program().router.peer(owner.token)
    peer.gone = "killed by signal 9"
    owner.connects = False
    program().on_process_lost(peer, None)
    owner.asking.peer_gone(owner.token, "its process is gone")
    began = time.monotonic()
    for future in futures:
        with pytest.raises(OwnerLostError, match="is gone"):
            future.get(10)
    assert time.monotonic() - began < 5
    with pytest.raises(OwnerLostError):
        owner.buffer[:8].read_into(bytearray(8)).get(10)


def test_a_refusal_of_the_device_is_an_error_and_its_owner_is_asked(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("monarch_backend._rdma.routes.verbs.ask", lambda *args: asked.append(args) or b"\x01")
    owner = far()
    owner.owner.release(owner.region)
    with pytest.raises(RDMAError, match="not registered any more"):
        owner.buffer[:8].read_into(bytearray(8)).get(10)
    assert len(asked) == 1


def test_one_part_s_failure_ends_the_others(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "CANCEL_GRACE_S", 0.05)
    monkeypatch.setattr("monarch_backend._rdma.routes.verbs.ask", lambda *_: b"\x01")
    good, bad = far(Fabric(at_once=False)), far()
    bad.owner.release(bad.region)
    both = RDMAAction().read_remote(bytearray(8), good.buffer[:8]).read_remote(bytearray(8), bad.buffer[:8])
    with pytest.raises(RDMAError, match="not registered any more"):
        both.submit().get(10)
    good.fabric.run()


def test_no_reconnect_for_cancelled_transfers(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = far(Fabric(at_once=False))
    dialed: list[int] = []
    monkeypatch.setattr(owner, "connect", lambda: dialed.append(1))
    future = owner.buffer[:8].read_into(bytearray(8))
    cancelling = threading.Thread(target=future.cancel)
    cancelling.start()
    assert until(lambda: future._transfer is not None)
    [request] = [flight.request for flight in future._transfer._under_way()]
    assert until(lambda: request.unwanted is not None, 10)
    owner.fabric.dead = True
    owner.fabric.run()
    cancelling.join(10)
    assert isinstance(future.exception(0), CancelledError)
    owner.fabric.dead = False
    assert not dialed


def test_one_queue_pair_breaks_and_the_other_never_ends(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting thread sees one queue pair break, then sleeps. The engine's thread must enforce the other's
    deadline.
    """
    monkeypatch.setattr(completion_poller, "SWEEP_INTERVAL_S", 60.0)
    monkeypatch.setattr(connection, "DRAIN_TIMEOUT_S", 0.2)
    owner = far(Fabric(at_once=False))
    futures = [owner.buffer[:8].read_into(bytearray(8)) for _ in range(2)]
    first, second = [pair for pair in owner.fabric.pairs.values() if pair.posted]
    disarm_completion_events(owner)
    awake = threading.Event()
    owner.asking.call_soon(awake.set)
    assert awake.wait(10)  # the engine's thread sleeps after this
    owner.fabric.dead = True
    with owner.fabric.lock:
        assert first.step()
    owner.fabric.dead = False
    link = owner.asking._links[owner.token]
    assert until(lambda: [future.done() for future in futures] and link.state is connection.State.DRAINING, 10)
    assert until(lambda: second.closed, 10)
    with Worker(owner.fabric):
        for future in futures:
            future.get(10)


def test_a_broken_connection_is_made_again(far: Make) -> None:
    owner = far(Fabric(at_once=False))
    into = bytearray(64 * KI)
    future = owner.buffer[: 64 * KI].read_into(into)
    owner.fabric.dead = True
    owner.fabric.run()
    owner.fabric.dead = False
    with Worker(owner.fabric):
        future.get(10)
    assert owner.holds(into, len(into))


class OtherWay:
    """Stands in for Tcp and records its calls. ``route`` falls back to it from the owner's NICs."""

    name = "tcp"

    def __init__(self, owner: FarOwner) -> None:
        self.tried: list[Any] = []
        self.warned: list[Any] = []
        self.aside: list[Any] = []
        self.handle = owner.buffer._handle._replace(ways=(("there", 1),))
        self.route = VerbsWithTcpFallback(owner.route, self, lambda *of: self.warned.append(of), self.aside.append)  # type: ignore[arg-type]

    def run(self, *args: Any) -> Result:
        self.tried.append(args)
        return Result(DONE, 0, 0, 0)


NO_WAY = Result(UNREACHABLE, 0, 0, 0, "no way")


def test_tcp_is_taken_where_the_devices_stop_to_reach_each_other(far: Make) -> None:
    other = OtherWay(far())
    route, handle, part = other.route, other.handle, ReadWriteOp(other.handle, False, ((0, 0, 8),))
    assert route.name == "verbs"
    late = Result(LATE, 0, 0, 0)
    assert route.recover(part, late, cancel_scope(None), None) == late
    assert not other.tried
    assert route.recover(part, NO_WAY, cancel_scope(None), None).outcome == DONE
    assert len(other.tried) == 1
    assert route.name == "tcp"
    assert route.begin(part, cancel_scope(None), None, lambda _: None) is None
    assert other.warned == [(handle, "no way")]
    assert not other.aside, "it is too early to try NICs again"


def test_nics_are_tried_again_beside_the_transfers(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = far()
    other = OtherWay(owner)
    route, memory = other.route, torch.zeros(8, dtype=torch.uint8)
    part, answers = ReadWriteOp(other.handle, False, ((0, memory.data_ptr(), 8),)), [False, True]

    def move() -> Result:
        return route.run(part, cancel_scope(10), (memory,))

    def meet(_: str) -> None:
        if answers.pop(0):
            owner.until_up()

    monkeypatch.setattr(owner.route, "_meet", meet)
    owner.asking.give_up(owner.token, "it was slow")
    route.recover(part, NO_WAY, cancel_scope(None), None)
    monkeypatch.setattr(selection, "RETRY_INTERVAL_S", 0.0)
    route.recover(part, NO_WAY, cancel_scope(None), None)
    assert move().outcome == DONE
    assert len(other.tried) == 3, "nobody waits for whoever tries NICs"
    other.aside.pop(0)()
    assert move().outcome == DONE
    assert len(other.tried) == 4, "the owner was slow again"
    monkeypatch.setattr(selection, "RETRY_INTERVAL_S", 60.0)
    other.aside.pop(0)()
    assert not other.aside
    assert route.begin(part, cancel_scope(None), (memory,), lambda _: None) is not None
    assert route.name == "verbs"
    assert move().outcome == DONE
    assert len(other.tried) == 4
    assert owner.holds(memory.numpy(), 8)


@pytest.mark.parametrize("outcome", [DONE, LOST, FAILED, LATE])
def test_switch_to_tcp_does_not_repeat_an_atomic(far: Make, monkeypatch: pytest.MonkeyPatch, outcome: int) -> None:
    owner = far()
    other = OtherWay(owner)
    ended = Result(outcome, 0, 0, 7, "it is said why")

    atomic = AtomicOp(other.handle, FETCH_ADD, 0, 1, 0, lambda _: None)

    def run(*_: Any) -> Result:
        other.route.recover(
            ReadWriteOp(other.handle, False, ((0, 0, 8),)), NO_WAY, cancel_scope(None), None
        )  # as from another thread
        return ended

    monkeypatch.setattr(owner.route, "run", run)
    assert other.route.run(atomic, cancel_scope(None), None) == ended
    assert other.route.recover(atomic, ended, cancel_scope(None), None) == ended
    assert len(other.tried) == 1


@pytest.mark.parametrize("why", ["nobody answers", "nothing comes through", "no port is up here"])
def test_unstarted_transfer_may_use_tcp(far: Make, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    owner = far(Fabric(at_once=False))
    owner.asking.give_up(owner.token, "a new one is needed")
    if why == "nobody answers":
        monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.05)
        owner.connects = False
    elif why == "nothing comes through":
        owner.fabric.dead = True
    else:

        def devices() -> list[Any]:
            raise VerbsError("no port of a verbs device is active here")

        monkeypatch.setattr(owner.asking, "devices", devices)
    memory = torch.zeros(8, dtype=torch.uint8)
    other = OtherWay(owner)
    with Worker(owner.fabric):
        read = ReadWriteOp(other.handle, False, ((0, memory.data_ptr(), 8),))
        moved = other.route.run(read, cancel_scope(10), (memory,))
        atomic = AtomicOp(other.handle, FETCH_ADD, 0, 1, 0, lambda _: None)
        added = other.route.run(atomic, cancel_scope(10), None)
    assert (moved.outcome, added.outcome) == (DONE, DONE)
    assert len(other.tried) == 2
    assert len(other.warned) == 1
    owner.fabric.dead = False


def test_tcp_is_used_when_local_queue_pairs_fail_to_connect(far: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's queue pairs are ready after its answer. If the local NIC then fails, the peer is not reported as
    lost.
    """
    owner = far(Fabric(at_once=False))
    again = threading.Event()

    def connect() -> None:
        answer = owner.owner.accept("asking", owner.asking.offer(owner.token))
        owner.fabric.unreachable.add(GID.raw)
        again.set()
        owner.asking.connect(owner.token, answer)

    monkeypatch.setattr(owner, "connect", connect)
    ended: list[Result] = []
    memory = torch.zeros(8, dtype=torch.uint8)
    part = ReadWriteOp(owner.buffer._handle, False, ((0, memory.data_ptr(), 8),))
    assert owner.route.begin(part, cancel_scope(10), memory, ended.append) is not None
    owner.fabric.dead = True
    owner.fabric.run()
    owner.fabric.dead = False
    assert again.wait(10)
    assert until(lambda: ended, 10)
    assert ended[0].outcome == UNREACHABLE
    assert "no way from here" in ended[0].text


@pytest.mark.parametrize("late", ["the offer", "the answer"])
def test_late_connect_reply_ends_no_transfer(far: Make, monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    """Another attempt connected, and an atomic is in progress on that connection. TCP would run the atomic twice."""
    owner = far(Fabric(at_once=False))
    ended: list[Result] = []
    part = AtomicOp(owner.buffer._handle, FETCH_ADD, 0, 1, 0, lambda _: None)
    assert owner.route.begin(part, cancel_scope(10), None, ended.append) is not None
    if late == "the answer":

        def ask(*_: Any) -> bytes:
            raise RDMAError("it did not answer in time")

        monkeypatch.setattr(owner.asking, "offer", lambda _: pack(ConnectRequest(b"12345678", [], [])))
        monkeypatch.setattr(verbs, "ask", ask)
    owner.route._meet(owner.token)
    assert not ended
    assert owner.asking.connected(owner.token)
    assert not owner.route.has_no_way(owner.token)
    with Worker(owner.fabric):
        assert until(lambda: ended, 10)
    assert ended[0].outcome == DONE


# ---- lanes of large transfers


@pytest.mark.parametrize(("nbytes", "lanes"), [(MI, 1), (16 * MI, 1), (64 * MI, 2)])
def test_large_transfer_uses_several_queue_pairs(far: Make, nbytes: int, lanes: int) -> None:
    assert Settings().queue_pairs == 2
    owner = far(Fabric(at_once=False), nbytes=nbytes)
    assert until(lambda: owner.fabric.run() == 0 and all(pair.most <= 1 for pair in owner.fabric.pairs.values()))
    for pair in owner.fabric.pairs.values():
        pair.most = 0
    into = torch.zeros(nbytes, dtype=torch.uint8)
    future = owner.buffer.read_into(into)
    while not future.done():
        owner.fabric.run(1)
    assert owner.holds(into.numpy(), nbytes)
    assert sum(pair.most > 0 for pair in owner.fabric.pairs.values()) == lanes
