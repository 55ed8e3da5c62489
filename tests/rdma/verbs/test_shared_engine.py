"""One verbs engine for all users of a process: how it connects, and when it is closed."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from monarch_backend._rdma.routes.verbs import Verbs
from monarch_backend._verbs import VerbsError, open_device, shared_engine
from monarch_backend._verbs import engine as engine_module
from monarch_backend._verbs.discovery import PortFacts
from monarch_backend._verbs.registrations.cache import allocation_of
from monarch_backend._verbs.wire_format import ROCE_V2, Gid
from tests.rdma.verbs.fabric import Fabric
from tests.rdma.verbs.peers import PATIENCE, Memory, Outcome, until


class Other(NamedTuple):
    """Peers of a second user of the engine."""

    name: str


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    made = Fabric()
    gid = Gid(1, ROCE_V2, bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1]))
    monkeypatch.setattr(
        open_device.discovery, "usable", lambda settings: [PortFacts("fake0", 1, "ACTIVE", True, (gid,), -1)]
    )
    monkeypatch.setattr(engine_module, "available", lambda: None)
    monkeypatch.setattr(engine_module, "load", lambda wanted: made)
    assert shared_engine._engine is None
    yield made
    for kind in list(shared_engine._dials):
        shared_engine.give_back(kind)
    assert all(nic.opened == nic.closed for nic in made.nics)


def test_each_user_dials_for_its_own_peers(fabric: Fabric) -> None:
    dialed: list[Any] = []
    engine = shared_engine.borrow(str, dialed.append)
    assert shared_engine.borrow(Other, dialed.append) is engine
    with pytest.raises(RuntimeError, match="in use for peers named by Other"):
        shared_engine.borrow(Other, dialed.append)
    memory = Memory(100)
    region = engine.expose(memory.address, 100, memory.view)
    outcomes = {peer: Outcome() for peer in ("token", Other("rank"), 5)}
    for peer, outcome in outcomes.items():
        engine.transfer(peer, "read", region, [(0, memory.address, 10)], memory.view, outcome)
    with pytest.raises(VerbsError, match="5 could not be dialed: no user in this process"):
        outcomes[5].wait()
    for peer in ("token", Other("rank")):
        engine.peer_gone(peer, "the test is over")
        with pytest.raises(VerbsError, match="the test is over"):
            outcomes[peer].wait()
    assert set(dialed) == {"token", Other("rank")}


def test_last_user_closes_the_engine(fabric: Fabric) -> None:
    engine = shared_engine.borrow(str, print)
    shared_engine.borrow(Other, print)
    assert engine.devices()
    assert not shared_engine.give_back(str)
    assert not shared_engine.give_back(str)  # a second call has no effect
    assert engine.devices()
    assert shared_engine.give_back(Other)
    with pytest.raises(VerbsError, match="closed"):
        engine.devices()
    assert shared_engine.borrow(str, print) is not engine


class _Registry:
    def __init__(self, memory: Any) -> None:
        self._memory, self.native = memory, self

    def memory(self, ticket: Any) -> Any:
        return self._memory

    def check(self, *_: Any) -> int:
        return 0


class _Whole(NamedTuple):
    address: int
    nbytes: int
    keep: Any
    writable: bool = True


class _Handle(NamedTuple):
    ticket: tuple[int, int, int]


def test_the_program_ends_and_others_stay(fabric: Fabric) -> None:
    """Its registrations end. The engine stays open, because others use it."""
    memory = Memory(4096)
    whole = _Whole(memory.address, memory.nbytes, memory.view)
    verbs = Verbs(None, _Registry(whole))  # type: ignore[arg-type]
    shared_engine.borrow(Other, print)
    assert verbs.exposed(_Handle((1, 2, 3)))  # type: ignore[arg-type]
    [nic] = fabric.nics
    assert len(nic.registered) == 1
    verbs.close()
    assert not nic.registered
    assert shared_engine._engine is not None
    assert shared_engine._engine.devices()


_before_forks: list[Callable[[], None]] = []
os.register_at_fork(before=lambda: [call() for call in _before_forks])  # the hook that was registered last runs first


def _in_fork(holds: Callable[[], bool]) -> bool:
    """Return whether ``holds()`` is true in a forked child."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if holds() else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return code == 0


def test_forked_child_has_no_engine(fabric: Fabric) -> None:
    shared_engine.borrow(str, print)
    assert _in_fork(lambda: shared_engine._engine is None and not shared_engine._dials)


def test_memory_that_is_gone_is_not_registered_when_a_process_forks(fabric: Fabric) -> None:
    """malloc keeps records in freed memory, which the child needs. The engine's thread is too busy to end the
    registration.
    """
    engine = shared_engine.borrow(str, print)
    [device] = engine.devices()
    [nic] = fabric.nics
    array = np.zeros(1000)
    device.cache.give(device.cache.take(allocation_of(array), writable=True))
    assert len(nic.registered) == 1
    busy, go_on = threading.Event(), threading.Event()
    engine.call_soon(lambda: (busy.set(), go_on.wait(PATIENCE)))
    assert busy.wait(PATIENCE)
    del array
    assert len(nic.registered) == 1
    _before_forks.append(go_on.set)
    try:
        assert _in_fork(lambda: not nic.registered)
    finally:
        _before_forks.clear()


def test_a_fork_waits_for_an_engine_for_a_moment_only(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_FORK_TIMEOUT_S", 0.01)
    engine = shared_engine.borrow(str, print)
    engine.devices()
    go_on = threading.Event()
    engine.call_soon(lambda: go_on.wait(PATIENCE))
    began = time.monotonic()
    assert _in_fork(lambda: True)
    took = time.monotonic() - began
    go_on.set()
    assert took < PATIENCE / 2


def test_a_callback_of_the_engine_s_thread_forks(fabric: Fabric) -> None:
    engine = shared_engine.borrow(str, print)
    engine.devices()
    outcomes: list[bool] = []
    engine.call_soon(lambda: outcomes.append(_in_fork(lambda: True)))
    assert until(lambda: outcomes == [True])


def test_fork_does_not_close_its_parents_engine(fabric: Fabric) -> None:
    """The child calls everything that ends resources, and drops all objects. A thread of the parent holds the
    engine's lock.
    """
    engine = shared_engine.borrow(str, print)
    memory, array = Memory(100), np.zeros(1000)
    region = engine.expose(memory.address, 100, memory.view)
    [device] = engine.devices()
    [nic] = fabric.nics
    device.cache.give(device.cache.take(allocation_of(array), writable=True))
    held = {"engine": engine, "array": array}
    del engine, device, array
    has, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with held["engine"]._lock:
            has.set()
            go_on.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has.wait(PATIENCE)

    def ends_all() -> bool:
        engine = held["engine"]
        for name in ("release", "peer_gone", "give_up", "stop"):
            getattr(engine, name)(*{"release": (region,), "stop": ("a", None, "over")}.get(name, ("a", "over")))
        engine.call_soon(print)
        engine.close()
        del engine
        held.clear()
        gc.collect()
        return nic.closed == 0 and len(nic.registered) == 2

    try:
        assert _in_fork(ends_all)
    finally:
        go_on.set()
        thread.join()


@pytest.mark.parametrize("how", ["expose", "transfer"])
def test_devices_outlive_a_concurrent_registration(fabric: Fabric, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A close during a registration waits for it, and the registering thread gets an error. The fixture checks for
    leaks.
    """
    engine = shared_engine.borrow(str, lambda _: None)
    memory, other = Memory(100), Memory(100)
    region = engine.expose(other.address, 100, other.view)
    (nic,) = fabric.nics
    registers, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []
    real, real_close = type(nic).register, type(nic).close

    def slow(self: Any, *args: Any) -> Any:
        registers.set()
        assert goes_on.wait(60)
        seen.append(ended.wait(0.5))  # longer than a close that does not wait
        return real(self, *args)

    def close(self: Any) -> None:
        ended.set()
        real_close(self)

    monkeypatch.setattr(type(nic), "register", slow)
    monkeypatch.setattr(type(nic), "close", close)
    errors: list[VerbsError] = []

    def use() -> None:
        try:
            if how == "expose":
                engine.expose(memory.address, 100, memory.view)
            else:
                engine.transfer("peer", "read", region, [(0, memory.address, 10)], memory.view, Outcome())
        except VerbsError as error:
            errors.append(error)

    user, closer = threading.Thread(target=use), threading.Thread(target=shared_engine.give_back, args=(str,))
    user.start()
    assert registers.wait(60)
    closer.start()
    assert until(lambda: engine._closed)
    goes_on.set()
    user.join(60)
    closer.join(60)
    assert seen == [False]
    assert ended.is_set()
    assert [str(error) for error in errors] == ["the engine is closed"]
    assert not nic.registered
