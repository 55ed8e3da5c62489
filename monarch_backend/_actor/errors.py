"""Exceptions of actors.

`ActorError`: the endpoint ran and raised. `SupervisionError`: the actor or its process has ended; its ``delivery``
tells whether the call may have run. `MeshFailure`: the report of a failure to supervisors.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch_backend._core.errors import MonarchError, public


@dataclass(frozen=True)
class Death:
    """End of one rank of a mesh: where it was, and why it ended.

    >>> from monarch_backend.actor import Death
    >>> print(Death(3, "gpus 3", "node1", 1234, "killed by signal 9 (SIGKILL)", -9))
    gpus 3 (host node1, pid 1234): killed by signal 9 (SIGKILL)
    """

    rank: int
    where: str  # "gpus 3"
    host: str
    pid: int
    what: str  # "killed by signal 9 (SIGKILL)"
    returncode: int | None = None  # as in subprocess, negative for a signal; None if only the actor has ended
    error: BaseException | None = None
    trace: str = ""  # remote traceback of that error
    last_words: tuple[str, ...] = ()  # the end of its stderr
    at_start: bool = False  # in ``bootstrap=``, before the process was ready
    messages: tuple[str, ...] = ()  # what it was doing, and its last messages, if they were recorded on this host

    @property
    def signal(self) -> int | None:
        """Number of the signal that ended the process; None if it ended otherwise."""
        return -self.returncode if self.returncode is not None and self.returncode < 0 else None

    def __str__(self) -> str:
        return f"{self.where} (host {self.host}, pid {self.pid}): {self.what}"


def in_words(returncode: int, oom: bool = False) -> str:
    """Return a text for the end of a process. ``returncode`` is as in subprocess.

    >>> in_words(-9), in_words(3), in_words(-9, oom=True)
    ('killed by signal 9 (SIGKILL)', 'exited with status 3', 'killed by signal 9 (SIGKILL): out of memory')
    """
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown"
    return f"killed by signal {-returncode} ({name})" + (": out of memory" if oom else "")


@public("monarch_backend.actor")
class ActorError(MonarchError, RuntimeError):
    """An endpoint raised. ``__cause__`` is its exception, and the text has the remote traceback. The actor goes on.

    ``actor`` and ``endpoint`` are names, ``rank`` is the rank in the mesh or slice that was called. ``delivery`` is
    "ran".

    >>> from monarch_backend.actor import Actor, ActorError, endpoint, this_proc
    >>> class Loader(Actor):
    ...     @endpoint
    ...     def load(self):
    ...         raise ValueError("no data")
    >>> try:
    ...     this_proc().spawn("loader", Loader).load.call_one().get()
    ... except ActorError as error:
    ...     print(error.actor, error.endpoint, error.rank, repr(error.__cause__))
    loader load 0 ValueError('no data')
    """

    delivery = "ran"

    def __init__(self, text: str, actor: str = "", endpoint: str = "", rank: int = 0) -> None:
        super().__init__(text)
        self.actor, self.endpoint, self.rank = actor, endpoint, rank

    def __reduce__(self) -> Any:
        return (ActorError, (self.args[0], self.actor, self.endpoint, self.rank), {"__cause__": self.__cause__})


@public("monarch_backend.actor")
class DeadlockError(MonarchError, RuntimeError):
    """Actors wait for each other in a cycle. Each one raises it: in ``get()``, at its ``await``, or where it sends.

    Each actor of the cycle handles one message at a time, so none would continue. The actors go on after the error. One
    that waits in a collective raises nothing, and goes on when the late ranks have entered it.
    ``members`` has one text for each actor: its mesh, endpoint, rank, host and pid, and the endpoint or queue that it
    waits for. The first one is the actor in which the error is raised. It is empty if an actor waits for its own reply.
    Calls with a limit of time, ``get(timeout=...)`` or ``options(timeout=...)``, are not checked. Nor is an ``await``
    while the event loop of its actor has a timer or another task.

    >>> from monarch_backend.actor import Actor, ActorError, DeadlockError, endpoint, this_proc
    >>> class Asker(Actor):
    ...     @endpoint
    ...     def ask(self, other, me):
    ...         return other.forward.call_one(me).get()
    ...     @endpoint
    ...     def forward(self, other):
    ...         return other.answer.call_one().get()
    ...     @endpoint
    ...     def answer(self):
    ...         return 1
    >>> a, b = this_proc().spawn("a", Asker), this_proc().spawn("b", Asker)
    >>> try:
    ...     a.ask.call_one(b, a).get()
    ... except ActorError as error:
    ...     print(type(error.__cause__).__name__, len(error.__cause__.members))
    DeadlockError 2
    """

    def __init__(self, text: str, members: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.members = tuple(members)

    def __reduce__(self) -> Any:
        return (DeadlockError, (self.args[0], self.members), {"__cause__": self.__cause__})


@public("monarch_backend.actor")
class SupervisionError(MonarchError, RuntimeError):
    """A call could not be completed because a called rank is dead. The future of the call raises it.

    ``broadcast`` on such a mesh and ``spawn`` on a stopped one raise it at once. ``endpoint`` names the endpoint.
    ``delivery`` is "not sent" if the call did not run, and "unknown" if it may have run. ``failure`` is the
    `MeshFailure`; ``rank``, ``host``, ``pid`` and ``signal`` describe its first death.

    >>> from monarch_backend.actor import Actor, SupervisionError, endpoint, this_proc
    >>> class Echo(Actor):
    ...     @endpoint
    ...     def say(self, text):
    ...         return text
    >>> mesh = this_proc().spawn("echo", Echo)
    >>> mesh.stop().get()
    >>> try:
    ...     mesh.say.call_one("hello").get()
    ... except SupervisionError as error:
    ...     print(error.endpoint, error.delivery, error.rank)
    echo.say not sent 0
    """

    def __init__(
        self, text: str, endpoint: str = "", failure: MeshFailure | None = None, delivery: str = "unknown"
    ) -> None:
        super().__init__(text)
        self.endpoint, self.failure, self.delivery = endpoint, failure, delivery

    @property
    def _death(self) -> Death | None:
        return self.failure.deaths[0] if self.failure is not None and self.failure.deaths else None

    @property
    def rank(self) -> int | None:
        """Rank of the first death, in the whole mesh; None if it is unknown."""
        return None if self._death is None else self._death.rank

    @property
    def host(self) -> str | None:
        """Host name of the first death; None if it is unknown."""
        return None if self._death is None else self._death.host

    @property
    def pid(self) -> int | None:
        """Process id of the first death; None if it is unknown."""
        return None if self._death is None else self._death.pid

    @property
    def signal(self) -> int | None:
        """Number of the signal that ended that process; None if it ended otherwise."""
        return None if self._death is None else self._death.signal

    def __reduce__(self) -> Any:
        return (SupervisionError, (self.args[0], self.endpoint, self.failure, self.delivery))


@public("monarch_backend.actor")
class MeshFailure(MonarchError):
    """Ranks of a mesh are dead. The argument of ``__supervise__`` and of ``unhandled_fault_hook``.

    ``initialized`` of a mesh raises it if a constructor or a process has failed. ``mesh`` is the mesh in the process
    that owns it, and None in other processes. ``deaths`` has a `Death` for each failed rank. ``__cause__`` is the
    failure or exception that led to this one.

    >>> from monarch_backend.actor import Death, MeshFailure
    >>> failure = MeshFailure("trainers", [Death(3, "gpus 3", "node1", 1234, "killed by signal 9 (SIGKILL)", -9)])
    >>> failure.ranks
    (3,)
    >>> print(failure)
    trainers: gpus 3 (host node1, pid 1234): killed by signal 9 (SIGKILL)
    """

    def __init__(self, mesh_name: str, deaths: Sequence[Death], mesh: Any = None) -> None:
        self.mesh_name, self.deaths, self.mesh = mesh_name, tuple(deaths), mesh
        text = f"{mesh_name}: " + "; ".join(str(death) for death in self.deaths[:4])
        traces = [death.trace for death in self.deaths if death.at_start and death.trace]
        super().__init__("\n\n".join([text, *traces[:1]]))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Failed ranks of the mesh."""
        return tuple(death.rank for death in self.deaths)

    def report(self) -> str:
        """Return a report of several lines: the root cause first, then its consequences."""
        chain: list[BaseException] = [self]
        while (cause := chain[-1].__cause__) is not None and cause not in chain:
            chain.append(cause)
        lines = []
        for failure in reversed(chain):
            head = "root cause: " if failure is chain[-1] else "therefore: "
            lines.append(head + _told(failure))
        return "\n".join(lines)

    def __reduce__(self) -> Any:
        return (MeshFailure, (self.mesh_name, self.deaths), {"__cause__": self.__cause__})


def _told(failure: BaseException) -> str:
    if not isinstance(failure, MeshFailure):
        return f"{type(failure).__name__}: {failure}"
    lines = [f"mesh {failure.mesh_name!r} lost {len(failure.deaths)} of its ranks"]
    for death in failure.deaths[:8]:
        lines.append(f"  {death}")
        lines += [f"    - {line}" for line in death.messages]
        lines += [f"    {line}" for line in death.trace.splitlines()]
        lines += [f"    | {line}" for line in death.last_words]
    if len(failure.deaths) > 8:
        lines.append(f"  ... and {len(failure.deaths) - 8} more")
    return "\n".join(lines)


@public("monarch_backend.actor")
class CancelledError(BaseException):
    """Raised in an endpoint whose caller has cancelled the call, and by the cancelled future.

    An ``async def`` endpoint gets asyncio.CancelledError. Both are BaseExceptions: code that catches Exception does not
    catch them.

    >>> from monarch_backend.actor import Channel
    >>> port, receiver = Channel.open()
    >>> value = receiver.recv()
    >>> value.cancel("not needed")
    True
    >>> value.exception()
    CancelledError('not needed')
    """


@public("monarch_backend.actor")
class UnknownEndpointError(MonarchError, AttributeError):
    """The class of the mesh has no such endpoint. Access to ``mesh.name`` raises it. The text lists the endpoints.

    An undecorated method raises it when it is called.

    >>> from monarch_backend.actor import Actor, endpoint, this_proc
    >>> class Echo(Actor):
    ...     @endpoint
    ...     def say(self, text):
    ...         return text
    >>> this_proc().spawn("echo", Echo).speak
    Traceback (most recent call last):
        ...
    monarch_backend.actor.UnknownEndpointError: Echo has no endpoint 'speak'; its endpoints are: say
    """
