"""Input and output of a debugger in a process: a local socket, to which clients of the same user connect.

The thread that stopped at a breakpoint serves the socket itself, in `Channel.readline`. So a client sees the state of
one stopped thread, and no command runs while the program does. This module is small because each process of a mesh
imports it; remote_pdb.py comes with the first breakpoint.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from monarch_backend._processes import local_sockets
from monarch_backend._processes.debugging.messages import SOCKET_PREFIX, Peer

POLL_S = 0.1
"""Seconds after which a waiting thread looks for an interruption."""

SEND_TIMEOUT_S = 5.0
"""Seconds that a client has to read its output. Then it is disconnected."""

_ending: str | None = None
_check_interruption: Callable[[FrameType], object] = bool  # none outside of meshes
label = "this process"
"""Name of this process for clients, such as "gpus 3"."""


def set_label(text: str) -> None:
    """Set `label`, when the process starts."""
    global label
    label = text


def end_waits(reason: str) -> None:
    """End all waits of this process with BdbQuit, and pass later breakpoints. Any thread may call it."""
    global _ending
    _ending = reason


def is_ending() -> bool:
    """Return whether `end_waits` was called."""
    return _ending is not None


def raise_at_end() -> None:
    """Raise BdbQuit after `end_waits`."""
    if _ending is not None:
        from bdb import BdbQuit

        raise BdbQuit(f"the process is to stop: {_ending}")


def set_interruption_check(check: Callable[[FrameType], object]) -> None:
    """Set what `wait` calls with its frame. It raises if the running call was cancelled."""
    global _check_interruption
    _check_interruption = check


def wait(descriptors: Sequence[int]) -> list[int]:
    """Return the descriptors that can be read, at the latest after `POLL_S` seconds: then perhaps none.

    A cancellation of the running call is raised here (_actor/execution/interruption.py).
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    ready = [descriptor for descriptor, _ in poll.poll(POLL_S * 1000)]
    _check_interruption(sys._getframe())
    return ready


class Channel:
    """The file from which pdb reads commands and to which it writes.

    It listens while the debugger waits, from `open` to `close`. One client may be attached, and keeps its connection
    while the program goes on. Others send single commands. ``status`` returns what `list` shows, ``names`` completes a
    line, ``describe`` writes the place of the debugger, and ``left`` is called when the attached client has
    disconnected.
    """

    encoding, errors = "utf-8", "replace"

    def __init__(
        self,
        status: Callable[[], dict[str, Any]],
        names: Callable[[str, str, int, int], list[str]],
        describe: Callable[[], None],
        left: Callable[[], None],
    ) -> None:
        self._status, self._names, self._describe, self._left = status, names, describe, left
        self._listener: socket.socket | None = None
        self._peers: dict[int, Peer] = {}
        self._attached: Peer | None = None
        self._answered: Peer | None = None  # it has sent the command that runs
        self._commands: deque[tuple[Peer, str]] = deque()
        self._written: list[str] = []
        self._start = ""  # what the debugger has written when it stopped, until the first command
        self._prompt = ""
        self._author: Peer | None = None  # of the last command
        self.is_same_client = False
        """Whether the client that has sent the last command had also sent the one before it."""

    @property
    def is_attended(self) -> bool:
        """Whether a client waits for the next prompt."""
        return self._attached is not None or self._answered is not None

    @property
    def attached_pid(self) -> int:
        """Process of the attached client, or 0."""
        return 0 if self._attached is None else self._attached.pid

    # ---- the file

    def write(self, text: str) -> int:
        """Write output of the debugger."""
        self._written.append(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: output is sent before the next command is read."""

    def isatty(self) -> bool:
        """Return False."""
        return False

    def readline(self) -> str:
        """Return the next command of a client. There is no end of the file: without clients it waits for one.

        Raises BdbQuit after `end_waits`.
        """
        text = "".join(self._written)
        self._written.clear()
        output, newline, self._prompt = text.rpartition("\n")
        output += newline
        to = self._attached or self._answered
        if to is None:
            self._start += output
        else:
            self._send(to, output=output)
            self._send(to, prompt=self._prompt)
        self._answered = None
        while not self._commands:
            self._serve()
        self._start = ""
        self._answered, command = self._commands.popleft()
        self.is_same_client, self._author = self._author is self._answered, self._answered
        return command + "\n"

    # ---- clients

    def open(self) -> None:
        """Listen for clients. Raises OSError."""
        address = local_sockets.address_of(f"{SOCKET_PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        self._listener = local_sockets.listen_at(address, 16)

    def close(self, over: str | None) -> None:
        """Stop listening. Tell the client that the program goes on.

        ``over``: why the debugger has ended, "" for an unknown reason. None: the client gets the next prompt.
        """
        if self._listener is not None:
            with contextlib.suppress(OSError):  # ends it also in forks of this process, which have inherited it
                self._listener.shutdown(socket.SHUT_RDWR)
            local_sockets.close(self._listener)
            self._listener = None
        text = "".join(self._written)
        self._written.clear()
        for peer in list(self._peers.values()):
            if peer not in (self._attached, self._answered):
                self._drop(peer)
            elif over is None:
                self._send(peer, resumed=text)
            else:
                self._send(peer, over=over, text=text)
                self._drop(peer)
        self._start = ""
        self._commands.clear()

    def _serve(self) -> None:
        """Wait for requests for a moment, and handle them."""
        raise_at_end()
        assert self._listener is not None
        for descriptor in wait([self._listener.fileno(), *self._peers]):
            if descriptor == self._listener.fileno():
                self._accept(self._listener)
            elif descriptor in self._peers:
                self._read(self._peers[descriptor])

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        pid, user = local_sockets.peer(sock)
        if user != os.geteuid():
            sock.close()
            return
        sock.settimeout(SEND_TIMEOUT_S)
        self._peers[sock.fileno()] = Peer(sock, pid)

    def _read(self, peer: Peer) -> None:
        try:
            requests = peer.receive()
        except (EOFError, OSError, ValueError):
            self._drop(peer)
            return
        for request in requests:
            if peer.socket.fileno() in self._peers:  # else it was dropped meanwhile
                self._handle(peer, request)

    def _handle(self, peer: Peer, request: dict[str, Any]) -> None:
        what = request.get("do")
        if what == "status":
            self._send(peer, status=self._status())
        elif what not in ("attach", "names", "run"):
            self._send(peer, error=f"unknown request {what!r}: the client is of another release")
        elif self._attached not in (None, peer):
            self._send(peer, error=f"process {self.attached_pid} is attached to it")
        elif what == "attach":
            self._attached = peer
            self._send(peer, status=self._status())
            self._send(peer, output=self._start or self._description())
            self._send(peer, prompt=self._prompt)
        elif what == "names":
            self._send(peer, names=self._complete(request))
        else:
            self._commands.append((peer, str(request.get("command", "")).replace("\n", " ")))

    def _description(self) -> str:
        self._describe()
        text = "".join(self._written)
        self._written.clear()
        return text

    def _complete(self, request: dict[str, Any]) -> list[str]:
        try:
            text, line = str(request["text"]), str(request["line"])
            names = self._names(text, line, int(request["begin"]), int(request["end"]))
        except Exception:  # the completed expression runs code of the program, which may raise anything
            names = []
        self._written.clear()
        return names

    def _send(self, peer: Peer, **message: Any) -> None:
        try:
            peer.send(**message)
        except OSError:
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        """Close a connection. Its pending commands do not run."""
        self._peers.pop(peer.socket.fileno(), None)
        peer.close()
        self._commands = deque(entry for entry in self._commands if entry[0] is not peer)
        if self._answered is peer:
            self._answered = None
        if self._attached is peer:
            self._attached = None
            if self._listener is not None:
                self._left()
