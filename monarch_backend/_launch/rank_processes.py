"""This host's ranks as processes of a fork server: start, wait, signal.

The launcher forks into itself and the server. Other fork servers are fresh interpreters. A launcher has imported torch
and done nothing else, so a copy of it is as good and saves a second import. A `RankProcess` has the role that
subprocess.Popen has for torch's agent. This module does not use torch.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

import cloudpickle  # type: ignore[import-untyped]

from monarch_backend._core import platform
from monarch_backend._launch import run_script
from monarch_backend._launch.kept_output import KeptOutput
from monarch_backend._processes import child_bootstrap, fork_server, system_calls
from monarch_backend._processes.fork_server_client import REPLY_TIMEOUT_S
from monarch_backend._processes.spawner import Event, Exited, ProcessSpec, Spawner, Started
from monarch_backend._telemetry import recorder
from monarch_backend._telemetry.labels import LAUNCHER

_log = logging.getLogger("monarch_backend")


@dataclass(frozen=True)
class ForkedServer:
    """A fork server that was forked from this process. It ends when ``connection`` does."""

    pid: int
    connection: socket.socket

    def wait(self) -> None:
        """Wait for the server's end after its connection's, but not without limit for a rank that hangs in a driver."""
        with contextlib.suppress(OSError, AttributeError):  # a kernel before 5.3, or a Python built on one
            watch = os.pidfd_open(self.pid)
            if not select.select([watch], [], [], REPLY_TIMEOUT_S)[0]:
                os.kill(self.pid, signal.SIGKILL)
            os.close(watch)
        _, status = os.waitpid(self.pid, 0)
        if status != 0:
            _kill_children()

    def discard(self) -> None:
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
    while (pids := system_calls.children()) and time.monotonic() < give_up:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.005)


def _serve(connection: socket.socket, launcher: int) -> NoReturn:
    try:
        system_calls.die_with_parent(launcher)
        os.setsid()  # the launcher handles Ctrl-C and ends its ranks
        system_calls.set_title("monarch fork server")
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


class RankProcess:
    """One rank, with the methods of a Popen that torch's agent calls."""

    def __init__(self, ranks: Ranks, label: str) -> None:
        self._ranks = ranks
        self.label = label
        self.number = 0  # the spawner's number
        self.pid = 0  # 0: not started yet
        self.returncode: int | None = None
        self.refusal = ""  # the reason, if it cannot be started

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ranks.wait_until(lambda: self.returncode is not None, timeout):
            raise subprocess.TimeoutExpired(self.label, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank's group, and SIGCONT as systemd does: a stopped process handles it at once."""
        for each in (number, signal.SIGCONT):
            self._ranks.kill(self, each)


class Ranks:
    """The ranks of this host. `close`, which a ``with`` calls at its end, kills those that are left."""

    def __init__(self, server: ForkedServer) -> None:
        self._changed = threading.Condition()
        self._processes: dict[int, RankProcess] = {}
        self._ended = 0
        self._server = server
        recorder.area(LAUNCHER)  # before the spawner makes it
        self._spawner = Spawner(self._on_event, connection=server.connection)
        # The path of a new interpreter, without the entry of the launcher's own script.
        safe = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
        self._path = sys.path[0 if safe else 1 :]
        self._kept = KeptOutput()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._spawner.close()
        self._kept.close()

    def start(
        self,
        words: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        stdouts: Sequence[str],
        stderrs: Sequence[str],
    ) -> list[RankProcess]:
        """Start ``python *words[i]`` for each i, and return when all run.

        Each environment is added to this process's. ``stdouts`` and ``stderrs`` are paths, empty for this process's
        own. Raises RuntimeError, with none of them running, when one cannot be started.
        """
        handled = [int(number) for number in signal.valid_signals() if callable(signal.getsignal(number))]
        system_calls.adopt_orphans()  # should the server die: `ForkedServer.wait` ends them then
        with contextlib.ExitStack() as files:
            specs = [
                ProcessSpec(
                    label=f"rank {environment.get('RANK', rank)}: {' '.join(words[rank][1:])}",
                    main=cloudpickle.dumps(functools.partial(run_script.run, list(words[rank]), handled)),
                    environment={**os.environ, **environment},
                    path=self._path,
                    argv=words[rank][2:] if words[rank][1] == "-m" else words[rank][1:],
                    cwd=os.getcwd(),
                    stdout=_open(stdouts[rank], files),
                    stderr=_open(stderrs[rank], files),
                )
                for rank, environment in enumerate(environments)
            ]
            started = self._spawn(specs)
        self.wait_until(lambda: all(process.pid or process.refusal for process in started), None)
        if refused := [process for process in started if process.refusal]:
            self._abandon(started)
            raise RuntimeError(f"{refused[0].label} could not be started: {refused[0].refusal}")
        for process, *paths in zip(started, stdouts, stderrs, strict=True):
            for stream, path in enumerate(paths, 1):
                if path:
                    self._kept.add(path, process.label, process.pid, stream)
            if process.returncode is not None:  # it exited before its files were added
                self._kept.end(process.pid)
        return started

    def _spawn(self, specs: Sequence[ProcessSpec]) -> list[RankProcess]:
        with self._changed:  # events come on another thread, which looks the processes up here
            started = [RankProcess(self, spec.label) for spec in specs]
            for process, number in zip(started, self._spawner.spawn(specs), strict=True):
                process.number = number
                self._processes[number] = process
            return started

    def _abandon(self, started: Sequence[RankProcess]) -> None:
        for process in started:
            self._spawner.kill(process.number)
        self.wait_until(lambda: all(p.refusal or p.returncode is not None for p in started), None)

    def kill(self, process: RankProcess, number: int) -> None:
        self._spawner.kill(process.number, number, group=True)

    def wait_for_end(self, seen: int, timeout: float) -> int:
        """Wait until more than ``seen`` ranks have ended, and return their number since the beginning."""
        self.wait_until(lambda: self._ended > seen, timeout)
        return self._ended

    def wait_until(self, happened: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for an event that makes ``happened()`` true. Return False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(happened, timeout)

    def _on_event(self, event: Event) -> None:
        with self._changed:
            process = self._processes.get(event.id)
            if process is None:  # a signal came between its start and its entry here: all ranks will end
                return
            if isinstance(event, Started):
                process.pid = event.pid
            elif isinstance(event, Exited):
                process.returncode = event.returncode
                self._ended += 1
                self._kept.end(event.pid)
                del self._processes[event.id]
                _remark(process, event)
            else:
                process.refusal = event.reason
                del self._processes[event.id]
            self._changed.notify_all()


def _remark(process: RankProcess, event: Exited) -> None:
    if event.reason:
        _log.error("%s (pid %d) was lost: %s", process.label, event.pid, event.reason)
    if event.oom_killed:
        _log.error(
            "%s (pid %d) was killed by the kernel for lack of memory: start fewer ranks, or let each use less",
            process.label,
            event.pid,
        )


def _open(path: str, files: contextlib.ExitStack) -> int | None:
    return files.enter_context(open(path, "w")).fileno() if path else None
