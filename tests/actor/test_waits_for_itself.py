"""Actors that wait for themselves get an error at once. Waits that another actor or thread ends are no error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._actor.current_runtime import program
from monarch_backend._transport.local.tuning import CREDIT_WINDOW
from monarch_backend.actor import (
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    DeadlockError,
    Port,
    ProcMesh,
    concurrent_endpoint,
    context,
    endpoint,
    this_proc,
)
from tests.actor.actors import running
from tests.actor.support import PATIENCE
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("faults")

WHILE_WAITING_S = 0.2
"""Seconds after which a file is made that ends a wait."""


def _touch_later(path: str) -> None:
    threading.Timer(WHILE_WAITING_S, Path(path).touch).start()


class Own(Actor):
    """Calls the mesh that it is in, and sends to itself."""

    def __init__(self) -> None:
        self.noted: list[int] = []

    @endpoint
    def rank(self) -> int:
        return context().actor_instance.rank.rank

    @endpoint
    def first_of_stream(self, mesh: ActorMesh) -> tuple[int, str]:
        """Return the first reply of the mesh, and the error of the second one."""
        stream = mesh.rank.stream()
        first = next(stream).get()
        try:
            next(stream).get()
        except DeadlockError as error:
            return first, str(error)
        return first, ""

    @endpoint
    def wait_shortly(self, me: ActorMesh) -> list[bool]:
        """Return for two calls of the own actor with a limit of time whether they took too long."""
        found = []
        for call, limit in ((me.rank.call_one(), 0.05), (me.rank.options(timeout=0.05).call_one(), None)):
            try:
                call.get(limit)
            except Exception as error:
                found.append(isinstance(error, TimeoutError))
        return found

    @endpoint
    def begin(self, mesh: ActorMesh, path: str) -> None:
        self.call: Any = mesh.wait_on_last_rank.call(path)

    @endpoint
    def wait_on_last_rank(self, path: str) -> int:
        rank = context().actor_instance.rank.rank
        if rank == 1:
            wait_until(Path(path).exists, PATIENCE)
        return rank

    @endpoint
    def begin_explicit(self, me: ActorMesh, other: ActorMesh, path: str) -> None:
        self.call = me.leave_to.call_one(other, path)

    @endpoint(explicit_response_port=True)
    def leave_to(self, port: Port[str], other: ActorMesh, path: str) -> None:
        other.reply_when.broadcast(port, path)

    @endpoint
    def reply_when(self, port: Port[str], path: str) -> None:
        wait_until(Path(path).exists, PATIENCE)
        port.send("from another")

    @endpoint
    def finish(self, path: str) -> Any:
        """Return the reply that `begin` has asked for."""
        _touch_later(path)
        return self.call.get()

    @endpoint
    def hold(self, path: str) -> None:
        wait_until(Path(path).exists, PATIENCE)

    @endpoint
    def note(self, value: int) -> None:
        self.noted.append(value)

    @endpoint
    def fill_and_note(self, me: ActorMesh, other: ActorMesh, path: str) -> None:
        """Fill the window of this process with messages to another actor, and send one to this actor."""
        for value in range(CREDIT_WINDOW):
            other.note.broadcast(value)
        _touch_later(path)
        me.note.broadcast(7)

    @endpoint
    def take_noted(self) -> list[int]:
        noted, self.noted = self.noted, []
        return noted

    @endpoint
    def send_values(self, port: Port[int], count: int) -> None:
        for value in range(count):
            port.send(value)

    @endpoint
    def send_to_own_port(self) -> None:
        port, self.receiver = Channel.open()
        for value in range(CREDIT_WINDOW + 1):
            port.send(value)

    @endpoint
    def send_to_thread(self) -> int:
        """Send values to a port that a thread of this actor reads, once the queue is full. Return their sum."""
        port, receiver = Channel.open()
        total: list[int] = []
        me = program().router.me

        def read() -> None:
            wait_until(lambda: me.credit <= 0, PATIENCE)
            total.append(sum(receiver.recv().get(PATIENCE) for _ in range(2 * CREDIT_WINDOW)))

        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(2 * CREDIT_WINDOW):
            port.send(1)
        thread.join()
        return total[0]


class OwnAsync(Actor):
    @concurrent_endpoint
    async def rank(self) -> int:
        return 3

    @concurrent_endpoint
    async def block(self, me: ActorMesh) -> str:
        """Block the event loop by waiting for a call of this actor."""
        try:
            with pytest.warns(RuntimeWarning, match="blocks the running event loop"):
                me.rank.call_one().get()
        except DeadlockError as error:
            return str(error)
        return ""


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 2}) as made:
        yield made


@pytest.fixture
def mesh(procs: ProcMesh) -> Iterator[ActorMesh]:
    made = procs.spawn("own", Own)
    yield made
    made.stop().get(PATIENCE)


def test_first_reply_of_another_rank_is_read_before_the_error(mesh: ActorMesh) -> None:
    first, error = mesh.slice(gpus=0).first_of_stream.call_one(mesh).get(PATIENCE)
    assert first == 1
    assert "own" in error and "would never continue: it handles one message at a time" in error


def test_own_call_with_a_limit_of_time_ends_by_it(mesh: ActorMesh) -> None:
    me = mesh.slice(gpus=0)
    assert me.wait_shortly.call_one(me).get(PATIENCE) == [True, True]


def test_call_with_the_own_reply_waits_for_the_other_rank(mesh: ActorMesh, tmp_path: Path) -> None:
    one, path = mesh.slice(gpus=0), str(tmp_path / "go")
    one.begin.call_one(mesh, path).get(PATIENCE)
    assert list(one.finish.call_one(path).get(PATIENCE).values()) == [0, 1]


def test_own_call_whose_reply_another_actor_sends_is_waited_for(mesh: ActorMesh, tmp_path: Path) -> None:
    one, other, path = mesh.slice(gpus=0), mesh.slice(gpus=1), str(tmp_path / "go")
    one.begin_explicit.call_one(one, other, path).get(PATIENCE)
    assert one.finish.call_one(path).get(PATIENCE) == "from another"


def test_message_to_itself_waits_for_another_actor_of_the_process(procs: ProcMesh, tmp_path: Path) -> None:
    one, path = procs.slice(gpus=0), str(tmp_path / "go")
    me, other = (one.spawn(name, Own) for name in ("me", "other"))
    other.hold.broadcast(path)
    me.fill_and_note.call_one(me, other, path).get(PATIENCE)
    assert me.take_noted.call_one().get(PATIENCE) == [7]
    assert other.take_noted.call_one().get(PATIENCE) == list(range(CREDIT_WINDOW))
    for made in (me, other):
        made.stop().get(PATIENCE)


def test_values_for_a_port_of_the_main_program_wait_for_it() -> None:
    mesh = this_proc().spawn("own_here", Own)
    port, receiver = Channel.open()
    sent = mesh.send_values.call_one(port, 2 * CREDIT_WINDOW)
    wait_until(lambda: program().router.me.credit <= 0, PATIENCE)
    assert [receiver.recv().get(PATIENCE) for _ in range(2 * CREDIT_WINDOW)] == list(range(2 * CREDIT_WINDOW))
    sent.get(PATIENCE)
    mesh.stop().get(PATIENCE)


def test_values_for_a_port_that_a_thread_reads_wait_for_it(mesh: ActorMesh) -> None:
    assert mesh.slice(gpus=0).send_to_thread.call_one().get(PATIENCE) == 2 * CREDIT_WINDOW


def test_actor_that_fills_its_own_port_gets_an_error(mesh: ActorMesh) -> None:
    with pytest.raises(ActorError, match="its messages to a port of its own process fill the queue"):
        mesh.slice(gpus=0).send_to_own_port.call_one().get(PATIENCE)


def test_async_actor_that_blocks_its_loop_gets_an_error(procs: ProcMesh) -> None:
    mesh = procs.slice(gpus=0).spawn("own_async", OwnAsync)
    error = mesh.block.call_one(mesh).get(PATIENCE)
    assert "own_async" in error and "would never continue: it blocks its event loop" in error
    mesh.stop().get(PATIENCE)
