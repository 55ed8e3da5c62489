"""One engine for all users of a process: whom it dials for, and when it is closed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from monarch_backend.rdma import _one_engine
from monarch_backend.rdma._verbs import Verbs
from monarch_backend.rdma.verbs import VerbsError, _device, _engine
from monarch_backend.rdma.verbs._devices import PortFacts
from monarch_backend.rdma.verbs._messages import ROCE_V2, Gid
from tests.rdma.verbs.fabric import Fabric
from tests.rdma.verbs.peers import Memory, Outcome, until


class Other(NamedTuple):
    """A peer of another user."""

    name: str


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    made = Fabric()
    gid = Gid(1, ROCE_V2, bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1]))
    monkeypatch.setattr(
        _device._devices, "usable", lambda settings: [PortFacts("fake0", 1, "ACTIVE", True, (gid,), -1)]
    )
    monkeypatch.setattr(_engine, "available", lambda: None)
    monkeypatch.setattr(_engine, "load", lambda wanted: made)
    assert _one_engine._engine is None
    yield made
    for kind in list(_one_engine._dials):
        _one_engine.give_back(kind)
    assert all(nic.opened == nic.closed for nic in made.nics)


def test_each_user_dials_for_its_own_peers(fabric: Fabric) -> None:
    dialed: list[Any] = []
    engine = _one_engine.borrow(str, dialed.append)
    assert _one_engine.borrow(Other, dialed.append) is engine
    with pytest.raises(RuntimeError, match="in use for peers named by Other"):
        _one_engine.borrow(Other, dialed.append)
    memory = Memory(100)
    region = engine.expose(memory.address, 100, memory.view)
    outcomes = {peer: Outcome() for peer in ("token", Other("rank"), 5)}
    for peer, outcome in outcomes.items():
        engine.transfer(peer, "read", region, [(0, memory.address, 10)], memory.view, outcome)
    with pytest.raises(VerbsError, match="5 could not be dialed: nobody here"):
        outcomes[5].wait()
    for peer in ("token", Other("rank")):
        engine.peer_gone(peer, "the test is over")
        with pytest.raises(VerbsError, match="the test is over"):
            outcomes[peer].wait()
    assert set(dialed) == {"token", Other("rank")}


def test_the_last_user_closes_it(fabric: Fabric) -> None:
    engine = _one_engine.borrow(str, print)
    _one_engine.borrow(Other, print)
    assert engine.devices()
    assert not _one_engine.give_back(str)
    assert not _one_engine.give_back(str)  # twice is as good as once
    assert engine.devices()
    assert _one_engine.give_back(Other)
    with pytest.raises(VerbsError, match="closed"):
        engine.devices()
    assert _one_engine.borrow(str, print) is not engine


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
    """Its registrations go; the engine, which others use, does not."""
    memory = Memory(4096)
    whole = _Whole(memory.address, memory.nbytes, memory.view)
    verbs = Verbs(None, _Registry(whole))  # type: ignore[arg-type]
    _one_engine.borrow(Other, print)
    assert verbs.exposed(_Handle((1, 2, 3)))  # type: ignore[arg-type]
    [nic] = fabric.nics
    assert len(nic.registered) == 1
    verbs.close()
    assert not nic.registered
    assert _one_engine._engine is not None
    assert _one_engine._engine.devices()


def test_a_fork_has_none(fabric: Fabric) -> None:
    _one_engine.borrow(str, print)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if _one_engine._engine is None and not _one_engine._dials else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("how", ["expose", "transfer"])
def test_devices_outlive_who_registers(fabric: Fabric, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The engine is closed meanwhile: that waits, and who registers hears of it. The fixture looks at what is open."""
    engine = _one_engine.borrow(str, lambda _: None)
    memory, other = Memory(100), Memory(100)
    region = engine.expose(other.address, 100, other.view)
    (nic,) = fabric.nics
    registers, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []
    real, real_close = type(nic).register, type(nic).close

    def slow(self: Any, *args: Any) -> Any:
        registers.set()
        assert goes_on.wait(60)
        seen.append(ended.wait(0.5))  # long enough for an end that does not wait
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

    user, closer = threading.Thread(target=use), threading.Thread(target=_one_engine.give_back, args=(str,))
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
