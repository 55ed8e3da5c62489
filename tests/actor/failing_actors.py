"""Actors that fail on request, for tests of failures.

Worker processes import this module, so it does not import pytest.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monarch_backend.actor import (
    Actor,
    ActorMesh,
    MeshFailure,
    Port,
    ProcMesh,
    Restart,
    concurrent_endpoint,
    context,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)
from tests.actor.actors import PortHolder
from tests.actor.support import pass_gate


def end_process(how: str) -> None:
    """End this process by the named signal, by ``segfault`` or ``abort``, or with an exit status."""
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
        threading.Event().wait()  # wait until the signal is delivered
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "abort":
        os.abort()
    else:
        os._exit(int(how))


class Victim(PortHolder):
    """Actor whose endpoints raise, wait, or end the actor or its process on request."""

    def __init__(self, log: str = "", name: str = "victim") -> None:
        self.notes: list[Any] = []
        self._log, self._name = log, name

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def note(self, value: Any) -> None:
        self.notes.append(value)
        self.say(str(value))

    @endpoint
    def all_notes(self) -> list[Any]:
        return self.notes

    @endpoint
    def count(self, to: int) -> Iterator[int]:
        try:
            yield from range(to)
        finally:
            self.say("counted")

    @endpoint
    def take_some(self, other: ActorMesh, begun: Port[int], gate: str) -> int:
        """Take one value of another actor's stream, and leave the rest unread."""
        first = next(other.count.call_one(10**9))
        begun.send(os.getpid())
        pass_gate(gate)
        return int(first)

    @endpoint
    def recurse(self) -> None:
        self.recurse()

    @endpoint
    def end_process(self, how: str) -> None:
        end_process(how)

    @endpoint
    def end_itself(self, how: str, reason: str) -> str:
        getattr(context().actor_instance, how)(reason)
        return "the rest of the message"

    @endpoint
    def wait(self, begun: Port[int] | None, gate: str) -> str:
        """Wait until the gate opens."""
        if begun is not None:
            begun.send(os.getpid())
        pass_gate(gate)
        self.say("waited")
        return "waited"

    @endpoint
    def raises(self, error: BaseException) -> None:
        raise error

    @endpoint
    def raises_from(self, outer: type[BaseException], args: tuple[Any, ...]) -> None:
        """Raise an exception that has an OSError as its cause."""
        try:
            os.stat("/nowhere")
        except OSError as inner:
            raise outer(*args) from inner

    @endpoint
    def exits(self, status: Any) -> None:
        sys.exit(status)

    @endpoint
    def wait_for_other(self, other: ActorMesh, begun: Port[int], gate: str) -> Any:
        """Wait for another actor, as a caller that neither owns nor is owned by it."""
        future = other.wait.call_one(None, gate)
        begun.send(os.getpid())
        return future.get()

    @endpoint(explicit_response_port=True)
    def answers_never(self, port: Port[Any]) -> None:
        self.notes.append(port)

    @endpoint(explicit_response_port=True)
    def answers_by_raising(self, port: Port[Any]) -> None:
        raise ValueError("instead of an answer")

    def say(self, what: str) -> None:
        """Write to the log file, which shows the order of events across processes."""
        if self._log:
            with open(self._log, "a") as file:
                file.write(f"{self._name}: {what}\n")

    def __cleanup__(self, exc: BaseException | None) -> None:
        self.say(f"cleanup {type(exc).__name__}")


class AsyncVictim(Actor):
    """Some endpoints of `Victim` as ``async`` functions."""

    def __init__(self, log: str = "") -> None:
        self._log = log

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def raises(self, error: BaseException) -> None:
        raise error

    @endpoint
    async def cancels_itself(self) -> None:
        raise asyncio.CancelledError("of its own")

    @concurrent_endpoint
    async def wait(self, begun: Port[int]) -> None:
        begun.send(os.getpid())
        await asyncio.Event().wait()

    @endpoint
    async def end_process(self, how: str) -> None:
        end_process(how)

    async def __cleanup__(self, exc: BaseException | None) -> None:
        await asyncio.sleep(0)
        if self._log:
            with open(self._log, "a") as file:
                file.write(f"async: cleanup {type(exc).__name__}\n")


class FailsInConstructor(Actor):
    """Actor whose constructor raises on the given ranks."""

    def __init__(self, error: BaseException, ranks: tuple[int, ...]) -> None:
        if current_rank().rank in ranks:
            raise error

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


class SlowToBuild(Victim):
    """Actor whose constructor waits at a gate."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        pass_gate(gate)


class Owner(Actor):
    """Spawns actors, in its own process or others, and processes. It has no ``__supervise__``."""

    def __init__(self, log: str = "", depth: int = 0) -> None:
        self._log = log
        self.procs: ProcMesh | None = None
        self.actors: ActorMesh | None = None
        self.below: ActorMesh | None = None
        if depth:
            self.below = (
                this_host()
                .spawn_procs({"deep": 1}, name=f"depth-{depth}")
                .spawn(f"owner-{depth}", type(self), log, depth - 1)
            )

    @endpoint
    def spawn(self, count: int = 2, restart: Restart | None = None) -> ActorMesh:
        """Spawn processes with an actor in each."""
        self.actors = self.spawn_without_waiting(count, restart)
        self.actors.initialized.get()
        return self.actors

    @endpoint
    def spawn_at_once(self) -> ActorMesh:
        """Return a reference to actors that are still starting."""
        self.actors = self.spawn_without_waiting(2, None)
        return self.actors

    def spawn_without_waiting(self, count: int, restart: Restart | None) -> ActorMesh:
        self.procs = this_host().spawn_procs({"nested": count}, name="nested-procs", restart=restart)
        return self.procs.spawn("nested", Victim, self._log, "nested")

    @endpoint
    def spawn_on(self, procs: ProcMesh) -> ActorMesh:
        """Spawn actors in processes that another actor or program owns."""
        self.actors = procs.spawn("nested", Victim, self._log, "nested")
        self.actors.initialized.get()
        return self.actors

    @endpoint
    def spawn_here(self) -> ActorMesh:
        """Spawn an actor in this process."""
        self.actors = this_proc().spawn("nested", Victim, self._log, "nested")
        return self.actors

    @endpoint
    def has_meshes(self) -> bool:
        return self.procs is not None

    @endpoint
    def spawn_behind(self, port: Port[Any], gate: str) -> None:
        """Spawn a mesh after the gate opens. Send its pid, or the name of an exception, to the port."""
        port.send("begun")
        pass_gate(gate)
        try:
            mesh = self.spawn_without_waiting(1, None)
            port.send(mesh.pid.call_one().get(5))
        except Exception as error:
            port.send(type(error).__name__)

    @endpoint
    def call_nested(self, value: Any) -> list[Any]:
        assert self.actors is not None
        return list(self.actors.echo.call(value).get().values())

    @endpoint
    def wait_for_nested(self, begun: Port[int], gate: str) -> Any:
        assert self.actors is not None
        future = self.actors.slice(nested=0).wait.call_one(None, gate)
        begun.send(os.getpid())
        return future.get()

    @endpoint
    def raises(self, error: BaseException) -> None:
        raise error

    @endpoint
    def deepest(self) -> list[int]:
        """Return the pids of this owner and of the owners below it."""
        return [os.getpid(), *(self.below.deepest.call_one().get() if self.below else [])]

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    def __cleanup__(self, exc: BaseException | None) -> None:
        if self._log:
            with open(self._log, "a") as file:
                file.write(f"owner: cleanup {type(exc).__name__}\n")


class Supervisor(Owner):
    """Owner with a ``__supervise__`` that returns or raises a given answer."""

    def __init__(self, answer: Any, log: str = "") -> None:
        super().__init__(log)
        self._answer = answer
        self.told: list[MeshFailure] = []

    @endpoint
    def received_failures(self) -> list[tuple[str, tuple[int, ...], bool]]:
        """Return name and ranks of each failure, and whether the failure has its mesh."""
        return [(failure.mesh_name, failure.ranks, failure.mesh is not None) for failure in self.told]

    @endpoint
    def go_on(self, value: Any) -> list[Any]:
        """Call the actors that have not failed."""
        assert self.actors is not None
        return list(self.actors.without(self.actors.failed_ranks).echo.call(value).get().values())

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.append(failure)
        return self.answer()

    def answer(self) -> bool:
        if isinstance(self._answer, BaseException):
            raise self._answer
        return bool(self._answer)


class SlowSupervisor(Supervisor):
    """Supervisor with an ``async`` ``__supervise__`` and synchronous endpoints."""

    async def __supervise__(self, failure: MeshFailure) -> bool:  # type: ignore[override]
        await asyncio.sleep(0)
        self.told.append(failure)
        return self.answer()


class AsyncSupervisor(Actor):
    """Supervisor with async endpoints: its ``__supervise__`` can run while an endpoint waits."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.told: list[MeshFailure] = []
        self.asked = asyncio.Event()

    @endpoint
    async def spawn(self) -> ActorMesh:
        self.actors = this_host().spawn_procs({"nested": 1}, name="nested-procs").spawn("nested", Victim)
        await self.actors.initialized
        return self.actors

    @endpoint
    async def wait_until_asked(self, begun: Port[int]) -> list[str]:
        begun.send(os.getpid())
        await self.asked.wait()
        return [failure.mesh_name for failure in self.told]

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.append(failure)
        self.asked.set()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return bool(self._answer)


def lines(log: Path) -> list[str]:
    """Return the lines of the log file of `Victim.say`, in order."""
    return log.read_text().splitlines() if log.exists() else []
