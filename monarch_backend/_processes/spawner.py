"""Client of the fork server: starts processes on this host for a controller, or for a worker.

`Spawner` starts the server at its first use, sends requests to it, and forwards events of the processes. fork_server.py
is the server.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import selectors
import signal as signals
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from monarch_backend._core import env, fork
from monarch_backend._core.errors import MonarchError, public
from monarch_backend._core.limits import start_thread
from monarch_backend._processes import local_sockets, resource_limits, system_calls
from monarch_backend._processes.fork_server_client import REPLY_TIMEOUT_S, ForkServer, connect, start_server
from monarch_backend._processes.resource_limits import SpawnLimitError
from monarch_backend._processes.spawn_protocol import (
    BadMessageError,
    Channel,
    Event,
    Exited,
    Kill,
    Method,
    Spawn,
    SpawnFailed,
    Started,
    check,
    close_all,
    frame,
)
from monarch_backend._telemetry import recorder

__all__ = ["Event", "Exited", "ProcessSpec", "SpawnFailed", "SpawnLimitError", "Spawner", "Started"]

_log = logging.getLogger("monarch_backend")


RANKS_HERE = "MONARCH_LOCAL_RANKS"
"""Variable with the number of processes on the host, for its agent. The processes do not get it."""


@dataclass(frozen=True)
class LostWithHost:
    """Event of a spawner for another host: the host is lost. It ends its processes itself."""

    id: int
    reason: str


@public("monarch_backend.errors")
class HostLostError(MonarchError, RuntimeError):
    """A host is lost, so that no process can be started on it any more.

    `HostMesh.spawn_procs` raises it if the host is lost during the call.

    >>> from monarch_backend.errors import HostLostError
    >>> issubclass(HostLostError, RuntimeError)
    True
    """


@dataclass(frozen=True)
class ProcessSpec:
    """Description of a process to start.

    ``label`` names it in messages and in ``ps``, like "gpus 3". ``main`` is a cloudpickled callable without arguments.
    When it returns the process exits with 0, when it raises, with a traceback and 1. ``bootstrap``, another one, runs
    before other code of the caller's. ``environment``, ``path`` (sys.path), ``argv`` and ``cwd`` are complete.

    ``cpus`` is an entry of `cpu_affinity.plan`. ``threads`` is the number of threads of torch and OpenBLAS, unless the
    environment has OMP_NUM_THREADS; None means one for each of ``cpus``, or torch's default.

    ``stdout`` and ``stderr`` are open files of the caller's that become the process's; None stands for those of the
    fork server's start. ``stdin`` is another one; None stands for empty input. Secrets for the new process go through
    it: bytes in ``main`` would stay in the memory of the fork server, and of each process that is forked later.

    ``imports`` are modules of this package that the server imports once, before it forks. ``main_module`` is the result
    of `main_module.main_module`.
    """

    label: str
    main: bytes
    environment: Mapping[str, str]
    path: Sequence[str]
    argv: Sequence[str]
    cwd: str
    bootstrap: bytes | None = None
    cpus: frozenset[int] | None = None
    threads: int | None = None
    stdout: int | None = None
    stderr: int | None = None
    imports: Sequence[str] = ()
    main_module: tuple[str, str] = ("", "")
    stdin: int | None = None

    @property
    def files(self) -> list[int]:
        """Open files for the new process, in the order in which they are sent."""
        return [file for file in (self.stdout, self.stderr, self.stdin) if file is not None]


def spawn_message(
    number: int, spec: ProcessSpec, method: Method | None, recording: tuple[int, int, int] | None = None
) -> Spawn:
    """Return the request to a fork server, here or on another host."""
    return Spawn(
        id=number,
        label=spec.label,
        main=spec.main,
        environment={os.fsencode(name): os.fsencode(value) for name, value in spec.environment.items()},
        path=[os.fsencode(entry) for entry in spec.path],
        argv=[os.fsencode(word) for word in spec.argv],
        cwd=os.fsencode(spec.cwd),
        bootstrap=spec.bootstrap,
        cpus=None if spec.cpus is None else sorted(spec.cpus),
        threads=spec.threads,
        stdout=spec.stdout is not None,
        stderr=spec.stderr is not None,
        method=method,
        imports=list(spec.imports),
        main_module=(spec.main_module[0], os.fsencode(spec.main_module[1])),
        recording=recording,
        stdin=spec.stdin is not None,
    )


def _message(number: int, spec: ProcessSpec, method: Method | None, recording: tuple[int, int, int] | None) -> bytes:
    try:
        message = frame(spawn_message(number, spec, method, recording))
        check(message)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"process {spec.label!r} can't be sent to the fork server: {error}") from None
    for name in spec.environment:
        if not name or "=" in name:
            raise ValueError(f"process {spec.label!r}: its environment has a variable named {name!r}")
    return message


def _reserve_slots(specs: Sequence[ProcessSpec], undo: contextlib.ExitStack) -> list[tuple[int, int, int] | None]:
    """Return for each process where it records: this pid, the descriptor of this process's area, and the slot."""
    area = recorder.area()
    if area is None:
        return [None] * len(specs)
    slots = [area.reserve(spec.label) for spec in specs]
    for slot in filter(None, slots):
        undo.callback(area.cancel, slot)
    return [(os.getpid(), area.descriptor, slot) if slot else None for slot in slots]


class Spawner:
    """Starts processes, and reports their starts and ends. Any thread may call all methods.

    ``on_event`` is called for each process with Started and later Exited, or with SpawnFailed. It runs on a thread of
    the spawner, which it must not block. ``address`` is another spawner's: its server starts the processes of this one.
    ``connection`` is the first one of a server that this process has forked and will wait for. ``preload`` names
    modules that a server imports which is started here. With ``ignores_sigterm`` that server and its processes ignore
    SIGTERM.

    If the process of a spawner dies, the spawner's processes are killed with their descendants. A process forked from
    it needs a spawner of its own. Raises OSError without a listener at ``address``, PermissionError if it belongs to
    another user.

    >>> import cloudpickle, os, queue, sys
    >>> events = queue.SimpleQueue()
    >>> spawner = Spawner(events.put)
    >>> main = cloudpickle.dumps(lambda: None)
    >>> spawner.spawn([ProcessSpec("gpus 0", main, os.environ, sys.path, sys.argv, os.getcwd())])
    [1]
    >>> [type(events.get()).__name__ for _ in range(2)]
    ['Started', 'Exited']
    >>> spawner.close()
    """

    def __init__(
        self,
        on_event: Callable[[Event], None],
        address: str | None = None,
        *,
        connection: socket.socket | None = None,
        preload: Sequence[str] = (),
        ignores_sigterm: bool = False,
    ) -> None:
        self._on_event = on_event
        self._preload, self._ignores_sigterm = list(preload), ignores_sigterm
        if connection is not None:
            address = "nowhere"  # it has no listener
        self._given = address
        self._given_socket = connect(address) if address is not None and connection is None else connection
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._requests: list[tuple[bytes, tuple[int, ...]]] = []
        self._asked: set[int] = set()  # ids of processes without an event so far
        self._running: dict[int, int] = {}  # pids by id
        self._slots: dict[int, int] = {}  # of the recording, by id
        self._listener: socket.socket | None = None  # of a server that is to be started
        self._address = address or ""  # empty: there is no server, and none is needed
        self._channel: Channel[Event] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._unusable = ""  # reason why no process can be started any more
        self._closing = False
        self._said_why = False
        self._thread: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        fork.register(fork.Step.SPAWNERS, after_in_child=self._abandon)
        atexit.register(self.close)

    @property
    def address(self) -> str:
        """Address at which other processes of this user find this server. Starts it if needed."""
        with self._lock:
            self._ensure_server()
            return self._address

    def start(self) -> None:
        """Start the server ahead of the first spawn, without waiting for it."""
        with self._lock:
            self._ensure_server()

    def spawn(self, specs: Sequence[ProcessSpec]) -> list[int]:
        """Request the start of processes, and return their ids at once. The specs' files may be closed afterwards.

        Raises, with nothing started:

        - ValueError for no specs, a spec that is too large, or an invalid MONARCH_START_METHOD,
        - SpawnLimitError if the system has no room for the processes,
        - OSError for a file that is not open,
        - RuntimeError if the spawner is closed or the server at its address has ended.
        """
        if not specs:
            raise ValueError("spawn needs at least one process")
        method = cast("Method | None", env.get("MONARCH_START_METHOD") or None)
        files = max(len(spec.files) for spec in specs)
        resource_limits.check_spawn(len(specs), plain=method == "spawn", descriptors_each=files)
        ids = [next(self._numbers) for _ in specs]
        with contextlib.ExitStack() as undo:
            slots = _reserve_slots(specs, undo)
            messages = [
                _message(number, spec, method, slot) for number, spec, slot in zip(ids, specs, slots, strict=True)
            ]
            requests = [(message, _duplicates(spec.files, undo)) for message, spec in zip(messages, specs, strict=True)]
            with self._lock:
                self._ensure_server()
                self._asked.update(ids)
                self._slots.update((number, slot[2]) for number, slot in zip(ids, slots, strict=True) if slot)
                self._requests += requests
            undo.pop_all()
        self._wake()
        return ids

    def kill(self, number: int, signal: int = signals.SIGKILL, *, group: bool = False) -> None:
        """Send a signal to the process with this id, also to its process group with ``group=True``.

        A process that is not started yet will not start. No effect after its end. Raises ValueError for an invalid
        signal.
        """
        signals.Signals(signal)
        with self._lock:
            if self._closing or (number not in self._asked and number not in self._running):
                return
            self._requests.append((frame(Kill(number, signal, group)), ()))
        self._wake()

    def close(self) -> None:
        """Kill all processes of this spawner, and return when they, and a server that it has started, have ended."""
        with self._lock:
            self._closing = True
            self._unusable = self._unusable or "the spawner is closed"
            thread = self._thread
        atexit.unregister(self.close)
        self._wake()
        if thread is None:
            self._release()
        elif thread is not threading.current_thread():
            thread.join()

    # Called with the lock held.

    def _ensure_server(self) -> None:
        if self._unusable:
            raise RuntimeError(f"{self._unusable}: no process can be started here any more")
        if not self._address:
            self._listener, self._address = local_sockets.listen()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="monarch-spawner", daemon=True)
            start_thread(thread)
            self._thread = thread
        self._wake()

    # From any thread.

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # a full socket wakes it, too; a closed one needs no wake-up
            self._wake_write.send(b"\0")

    def _release(self) -> None:
        self._selector.close()
        for sock in (self._wake_read, self._wake_write, self._listener, self._given_socket):
            if sock is not None:
                sock.close()

    def _abandon(self) -> None:
        """Release everything in a process forked from this one, without a message to the server."""
        self._lock = threading.Lock()
        self._thread = None
        self._closing = True
        self._unusable = "this process was forked from the one that has the spawner"
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.returncode = 0  # another process's child cannot be waited for
        self._release()

    # The spawner's own thread. It also starts the server, which dies with this thread until it has imported torch.

    def _run(self) -> None:
        while not self._closing:
            if not self._address:
                self._selector.select()
                self._drain_wakes()
            elif (server := self._connect_or_start()) is not None:
                self._converse(server)
                self._selector.unregister(server.channel.socket)
                why = server.wait()
                server.close()
                self._channel = self._process = None
                self._lose(why)
        self._lose("the spawner was closed")
        self._release()

    def _connect_or_start(self) -> ForkServer | None:
        try:
            if self._given_socket is None:
                listener, self._listener = self._listener, None
                server = start_server(listener, self._preload, ignores_sigterm=self._ignores_sigterm)
            else:
                sock, self._given_socket = self._given_socket, None
                server = ForkServer(sock, None, None)
        except (OSError, RuntimeError) as error:
            self._lose(f"the fork server could not be started: {error}")
            return None
        self._channel, self._process = server.channel, server.process
        self._selector.register(server.channel.socket, selectors.EVENT_READ)
        return server

    def _converse(self, server: ForkServer) -> None:
        """Send requests and receive events, until the connection ends or closing has taken too long."""
        give_up: float | None = None
        while give_up is None or time.monotonic() < give_up:
            if self._closing and give_up is None:
                server.stop()
                give_up = time.monotonic() + REPLY_TIMEOUT_S
            self._send(server.channel)
            timeout = None if give_up is None else max(0.0, give_up - time.monotonic())
            for key, events in self._selector.select(timeout):
                if key.fileobj is self._wake_read:
                    self._drain_wakes()
                elif events & selectors.EVENT_READ and not self._hear(server.channel):
                    return

    def _send(self, channel: Channel[Event]) -> None:
        with self._lock:
            requests, self._requests = self._requests, []
        for message, files in requests:
            channel.put(message, files)
        if self._closing:
            channel.drop_unsent()
        try:
            channel.flush()
        except OSError:  # the server has ended: events may be left to read, then the end
            channel.drop_unsent()
        events = selectors.EVENT_READ | selectors.EVENT_WRITE * channel.has_unsent
        if self._selector.get_key(channel.socket).events != events:
            self._selector.modify(channel.socket, events)

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    def _hear(self, channel: Channel[Event]) -> bool:
        """Handle events. Return False at the end of the connection."""
        try:
            events = channel.receive()
        except (EOFError, OSError):
            return False
        except BadMessageError:
            _log.exception("the fork server sent an invalid message")
            return False
        for event in events:
            self._tell(event)
        return True

    def _tell(self, event: Event) -> None:
        with self._lock:
            self._asked.discard(event.id)
            if isinstance(event, Started):
                self._running[event.id] = event.pid
                slot = self._slots.get(event.id, 0)
                if slot and (area := recorder.area()) is not None:
                    area.forked(slot, event.pid)
            else:
                self._running.pop(event.id, None)
                slot = self._slots.pop(event.id, 0)
                if slot and (area := recorder.area()) is not None:
                    area.end(slot, event.returncode if isinstance(event, Exited) else 1)
        if isinstance(event, Started) and event.reason and not self._said_why:
            self._said_why = True
            _log.warning("processes are started one by one, and each imports torch itself: %s", event.reason)
        try:
            self._on_event(event)
        except Exception:
            _log.exception("on_event of a Spawner raised on %r", event)

    def _lose(self, why: str) -> None:
        """Handle the end of the server: report the end of its processes, and be ready to start another one."""
        with self._lock:
            asked, self._asked = sorted(self._asked), set()
            running, self._running = self._running, {}
            requests, self._requests = self._requests, []
            if self._given is not None:
                self._unusable = self._unusable or why
            else:
                local_sockets.remove(self._address)
            self._address = ""
        for _, files in requests:
            close_all(files)
        _kill_what_is_left(running.values())
        for number in asked:
            self._tell(SpawnFailed(number, why))
        for number, pid in running.items():
            self._tell(Exited(number, pid, -signals.SIGKILL, reason=why))


def _kill_what_is_left(pids: Collection[int]) -> None:
    """Kill descendants of a dead server's processes. The processes died with it, their orphans did not."""
    give_up = time.monotonic() + REPLY_TIMEOUT_S
    while pids and system_calls.kill_sessions(pids) and time.monotonic() < give_up:
        time.sleep(0.005)


def _duplicates(files: Sequence[int], undo: contextlib.ExitStack) -> tuple[int, ...]:
    made = tuple(os.dup(file) for file in files)
    undo.callback(close_all, made)
    return made
