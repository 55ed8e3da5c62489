"""Actors that wait for a reply whose port only a waiting endpoint has raise DeadlockError. Other holders may reply."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest

from monarch_backend._actor.execution.port_use import only_sends
from monarch_backend.actor import (
    Actor,
    ActorMesh,
    DeadlockError,
    Port,
    endpoint,
    this_proc,
)
from tests.actor.actors import running
from tests.actor.support import PATIENCE

pytestmark = pytest.mark.usefixtures("faults")

LONGER_THAN_A_PROBE_S = 0.5
"""Seconds of a wait that is checked for a deadlock at least once."""


def _later(send: Callable[[], object]) -> None:
    """Call a function in a thread, after the first probe of a wait that begins now."""
    threading.Timer(LONGER_THAN_A_PROBE_S, send).start()


class Asker(Actor):
    """Calls explicit endpoints that call it back."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.port: Any = None

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except DeadlockError as error:
            self.seen.append(str(error))

    @endpoint
    def hop(self) -> str:
        return "end"

    @endpoint
    def ask(self, target: ActorMesh, how: str, me: ActorMesh) -> str:
        """Call an explicit endpoint of the target, and return its reply or the type of its error."""
        try:
            return str(getattr(target, how).call_one(me).get())
        except DeadlockError as error:
            self.seen.append(str(error))
            return "DeadlockError"

    @endpoint
    def ask_slices(self, first: ActorMesh, second: ActorMesh, me: ActorMesh) -> str:
        with self._noted():
            return str(first.pass_along.call_one(second, me).get())
        return "DeadlockError"

    @endpoint
    def take_seen(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen

    @endpoint(explicit_response_port=True)
    def alone(self, port: Port[str], back: ActorMesh) -> None:
        with self._noted():
            back.hop.call_one().get()
        port.send("late")

    @endpoint(explicit_response_port=True)
    def pass_along(self, port: Port[str], target: ActorMesh, back: ActorMesh) -> None:
        with self._noted():
            port.send(target.alone.call_one(back).get())

    @endpoint(explicit_response_port=True)
    def thread(self, port: Port[str], back: ActorMesh) -> None:
        _later(lambda: port.send("by closure"))
        back.hop.call_one().get()

    @endpoint(explicit_response_port=True)
    def bound(self, port: Port[str], back: ActorMesh) -> None:
        _later(functools.partial(port.send, "by method"))
        back.hop.call_one().get()

    @endpoint(explicit_response_port=True)
    def deleted(self, port: Port[str], back: ActorMesh) -> None:
        _later(functools.partial(port.send, "by method"))
        del port
        back.hop.call_one().get()

    @endpoint(explicit_response_port=True)
    def attribute(self, port: Port[str], back: ActorMesh) -> None:
        self.port = port
        _later(lambda: self.port.send("by attribute"))
        back.hop.call_one().get()

    @endpoint(explicit_response_port=True)
    def rebound(self, port: Port[str] | None, back: ActorMesh) -> None:
        self.port, port = port, None
        _later(lambda: self.port.send("by attribute"))
        back.hop.call_one().get()

    @endpoint(explicit_response_port=True)
    def weak(self, port: Port[str], back: ActorMesh) -> None:
        found = weakref.ref(port)
        _later(lambda: found().send("by weak reference"))  # type: ignore[union-attr]
        back.hop.call_one().get()

    @endpoint(explicit_response_port=True)
    def callback(self, port: Port[str], back: ActorMesh) -> None:
        other = back.slow_hop.call_one()  # the actor does not take it before its call has ended
        other.ignore()
        send = functools.partial(port.send, "by callback")
        other.add_done_callback(lambda _: send())
        _later(functools.partial(other.cancel, "enough"))
        back.hop.call_one().get()

    @endpoint
    def slow_hop(self) -> None:
        """Do nothing, later."""

    @endpoint(explicit_response_port=True)
    def replied(self, port: Port[str], back: ActorMesh) -> None:
        port.send("before")
        back.hop.call_one().get()

    @endpoint(explicit_response_port=True)
    def handed(self, port: Port[str], back: ActorMesh) -> None:
        self.me.send_later.broadcast(port)
        back.hop.call_one().get()

    @endpoint
    def send_later(self, port: Port[str]) -> None:
        _later(functools.partial(port.send, "by another actor"))

    @endpoint
    def know(self, me: ActorMesh) -> None:
        self.me = me


@pytest.fixture(scope="module")
def actors() -> Iterator[list[ActorMesh]]:
    """Return actors of two processes and one of this process. The second one has the port, the third one none."""
    with running({"gpus": 2}) as procs:
        made = [procs.slice(gpus=rank).spawn(name, Asker) for rank, name in enumerate(("asker", "target"))]
        made.append(this_proc().spawn("third", Asker))
        made[1].know.call_one(made[2]).get(PATIENCE)
        yield made
        made[2].stop().get(PATIENCE)


def test_caller_of_an_endpoint_that_alone_has_the_port_raises(actors: list[ActorMesh]) -> None:
    asker, target, _ = actors
    assert asker.ask.call_one(target, "alone", asker).get(PATIENCE) == "DeadlockError"
    for first, other, endpoints in ((asker, target, ("ask", "alone")), (target, asker, ("alone", "ask"))):
        [text] = first.take_seen.call_one().get(PATIENCE)
        assert text.startswith("a cycle of 2 actors that wait for each other")
        assert text.splitlines()[1].startswith(f"  {first.name}.{endpoints[0]} (")
        assert text.splitlines()[2].startswith(f"  {other.name}.{endpoints[1]} (")
    assert asker.ask.call_one(target, "replied", asker).get(PATIENCE) == "before"


def test_cycle_of_three_actors_with_two_ports_raises_in_all(actors: list[ActorMesh]) -> None:
    asker, target, third = actors
    assert asker.ask_slices.call_one(target, third, asker).get(PATIENCE) == "DeadlockError"
    for mesh in actors:
        [text] = mesh.take_seen.call_one().get(PATIENCE)
        assert text.startswith("a cycle of 3 actors that wait for each other")


@pytest.mark.parametrize(
    ("how", "reply"),
    [
        ("thread", "by closure"),
        pytest.param("bound", "by method", marks=pytest.mark.slow),
        ("deleted", "by method"),
        pytest.param("attribute", "by attribute", marks=pytest.mark.slow),
        pytest.param("rebound", "by attribute", marks=pytest.mark.slow),
        pytest.param("weak", "by weak reference", marks=pytest.mark.slow),
        pytest.param("callback", "by callback", marks=pytest.mark.slow),
        pytest.param("replied", "before", marks=pytest.mark.slow),
        ("handed", "by another actor"),
    ],
)
def test_port_that_other_code_has_raises_nothing(how: str, reply: str, actors: list[ActorMesh]) -> None:
    asker, target, _ = actors
    assert asker.ask.call_one(target, how, asker).get(PATIENCE) == reply
    assert target.hop.call_one().get(PATIENCE) == "end"
    for mesh in actors:
        assert mesh.take_seen.call_one().get(PATIENCE) == []


# ---- the proof alone


class _Explicit:
    """Endpoints as `only_sends` sees them."""

    def nothing(self, port: Any) -> None:
        """Never reply."""

    def sends(self, port: Any, other: Any) -> None:
        if other is None:
            port.exception(ValueError("none"))
        port.send(other.hop.call_one().get())
        print(other, port.send(1))

    def sends_and_deletes(self, port: Any, other: Any) -> None:
        port.send(value=1)
        del port

    def assigned(self, port: Any) -> None:
        port.send([str(each) for each in range(3)])
        port = None

    def stored(self, port: Any) -> None:
        self.port = port

    def moved(self, port: Any) -> None:
        self.port, port = port, None

    def passed(self, port: Any, other: Any) -> None:
        other.hop(port)

    def passed_first(self, port: Any, other: Any) -> None:
        other.hop(port, other)

    def returned(self, port: Any) -> Any:
        return port

    def bound(self, port: Any) -> None:
        self.send = port.send

    def bound_and_passed(self, port: Any, other: Any) -> None:
        other.hop(port.send)

    def closure(self, port: Any, other: Any) -> None:
        other.hop(lambda: port.send(1))

    def comprehension(self, port: Any) -> None:
        self.ports = [port for _ in range(2)]

    def variables(self, port: Any) -> None:
        self.ports = locals()

    def other_name(self, port: Any) -> None:
        same = port
        same.send(1)

    def chosen(self, port: Any, other: Any) -> None:
        (port if other else self).send(1)  # type: ignore[attr-defined]

    def other_method(self, port: Any) -> None:
        port.__reduce__()

    def any_arguments(self, *arguments: Any) -> None:
        arguments[0].send(1)

    def generator(self, port: Any) -> Iterator[None]:
        yield port.send(1)

    async def coroutine(self, port: Any) -> None:
        port.send(1)


@pytest.mark.parametrize("name", ["nothing", "sends", "sends_and_deletes", "assigned"])
def test_endpoint_that_only_sends_keeps_its_port(name: str) -> None:
    assert only_sends(getattr(_Explicit(), name))


@pytest.mark.parametrize(
    "name",
    [
        "stored", "moved", "passed", "passed_first", "returned", "bound", "bound_and_passed", "closure",
        "comprehension", "variables", "other_name", "chosen", "other_method", "any_arguments", "generator", "coroutine",
    ],
)  # fmt: skip
def test_endpoint_that_does_more_is_no_proof(name: str) -> None:
    assert not only_sends(getattr(_Explicit(), name))


def test_wrapped_method_is_no_proof() -> None:
    assert not only_sends(functools.partial(_Explicit().sends))
    assert not only_sends(_Explicit.sends)

    @functools.wraps(_Explicit.sends)
    def wrapped(self: Any, port: Any, *more: Any) -> None:
        _Explicit.sends(self, port, *more)

    assert not only_sends(MethodType(wrapped, _Explicit()))
