"""Bounded queues: a sender blocks, memory does not grow, and actors that call each other do not deadlock."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._actor import sigint
from monarch_backend._processes.system_calls import stands_still
from monarch_backend._transport.local import tuning
from monarch_backend._transport.local.links import MAX_UNREAD_BYTES
from monarch_backend._transport.local.tuning import CREDIT_WINDOW
from monarch_backend.actor import (
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    Port,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    endpoint,
    this_host,
    this_proc,
)
from tests.actor.actors import Recorder, Sync, pid_of, resident_bytes, running, until
from tests.actor.support import PATIENCE, Faults, gate
from tests.support.terminal import Terminal

pytestmark = pytest.mark.usefixtures("faults")

MIB = 1 << 20
FLOOD = 5000


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 3}) as mesh:
        yield mesh


@pytest.fixture
def recorders(procs: ProcMesh) -> Iterator[ActorMesh]:
    mesh = procs.spawn("recorders", Recorder)
    yield mesh
    mesh.stop().get(PATIENCE)


class Sender:
    """Calls ``send`` repeatedly in a thread, and counts the calls that have returned."""

    def __init__(self, send: Callable[[int], object], times: int = FLOOD) -> None:
        self.sent = 0
        self.error: BaseException | None = None

        def run() -> None:
            try:
                for i in range(times):
                    send(i)
                    self.sent = i + 1
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(2 * PATIENCE)
        assert not self._thread.is_alive()


class StderrText:
    """The text written to stderr so far."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def __contains__(self, text: str) -> bool:
        return text in self._terminal.err

    def count(self, text: str) -> int:
        return self._terminal.err.count(text)


@pytest.fixture
def stderr_text(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> StderrText:
    """Set MONARCH_DEBUG=1, so that a waiting sender logs it. Yield the text on stderr."""
    monkeypatch.setenv("MONARCH_DEBUG", "1")
    return StderrText(Terminal(capfd))


def hold(one: ActorMesh, name: str) -> None:
    """Block the actor until the gate opens."""
    port, receiver = Channel.open(once=True)
    one.hold.broadcast(port, name)
    receiver.recv().get(PATIENCE)


WAITING = f"monarch: {CREDIT_WINDOW} messages to"
FULL = "monarch: no room in shared memory"


# ---- a sender waits for credit or memory


def test_slow_actor_blocks_its_sender(recorders: ActorMesh, tmp_path: Path, stderr_text: StderrText) -> None:
    one = recorders.slice(gpus=1)
    payload = b"x" * 20_000  # larger than the ring
    with gate(tmp_path) as (name, open_gate):
        hold(one, name)
        before = resident_bytes()
        sender = Sender(lambda i: one.note.broadcast("main", i, payload))
        until(lambda: WAITING in stderr_text, "the sender says that it waits")
        assert sender.sent < CREDIT_WINDOW
        assert resident_bytes() - before < 2 * CREDIT_WINDOW * len(payload)
        assert recorders.slice(gpus=0).echo.call_one("others are not held up").get(PATIENCE) == "others are not held up"
        assert sender.sent < CREDIT_WINDOW
        open_gate()
        sender.join()
    assert sender.error is None
    assert one.by_sender.call_one().get(PATIENCE) == {"main": list(range(FLOOD))}
    assert resident_bytes() - before < 2 * CREDIT_WINDOW * len(payload)
    assert f"{CREDIT_WINDOW} messages to gpus 1 of {recorders.proc_mesh.name} (pid " in stderr_text


def small_places() -> None:
    tuning.BYTES_PER_CREDIT = 4096


# the first spawn leaves the fork server behind, so `procs` does it before the leak check
@pytest.mark.usefixtures("procs")
def test_large_messages_take_more_credit(
    tmp_path: Path, stderr_text: StderrText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "BYTES_PER_CREDIT", 4096)
    payload, n = b"x" * (64 << 10), 200
    with running({"gpus": 2}, bootstrap=small_places) as procs, gate(tmp_path) as (name, open_gate):
        mesh = procs.spawn("recorders", Recorder)
        one = mesh.slice(gpus=1)
        hold(one, name)
        sender = Sender(lambda i: (mesh.note if i % 2 else one.note).broadcast("main", i, payload), n)
        until(lambda: WAITING in stderr_text, "the sender says that it waits")
        # A message takes 17 credits. Each message is for rank 1, whether sent to the mesh or to one rank.
        assert sender.sent == -(-CREDIT_WINDOW // 17)
        open_gate()
        sender.join()
        assert one.by_sender.call_one().get(PATIENCE) == {"main": list(range(n))}


def test_stopped_process_leaves_memory_for_others(recorders: ActorMesh, stderr_text: StderrText) -> None:
    one, other = recorders.slice(gpus=1), recorders.slice(gpus=0)
    payload = bytes(MAX_UNREAD_BYTES // 4 - 4096)
    pid = pid_of(one)
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: stands_still(pid), "it stands still")
        sender = Sender(lambda i: one.note.broadcast("main", i, payload), 6)
        until(lambda: FULL in stderr_text, "the sender says that it waits")
        assert sender.sent == 4
        for _ in range(5):
            assert other.echo.call_one(payload).get(PATIENCE) == payload
        assert sender.sent == 4
    finally:
        os.kill(pid, signal.SIGCONT)
    sender.join()
    assert sender.error is None
    assert one.by_sender.call_one().get(PATIENCE) == {"main": list(range(6))}
    name = f"gpus 1 of {recorders.proc_mesh.name} (pid {pid})"
    assert stderr_text.count(f"{FULL} for a message to {name}: messages that {name} did not read fill it: waiting") == 1


@pytest.fixture
def stopped(recorders: ActorMesh) -> Iterator[ActorMesh]:
    """Rank 1, stopped by SIGSTOP. It has left its share of the main program's shared memory unread."""
    one = recorders.slice(gpus=1)
    pid = pid_of(one)
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: stands_still(pid), "it stands still")
        one.note.broadcast("main", 0, bytes(MAX_UNREAD_BYTES - 4096))
        yield one
    finally:
        os.kill(pid, signal.SIGCONT)


def test_multicast_does_not_wait_for_a_stopped_process(
    recorders: ActorMesh, stopped: ActorMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MAX_DIRECT_RECEIVERS", 1)
    for size in (100, 20_000):
        recorders.note.broadcast("main", size, b"x" * size)
    for gpu in (0, 2):
        assert recorders.slice(gpus=gpu).by_sender.call_one().get(PATIENCE) == {"main": [100, 20_000]}
    os.kill(pid_of(stopped), signal.SIGCONT)
    assert stopped.by_sender.call_one().get(PATIENCE) == {"main": [0, 100, 20_000]}


def test_actor_can_wait_for_another_actor_of_its_mesh(recorders: ActorMesh, stderr_text: StderrText) -> None:
    """An actor that waits for memory does not wait for its own queue, although it also sends to itself."""
    first, one = recorders.slice(gpus=0), recorders.slice(gpus=1)
    first.large.call_one(recorders, "first", 1, 10).get(PATIENCE)
    came: dict[Any, list[int]] = {}
    # Wait until both processes are connected, which on a busy machine takes longer than the call. Messages are queued
    # while a link is missing, and do not wait for memory.
    until(lambda: came.update(one.by_sender.call_one().get(PATIENCE)) or came, "the first message arrives")
    assert came == first.by_sender.call_one().get(PATIENCE) == {"first": [0]}
    pid = pid_of(one)
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: stands_still(pid), "it stands still")
        sent = first.large.call_one(recorders, "first", 6, MAX_UNREAD_BYTES // 4 - 4096)
        until(lambda: "no room in shared memory for a message to 3 processes" in stderr_text, "it says that it waits")
        assert not sent.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    sent.get(PATIENCE)
    for mesh in (first, one):
        assert mesh.by_sender.call_one().get(PATIENCE) == {"first": [*range(6)]}


def test_ctrl_c_ends_a_wait_for_memory(stopped: ActorMesh, stderr_text: StderrText) -> None:
    pid, struck, ended = pid_of(stopped), [], threading.Event()
    ours = f"{FULL} for a message to gpus 1 of"  # not a line that the worker of another test has logged

    def interrupt() -> None:
        try:
            until(lambda: ours in stderr_text or ended.is_set(), "the sender says that it waits")
            if not ended.is_set():
                struck.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)
                ended.wait(PATIENCE)
        finally:
            os.kill(pid, signal.SIGCONT)  # resume the process in every case, so that no wait is endless

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            stopped.note.broadcast("main", 1, bytes(100_000))
        assert time.monotonic() - struck[0] < sigint.MAX_DELAY_S
    finally:
        ended.set()
        thread.join()
    stopped.note.broadcast("main", 2)
    assert stopped.by_sender.call_one().get(PATIENCE) == {"main": [0, 2]}


def test_slowest_receiver_blocks_the_sender(recorders: ActorMesh, tmp_path: Path, stderr_text: StderrText) -> None:
    with gate(tmp_path) as (name, open_gate):
        hold(recorders.slice(gpus=2), name)
        sender = Sender(lambda i: recorders.note.broadcast("main", i), 3 * CREDIT_WINDOW)
        until(lambda: WAITING in stderr_text, "the sender says that it waits")
        open_gate()
        sender.join()
    assert list(recorders.by_sender.call().get(PATIENCE).values()) == [{"main": list(range(3 * CREDIT_WINDOW))}] * 3


def test_full_window_blocks_calls(recorders: ActorMesh, tmp_path: Path, stderr_text: StderrText) -> None:
    one = recorders.slice(gpus=0)
    futures: list[Any] = []
    with gate(tmp_path) as (name, open_gate):
        hold(one, name)
        sender = Sender(lambda i: futures.append(one.note.call_one("main", i)), 2 * CREDIT_WINDOW)
        until(lambda: WAITING in stderr_text, "the sender says that it waits")
        open_gate()
        sender.join()
    assert [future.get(PATIENCE) for future in futures] == [(0, i) for i in range(2 * CREDIT_WINDOW)]


def test_many_senders_share_the_window(recorders: ActorMesh, tmp_path: Path, stderr_text: StderrText) -> None:
    one = recorders.slice(gpus=0)
    with gate(tmp_path) as (name, open_gate):
        hold(one, name)
        senders = [Sender(lambda i, t=t: one.note.broadcast(t, i), CREDIT_WINDOW) for t in range(3)]
        until(lambda: stderr_text.count(WAITING) == 3, "all three wait")
        assert sum(sender.sent for sender in senders) < CREDIT_WINDOW
        open_gate()
        for sender in senders:
            sender.join()
    assert one.by_sender.call_one().get(PATIENCE) == {t: list(range(CREDIT_WINDOW)) for t in range(3)}


def test_full_window_blocks_a_sending_actor(recorders: ActorMesh, procs: ProcMesh, tmp_path: Path) -> None:
    one, source = recorders.slice(gpus=1), procs.slice(gpus=0).spawn("source", Recorder)
    with gate(tmp_path) as (name, open_gate):
        hold(one, name)
        before = source.resident.call_one().get(PATIENCE)
        beside = procs.slice(gpus=0).spawn("beside", Recorder)
        sent = source.flood.call_one(one, "actor", FLOOD // 4)
        until(lambda: beside.echo.call_one(1).get(PATIENCE) == 1, "its process goes on")
        assert not sent.done()
        assert beside.resident.call_one().get(PATIENCE) - before < 100 * MIB
        open_gate()
        assert sent.get(PATIENCE) == FLOOD // 4
    came: list[int] = []

    # the main program and the actor are different senders: this call may overtake the actor's last messages
    def all_there() -> bool:
        came.extend(one.by_sender.call_one().get(PATIENCE).get("actor", []))
        return len(came) >= FLOOD // 4

    until(all_there, "all that it has sent")
    assert came == list(range(FLOOD // 4))
    for mesh in (source, beside):
        mesh.stop().get(PATIENCE)


def test_unread_port_blocks_its_sender(recorders: ActorMesh) -> None:
    port, receiver = Channel.open()
    n = 3 * CREDIT_WINDOW
    filled = recorders.slice(gpus=0).fill.call_one(port, "actor", n)
    until(lambda: len(receiver._values) >= CREDIT_WINDOW // 2, "the window is at least half full")
    assert not filled.done()
    for i in range(n):
        assert len(receiver._values) <= CREDIT_WINDOW
        assert receiver.recv().get(PATIENCE)[1] == i
    filled.get(PATIENCE)
    receiver.close()


def test_blocked_sender_logs_nothing_without_debug(
    recorders: ActorMesh, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MONARCH_DEBUG", raising=False)
    one = recorders.slice(gpus=0)
    peer = one._core.peer(0)
    with gate(tmp_path) as (name, open_gate):
        hold(one, name)
        sender = Sender(lambda i: one.note.broadcast("main", i), 2 * CREDIT_WINDOW)
        until(lambda: peer.credit == 0 and peer.credit_waiter is not None, "the sender waits")
        open_gate()
        sender.join()
    assert "messages to" not in capfd.readouterr().err


# ---- a sender's wait ends


def test_blocked_sender_gets_the_death_of_its_receiver(faults: Faults, tmp_path: Path, stderr_text: StderrText) -> None:
    with this_host().spawn_procs({"gpus": 1}, name="doomed") as procs:
        one = procs.spawn("recorders", Recorder)
        port, receiver = Channel.open(once=True)
        with gate(tmp_path) as (name, _):
            one.hold.broadcast(port, name)
            pid = receiver.recv().get(PATIENCE)
            sender = Sender(lambda i: one.note.broadcast("main", i))
            until(lambda: WAITING in stderr_text, "the sender says that it waits")
            os.kill(pid, signal.SIGKILL)
            sender.join()
        assert isinstance(sender.error, SupervisionError)
        assert (sender.error.pid, sender.error.signal) == (pid, signal.SIGKILL)
        assert faults.next().mesh_name == "doomed"


def test_closed_port_releases_its_senders(recorders: ActorMesh) -> None:
    one = recorders.slice(gpus=0)
    for _ in range(3):
        port, receiver = Channel.open()
        filled = one.fill.call_one(port, "actor", 2 * CREDIT_WINDOW)
        until(lambda held=receiver._values: len(held) >= CREDIT_WINDOW // 2, "the window is full")  # type: ignore[misc]
        receiver.close()
        filled.get(PATIENCE)
    port, receiver = Channel.open()
    one.fill.call_one(port, "actor", 10).get(PATIENCE)
    assert [receiver.recv().get(PATIENCE)[1] for _ in range(10)] == list(range(10))
    receiver.close()


def test_collected_receiver_releases_its_senders(recorders: ActorMesh) -> None:
    one = recorders.slice(gpus=0)
    port, receiver = Channel.open()
    filled = one.fill.call_one(port, "actor", 2 * CREDIT_WINDOW)
    until(lambda held=receiver._values: len(held) >= CREDIT_WINDOW // 2, "the window is full")  # type: ignore[misc]
    del receiver
    gc.collect()
    filled.get(PATIENCE)


def test_polling_with_a_timeout_loses_no_value(recorders: ActorMesh, tmp_path: Path) -> None:
    one = recorders.slice(gpus=0)
    port, receiver = Channel.open()
    with gate(tmp_path) as (name, open_gate):
        hold(one, name)
        filled = one.fill.call_one(port, "actor", 3)
        for _ in range(10):
            with pytest.raises(TimeoutError):
                receiver.recv().get(0.001)
        open_gate()
        filled.get(PATIENCE)
    assert [receiver.recv().get(PATIENCE)[1] for _ in range(3)] == [0, 1, 2]
    receiver.close()


def test_unreferenced_receiver_delivers_an_awaited_value(recorders: ActorMesh) -> None:
    port, receiver = Channel.open()
    came = threading.Event()
    receiver.recv().add_done_callback(lambda _: came.set())
    del receiver
    gc.collect()
    recorders.slice(gpus=0).fill.call_one(port, "actor", 1).get(PATIENCE)
    assert came.wait(PATIENCE)


# ---- within one process


class LocalSender(Actor):
    """Sends to actors in its own process."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    def flood(self, other: ActorMesh, n: int) -> None:
        for i in range(n):
            other.note.broadcast(i)

    @endpoint
    def note(self, i: int) -> None:
        self.seen.append(i)

    @endpoint
    def take_seen(self) -> list[int]:
        seen, self.seen = self.seen, []
        return seen


def test_flood_between_actors_of_one_process_arrives_in_order(procs: ProcMesh) -> None:
    proc = procs.slice(gpus=0)
    source, sink = proc.spawn("source", LocalSender), proc.spawn("sink", LocalSender)
    source.flood.call_one(sink, FLOOD).get(PATIENCE)
    assert sink.take_seen.call_one().get(PATIENCE) == list(range(FLOOD))
    for mesh in (source, sink):
        mesh.stop().get(PATIENCE)


def test_flood_between_program_and_actor_of_its_process_arrives() -> None:
    mesh = this_proc().spawn("local", Sync)
    for i in range(FLOOD):
        mesh.note.broadcast(i)
    assert mesh.take_seen.call_one().get(PATIENCE) == list(range(FLOOD))
    mesh.stop().get(PATIENCE)


def test_actor_that_floods_itself_gets_an_error(procs: ProcMesh) -> None:
    mesh = procs.slice(gpus=0).spawn("me", LocalSender)
    with pytest.raises(ActorError, match=r"me .*would never continue: its messages to itself fill the queue"):
        mesh.flood.call_one(mesh, CREDIT_WINDOW + 1).get(PATIENCE)
    assert mesh.take_seen.call_one().get(PATIENCE) == list(range(CREDIT_WINDOW))
    mesh.flood.call_one(mesh, CREDIT_WINDOW // 2).get(PATIENCE)  # the actor still works
    assert mesh.take_seen.call_one().get(PATIENCE) == list(range(CREDIT_WINDOW // 2))
    mesh.stop().get(PATIENCE)


# ---- actors that call each other


class Peer(Actor):
    """Actor whose endpoints call other actors and wait for replies."""

    @concurrent_endpoint
    async def down(self, chain: list[ActorMesh], depth: int) -> int:
        """Call along the ring of actors for ``depth`` steps."""
        if depth == 0:
            return 0
        return 1 + int(await chain[depth % len(chain)].down.call_one(chain, depth - 1))

    @concurrent_endpoint
    async def ask_often(self, other: ActorMesh, n: int) -> int:
        """Make n calls concurrently."""
        return sum(await asyncio.gather(*[other.one.call_one() for _ in range(n)]))

    @concurrent_endpoint
    async def ask_in_turn(self, other: ActorMesh, n: int) -> int:
        total = 0
        for _ in range(n):
            total += await other.one.call_one()
        return total

    @concurrent_endpoint
    async def one(self) -> int:
        return 1


@pytest.mark.parametrize("places", [(0, 1), (0, 0), (0, 1, 2), (2, 1, 2, 0)], ids=str)
def test_cycle_of_async_actors_does_not_deadlock(procs: ProcMesh, places: tuple[int, ...]) -> None:
    ring = [procs.slice(gpus=place).spawn(f"peer {i}", Peer) for i, place in enumerate(places)]
    calls = [peer.down.call_one(ring, 40) for peer in ring for _ in range(5)]
    assert [call.get(PATIENCE) for call in calls] == [40] * len(calls)
    for peer in ring:
        peer.stop().get(PATIENCE)


@pytest.mark.parametrize("way", ["ask_often", "ask_in_turn"])
def test_two_async_actors_that_call_each_other_do_not_deadlock(procs: ProcMesh, way: str) -> None:
    first, second = (procs.slice(gpus=place).spawn(f"peer {place}", Peer) for place in (0, 1))
    n = CREDIT_WINDOW // 4
    calls = [getattr(one, way).call_one(other, n) for one, other in ((first, second), (second, first))]
    assert [call.get(PATIENCE) for call in calls] == [n, n]
    for peer in (first, second):
        peer.stop().get(PATIENCE)


class Asker(Actor):
    @endpoint
    def ask(self, other: ActorMesh, n: int) -> int:
        return sum(other.echo.call_one(1).get(PATIENCE) for _ in range(n))

    @endpoint
    def ask_at_once(self, other: ActorMesh, n: int) -> int:
        return sum(future.get(PATIENCE) for future in [other.echo.call_one(1) for _ in range(n)])


@pytest.mark.parametrize("way", ["ask", "ask_at_once"])
def test_two_processes_that_call_each_other_do_not_deadlock(procs: ProcMesh, recorders: ActorMesh, way: str) -> None:
    """In each process one actor calls and another one answers, all at the same time."""
    askers = procs.spawn("askers", Asker)
    n = 2 * CREDIT_WINDOW + 100
    calls = [
        getattr(askers.slice(gpus=i), way).call_one(recorders.slice(gpus=j), n) for i, j in ((0, 1), (1, 0), (2, 2))
    ]
    assert [call.get(2 * PATIENCE) for call in calls] == [n] * 3
    askers.stop().get(PATIENCE)


class Chain(Actor):
    @endpoint
    def pass_on(self, rest: list[ActorMesh], value: Any) -> Any:
        return rest[0].pass_on.call_one(rest[1:], value + 1).get(PATIENCE) if rest else value


def test_chain_of_plain_actors_does_not_deadlock(procs: ProcMesh) -> None:
    chain = [procs.slice(gpus=i % 3).spawn(f"link {i}", Chain) for i in range(12)]
    calls = [chain[0].pass_on.call_one(chain[1:], 100 * i) for i in range(20)]
    assert [call.get(PATIENCE) for call in calls] == [100 * i + 11 for i in range(20)]
    for link in chain:
        link.stop().get(PATIENCE)


class Pipeline(Actor):
    """A stage that passes each value on to the next stage without waiting."""

    @endpoint
    def through(self, rest: list[ActorMesh], port: Port[Any], value: int) -> None:
        if rest:
            rest[0].through.broadcast(rest[1:], port, value)
        else:
            port.send(value)


def test_pipeline_under_pressure_completes(procs: ProcMesh) -> None:
    stages = [procs.slice(gpus=i).spawn(f"stage {i}", Pipeline) for i in range(3)]
    port, receiver = Channel.open()
    n = 3 * CREDIT_WINDOW
    sender = Sender(lambda i: stages[0].through.broadcast(stages[1:], port, i), n)
    assert [receiver.recv().get(PATIENCE) for _ in range(n)] == list(range(n))
    sender.join()
    receiver.close()
    for stage in stages:
        stage.stop().get(PATIENCE)
