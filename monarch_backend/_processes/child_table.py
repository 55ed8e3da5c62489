"""Children of the fork server: they are started, reaped, and their descendants are killed.

fork_server.py has the sockets and clients.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping

import msgspec

from monarch_backend._core import platform
from monarch_backend._processes import cgroup, interpreter_args, system_calls
from monarch_backend._processes.spawn_protocol import Exited, Spawn, Started

# Variables that a running process cannot apply. A child whose value differs from the server's is spawned plainly.
_READ_AT_START = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED")


class StartError(Exception):
    """The process could not be started. The text gives the reason, and what to do."""


def why_not_fork(environment: Mapping[bytes, bytes], own: Mapping[bytes, bytes]) -> str | None:
    """Return why a child with ``environment`` must not be forked from this process, which started with ``own``."""
    if not platform.HAS_SAFE_FORK:
        return platform.NO_FORK
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        names = sorted(_thread_name(thread) for thread in threads if int(thread) != os.getpid())
        return f"the fork server has threads besides its main one, which a forked process would lack: {names}"
    for name in ("cuda", "xpu"):
        device = getattr(sys.modules.get("torch"), name, None)
        if device is not None and device.is_initialized():
            return f"torch.{name} is initialized in the fork server, and does not work after a fork"
    for variable in _READ_AT_START:
        if environment.get(os.fsencode(variable)) != own.get(os.fsencode(variable)):
            return f"{variable} has changed since the fork server started, and is read only at a start"
    return None


def _thread_name(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm") as comm:
            return comm.read().strip()
    except OSError:
        return "?"


class Processes:
    """Starts, signals and reaps processes. For one thread only; no other code of this process may wait for children."""

    def __init__(self) -> None:
        self._environment = dict(os.environb)
        self._alive: dict[int, int] = {}  # ids by pid
        self._killed: set[int] = set()
        self._untidy = False  # processes were reaped since the last `tidy`
        self._helpers = system_calls.children()  # made by an imported library
        self._oom_kills = cgroup.OomKills()
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._allow_open_files()
        system_calls.adopt_orphans()

    def _allow_open_files(self) -> None:
        """Raise the limit as far as possible, for connections and waiting requests. A child gets the inherited
        limit.
        """
        _, hard = self._open_files
        with contextlib.suppress(OSError, ValueError):  # the system's limit is lower now
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def start(self, spec: Spawn, stdout: int, stderr: int, stdin: int | None = None) -> Started:
        """Start the process; in a forked one, return pid 0. Raises StartError."""
        reason = why_not_fork(spec.environment, self._environment)
        if reason is not None and spec.method == "fork":
            raise StartError(f"MONARCH_START_METHOD=fork, but {reason}; unset it")
        plain = reason is not None or spec.method == "spawn"
        pid = None
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._open_files)
            pid = _spawn(spec, stdout, stderr, stdin) if plain else _fork()
        except (OSError, RuntimeError, ValueError) as error:
            raise StartError(_why_not_started(error)) from error
        finally:
            if pid != 0:
                self._allow_open_files()
        if pid:
            self._alive[pid] = spec.id
        # Where no process can be forked, the reason is not worth a warning.
        told = platform.HAS_SAFE_FORK and spec.method is None
        return Started(spec.id, pid, "spawn" if plain else "fork", reason if reason and told else "")

    def kill(self, pid: int, number: int, group: bool = False) -> None:
        """Send a signal to a process that was started here and has not been reaped, and to its ``group``."""
        if number == signal.SIGKILL:
            self._killed.add(pid)
        with contextlib.suppress(OSError, OverflowError):  # there is no such signal
            if group:
                with contextlib.suppress(ProcessLookupError):  # it was just forked and leads no process group yet
                    os.killpg(pid, number)
                    return
            os.kill(pid, number)

    def reap(self) -> Iterator[Exited]:
        """Return the processes that have ended since the last call. Call `tidy` after their ends have been sent."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                self._untidy = True
                if (death := self._death(*ended)) is not None:
                    yield death

    def _death(self, pid: int, status: int) -> Exited | None:
        self._helpers.discard(pid)
        number = self._alive.pop(pid, None)
        if number is None:
            return None
        if not platform.HAS_PRCTL:  # this process does not adopt its descendants, for `tidy`
            system_calls.kill_sessions([pid])
        returncode = os.waitstatus_to_exitcode(status)
        unexplained = returncode == -signal.SIGKILL and pid not in self._killed
        self._killed.discard(pid)
        return Exited(number, pid, returncode, os.WCOREDUMP(status), unexplained and self._oom_kills.again())

    def tidy(self) -> None:
        """Kill the remaining descendants of ended processes.

        Every process adopts its own descendants' orphans (child_bootstrap.py), so this one adopts only those of an
        ended process.
        """
        if not self._untidy:
            return
        self._untidy = False
        for pid in system_calls.children() - self._alive.keys() - self._helpers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        for pid in self._alive:
            os.kill(pid, signal.SIGKILL)
        if not platform.HAS_PRCTL:
            system_calls.kill_sessions(self._alive)
        self._helpers.clear()
        self._alive.clear()
        with contextlib.suppress(ChildProcessError):
            while True:
                self._untidy = True
                self.tidy()
                os.waitpid(-1, 0)


def _fork() -> int:
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            system_calls.die_with_parent(parent)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn(spec: Spawn, stdout: int, stderr: int, stdin: int | None) -> int:
    """Start a fresh interpreter that reads ``spec`` from an inherited file. It starts with this package's sys.path."""
    message = _file_of(msgspec.msgpack.encode(spec))
    try:
        for descriptor in (message, *interpreter_args.inherited()):
            os.set_inheritable(descriptor, True)  # no other thread could start a process meanwhile
        command = interpreter_args.command("monarch_backend._processes.child_bootstrap", str(message), sys.path)
        streams = [(os.POSIX_SPAWN_DUP2, stdout, 1), (os.POSIX_SPAWN_DUP2, stderr, 2)]
        if stdin is not None:
            streams.append((os.POSIX_SPAWN_DUP2, stdin, 0))
        return os.posix_spawn(command[0], command, spec.environment, file_actions=streams, setsid=platform.HAS_PRCTL)
    finally:
        os.close(message)


def _file_of(data: bytes) -> int:
    """Return a descriptor of a file without a name that holds ``data``, at its start."""
    if platform.HAS_MEMFD:
        descriptor = os.memfd_create("monarch spawn")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _why_not_started(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EAGAIN:
        return f"the system allows no more processes ({error}): raise `ulimit -u` or pids.max, or start fewer"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return f"there is no memory for another process ({error}): start fewer"
    return f"the process could not be made: {error}"
