"""Small transfers over TCP whose replies the waiting thread reads itself: delivery, and every way in which they end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_backend import _native
from monarch_backend._actor.runtime import program
from monarch_backend._rdma.registrations import Handle
from monarch_backend._rdma.routes.protocol import CANCELLED, DONE, DROPPED, FETCH_ADD, LATE, LOST, READ, REFUSED, WRITE
from monarch_backend._rdma.routes.tcp import Tcp
from monarch_backend._rdma.transfers.engine import Workers, engine
from monarch_backend.actor import CancelledError
from monarch_backend.rdma import RDMABuffer, RDMAError
from tests.rdma.tcp_owners import Background, Memory, Narrow, Owner, Ticket, owner
from tests.rdma.verbs.peers import until

CONTENT = bytes(range(256)) * 1024
KEPT: list[Memory] = []
BOTH = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


@pytest.fixture
def it(request: pytest.FixtureRequest) -> Iterator[Owner]:
    with owner(getattr(request, "param", False)) as made:
        yield made
    KEPT.clear()


@contextlib.contextmanager
def connected(it: Owner, streams: int = 1, **other: Any) -> Iterator[tuple[_native.MemoryClient, Ticket]]:
    """Yield a client with an open connection, and a ticket for the owner's memory."""
    client, ticket = it.client(streams, **other), it.ask("add", CONTENT)
    memory = Memory(1)
    assert client.read(ticket, memory.all(), 20.0).outcome == "done"
    try:
        yield client, ticket
    finally:
        client.close()


def begin(
    client: Any, ticket: Ticket, memory: Memory, scope: Any = None, access: int = READ, more: Any = (0, 0)
) -> Any:
    KEPT.append(memory)  # keep the memory alive, because the request may write to it later
    return client.begin(ticket, access, memory.all(), *more, scope or _native.CancelScope(None))


# ---- requests in the core


@pytest.mark.parametrize("it", [False, True], indirect=True, ids=["plain", "tls"])
def test_reads_writes_and_atomics(it: Owner) -> None:
    with connected(it) as (client, ticket):
        for size in (1, 8, 4096, 64 << 10):
            memory = Memory(size)
            request = begin(client, ticket, memory)
            assert request.fetch(20.0)[0] == DONE
            assert memory[:size] == CONTENT[:size]
            assert request.is_over
            assert request.fetch(0.0) is None, "the result is told once"
        for size in (1, 16 << 10):
            assert begin(client, ticket, Memory(size, b"x" * size), access=WRITE).fetch(20.0)[0] == DONE
            assert it.ask("content", ticket)[: size + 1] == b"x" * size + CONTENT[size : size + 1]
        found = begin(client, ticket, Memory(8), access=FETCH_ADD, more=(3, 0)).fetch(20.0)
        assert found[3] == int.from_bytes(b"x" * 8, "little")
        assert it.ask("content", ticket)[:8] == (found[3] + 3).to_bytes(8, "little")
        it.ask("drop", ticket)
        assert begin(client, ticket, Memory(8)).fetch(20.0)[:2] == (REFUSED, DROPPED)


def test_request_without_a_free_connection_is_not_started(it: Owner) -> None:
    client, ticket = it.client(1), it.ask("add", CONTENT)
    assert begin(client, ticket, Memory(8)) is None, "there is no connection yet"
    client.close()
    assert begin(client, ticket, Memory(8)) is None, "it is closed"
    with connected(it) as (client, ticket):
        assert begin(client, ticket, Memory((64 << 10) + 1)) is None
        assert begin(client, ticket, Memory((16 << 10) + 1), access=WRITE) is None
        first = begin(client, ticket, Memory(8))
        assert begin(client, ticket, Memory(8)) is None, "the only connection has something under way"
        assert first.fetch(20.0)[0] == DONE
        assert begin(client, ticket, Memory(8)).fetch(20.0)[0] == DONE
        it.ask("restart")
        assert until(lambda: begin(client, ticket, Memory(8)) is None, 20), "its owner has hung up"
        assert client.read(ticket, Memory(8).all(), 20.0).outcome == "done"


@BOTH
def test_an_owner_that_stands_still(tls: bool) -> None:
    with owner(tls) as it, connected(it) as (client, ticket):
        it.stop()
        memory, scope = Memory(8), _native.CancelScope(None)
        request = begin(client, ticket, memory, scope)
        assert request.fetch(0.02) is None
        assert not request.is_over
        scope.cancel()
        assert request.fetch(0.0)[0] == CANCELLED
        assert request.is_over
        it.signal(signal.SIGCONT)
        assert client.read(ticket, memory.all(), 20.0).outcome == "done", "on a new connection"
        it.stop()
        assert begin(client, ticket, memory, _native.CancelScope(0.05)).fetch(None)[0] == LATE
        it.signal(signal.SIGCONT)


def test_an_owner_that_dies(it: Owner) -> None:
    with connected(it) as (client, ticket):
        it.stop()
        request = begin(client, ticket, Memory(8))
        fetching = Background(request.fetch, None)
        it.signal(signal.SIGKILL)
        assert fetching.wait()[0] == LOST


def test_only_one_fetching_thread_gets_the_result(it: Owner) -> None:
    with connected(it) as (client, ticket):
        it.stop()
        request = begin(client, ticket, Memory(8))
        scope, others = Background(request.fetch, None), [Background(request.fetch, 20.0) for _ in range(4)]
        it.signal(signal.SIGCONT)
        assert sum(each.wait() is not None for each in [scope, *others]) == 1


def test_dropped_request_does_not_block_later_reads(it: Owner) -> None:
    with connected(it) as (client, ticket):
        it.stop()
        request = begin(client, ticket, Memory(8))
        assert begin(client, ticket, Memory(8)) is None
        del request
        gc.collect()
        it.signal(signal.SIGCONT)
        assert client.read(ticket, Memory(8).all(), 20.0).outcome == "done"


@BOTH
def test_partial_reply_does_not_block_fetch(tls: bool) -> None:
    with owner(tls) as it, Narrow(it.port) as narrow, connected(it, port=narrow.port) as (client, ticket):
        for size, parts in ((8, (1, 32, 10)), (40_000, (1, 31, 40, 100, 17_000, 17_000, 3_000))):
            memory = Memory(size)
            narrow.let_through(0)
            narrow.wait()
            request = begin(client, ticket, memory, _native.CancelScope(10))
            for part in parts:
                narrow.let_through(part)
                narrow.wait()
                assert request.fetch(0.0) is None
                assert request.fetch(0.01) is None
                assert not request.is_over
            narrow.let_through(Narrow.ALL)
            assert request.fetch(None)[0] == DONE
            assert memory[:size] == CONTENT[:size]


@pytest.mark.parametrize(("seconds", "outcome"), [(None, CANCELLED), (0.3, LATE)], ids=["cancelled", "late"])
@BOTH
def test_request_can_end_during_a_partial_reply(tls: bool, seconds: float | None, outcome: int) -> None:
    with owner(tls) as it, Narrow(it.port) as narrow, connected(it, port=narrow.port) as (client, ticket):
        scope = _native.CancelScope(seconds)
        narrow.let_through(40)
        request = begin(client, ticket, Memory(8), scope)
        narrow.wait()
        fetching = Background(request.fetch, None)
        if outcome == CANCELLED:
            scope.cancel()
        assert fetching.wait()[0] == outcome
        assert begin(client, ticket, Memory(8)) is None, "its connection is given up"


# ---- requests of the route


@contextlib.contextmanager
def routed(it: Owner, client: _native.MemoryClient, ticket: Ticket) -> Iterator[tuple[RDMABuffer, Tcp]]:
    """Yield the owner's memory as a buffer that this process could have received from an actor."""
    token = it.token
    route = Tcp(program(), engine().registry, engine().movers.submit_at_once)
    route._clients[token] = [client]
    engine().routes._chosen[token, False, False] = route
    yield RDMABuffer._of(Handle(token, it.pid, "far", ticket, 0, len(CONTENT), "cpu", True)), route
    engine().routes._chosen.pop((token, False, False))
    program().router.peers.pop(token, None)
    route.close()


@pytest.fixture
def far(it: Owner) -> Iterator[tuple[RDMABuffer, Tcp]]:
    """The owner's memory over several connections. No transfer has used a thread yet."""
    with connected(it, 4) as (client, ticket), routed(it, client, ticket) as made:
        yield made


def by_threads(route: Tcp, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that collects the transfers that worker threads run or wait for."""
    found: list[Any] = []
    run, submit = route.run, route._small_requests.submit
    monkeypatch.setattr(route, "run", lambda *args: (found.append(args), run(*args))[1])
    monkeypatch.setattr(route._small_requests, "submit", lambda job: (found.append(job), submit(job)))
    return found


def test_waiting_thread_reads_the_reply(far: tuple[RDMABuffer, Tcp], monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, route = far
    monkeypatch.setattr("monarch_backend._rdma.routes.tcp.SOCKET_WAIT_S", 20.0)
    monkeypatch.setattr("monarch_backend._rdma.routes.tcp.SWEEP_INTERVAL_S", 60.0)
    jobs = by_threads(route, monkeypatch)
    for size in (1, 8, 4096, 64 << 10):
        into = bytearray(size)
        assert buffer[:size].read_into(into, timeout=20).get() is None
        assert into == CONTENT[:size]
    assert buffer.fetch_add(1).get() == int.from_bytes(CONTENT[:8], "little")
    buffer[:8].write_from(CONTENT[:8]).get()
    assert not jobs
    into = bytearray(len(CONTENT))
    buffer.read_into(into).get(20)
    assert into == CONTENT
    assert len(jobs) == 1, "that was large"


def test_unpolled_requests_finish_soon(far: tuple[RDMABuffer, Tcp]) -> None:
    futures = [far[0][:8].read_into(bytearray(8)) for _ in range(3)]
    assert until(lambda: all(future.ready for future in futures), 10)
    assert until(lambda: not far[1]._small_requests._sweeps, 10), "the thread still searches for requests"


def test_route_is_chosen_by_one_thread(far: tuple[RDMABuffer, Tcp], monkeypatch: pytest.MonkeyPatch) -> None:
    handle, route = far[0]._handle, far[1]
    chosen, first, others = [], threading.Event(), threading.Event()

    def choose(of: Handle) -> Tcp:
        chosen.append(of)
        first.set()
        assert others.wait(10)
        return route

    monkeypatch.setattr(engine().routes, "_choose", choose)
    engine().routes._chosen.pop((handle.token, False, False))
    threads = [threading.Thread(target=engine().routes.to, args=(handle,)) for _ in range(4)]
    threads[0].start()
    assert first.wait(10)
    for thread in threads[1:]:
        thread.start()
    others.set()
    for thread in threads:
        thread.join()
    assert chosen == [handle]


def test_callbacks_and_await(far: tuple[RDMABuffer, Tcp], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_backend._rdma.routes.tcp.SWEEP_INTERVAL_S", 60.0)
    called = threading.Event()
    far[0][:8].read_into(bytearray(8)).add_done_callback(lambda _: called.set())
    assert called.wait(10)
    into = [bytearray(100 * number) for number in range(1, 9)]

    async def all_of_them() -> None:
        await asyncio.gather(*(far[0][: len(each)].read_into(each).as_asyncio() for each in into))

    asyncio.run(all_of_them())
    assert all(each == CONTENT[: len(each)] for each in into)


def test_read_of_a_stopped_owner_can_be_cancelled_or_time_out(it: Owner, far: tuple[RDMABuffer, Tcp]) -> None:
    buffer, _ = far
    it.stop()
    waiting = buffer[:8].read_into(bytearray(8))
    with pytest.raises(TimeoutError, match="the call goes on"):
        waiting.get(0.05)
    assert not waiting.done()
    assert waiting.cancel("no more")
    with pytest.raises(CancelledError, match="no more"):
        waiting.get()
    it.signal(signal.SIGCONT)
    buffer[:8].read_into(bytearray(8)).get(20)  # a new connection is made
    it.stop()
    with pytest.raises(TimeoutError, match=r"was not done within 0\.1 s"):
        buffer[:8].read_into(bytearray(8), timeout=0.1).get(20)
    slow = buffer[:8].read_into(bytearray(8))
    it.signal(signal.SIGCONT)
    slow.get(20)
    assert not program().pending


@BOTH
def test_polling_thread_does_not_wait_for_the_rest_of_a_reply(tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_backend._rdma.routes.tcp.SWEEP_INTERVAL_S", 60.0)
    size, first = 40_000, 20_000  # more than one TLS record
    with (
        owner(tls) as it,
        Narrow(it.port) as narrow,
        connected(it, port=narrow.port) as (client, ticket),
        routed(it, client, ticket) as (buffer, _),
    ):
        for _ in range(2):
            into = bytearray(size)
            narrow.let_through(first)
            future = buffer[:size].read_into(into, timeout=10)
            narrow.wait()
            begun = time.monotonic()
            assert not future.done()
            with pytest.raises(TimeoutError, match="the call goes on"):
                future.get(0.05)
            assert time.monotonic() - begun < 5, "it was the transfer's own time that ended it"
            narrow.let_through(Narrow.ALL)
            assert future.get(20) is None
            assert into == CONTENT[:size]


def test_refusals_and_lost_connections(it: Owner, far: tuple[RDMABuffer, Tcp]) -> None:
    buffer, _ = far
    it.ask("restart")
    into = bytearray(8)
    buffer[:8].read_into(into).get(20)  # the transfer is repeated on a new connection
    assert into == CONTENT[:8]
    it.ask("drop", buffer._handle.ticket)
    with pytest.raises(RDMAError, match="not registered any more"):
        buffer[:8].read_into(into).get(20)


def test_all_threads_are_taken_by_others(far: tuple[RDMABuffer, Tcp], monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback runs although all worker threads are busy."""
    movers, go, called = Workers(2), threading.Event(), threading.Event()
    monkeypatch.setattr(far[1]._small_requests, "submit", movers.submit_at_once)
    monkeypatch.setattr("monarch_backend._rdma.routes.tcp.SWEEP_INTERVAL_S", 60.0)
    try:
        for _ in range(4):
            movers.submit(lambda: (go.wait(30), None)[1])
        assert engine().routes._tcp._small_requests.submit == engine().movers.submit_at_once
        far[0][:8].read_into(bytearray(8)).add_done_callback(lambda _: called.set())
        assert called.wait(10)
    finally:
        go.set()


def test_no_descriptor_is_left(it: Owner, far: tuple[RDMABuffer, Tcp]) -> None:
    """If no descriptor is free, the worker reports the error instead of the call."""
    limit, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        future = far[0][:8].read_into(bytearray(8), timeout=10)
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert future.exception(20) is None or isinstance(future.exception(), RDMAError)


def test_many_from_many_threads(far: tuple[RDMABuffer, Tcp]) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for i in range(40):
            size = 1 + (number * 40 + i) * 97 % (100 << 10)
            into = bytearray(size)
            far[0][:size].read_into(into, timeout=30).get()
            if into != CONTENT[:size]:
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
