"""Fork of the launcher into itself and a fork server, which then has torch already imported.

Other fork servers are fresh interpreters. A launcher has imported torch and done nothing else, so a copy of it is as
good and saves a second import. This module contains only the fork and the check that it was safe.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import NoReturn

from monarch_backend._core import platform
from monarch_backend._processes import child_bootstrap, fork_server, linux
from monarch_backend._processes.fork_server_client import REPLY_TIMEOUT_S


@dataclass(frozen=True)
class ForkedServer:
    """A fork server that was forked from this process. It ends when ``connection`` does."""

    pid: int
    connection: socket.socket

    def wait(self) -> None:
        """Wait for the server's end after that of its connection, and end the processes that it has left.

        A rank that hangs in a driver cannot be killed. The server would wait for it without limit; this function does
        not.
        """
        with contextlib.suppress(OSError, AttributeError):  # a kernel before 5.3, or a Python built on one
            watch = os.pidfd_open(self.pid)
            if not select.select([watch], [], [], REPLY_TIMEOUT_S)[0]:
                os.kill(self.pid, signal.SIGKILL)
            os.close(watch)
        _, status = os.waitpid(self.pid, 0)
        if status != 0:
            _kill_children()

    def discard(self) -> None:
        """End the server before it has served."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def fork() -> tuple[ForkedServer | None, str]:
    """Return the server, made before this process has threads or a device, or None; and the reason for None."""
    if not platform.HAS_SAFE_FORK:
        return None, platform.NO_FORK
    if threading.current_thread() is not threading.main_thread() or threading.active_count() > 1:
        names = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return None, f"the launcher has threads besides its main one, which a forked process would lack: {names}"
    fork_server.preload()
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # otherwise both processes would print it
    launcher = os.getpid()
    # Imported objects stay. The collector, which would write to all of their memory, skips them from now on; at
    # the launcher's end, too, where a last collection takes half a second.
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(theirs, launcher)
    theirs.close()
    server = ForkedServer(pid, ours)
    # OpenBLAS, which NumPy has loaded, has threads; it ends them before a fork and starts new ones when needed.
    # Threads that exist now belong to other libraries, and the forked server would lack them.
    others = len(os.listdir("/proc/self/task")) - 1
    if others:
        server.discard()
        return None, f"{others} threads of an imported library were running, which a forked process would lack"
    return server, ""


def _kill_children() -> None:
    """Kill the children, and their descendants, which become children meanwhile."""
    give_up = time.monotonic() + REPLY_TIMEOUT_S
    while (pids := linux.children()) and time.monotonic() < give_up:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.005)


def _serve(connection: socket.socket, launcher: int) -> NoReturn:
    try:
        linux.die_with_parent(launcher)
        os.setsid()  # the launcher handles Ctrl-C and ends its ranks
        linux.set_title("monarch fork server")
        stdout, stderr = _duplicate(1), _duplicate(2)
        configuration = fork_server.Configuration(connection.detach(), None, stdout, stderr, [], lasting=False)
        child_bootstrap.run(fork_server.serve(configuration))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)  # never return into the launcher's own code


def _duplicate(number: int) -> int:
    try:
        return os.dup(number)
    except OSError:  # the launcher was started without it
        return os.open(os.devnull, os.O_WRONLY)
