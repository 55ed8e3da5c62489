"""The launcher becomes two: itself, and a fork server that has torch already.

A fork server of mesh/ is a fresh interpreter. A launcher has imported torch and done nothing else yet, so a copy of it
is as good, and nobody waits for a second import. Only that copying, and whether it was safe, live here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import NoReturn

from monarch_backend.mesh import _fork_server, _linux


@dataclass(frozen=True)
class ForkedServer:
    """A fork server that was forked from this process; it ends when ``connection`` does."""

    pid: int
    connection: socket.socket

    def wait(self) -> None:
        """Wait for its end, which the end of the connection has brought about."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def discard(self) -> None:
        """End it before it has served."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()


def fork() -> tuple[ForkedServer | None, str]:
    """Make the server, before this process has threads or a device; or (None, why not)."""
    if not _linux.LINUX:
        return None, f"fork is not safe on {sys.platform}"
    if threading.current_thread() is not threading.main_thread() or threading.active_count() > 1:
        names = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return None, f"the launcher has other threads than its main one, which a forked process would lack: {names}"
    _fork_server.preload()
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # else both would print it
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(theirs, launcher)
    theirs.close()
    server = ForkedServer(pid, ours)
    # OpenBLAS, which NumPy has loaded, has threads; it ends them before a fork and makes them anew when it needs some.
    # Whoever is still here now is another's, and the server a torso.
    others = len(os.listdir("/proc/self/task")) - 1
    if others:
        server.discard()
        return None, f"{others} threads of an imported library were running, which a forked process would lack"
    return server, ""


def _serve(connection: socket.socket, launcher: int) -> NoReturn:
    try:
        _linux.die_with_parent(launcher)
        os.setsid()  # Ctrl-C is for the launcher, which decides what becomes of its ranks
        _linux.set_title("monarch fork server")
        stdout, stderr = _duplicate(1), _duplicate(2)
        _fork_server.serve(_fork_server.Configuration(connection.detach(), None, stdout, stderr, [], lasting=False))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)  # never into the launcher's own code


def _duplicate(number: int) -> int:
    try:
        return os.dup(number)
    except OSError:  # the launcher was started without it
        return os.open(os.devnull, os.O_WRONLY)
