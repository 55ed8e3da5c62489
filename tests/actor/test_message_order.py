"""Messages from one sender to one receiver arrive in order and at most once, also through a multicast tree."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_backend._actor.runtime import program
from monarch_backend._transport.local import tuning
from monarch_backend._transport.local.tree_multicast import TreeMulticast
from monarch_backend.actor import (
    Accumulator,
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    PortReceiver,
    ProcMesh,
    this_proc,
)
from tests.actor.actors import AsyncRecorder, Recorder, running, send_in_every_way, until
from tests.actor.support import PATIENCE

pytestmark = pytest.mark.usefixtures("faults")

MANY = 24
DIRECT = 16  # replaces MAX_DIRECT_RECEIVERS: more receivers than this are reached through a tree
assert MANY > DIRECT > tuning.TREE_FANOUT  # so that the tree has two levels below its root


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 3}) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def many() -> Iterator[ProcMesh]:
    """Yield a mesh with enough processes for a tree."""
    with running({"x": 4, "y": MANY // 4}, bootstrap=lower_multicast_limits) as mesh:
        yield mesh


def lower_multicast_limits() -> None:
    tuning.MAX_DIRECT_RECEIVERS = DIRECT
    tuning.MOST_IN_ONE = 128 << 10  # the aggregated replies of a few ranks exceed this, so they are sent in pieces


@pytest.fixture(params=[Recorder, AsyncRecorder])
def recorders(procs: ProcMesh, request: pytest.FixtureRequest) -> Iterator[ActorMesh]:
    mesh = procs.spawn("recorders", request.param)
    yield mesh
    mesh.stop().get(PATIENCE)


@pytest.fixture
def tree(many: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActorMesh]:
    monkeypatch.setattr(tuning, "MAX_DIRECT_RECEIVERS", DIRECT)
    multicasts: list[Any] = []
    send_down = TreeMulticast.send
    monkeypatch.setattr(
        TreeMulticast,
        "send",
        lambda self, *args, **kwargs: (multicasts.append(args), send_down(self, *args, **kwargs)),
    )
    mesh = many.spawn("tree", Recorder)
    mesh.initialized.get(PATIENCE)
    yield mesh
    mesh.stop().get(PATIENCE)
    assert multicasts  # otherwise the test has not used a tree


def all_came(mesh: ActorMesh, expected: dict[Any, int]) -> None:
    """Assert that each rank has received 0 to n - 1 of each sender, in order and once."""
    for found in mesh.by_sender.call().get(PATIENCE).values():
        assert found == {sender: list(range(n)) for sender, n in expected.items()}


def together(works: list[Callable[[], Any]]) -> list[Any]:
    """Run functions at the same time, each in a thread. Return their results, or raise their first error."""
    line = threading.Barrier(len(works))
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        line.wait(PATIENCE)
        try:
            results[i] = works[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
    for error in errors:
        raise error
    return results


# ---- messages sent directly


def test_calls_of_every_kind_from_one_sender_arrive_in_order(recorders: ActorMesh) -> None:
    send_in_every_way(recorders, "main", 200)
    all_came(recorders, {"main": 200})


def test_messages_of_each_thread_arrive_in_order(recorders: ActorMesh) -> None:
    together([lambda t=t: send_in_every_way(recorders, t, 80) for t in range(5)])  # type: ignore[misc]
    all_came(recorders, dict.fromkeys(range(5), 80))


def test_messages_of_actors_arrive_in_order(recorders: ActorMesh, procs: ProcMesh) -> None:
    senders = procs.spawn("senders", Recorder)
    flat = senders.flatten("r")
    floods = [flat.slice(r=r).flood.call_one(recorders, f"rank {r}", 80) for r in range(3)]
    send_in_every_way(recorders, "main", 80)
    assert [flood.get(PATIENCE) for flood in floods] == [80] * 3
    all_came(recorders, {"main": 80, **{f"rank {r}": 80 for r in range(3)}})
    senders.stop().get(PATIENCE)


@pytest.mark.parametrize("cls", [Recorder, AsyncRecorder])
def test_messages_within_one_process_arrive_in_order(cls: type[Actor]) -> None:
    mesh = this_proc().spawn("local", cls)
    together([lambda t=t: send_in_every_way(mesh, t, 80) for t in range(3)])  # type: ignore[misc]
    all_came(mesh, dict.fromkeys(range(3), 80))
    mesh.stop().get(PATIENCE)


def test_messages_beyond_the_window_arrive_in_order(recorders: ActorMesh) -> None:
    n = 2 * tuning.CREDIT_WINDOW + 100
    for i in range(n):
        recorders.note.broadcast("main", i)
    all_came(recorders, {"main": n})


def test_messages_to_overlapping_slices_arrive_in_order(recorders: ActorMesh) -> None:
    counts = [0, 0, 0]
    for turn in range(300):
        ranks = [(0, 1, 2), (0, 1), (1, 2), (2,), (0,)][turn % 5]
        for rank in ranks:
            counts[rank] += 1
        part = recorders.slice(gpus=slice(ranks[0], ranks[-1] + 1))
        (part.note.broadcast if turn % 2 else part.note.call)("main", turn)
    for rank, found in enumerate(recorders.by_sender.call().get(PATIENCE).values()):
        assert len(found["main"]) == counts[rank]
        assert found["main"] == sorted(set(found["main"]))


def read(receiver: PortReceiver[Any], n: int) -> dict[Any, list[int]]:
    """Receive n values. Return the numbers of each sender."""
    found: dict[Any, list[int]] = {}
    for _ in range(n):
        sender, i, *_ = receiver.recv().get(PATIENCE)
        found.setdefault(sender, []).append(i)
    return found


def test_values_of_a_port_arrive_in_order(procs: ProcMesh) -> None:
    senders = procs.spawn("senders", Recorder)
    port, receiver = Channel.open()
    n = tuning.CREDIT_WINDOW + 200
    for r in range(3):
        senders.slice(gpus=r).fill.broadcast(port, r, n)
    assert read(receiver, 3 * n) == {r: list(range(n)) for r in range(3)}
    receiver.close()
    senders.stop().get(PATIENCE)


def test_port_values_of_many_threads_arrive_in_order() -> None:
    port, receiver = Channel.open()

    def fill(t: int) -> None:
        for i in range(150):
            port.send((t, i) if i % 5 else (t, i, b"x" * 40_000))

    *_, found = together([*[lambda t=t: fill(t) for t in range(4)], lambda: read(receiver, 600)])  # type: ignore[misc]
    assert found == {t: list(range(150)) for t in range(4)}
    receiver.close()


def test_receivers_get_values_in_order_of_their_requests() -> None:
    port, receiver = Channel.open()
    waiting = [receiver.recv() for _ in range(20)]
    for i in range(30):
        port.send(i)
    waiting += [receiver.recv() for _ in range(10)]
    assert [future.get(PATIENCE) for future in waiting] == list(range(30))
    receiver.close()


def test_value_during_the_start_of_a_wait_is_received() -> None:
    """`send` finds no waiting receiver; a receiver that starts to wait before the value is queued must still get it."""
    port, receiver = Channel.open()
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(receiver.recv().get(PATIENCE)))

    class Values(deque[Any]):
        def append(self, item: Any) -> None:
            asking.start()
            asking.join(0.1)
            super().append(item)

    receiver._values = Values()
    port.send("there")
    asking.join(2 * PATIENCE)
    assert found == ["there"]
    receiver.close()


@pytest.mark.parametrize("moment", ["before", "after", "no room", "an error"])
@pytest.mark.parametrize("to", ["one", "all"])
def test_signal_handler_can_send_while_its_thread_sends(
    to: str, moment: str, recorders: ActorMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler may interrupt a send at any point.

    Its message has its own sequence number, and no number is skipped.
    """
    one, links = recorders.slice(gpus=0), program().router.links
    handled: list[int] = []
    due = False

    def interrupted(send: Callable[..., bool]) -> Callable[..., bool]:
        def sends(*args: Any) -> bool:
            nonlocal due
            done = send(*args) if moment == "after" else False
            if due:
                due = False
                one.note.broadcast("handler", len(handled))
                handled.append(1)
                if moment == "an error":
                    raise ValueError("as of a buffer that is none")
                if moment == "no room":
                    return False
            return done if moment == "after" else send(*args)

        return sends

    one.note.call_one("met", 0).get(PATIENCE)
    monkeypatch.setattr(links, "send", interrupted(links.send))
    monkeypatch.setattr(links, "multicast", interrupted(links.multicast))
    for i in range(10):
        due = True
        try:
            (one if to == "one" else recorders).note.broadcast("main", i)
        except ValueError:
            assert moment == "an error"
    monkeypatch.undo()
    found = one.by_sender.call_one().get(PATIENCE)
    assert found == {"met": [0], "handler": list(range(10))} | (
        {} if moment == "an error" else {"main": list(range(10))}
    )


def test_calls_of_one_asyncio_task_arrive_in_order(recorders: ActorMesh) -> None:
    async def send(task: int) -> None:
        for i in range(60):
            if i % 3 == 0:
                await recorders.note.call(task, i)
            else:
                recorders.note.broadcast(task, i)

    async def main() -> None:
        await asyncio.gather(*[send(task) for task in range(6)])

    asyncio.run(main())
    all_came(recorders, dict.fromkeys(range(6), 60))


# ---- multicast down a tree


def test_multicast_of_one_sender_arrives_in_order(tree: ActorMesh) -> None:
    futures = send_in_every_way(tree, "main", 64)
    all_came(tree, {"main": 64})
    for future in futures:
        error = future.exception(PATIENCE)
        assert error is None or isinstance(error, ActorError)


def test_multicasts_of_many_threads_arrive_in_order(tree: ActorMesh) -> None:
    together([lambda t=t: send_in_every_way(tree, t, 32) for t in range(4)])  # type: ignore[misc]
    all_came(tree, dict.fromkeys(range(4), 32))


def test_multicasts_of_many_roots_arrive_in_order(tree: ActorMesh, many: ProcMesh) -> None:
    # these roots are also receivers, so they send to all processes directly
    inside = many.slice(x=1).spawn("inside", Recorder)
    with running({"gpus": 2}, bootstrap=lower_multicast_limits) as elsewhere:
        outside = elsewhere.spawn("outside", Recorder)
        roots = [inside.slice(y=0), inside.slice(y=5), outside.slice(gpus=0), outside.slice(gpus=1)]
        floods = [root.flood.call_one(tree, name, 16) for name, root in enumerate(roots)]
        send_in_every_way(tree, "main", 32)
        assert [flood.get(PATIENCE) for flood in floods] == [16] * 4
        all_came(tree, {"main": 32, **dict.fromkeys(range(4), 16)})
    inside.stop().get(PATIENCE)


def test_multicast_replies_are_by_rank(tree: ActorMesh) -> None:
    calls = [tree.note.call("main", i) for i in range(50)]
    for i, call in enumerate(calls):
        assert list(call.get(PATIENCE).values()) == [(rank, i) for rank in range(MANY)]
    part = tree.slice(x=slice(1, 4), y=slice(0, 6))  # 18 ranks: also a tree
    assert len(part) == 18
    assert list(part.note.call("main", 50).get(PATIENCE).values()) == [(rank, 50) for rank in range(18)]
    assert sorted(future.get(PATIENCE) for future in tree.note.stream("main", 51)) == [(r, 51) for r in range(MANY)]
    assert Accumulator(tree.note, [], lambda done, reply: [*done, reply[0]]).accumulate("main", 52).get(
        PATIENCE
    ) == list(range(MANY))


@pytest.mark.parametrize("size", [0, 100, 5_000, 20_000, 100_000, 200_000])
def test_multicast_combines_replies_of_every_size(tree: ActorMesh, size: int) -> None:
    for fill in range(3):
        replies = tree.block.call(size, fill).get(PATIENCE)
        assert len(replies) == MANY
        assert set(replies.values()) == {bytes([fill]) * size}
    nothing_is_kept()


def nothing_is_kept() -> None:
    router = program().router
    until(lambda: not router.tree.multicasts and not router.tree.combiners, "nothing of the multicasts is remembered")


def test_multicast_with_replies_of_other_actors(tree: ActorMesh) -> None:
    replies = tree.through.call(tree.slice(x=3, y=1)).get(PATIENCE)
    assert list(replies.values()) == list(range(MANY))
    nothing_is_kept()


def test_multicast_with_errors_returns_them(tree: ActorMesh) -> None:
    for i in range(5):
        with pytest.raises(ActorError, match=f"ValueError: main {i}"):
            tree.fail.call("main", i).get(PATIENCE)
    assert all(isinstance(future.exception(PATIENCE), ActorError) for future in tree.fail.stream("main", 5))
    all_came(tree, {"main": 6})


def test_multicast_with_explicit_ports(tree: ActorMesh) -> None:
    for i in range(5):
        assert list(tree.later.call("main", i).get(PATIENCE).values()) == [(rank, i) for rank in range(MANY)]


def test_multicast_can_be_cancelled(tree: ActorMesh) -> None:
    calls = [tree.note.call("main", i) for i in range(100)]
    cancelled = [call.cancel() for call in calls]
    assert list(tree.note.call("main", 100).get(PATIENCE).values()) == [(rank, 100) for rank in range(MANY)]
    for i, call in enumerate(calls):
        assert cancelled[i] or list(call.get(0).values()) == [(rank, i) for rank in range(MANY)]
    for found in tree.by_sender.call().get(PATIENCE).values():
        assert found["main"] == sorted(set(found["main"]))


def test_multicasts_beyond_the_window_arrive_in_order(tree: ActorMesh) -> None:
    n = tuning.CREDIT_WINDOW + 200
    for i in range(n):
        tree.note.broadcast("main", i)
    all_came(tree, {"main": n})
