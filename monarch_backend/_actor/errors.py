"""What can go wrong with actors, as exceptions. Nothing is decided here.

Who catches what: `ActorError` means that the endpoint ran and raised; `SupervisionError` that whoever should have
answered is dead, and its ``delivery`` whether the call can have run; `MeshFailure` is what supervisors are told.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch_backend._core.errors import MonarchError, public


@dataclass(frozen=True)
class Death:
    """How one rank of a mesh ended."""

    rank: int
    where: str  # "gpus 3"
    host: str
    pid: int
    what: str  # "killed by signal 9 (SIGKILL)"
    returncode: int | None = (
        None  # as in subprocess: negative for a signal; None: the process lives, its actor does not
    )
    error: BaseException | None = None
    trace: str = ""  # the remote traceback of that error
    last_words: tuple[str, ...] = ()  # of its stderr
    at_start: bool = False  # before the process was up, in its ``bootstrap=``

    @property
    def signal(self) -> int | None:
        """The signal that ended the process, if one did."""
        return -self.returncode if self.returncode is not None and self.returncode < 0 else None

    def __str__(self) -> str:
        return f"{self.where} (host {self.host}, pid {self.pid}): {self.what}"


def in_words(returncode: int, oom: bool = False) -> str:
    """How a process ended, for people.

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
    """An endpoint raised. ``__cause__`` is its exception; the text has the remote traceback. The actor lives on.

    ``rank`` is the rank in the mesh or slice that was called; ``delivery`` is always "ran".
    """

    delivery = "ran"

    def __init__(self, text: str, actor: str = "", endpoint: str = "", rank: int = 0) -> None:
        super().__init__(text)
        self.actor, self.endpoint, self.rank = actor, endpoint, rank

    def __reduce__(self) -> Any:
        return (ActorError, (self.args[0], self.actor, self.endpoint, self.rank), {"__cause__": self.__cause__})

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        self.__cause__ = (state or {}).get("__cause__")


@public("monarch_backend.actor")
class SupervisionError(MonarchError, RuntimeError):
    """A call on a mesh of which a rank is dead. ``endpoint`` names what was called.

    ``delivery`` says what became of the call there: "not sent", or "unknown" if it may have run. ``failure`` is the
    MeshFailure, ``rank``, ``host``, ``pid`` and ``signal`` tell of the first death in it.
    """

    def __init__(
        self, text: str, endpoint: str = "", failure: MeshFailure | None = None, delivery: str = "unknown"
    ) -> None:
        super().__init__(text)
        self.endpoint, self.failure, self.delivery = endpoint, failure, delivery

    def _first(self, name: str) -> Any:
        return getattr(self.failure.deaths[0], name) if self.failure is not None and self.failure.deaths else None

    @property
    def rank(self) -> int | None:
        """Of the first death, in the whole mesh."""
        rank: int | None = self._first("rank")
        return rank

    @property
    def host(self) -> str | None:
        """Of the first death."""
        host: str | None = self._first("host")
        return host

    @property
    def pid(self) -> int | None:
        """Of the first death."""
        pid: int | None = self._first("pid")
        return pid

    @property
    def signal(self) -> int | None:
        """The signal that ended that process, if one did."""
        number: int | None = self._first("signal")
        return number

    def __reduce__(self) -> Any:
        return (SupervisionError, (self.args[0], self.endpoint, self.failure, self.delivery))


@public("monarch_backend.actor")
class MeshFailure(MonarchError):
    """Ranks of a mesh are dead. What supervisors get, and at last the program.

    ``mesh`` is the mesh as its owner knows it (None once it has travelled), ``ranks`` the failed ones, ``deaths`` tells
    of each; ``__cause__`` is the failure or the exception that led to it.
    """

    def __init__(self, mesh_name: str, deaths: Sequence[Death], mesh: Any = None) -> None:
        self.mesh_name, self.deaths, self.mesh = mesh_name, tuple(deaths), mesh
        text = f"{mesh_name}: " + "; ".join(str(death) for death in self.deaths[:4])
        traces = [death.trace for death in self.deaths if death.at_start and death.trace]
        super().__init__("\n\n".join([text, *traces[:1]]))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The failed ranks of the mesh."""
        return tuple(death.rank for death in self.deaths)

    def report(self) -> str:
        """Several lines for people: the root cause first, then what followed from it."""
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

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        self.__cause__ = (state or {}).get("__cause__")


def _told(failure: BaseException) -> str:
    if not isinstance(failure, MeshFailure):
        return f"{type(failure).__name__}: {failure}"
    lines = [f"mesh {failure.mesh_name!r} lost {len(failure.deaths)} of its ranks"]
    for death in failure.deaths[:8]:
        lines.append(f"  {death}")
        lines += [f"    {line}" for line in death.trace.splitlines()]
        lines += [f"    | {line}" for line in death.last_words]
    if len(failure.deaths) > 8:
        lines.append(f"  ... and {len(failure.deaths) - 8} more")
    return "\n".join(lines)


@public("monarch_backend.actor")
class CancelledError(BaseException):
    """Raised in an endpoint whose caller has cancelled the call, and in whoever waits for a cancelled future.

    A BaseException, as asyncio's: code that catches Exception does not swallow it.
    """


@public("monarch_backend.actor")
class UnknownEndpointError(MonarchError, AttributeError):
    """The mesh's class has no such endpoint; the text lists those it has."""
