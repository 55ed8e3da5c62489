"""What controllers, agents and daemons say to each other; typed, and each decoded only after its sender's proof.

Processes are spoken of in the words of _processes/spawn_protocol.py. No sending.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import socket
import sys
from typing import Any

import msgspec

from monarch_backend._core import env
from monarch_backend._processes.spawn_protocol import Exited, Kill, Spawn, SpawnFailed, Started
from monarch_backend._transport.network.connection import Timeouts

__all__ = ["Exited", "Kill", "Spawn", "SpawnFailed", "Started"]


ANY = "any"
"""In the place of a version: it need not be the same."""
REMEDY = "install the same versions on both, or, if torch differs on purpose, attach with any_torch=True"
"""Where versions differ."""


def _torch_version() -> str:
    """Without an import of it, which takes a daemon ten times as long as all else that it does."""
    loaded = sys.modules.get("torch")
    if loaded is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version("torch")
        loaded = importlib.import_module("torch")  # it was built, and not installed
    return str(loaded.__version__)


class Versions(msgspec.Struct, frozen=True):
    """What must be the same on both sides, since code and data travel."""

    python: str
    torch: str
    """Or ANY."""
    monarch_backend: str

    @classmethod
    def here(cls, any_torch: bool = False) -> Versions:
        """Of this interpreter. ``any_torch``: the other side may have another one."""
        from monarch_backend import __version__

        # The build's suffix ("+cpu", "+cu126") may differ: hosts may have other accelerators.
        return cls(platform.python_version(), ANY if any_torch else _torch_version().partition("+")[0], __version__)

    def differences(self, host: Versions) -> list[str]:
        """Of a controller's from a host's, in words; Python's micro versions may differ."""
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


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """A controller to a daemon: an agent, please."""

    token: str  # of the gateway that asks: the controller's, or one that the controller has on another host
    root: str
    versions: Versions
    heartbeat: float
    silence: float

    @property
    def bounds(self) -> Timeouts:
        """The controller's."""
        return Timeouts(heartbeat=self.heartbeat, silence=self.silence)


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The daemon's answer: call this one at the same address. ``workers``: addresses that can be reached from there."""

    token: str
    host_name: str
    versions: Versions
    workers: tuple[str, ...] = ()


class Unwelcome(msgspec.Struct, tag="unwelcome", frozen=True):
    """Or why not."""

    reason: str


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """A controller to an agent: reach the host at this address within ``patience`` seconds.

    ``secret_name``: `name_of` the secret of that host's job, for the controller's own gateway, which finds the secret
    in its pipe. Messages lie in memory that processes of the program share. An agent on another host gets b"": it has
    the secret of its job.
    """

    id: int
    host: str
    port: int
    patience: float
    any_torch: bool = False
    secret_name: bytes = b""


class Attached(msgspec.Struct, tag="attached", frozen=True):
    """It is reached."""

    id: int
    token: str
    host_name: str
    workers: tuple[str, ...] = ()


class AttachFailed(msgspec.Struct, tag="attach_failed", frozen=True):
    """It is not."""

    id: int
    reason: str


class Hosts(msgspec.Struct, tag="hosts", frozen=True):
    """To every agent: where the others are. By host: address, port, the agent's token, its name for people.

    ``ways``: which other host those are reached through that can't be called.
    """

    known: dict[str, tuple[str, int, str, str]]
    ways: dict[str, str]


class KillIfDeaf(msgspec.Struct, tag="kill_if_deaf", frozen=True):
    """To an agent: this process was told to stop a while ago; kill it if it does not even read.

    ``knocked``: it has read so much that it may be at work since, unless it stands still.
    """

    id: int
    knocked: bool


class Output(msgspec.Struct, tag="output", frozen=True):
    """What a process has written; stream 1 or 2. No data: the end."""

    id: int
    stream: int
    data: bytes


class OutputTaken(msgspec.Struct, tag="output_taken", frozen=True):
    """So many bytes of it are dealt with: the agent may send more."""

    count: int


class Finish(msgspec.Struct, tag="finish", frozen=True):
    """A controller to its own gateway: say goodbye to all hosts, and end."""


class Lost(msgspec.Struct, tag="lost", frozen=True):
    """A gateway to its controller, which has asked it to reach this host: it is lost, and why.

    And the controller to all: what it has lost is lost to everybody.
    """

    host: str
    reason: str


Message = (
    Ask
    | Welcome
    | Unwelcome
    | Attach
    | Attached
    | AttachFailed
    | Hosts
    | Output
    | OutputTaken
    | Lost
    | Finish
    | Spawn
    | Kill
    | KillIfDeaf
    | Started
    | SpawnFailed
    | Exited
)

_decoder = msgspec.msgpack.Decoder(Message)
_encode = msgspec.msgpack.Encoder().encode


def encode(message: Any) -> bytes:
    """Its bytes."""
    return _encode(message)


def decode(data: Any) -> Any:
    """One of the above. Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(data)


def host_name() -> str:
    """Name of this host in messages: MONARCH_HOST_NAME where it is set, else the system's host name."""
    return env.get("MONARCH_HOST_NAME") or socket.gethostname()
