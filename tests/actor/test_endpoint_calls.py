"""Every way to call an endpoint, on a mesh, a slice and one rank, for every kind of endpoint; the context of calls."""

from __future__ import annotations

import os
import pickle
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_backend.actor import (
    Accumulator,
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    Endpoint,
    Future,
    Point,
    Port,
    ProcMesh,
    SerializationError,
    Stream,
    SupervisionError,
    UnknownEndpointError,
    ValueMesh,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    get_or_spawn_controller,
    send,
    this_host,
    this_proc,
)
from tests.actor.actors import Async, Concurrent, Gate, Sync, pid_of, running, until
from tests.actor.support import PATIENCE, Faults

pytestmark = pytest.mark.usefixtures("faults")

KINDS: dict[str, tuple[type[Actor], str]] = {
    "plain": (Sync, "square"),
    "generator": (Sync, "count"),
    "async": (Async, "square"),
    "async generator": (Async, "count"),
    "concurrent": (Concurrent, "square"),
    "concurrent generator": (Concurrent, "count"),
}
PARTS: dict[str, Callable[[ActorMesh], ActorMesh]] = {
    "mesh": lambda mesh: mesh,
    "slice": lambda mesh: mesh.slice(x=1),
    "rank": lambda mesh: mesh.slice(x=1, y=0),
}
SIZES = {"mesh": 4, "slice": 2, "rank": 1}


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"x": 2, "y": 2}) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def actors(procs: ProcMesh) -> dict[type[Actor], ActorMesh]:
    return {cls: procs.spawn(cls.__name__, cls) for cls in (Sync, Async, Concurrent)}


class Case:
    """One kind of endpoint on one part of a mesh, with its expected replies."""

    def __init__(self, actors: dict[type[Actor], ActorMesh], kind: str, part: str) -> None:
        cls, method = KINDS[kind]
        self.mesh = PARTS[part](actors[cls])
        self.endpoint: Endpoint[Any] = getattr(self.mesh, method)
        self.streams = method == "count"
        self.size = SIZES[part]

    def of_rank(self, rank: int) -> Any:
        """Return the expected reply to (3, plus=1): a value, or the list of yielded values."""
        return [(rank, i + 1) for i in range(3)] if self.streams else (rank, 10)

    def of_all(self) -> list[Any]:
        return [self.of_rank(rank) for rank in range(self.size)]

    def one(self, reply: Any) -> Any:
        """Return the result of a verb that calls one rank."""
        assert isinstance(reply, Stream if self.streams else Future)
        return list(reply) if self.streams else reply.get(PATIENCE)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def case(actors: dict[type[Actor], ActorMesh], kind: str, part: str) -> Case:
    return Case(actors, kind, part)


# ---- each verb with each kind of endpoint and each part of a mesh


def test_call_returns_values_by_rank(case: Case) -> None:
    replies = case.endpoint.call(3, plus=1).get(PATIENCE)
    assert isinstance(replies, ValueMesh)
    assert replies.extent == case.mesh.extent
    assert list(replies.values()) == case.of_all()
    assert list(replies) == list(zip(case.mesh.extent, case.of_all(), strict=True))


def test_call_one_returns_the_value_of_one_rank(case: Case) -> None:
    if case.size == 1:
        assert case.one(case.endpoint.call_one(3, plus=1)) == case.of_rank(0)
    else:
        with pytest.raises(ValueError, match=rf"call_one is for a mesh of one rank.*has {case.size}: slice it"):
            case.endpoint.call_one(3, plus=1)


def test_choose_calls_one_rank(case: Case) -> None:
    chosen = [case.one(case.endpoint.choose(3, plus=1)) for _ in range(2 * case.size)]
    assert sorted(chosen) == sorted(2 * case.of_all())  # consecutive calls go to each rank in turn


def test_stream_yields_results_of_all_ranks(case: Case) -> None:
    replies = [future.get(PATIENCE) for future in case.endpoint.stream(3, plus=1)]
    expected = [pair for rank in case.of_all() for pair in rank] if case.streams else case.of_all()
    assert sorted(replies) == sorted(expected)
    for rank in range(case.size):  # the values of one rank arrive in order
        assert [r for r in replies if r[0] == rank] == [e for e in expected if e[0] == rank]


def test_broadcast_reaches_all_ranks(case: Case) -> None:
    case.mesh.take_seen.call().get(PATIENCE)
    assert case.endpoint.broadcast(3, plus=1) is None  # type: ignore[func-returns-value]
    until_seen(case.mesh, [3])


def until_seen(mesh: ActorMesh, expected: list[Any]) -> None:
    """Wait until each rank has handled these broadcasts. Concurrent bodies may end after a later call."""
    seen: list[list[Any]] = [[] for _ in range(len(mesh))]

    def all_there() -> bool:
        for rank, more in enumerate(mesh.take_seen.call().get(PATIENCE).values()):
            seen[rank] += more
        return all(len(one) >= len(expected) for one in seen)

    until(all_there, "every rank has seen the broadcasts")
    assert seen == [expected] * len(mesh)


@pytest.mark.parametrize("raw", ["send", "Endpoint.send"])
@pytest.mark.parametrize("selection", ["all", "choose"])
def test_send_to_a_port(case: Case, selection: str, raw: str) -> None:
    port, receiver = Channel.open_ranked()
    for _ in range(2):
        if raw == "send":
            send(case.endpoint, (3,), {"plus": 1}, port=port, selection=selection)
        else:
            case.endpoint.send((3,), {"plus": 1}, port=port, selection=selection)
    each = 3 if case.streams else 1
    count = 2 * each * (case.size if selection == "all" else 1)
    replies = [receiver.recv().get(PATIENCE) for _ in range(count)]
    assert all(rank == value[0] for rank, value in replies)
    expected = [pair for rank in case.of_all() for pair in rank] if case.streams else case.of_all()
    if selection == "all":
        assert sorted(value for _, value in replies) == sorted(2 * expected)
    else:  # two ranks, or the same rank twice if the part has only one
        chosen = {rank for rank, _ in replies}
        assert len(chosen) == min(2, case.size)
        times = 2 // len(chosen)
        assert sorted(value for _, value in replies) == sorted(times * [v for v in expected if v[0] in chosen])
    receiver.close()


def test_send_without_a_port(case: Case) -> None:
    case.mesh.take_seen.call().get(PATIENCE)
    send(case.endpoint, (3,))
    until_seen(case.mesh, [3])


def test_accumulate_folds_results(case: Case) -> None:
    steps = Accumulator(case.endpoint, [], lambda done, reply: [*done, reply])
    assert steps.accumulate(3, plus=1).get(PATIENCE) == case.of_all()


@pytest.mark.parametrize("verb", ["call", "choose", "stream", "broadcast", "send", "accumulate"])
def test_arguments_are_checked_before_anything_is_sent(case: Case, verb: str) -> None:
    case.mesh.take_seen.call().get(PATIENCE)
    verbs: dict[str, Callable[..., Any]] = {
        "send": lambda *args, **kwargs: send(case.endpoint, args, kwargs),
        "accumulate": Accumulator(case.endpoint, 0, lambda a, _: a).accumulate,
    }
    do = verbs.get(verb) or getattr(case.endpoint, verb)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'n'"):
        do()
    with pytest.raises(TypeError, match="unexpected keyword argument 'minus'"):
        do(3, minus=1)
    with pytest.raises(SerializationError, match=r"args\[0\]|\[0\]\[0\]"):
        do(threading.Lock())
    assert list(case.mesh.take_seen.call().get(PATIENCE).values()) == [[]] * case.size


# ---- the context of a message


@pytest.mark.parametrize("cls", [Sync, Async, Concurrent])
def test_rank_and_size_are_those_of_the_slice(actors: dict[type[Actor], ActorMesh], cls: type[Actor]) -> None:
    mesh = actors[cls]
    whole = mesh.place.call().get(PATIENCE)
    assert whole.item(x=1, y=0) == (2, {"x": 1, "y": 0}, {"x": 2, "y": 2})
    row = mesh.slice(x=1).place.call().get(PATIENCE)
    assert list(row.values()) == [(0, {"y": 0}, {"y": 2}), (1, {"y": 1}, {"y": 2})]
    assert mesh.slice(x=1, y=1).place.call_one().get(PATIENCE) == (0, {}, {})
    flat = mesh.flatten("all").place.call().get(PATIENCE)
    assert flat.item(all=3) == (3, {"all": 3}, {"all": 4})
    split = mesh.flatten("all").split(all=("p", "q"), q=4).place.call().get(PATIENCE)
    assert split.item(p=0, q=2) == (2, {"p": 0, "q": 2}, {"p": 1, "q": 4})
    renamed = mesh.rename(x="row").slice(y=0).place.call().get(PATIENCE)
    assert renamed.item(row=1) == (1, {"row": 1}, {"row": 2})
    rest = mesh.without([0, 3]).place.call().get(PATIENCE)
    assert [reply[0] for reply in rest.values()] == [0, 1]


class ContextReporter(Actor):
    def __init__(self, label: str) -> None:
        instance = context().actor_instance
        self.at_birth = (instance.name, instance.rank.rank, dict(instance.rank), current_rank().rank)
        self.label = label

    @endpoint
    def of_birth(self) -> Any:
        return self.at_birth

    @endpoint
    def tell(self) -> dict[str, Any]:
        here = context()
        instance = here.actor_instance
        return {
            "name": instance.name,
            "current name": current_actor_name(),
            "rank": instance.rank.rank,
            "whole": instance.rank.extent,
            "message rank": here.message_rank,
            "current": current_rank(),
            "creator": instance.creator,
            "procs": instance.proc_mesh,
            "proc": len(instance.proc),
            "cancelled": instance.cancelled,
            "logger": self.logger.name,
        }

    @endpoint
    def spawn_beside(self) -> dict[str, Any]:
        found: dict[str, Any] = this_proc().spawn("child", ContextReporter, "child").tell.call_one().get(PATIENCE)
        return found


def test_context_of_an_actor(procs: ProcMesh) -> None:
    mesh = procs.spawn("reporter", ContextReporter, "a")
    told = mesh.slice(x=1).slice(y=1).tell.call_one().get(PATIENCE)
    assert (told["name"], told["current name"], told["creator"]) == ("reporter", "reporter", "main")
    assert told["rank"] == 3
    assert told["whole"] == mesh.extent
    assert told["message rank"] == told["current"] == Point(0, mesh.slice(x=1, y=1).extent)
    assert told["proc"] == 1
    assert not told["cancelled"]
    assert told["logger"].endswith(".reporter")
    assert isinstance(told["procs"], ProcMesh)
    assert told["procs"].extent == procs.extent
    assert told["procs"].name == procs.name
    assert mesh.slice(x=0, y=1).of_birth.call_one().get(PATIENCE) == ("reporter", 1, {"x": 0, "y": 1}, 1)


def test_context_of_an_actor_that_an_actor_has_spawned(procs: ProcMesh) -> None:
    told = procs.spawn("parent", ContextReporter, "a").slice(x=0, y=0).spawn_beside.call_one().get(PATIENCE)
    assert (told["name"], told["creator"], told["rank"]) == ("child", "parent", 0)


def test_context_of_the_main_program() -> None:
    instance = context().actor_instance
    assert (instance.name, current_actor_name(), instance.creator) == ("main", "main", "")
    assert (instance.rank.rank, current_rank().rank, current_size(), instance.proc_mesh) == (0, 0, {}, None)
    assert len(instance.proc) == 1
    with pytest.raises(RuntimeError, match="the main program is not an actor and cannot be stopped so"):
        instance.stop()


# ---- results


def test_value_mesh_of_results(actors: dict[type[Actor], ActorMesh]) -> None:
    squares = actors[Sync].square.call(3).get(PATIENCE)
    assert squares.item(x=1, y=0) == (2, 9)
    assert list(squares.slice(y=1).values()) == [(1, 9), (3, 9)]
    assert len(squares) == 4
    assert pickle.loads(pickle.dumps(squares)) == squares
    with pytest.raises(KeyError, match="y"):
        squares.item(x=1)
    with pytest.raises(KeyError, match="z"):
        squares.item(x=1, y=1, z=1)
    with pytest.raises(IndexError, match="2"):
        squares.item(x=2, y=0)


def test_value_mesh_as_an_argument(actors: dict[type[Actor], ActorMesh]) -> None:
    mesh = actors[Sync]
    squares = mesh.square.call(3).get(PATIENCE)
    assert mesh.slice(x=0, y=0).echo.call_one(squares).get(PATIENCE) == squares


def test_first_error_of_a_call_is_raised_and_the_actors_live_on(actors: dict[type[Actor], ActorMesh]) -> None:
    mesh = actors[Sync]
    with pytest.raises(ActorError, match=r"(?s)Sync\.fail raised on .*pid.*ValueError: no.*raise ValueError") as caught:
        mesh.fail.call("no").get(PATIENCE)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.args == ("no",)
    assert (caught.value.actor, caught.value.endpoint, caught.value.delivery) == ("Sync", "fail", "ran")
    for future in mesh.fail.stream("each"):
        assert isinstance(future.exception(PATIENCE), ActorError)
    with pytest.raises(ActorError):
        mesh.fail.choose("one").get(PATIENCE)
    with pytest.raises(ActorError):
        Accumulator(mesh.fail, 0, lambda a, _: a).accumulate("all").get(PATIENCE)
    assert len(mesh.pid.call().get(PATIENCE)) == 4


def test_error_goes_to_the_port_of_a_send(actors: dict[type[Actor], ActorMesh]) -> None:
    port, receiver = Channel.open()
    send(actors[Sync].fail, ("to the port",), port=port)
    for _ in range(4):
        with pytest.raises(ActorError, match="to the port") as caught:
            receiver.recv().get(PATIENCE)
        assert isinstance(caught.value.__cause__, ValueError)
    receiver.close()


def test_error_in_the_accumulate_function_is_the_futures_error(actors: dict[type[Actor], ActorMesh]) -> None:
    failing = Accumulator(actors[Sync].square, 0, lambda a, reply: a / 0).accumulate(2)
    with pytest.raises(ZeroDivisionError):
        failing.get(PATIENCE)


def test_selection_is_all_or_choose(actors: dict[type[Actor], ActorMesh]) -> None:
    with pytest.raises(ValueError, match=r"selection='some': it must be 'all' or 'choose'"):
        send(actors[Sync].square, (1,), selection="some")


# ---- choose balances, an accumulator folds in order


@pytest.fixture
def gate(procs: ProcMesh) -> Iterator[ActorMesh]:
    mesh = procs.spawn("gate", Gate)
    yield mesh
    mesh.stop().get(PATIENCE)


def all_have_come(gate: ActorMesh, counts: list[int]) -> None:
    until(lambda: [came for came, _ in gate.counts.call().get(PATIENCE).values()] == counts, f"{counts} have come")


def test_choose_takes_the_least_loaded_rank(gate: ActorMesh) -> None:
    waiting = [gate.wait.choose() for _ in range(8)]
    all_have_come(gate, [2, 2, 2, 2])
    gate.slice(x=1, y=1).let_pass.call_one().get(PATIENCE)
    until(lambda: sum(future.done() for future in waiting) == 2, "two were let pass")
    # rank 3 has no pending call now, and the other ranks have two each
    waiting += [gate.wait.choose() for _ in range(2)]
    all_have_come(gate, [2, 2, 2, 4])
    gate.let_pass.call().get(PATIENCE)
    assert sorted(future.get(PATIENCE) for future in waiting) == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]


def test_choose_knows_of_calls_that_failed_or_were_cancelled(gate: ActorMesh) -> None:
    waiting = [gate.wait.choose() for _ in range(4)]
    all_have_come(gate, [1, 1, 1, 1])
    assert all(future.cancel() for future in waiting)
    waiting = [gate.wait.choose() for _ in range(4)]
    all_have_come(gate, [2, 2, 2, 2])
    gate.let_pass.call().get(PATIENCE)
    for future in waiting:
        future.get(PATIENCE)


def test_choose_within_a_slice_stays_in_it(gate: ActorMesh) -> None:
    waiting = [gate.slice(y=1).wait.choose() for _ in range(4)]
    all_have_come(gate, [0, 2, 0, 2])
    gate.let_pass.call().get(PATIENCE)
    for future in waiting:
        future.get(PATIENCE)


class Later(Actor):
    """Keeps its response ports until it is told to use them."""

    def __init__(self) -> None:
        self.ports: list[Port[Any]] = []

    @endpoint(explicit_response_port=True)
    def ask(self, port: Port[Any], *values: Any) -> None:
        self.ports.append(port)

    @endpoint(explicit_response_port=True)
    def ask_in_a_thread(self, port: Port[Any], value: Any, *, twice: bool = False) -> None:
        def answer() -> None:
            port.send(value)
            if twice:
                port.send("again")

        threading.Thread(target=answer).start()

    @endpoint(explicit_response_port=True)
    def refuse(self, port: Port[Any], error: Exception) -> None:
        port.exception(error)

    @endpoint(explicit_response_port=True)
    def give_away(self, port: Port[Any], to: ActorMesh, how: str, twice: bool = False) -> None:
        """Let another actor answer. With ``twice`` that actor passes the port on to a third one."""
        if twice:
            to.pass_on.broadcast([port], to.slice(x=1), how)
        elif how == "port=":
            send(to.sent, (), {}, port=port)
        else:
            to.use.broadcast(port, how)

    @endpoint
    def sent(self) -> tuple[int, bytes]:
        return os.getpid(), b"x" * 100_000

    @endpoint(explicit_response_port=True)
    def forget(self, port: Port[Any]) -> None:
        pass

    @endpoint
    def fail(self) -> None:
        raise ValueError("the end of this actor")

    @endpoint
    def pass_on(self, ports: list[Port[Any]], to: ActorMesh, how: str) -> None:
        to.use.broadcast(*ports, how)

    @endpoint
    def use(self, port: Port[Any], how: str) -> None:
        if how == "keep":
            self.ports.append(port)
        elif how == "value":
            port.send((os.getpid(), b"x" * 100_000))
        else:
            port.exception(KeyError("no such thing"))

    @endpoint
    def answer(self, value: Any) -> None:
        for port in self.ports:
            port.send(value)

    @endpoint
    def asked(self) -> int:
        return len(self.ports)


class AsyncLater(Actor):
    @endpoint(explicit_response_port=True)
    async def ask_in_a_thread(self, port: Port[Any], value: Any, *, twice: bool = False) -> None:
        port.send(value)
        if twice:
            port.send("again")

    @concurrent_endpoint(explicit_response_port=True)
    async def ask(self, port: Port[Any], value: Any) -> None:
        port.send(value)


@pytest.fixture
def later(procs: ProcMesh) -> Iterator[ActorMesh]:
    mesh = procs.spawn("later", Later)
    yield mesh
    mesh.stop().get(PATIENCE)


def test_accumulator_folds_by_rank_also_if_replies_come_otherwise(later: ActorMesh) -> None:
    total = Accumulator(later.ask, "0", lambda a, b: f"({a}+{b})").accumulate()
    for rank in (2, 0, 3, 1):
        assert not total.done()
        later.flatten("r").slice(r=rank).answer.call_one(rank + 1).get(PATIENCE)
    assert total.get(PATIENCE) == "((((0+1)+2)+3)+4)"


def test_stream_is_in_the_order_of_completion(later: ActorMesh) -> None:
    replies = later.ask.stream()
    for rank in (2, 0, 3, 1):
        later.flatten("r").slice(r=rank).answer.call_one(rank).get(PATIENCE)
        assert next(replies).get(PATIENCE) == rank
    assert list(replies) == []


# ---- explicit response ports


def test_explicit_port_can_reply_later(later: ActorMesh) -> None:
    future = later.ask.call(1, 2)
    assert list(later.asked.call().get(PATIENCE).values()) == [1] * 4  # the endpoint has returned without an answer
    assert not future.done()
    later.answer.call("at last").get(PATIENCE)
    assert list(future.get(PATIENCE).values()) == ["at last"] * 4


@pytest.mark.parametrize("cls", [Later, AsyncLater])
@pytest.mark.parametrize("twice", [False, True])
def test_explicit_port_with_every_verb(procs: ProcMesh, cls: type[Actor], twice: bool) -> None:
    mesh = procs.spawn("later", cls)
    one = mesh.slice(x=0, y=1)
    for _ in range(3):  # a second reply to one call must not be taken for the reply to the next call
        assert one.ask_in_a_thread.call_one("one", twice=twice).get(PATIENCE) == "one"
        assert list(mesh.ask_in_a_thread.call("all", twice=twice).get(PATIENCE).values()) == ["all"] * 4
        assert mesh.ask_in_a_thread.choose("any", twice=twice).get(PATIENCE) == "any"
        assert [f.get(PATIENCE) for f in mesh.ask_in_a_thread.stream("each", twice=twice)] == ["each"] * 4
    port, receiver = Channel.open()
    send(mesh.ask_in_a_thread, ("sent",), {"twice": twice}, port=port)
    replies = [receiver.recv().get(PATIENCE) for _ in range(8 if twice else 4)]
    assert sorted(replies) == sorted(["sent"] * 4 + ["again"] * (4 if twice else 0))
    mesh.ask_in_a_thread.broadcast("nobody listens", twice=twice)
    assert one.ask_in_a_thread.call_one("still there").get(PATIENCE) == "still there"
    receiver.close()
    mesh.stop().get(PATIENCE)


def test_explicit_port_of_a_concurrent_endpoint(procs: ProcMesh) -> None:
    mesh = procs.spawn("later", AsyncLater)
    assert list(mesh.ask.call(5).get(PATIENCE).values()) == [5] * 4
    mesh.stop().get(PATIENCE)


def test_explicit_port_can_reply_with_an_exception(later: ActorMesh) -> None:
    with pytest.raises(ActorError, match="not today") as caught:
        later.slice(x=0, y=0).refuse.call_one(KeyError("not today")).get(PATIENCE)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(ActorError, match="not today"):
        later.refuse.call(KeyError("not today")).get(PATIENCE)


def test_other_actors_can_reply_through_an_explicit_port(later: ActorMesh) -> None:
    one, other = later.slice(x=0, y=0), later.slice(x=1, y=1)
    answer = (pid_of(other), b"x" * 100_000)
    assert one.give_away.call_one(other, "value").get(PATIENCE) == answer
    # passed on by a second actor
    assert one.give_away.call_one(later.slice(y=1), "value", twice=True).get(PATIENCE) == answer
    assert list(later.give_away.call(other, "value").get(PATIENCE).values()) == [answer] * 4
    assert [future.get(PATIENCE) for future in later.give_away.stream(other, "value")] == [answer] * 4
    port, receiver = Channel.open()
    send(later.give_away, (other, "value"), {}, port=port)
    assert [receiver.recv().get(PATIENCE) for _ in range(4)] == [answer] * 4
    later.give_away.broadcast(other, "value")  # a broadcast: the answer is dropped
    assert one.give_away.call_one(other, "port=").get(PATIENCE) == answer
    assert list(later.give_away.call(other, "port=").get(PATIENCE).values()) == [answer] * 4
    for call in (one.give_away.call_one(other, "error"), later.give_away.call(other, "error")):
        with pytest.raises(ActorError, match="no such thing") as caught:
            call.get(PATIENCE)
        assert isinstance(caught.value.__cause__, KeyError)


def test_dropped_explicit_port_is_an_error_reply(later: ActorMesh) -> None:
    for call in (later.slice(x=0, y=1).forget.call_one(), later.forget.call(), *later.forget.stream()):
        with pytest.raises(ActorError, match="has dropped its port without a reply"):
            call.get(PATIENCE)
    later.forget.broadcast()


def test_death_of_an_actor_fails_callers_of_its_explicit_ports(procs: ProcMesh, faults: Faults) -> None:
    first, second = (procs.slice(x=0, y=0).spawn(name, Later) for name in ("first", "second"))
    held, given = first.ask.call_one(1), first.give_away.call_one(second, "keep")
    first.fail.broadcast()
    with pytest.raises(SupervisionError, match="the end of this actor"):
        held.get(PATIENCE)
    faults.next()
    second.answer.call_one("from the second").get(PATIENCE)
    assert given.get(PATIENCE) == "from the second"
    held = second.ask.call_one(1)
    assert second.asked.call_one().get(PATIENCE) == 2
    second.stop().get(PATIENCE)
    assert isinstance(held.exception(PATIENCE), (ActorError, SupervisionError))
    first.stop().get(PATIENCE)


def test_arguments_are_checked_without_the_port(later: ActorMesh) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'value'"):
        later.ask_in_a_thread.call()


# ---- methods that are not endpoints


class Mixed(Actor):
    """Actor whose endpoints call each other and plain methods."""

    def __init__(self) -> None:
        self.box = [1, 2]

    def plain(self, a: int, b: int = 1) -> int:
        return a + b

    def several(self, n: int) -> Iterator[int]:
        yield from range(n)

    def by_port(self, port: Port[Any], value: Any) -> None:
        port.send(value)

    @endpoint
    def same(self, value: Any) -> Any:
        return value

    @endpoint
    def yields(self, n: int) -> Iterator[int]:
        yield from range(n)

    @endpoint
    def calls_itself_plainly(self) -> dict[str, Any]:
        return {
            "no copy": self.same(self.box) is self.box,
            "plain": self.plain(1, b=2),
            "generator": list(self.yields(3)),
            "is a method": callable(self.same) and self.same.__name__ == "same",
        }


class AsyncMixed(Actor):
    @endpoint
    async def same(self, value: Any) -> Any:
        return value

    async def plain(self, a: int, b: int = 1) -> int:
        return a + b

    def quick(self, a: int) -> int:
        return -a

    @endpoint
    async def calls_itself_plainly(self) -> bool:
        box = [1]
        return await self.same(box) is box


@pytest.fixture(scope="module")
def mixed(procs: ProcMesh) -> ActorMesh:
    mesh: ActorMesh = procs.spawn("mixed", Mixed)
    return mesh


def test_inside_the_actor_an_endpoint_is_a_plain_method(procs: ProcMesh, mixed: ActorMesh) -> None:
    found = mixed.slice(x=0, y=0).calls_itself_plainly.call_one().get(PATIENCE)
    assert found == {"no copy": True, "plain": 3, "generator": [0, 1, 2], "is a method": True}
    assert procs.slice(x=0, y=0).spawn("am", AsyncMixed).calls_itself_plainly.call_one().get(PATIENCE)


def test_as_endpoint(mixed: ActorMesh) -> None:
    plain = as_endpoint(mixed.plain)
    assert list(plain.call(3, b=4).get(PATIENCE).values()) == [7] * 4
    assert plain.choose(1).get(PATIENCE) == 2
    assert as_endpoint(mixed.slice(x=0, y=0).plain).call_one(1).get(PATIENCE) == 2
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        plain.call()
    assert as_endpoint(mixed.same) is mixed.same


def test_as_endpoint_of_a_generator(mixed: ActorMesh) -> None:
    several = as_endpoint(mixed.slice(x=0, y=0).several)
    assert list(several.call_one(200)) == list(range(200))
    assert list(as_endpoint(mixed.several).call(2).get(PATIENCE).values()) == [[0, 1]] * 4


def test_as_endpoint_with_an_explicit_port(mixed: ActorMesh) -> None:
    by_port = as_endpoint(mixed.slice(x=0, y=0).by_port, explicit_response_port=True)
    assert by_port.call_one("through the port").get(PATIENCE) == "through the port"


def test_as_endpoint_of_an_async_actor(procs: ProcMesh) -> None:
    one = procs.slice(x=0, y=0).spawn("am", AsyncMixed)
    assert as_endpoint(one.plain).call_one(2).get(PATIENCE) == 3
    assert as_endpoint(one.quick).call_one(2).get(PATIENCE) == -2


def test_as_endpoint_takes_methods_of_meshes_only(mixed: ActorMesh) -> None:
    with pytest.raises(TypeError, match=r"as_endpoint takes mesh\.method"):
        as_endpoint(print)


@pytest.mark.parametrize("verb", ["call", "call_one", "choose", "stream", "broadcast"])
def test_undecorated_method_error_says_what_to_do(mixed: ActorMesh, verb: str) -> None:
    advice = r"decorate it with @endpoint, or call it through as_endpoint\(mesh\.plain\)"
    message = rf"Mixed\.plain is not an endpoint: {advice}"
    with pytest.raises(UnknownEndpointError, match=message):
        getattr(mixed.plain, verb)(1)
    with pytest.raises(UnknownEndpointError, match=message):
        mixed.plain(1)


def test_unknown_endpoint_error_lists_endpoints(mixed: ActorMesh) -> None:
    with pytest.raises(UnknownEndpointError, match=r"no endpoint 'nothing'.*calls_itself_plainly, same, yields"):
        mixed.nothing  # noqa: B018
    assert not hasattr(mixed, "nothing")


def test_direct_call_of_an_endpoint_is_refused(mixed: ActorMesh) -> None:
    with pytest.raises(TypeError, match=r"choose a way to send, mesh\.same\.call\(\.\.\.\), \.call_one"):
        mixed.same(1)


# ---- within one process


def test_calls_within_one_process_copy_arguments() -> None:
    mesh = this_proc().spawn("local", Sync)
    box = {"list": [1], "tensor": torch.arange(4.0), "large": torch.arange(1 << 16), "bytes": bytearray(b"x" * 100_000)}
    back = mesh.echo.call_one(box).get(PATIENCE)
    for name in box:
        assert back[name] is not box[name]
    back["list"].append(2)
    back["tensor"].zero_()
    back["large"].zero_()
    back["bytes"][:] = b""
    assert box["list"] == [1]
    assert box["tensor"].tolist() == [0, 1, 2, 3]
    assert torch.equal(box["large"], torch.arange(1 << 16))
    assert box["bytes"] == b"x" * 100_000
    assert mesh.pid.call_one().get(PATIENCE) == os.getpid()
    mesh.stop().get(PATIENCE)


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_works_within_one_process(kind: str) -> None:
    cls, _ = KINDS[kind]
    mesh = this_proc().spawn("local", cls)
    case = Case({cls: mesh}, kind, "mesh")
    case.size = 1
    test_call_returns_values_by_rank(case)
    test_call_one_returns_the_value_of_one_rank(case)
    test_choose_calls_one_rank(case)
    test_stream_yields_results_of_all_ranks(case)
    test_broadcast_reaches_all_ranks(case)
    test_accumulate_folds_results(case)
    test_send_to_a_port(case, "all", "send")
    mesh.stop().get(PATIENCE)


@pytest.mark.parametrize("cls", [Sync, Async, Concurrent])
def test_two_actors_of_one_process(procs: ProcMesh, cls: type[Actor]) -> None:
    proc = procs.slice(x=0, y=0)
    one, other = proc.spawn("one", Sync), proc.spawn("other", cls)
    for value in ("small", torch.arange(100_000)):
        reply = one.relay.call_one(other, value).get(PATIENCE)
        assert torch.equal(reply, value) if isinstance(value, torch.Tensor) else reply == value
    assert one.pid.call_one().get(PATIENCE) != os.getpid()


class Myself(Actor):
    """Sends messages to itself."""

    @concurrent_endpoint
    async def depth(self, me: ActorMesh, n: int) -> int:
        below: int = 0 if n == 0 else await me.depth.call_one(me, n - 1)
        return below + 1

    @concurrent_endpoint
    async def changes(self, me: ActorMesh) -> Any:
        mine = torch.zeros(100_000)
        theirs = await me.change.call_one(mine)
        return float(mine.sum()), float(theirs.sum())

    @concurrent_endpoint
    async def change(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(1)


def test_an_actor_calls_itself(procs: ProcMesh) -> None:
    me = procs.slice(x=1, y=1).spawn("me", Myself)
    assert me.depth.call_one(me, 20).get(PATIENCE) == 21
    assert me.changes.call_one(me).get(PATIENCE) == (0.0, 100_000.0)


# ---- between actors; references


def test_actors_call_each_other(actors: dict[type[Actor], ActorMesh], procs: ProcMesh) -> None:
    targets = procs.spawn("targets", Sync)
    for cls in (Sync, Async, Concurrent):
        for target in (targets.slice(x=1, y=1), targets.slice(x=0, y=0), this_proc().spawn("here", Sync)):
            replies = actors[cls].relay.call(target, "hello").get(PATIENCE)
            assert list(replies.values()) == ["hello"] * 4


def test_sent_reference_keeps_its_slice(actors: dict[type[Actor], ActorMesh]) -> None:
    row = actors[Sync].slice(x=1).rename(y="column")
    back = actors[Sync].slice(x=0, y=0).echo.call_one({"rows": [row]}).get(PATIENCE)["rows"][0]
    assert back.extent == row.extent
    assert back.name == row.name
    assert list(back.place.call().get(PATIENCE).values()) == list(row.place.call().get(PATIENCE).values())


def test_port_can_be_sent(actors: dict[type[Actor], ActorMesh], procs: ProcMesh) -> None:
    port, receiver = Channel.open_ranked()
    sender = procs.spawn("senders", Reporter)
    sender.report.call(port, "x").get(PATIENCE)
    assert sorted(receiver.recv().get(PATIENCE) for _ in range(4)) == [(0, ("x", r)) for r in range(4)]
    receiver.close()


class Reporter(Actor):
    @endpoint
    def report(self, port: Port[Any], value: Any) -> None:
        port.send((value, current_rank().rank))


class Early(Actor):
    """Calls a mesh that has not started yet."""

    def __init__(self) -> None:
        self.begun = 0

    @concurrent_endpoint
    async def relay(self, mesh: ActorMesh, value: Any) -> Any:
        future = mesh.echo.call(value)
        self.begun += 1
        return list((await future).values())

    @endpoint
    async def has_begun(self) -> int:
        return self.begun


def wait_for_file(path: str) -> None:
    """Block a bootstrap until the file exists."""
    until(lambda: os.path.exists(path), f"the test has made {path}")


@pytest.mark.parametrize("cls", [Sync, Async])
def test_reference_can_be_used_before_the_mesh_is_initialized(
    procs: ProcMesh, tmp_path: Path, cls: type[Actor]
) -> None:
    start = tmp_path / "start"
    early = procs.slice(x=0, y=0).spawn("early", Early)
    path = str(start)
    with this_host().spawn_procs({"gpus": 3}, bootstrap=lambda: wait_for_file(path)) as fresh:
        mesh = fresh.spawn("late", cls)
        large = torch.arange(50_000)
        replies = [
            early.relay.call_one(mesh.slice(gpus=slice(1, 3)), "first"),
            early.relay.call_one(mesh, large),
        ]
        mine = mesh.echo.call(large)
        large.zero_()
        assert early.has_begun.call_one().get(PATIENCE) == 2  # the actor has sent both calls and can handle another
        assert not any(reply.done() for reply in (*replies, mine, mesh.initialized, fresh.initialized))
        start.touch()
        assert replies[0].get(PATIENCE) == ["first"] * 2
        for values in (replies[1].get(PATIENCE), list(mine.get(PATIENCE).values())):
            assert len(values) == 3
            assert all(torch.equal(value, torch.arange(50_000)) for value in values)
        assert mesh.initialized.get(PATIENCE) is None


def test_messages_before_initialization_keep_their_order(tmp_path: Path) -> None:
    path = str(tmp_path / "start")
    with this_host().spawn_procs({"gpus": 2}, bootstrap=lambda: wait_for_file(path)) as fresh:
        mesh = fresh.spawn("late", Sync)
        for i in range(300):
            (mesh if i % 3 else mesh.slice(gpus=slice(0, 2))).note.broadcast(i)
        seen = mesh.take_seen.call()
        Path(path).touch()
        assert list(seen.get(PATIENCE).values()) == [list(range(300))] * 2


# ---- one named actor for the program


class Named(Actor):
    """An actor with a unique id, which shows how often it was built."""

    def __init__(self, given: Any) -> None:
        self.id = uuid.uuid4().hex
        self.given = given

    @endpoint
    def who(self) -> tuple[str, Any, int]:
        return self.id, self.given, os.getpid()


class Asker(Actor):
    @endpoint
    def ask(self, name: str, given: Any) -> tuple[str, Any, int]:
        mesh = get_or_spawn_controller(name, Named, given).get(PATIENCE)
        found: tuple[str, Any, int] = mesh.who.call_one().get(PATIENCE)
        return found


class AsyncAsker(Actor):
    @endpoint
    async def ask(self, name: str, given: Any) -> tuple[str, Any, int]:
        mesh = await get_or_spawn_controller(name, Named, given)
        found: tuple[str, Any, int] = await mesh.who.call_one()
        return found


@pytest.fixture(scope="module")
def askers(procs: ProcMesh) -> list[ActorMesh]:
    return [procs.spawn("askers", Asker), procs.spawn("async askers", AsyncAsker)]


@pytest.mark.parametrize(("threads", "with_actors"), [(6, False), (0, True), (6, True)])
def test_concurrent_requests_create_one_named_actor(askers: list[ActorMesh], threads: int, with_actors: bool) -> None:
    for turn in range(8):
        name = f"controller {threads} {with_actors} {turn}"
        found: list[tuple[str, Any, int]] = []
        line = threading.Barrier(threads + 1)

        def ask(given: int, name: str = name, line: threading.Barrier = line, found: list[Any] = found) -> None:
            line.wait(PATIENCE)
            found.append(get_or_spawn_controller(name, Named, given).get(PATIENCE).who.call_one().get(PATIENCE))

        asking = [threading.Thread(target=ask, args=(given,)) for given in range(threads)]
        for thread in asking:
            thread.start()
        line.wait(PATIENCE)
        calls = [mesh.ask.call(name, "actor") for mesh in askers] if with_actors else []
        for call in calls:
            found += call.get(PATIENCE).values()
        for thread in asking:
            thread.join(PATIENCE)
        assert len(found) == threads + 8 * with_actors
        assert len(set(found)) == 1, found  # built once, with the arguments of the first caller
        assert found[0][2] == os.getpid()


def test_named_actor_of_another_class_is_refused(askers: list[ActorMesh]) -> None:
    get_or_spawn_controller("taken", Asker).get(PATIENCE)
    with pytest.raises(TypeError, match="the actor 'taken' is a Asker, not a Named: use another name"):
        get_or_spawn_controller("taken", Named, 1)
    with pytest.raises(ActorError, match="another name"):
        askers[0].slice(x=0, y=0).ask.call_one("taken", 1).get(PATIENCE)


# ---- attributes of endpoints, and errors in broadcasts


def test_calls_are_attributes_of_endpoints_only(mixed: ActorMesh) -> None:
    assert mixed.same.name == "same"
    assert re.fullmatch(r"<Endpoint mixed\.same of .*x.*>", repr(mixed.same))
    assert "same" in dir(mixed)
    assert "plain" not in dir(mixed)
    with pytest.raises(AttributeError):
        mixed.same.nonsense  # noqa: B018


def test_error_in_a_broadcast_ends_the_actor(procs: ProcMesh, faults: Faults) -> None:
    doomed = procs.slice(x=0, y=0).spawn("doomed", Sync)
    doomed.fail.broadcast("nobody waits for this")
    assert faults.next().mesh_name == "doomed"
