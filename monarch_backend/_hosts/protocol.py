"""Messages between controllers, agents and daemons. They are typed, and decoded only after the sender's proof.

Processes are described by the messages of _processes/spawn_protocol.py. This module does not send.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import operator
import platform
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from monarch_backend._core import env
from monarch_backend._processes.spawn_protocol import Exited, Kill, Spawn, SpawnFailed, Started

__all__ = ["Exited", "Kill", "Spawn", "SpawnFailed", "Started"]


ANY = "any"
"""Stands for a version that may differ."""
REMEDY = "install the same versions on both, or, if torch differs on purpose, attach with any_torch=True"
"""Advice for versions that differ."""


def _torch_version() -> str:
    """Return the version of torch without importing it, which would take most of a daemon's start."""
    loaded = sys.modules.get("torch")
    if loaded is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version("torch")
        loaded = importlib.import_module("torch")  # built in place, without installed metadata
    return str(loaded.__version__)


class Versions(msgspec.Struct, frozen=True):
    """Versions that must be equal on both sides, because code and data travel."""

    python: str
    torch: str
    """A version, or ANY."""
    monarch_backend: str

    @classmethod
    def here(cls, any_torch: bool = False) -> Versions:
        """Return those of this interpreter. ``any_torch``: the other side may have another torch."""
        from monarch_backend import __version__

        # The build's suffix ("+cpu", "+cu126") may differ: hosts may have other accelerators.
        return cls(platform.python_version(), ANY if any_torch else _torch_version().partition("+")[0], __version__)

    def differences(self, host: Versions) -> list[str]:
        """Return how these, a controller's, differ from a host's, in words. Micro versions of Python may differ."""
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(host)
        for each in (mine, theirs):
            each["python"] = each["python"].rpartition(".")[0]
        if ANY in (mine["torch"], theirs["torch"]):
            del mine["torch"]
        return [
            f"{name} is {theirs[name]} there and {mine[name]} with the controller"
            for name in mine
            if mine[name] != theirs[name]
        ]


class _Message(msgspec.Struct, frozen=True):
    """Base class of the messages that `decode` returns."""


class Ask(_Message, tag="ask", frozen=True):
    """Request of a controller to a daemon: start an agent. ``reads``: for a reader, which keeps no host running."""

    token: str  # of the gateway that sends it: the controller's own one, or an agent of it on another host
    root: str
    versions: Versions
    heartbeat: float
    silence: float
    reads: bool = False


class Welcome(_Message, tag="welcome", frozen=True):
    """The daemon's answer: an agent was started at this address. ``workers`` can be reached from there."""

    token: str
    host_name: str
    versions: Versions
    workers: tuple[str, ...] = ()


class Unwelcome(_Message, tag="unwelcome", frozen=True):
    reason: str


class Attach(_Message, tag="attach", frozen=True):
    """Request of a controller to an agent: reach the host at this address within ``patience`` seconds.

    ``secret_name``: `name_of` the secret of that host's job. The controller's own gateway finds the secret in its pipe:
    messages are in memory that the program's processes share. An agent on another host gets b"": it has the secret of
    its job. ``reads`` is that of `Ask`.
    """

    id: int
    host: str
    port: int
    patience: float
    any_torch: bool = False
    secret_name: bytes = b""
    reads: bool = False


class Attached(_Message, tag="attached", frozen=True):
    id: int
    token: str
    host_name: str
    workers: tuple[str, ...] = ()


class AttachFailed(_Message, tag="attach_failed", frozen=True):
    id: int
    reason: str


class Hosts(_Message, tag="hosts", frozen=True):
    """Addresses of all hosts, sent to every agent. By host: address, port, the agent's token, its name in messages.

    ``ways``: the next host on the route to each host that cannot be connected to.
    """

    known: dict[str, tuple[str, int, str, str]]
    ways: dict[str, str]


class KillIfUnresponsive(_Message, tag="kill_if_unresponsive", frozen=True):
    """Kill a process that does not read its messages; with ``stop_read`` only if a signal or debugger stopped it."""

    id: int
    stop_read: bool


class Output(_Message, tag="output", frozen=True):
    """Output of a process; stream 1 or 2. Empty data marks the end."""

    id: int
    stream: int
    data: bytes


class OutputTaken(_Message, tag="output_taken", frozen=True):
    """Acknowledgement of ``count`` bytes of output: the agent may send more."""

    count: int


class Finish(_Message, tag="finish", frozen=True):
    """Order of a controller to a gateway: end the sessions with all hosts, and end.

    ``attach_failed``: the controller could not attach other hosts that it needs together with this one.
    """

    attach_failed: bool = False


class Lost(_Message, tag="lost", frozen=True):
    """Report that a host is lost, from a gateway to its controller, and from there to all agents."""

    host: str
    reason: str


class Ending(_Message, tag="ending", frozen=True):
    """Notice that a host ends in ``seconds``: from its daemon to its agents, and from these to their controllers."""

    seconds: float
    reason: str


class PlaceOfCall(msgspec.Struct, frozen=True, array_like=True):
    """A call whose receiver has this identity in recordings; the other fields are those of `whereabouts.Call`."""

    identity: int
    actor: str
    rank: int
    caller: int
    number: int


class AskPlaces(_Message, tag="ask_places", frozen=True):
    """Request of a process with the token ``asker`` to the agent of a host: where are the receivers of these calls?

    The gateway of the process's own host gets it, and sends it on. The answer is of use for ``timeout`` seconds.
    """

    id: int
    asker: str
    host: str
    timeout: float
    calls: tuple[PlaceOfCall, ...]


class Places(_Message, tag="places", frozen=True):
    """Answer of an agent: a text for each call."""

    id: int
    texts: tuple[str, ...]


# Every class of messages must be defined in this module, above this line.
_messages = (*_Message.__subclasses__(), Exited, Kill, Spawn, SpawnFailed, Started)
encode = msgspec.msgpack.Encoder().encode
decode: Callable[[Any], Any] = msgspec.msgpack.Decoder(functools.reduce(operator.or_, _messages)).decode
"""Return a message of this module. Raises msgspec.DecodeError for other bytes."""


def host_name() -> str:
    """Return the name of this host in messages: MONARCH_HOST_NAME if it is set, else the system's host name.

    >>> from monarch_backend.hosts import host_name
    >>> len(host_name()) > 0
    True
    """
    return env.get("MONARCH_HOST_NAME") or socket.gethostname()
