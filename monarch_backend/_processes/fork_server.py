"""The fork server: a process that imports torch once (`MONARCH_PRELOAD_TORCH`), and starts processes by forking itself.

It is a clean interpreter without threads or accelerator context. It never imports the user's program, and unpickles
nothing: its children do. Each connection owns the processes that it has requested. At its end they are killed, with all
their descendants. At the end of the first connection, the controller's, everything ends.

Where fork is not safe, as on macOS, the server starts fresh interpreters instead, and imports nothing for them. It
still owns, reaps and kills the processes of all connections.

child_table.py starts and reaps children, child_bootstrap.py is their first code, spawner.py is the client.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from monarch_backend._core import env, platform
from monarch_backend._core.garbage_collection import without_collector
from monarch_backend._processes import child_bootstrap, finalization, local_sockets, system_calls
from monarch_backend._processes.child_table import Processes, StartError
from monarch_backend._processes.spawn_protocol import (
    BadMessageError,
    Channel,
    Event,
    Kill,
    Request,
    Spawn,
    SpawnFailed,
    close_all,
    frame,
)

# Higher layers name theirs when they make a Spawner.
_WITH_TORCH = ("torch", "torch.distributed", "monarch_backend.process_group")
_PRELOAD = (
    *_WITH_TORCH,
    "asyncio",
    "concurrent.futures",
    "logging",
    "traceback",
)
_PRELOAD_IF_THERE = ("numpy", "numpy.random", "uvloop")

# Limit of queued requests of one connection. Further ones wait in its socket.
_MAX_WAITING = 32


class Configuration(msgspec.Struct, frozen=True):
    """Configuration of the server by its spawner: inherited descriptors, and modules to import.

    ``lasting``: the server will start processes for a long time. Then a few tenths of a second at its start make each
    of them cheaper. ``ignores_sigterm``: the server and its processes ignore SIGTERM, which is for their starter.
    """

    connection: int
    listener: int | None
    stdout: int
    stderr: int
    preload: list[str]
    lasting: bool = True
    ignores_sigterm: bool = False


def main(argument: str) -> NoReturn:
    """Run the server. ``argument`` is a Configuration in JSON. In a child it continues with the child's bootstrap."""
    system_calls.set_title("monarch fork server")
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the thread that started this process may have blocked some
    configuration = msgspec.json.decode(argument, type=Configuration)
    preload(configuration.preload)
    child_bootstrap.run(serve(configuration))


def serve(configuration: Configuration) -> Spawn:
    """Run the server in a process that has made its imports, and that dies with its parent until now.

    Returns in children only, with the spec of each.
    """
    server = Server(configuration)
    system_calls.outlive_parent()  # from now on the end of the connection ends the server, with its children
    spec = server.serve()
    if spec is None:
        os._exit(0)
    return spec


def preload(more: Sequence[str] = ()) -> None:
    """Import modules that children will need, if they are forked."""
    if not platform.HAS_SAFE_FORK:
        return
    with without_collector():
        left_out = () if env.get("MONARCH_PRELOAD_TORCH") else _WITH_TORCH
        for name in (*_PRELOAD, *more):
            if name not in left_out:
                importlib.import_module(name)
        for name in _PRELOAD_IF_THERE:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    child_bootstrap.openblas()  # found once, for all children


@dataclass(frozen=True)
class _Job:
    """A request that waits for its turn, with its files for stdout, stderr and stdin."""

    spec: Spawn
    files: list[int | None]

    def close(self) -> None:
        close_all(file for file in self.files if file is not None)


@dataclass(eq=False)
class _Client:
    """A connection, and the processes that it owns."""

    channel: Channel[Request]
    pid: int
    first: bool
    pidfd: int | None = None
    waiting: deque[_Job] = field(default_factory=deque)
    pids: dict[int, int] = field(default_factory=dict)  # of its living processes, by id
    closing: bool = False
    gone: bool = False

    def say(self, event: Event) -> None:
        if not self.gone:
            self.channel.put(frame(event))


class Server:
    """Loop of the server. Single-threaded: it listens, starts one process per client and round, and reaps."""

    def __init__(self, configuration: Configuration) -> None:
        self._stdout, self._stderr = configuration.stdout, configuration.stderr
        self._lasting, self._ignores_sigterm = configuration.lasting, configuration.ignores_sigterm
        inherited = {configuration.connection, configuration.listener, self._stdout, self._stderr} - {None}
        for descriptor in inherited:
            os.set_inheritable(descriptor, False)  # type: ignore[arg-type]
        self._keep = _open_descriptors() - inherited - {0, 1, 2}  # threads of an imported library
        self._processes = Processes()
        self._owners: dict[int, _Client] = {}  # by pid of the process
        self._clients: list[_Client] = []
        self._selector = selectors.DefaultSelector()
        self._watch_signals()
        self._listener: socket.socket | None = None
        if configuration.listener is not None:
            self._listener = socket.socket(fileno=configuration.listener)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)
        self._add_client(socket.socket(fileno=configuration.connection), first=True)

    def serve(self) -> Spawn | None:
        """Run until the first connection has ended, then return None. In a child, return its spec, with all descriptors
        closed.
        """
        self._settle()
        while self._clients:
            busy = any(client.waiting for client in self._clients)
            for key, events in self._selector.select(0 if busy else None):
                key.data(events)
            for client in list(self._clients):
                if client.waiting:
                    job = client.waiting.popleft()
                    if self._start(client, job):
                        self._leave()
                        return job.spec
                    job.close()
                self._attend(client)
            self._processes.tidy()
        self._processes.end()
        return None

    def _settle(self) -> None:
        """Make all imported modules cheap to copy."""
        finalization.remember_preloaded()  # here: a child would copy 800 shared pages
        if self._lasting:
            gc.collect()
            system_calls.use_huge_pages()
        gc.freeze()  # a child's collector skips objects of the server, so their memory stays shared

    def _import(self, names: Sequence[str]) -> None:
        """Import further modules for children, of this package only: no user code runs in the server."""
        missing = [name for name in names if name not in sys.modules]
        if not missing:
            return
        if others := [name for name in missing if not name.startswith("monarch_backend.")]:
            raise StartError(f"the fork server imports modules of monarch_backend only, not {', '.join(others)}")
        before = _open_descriptors()
        try:
            with without_collector():
                for name in missing:
                    importlib.import_module(name)
        except Exception as error:
            raise StartError(f"the fork server can't import {', '.join(missing)}: {error!r}") from error
        self._keep |= _open_descriptors() - before
        self._settle()

    # Processes

    def _start(self, client: _Client, job: _Job) -> bool:
        """Start the process; return True in a forked one."""
        stdout, stderr, stdin = job.files
        stdout = self._stdout if stdout is None else stdout
        stderr = self._stderr if stderr is None else stderr
        try:
            if job.spec.method != "spawn":
                self._import(job.spec.imports)
            started = self._processes.start(job.spec, stdout, stderr, stdin)
        except StartError as error:
            client.say(SpawnFailed(job.spec.id, str(error)))
            return False
        if started.pid == 0:
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            if stdin is not None:
                os.dup2(stdin, 0)
            return True
        client.pids[started.id] = started.pid
        self._owners[started.pid] = client
        client.say(started)
        return False

    def _leave(self) -> None:
        """Close the server's descriptors in a forked child. Objects go first: a late one could close another's
        descriptor.
        """
        for client in self._clients:
            client.channel.socket.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        for descriptor in _open_descriptors() - self._keep - {0, 1, 2}:
            os.close(descriptor)

    def _watch_signals(self) -> None:
        read, write = os.pipe()
        for end in (read, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # the pipe reports it
        self._selector.register(read, selectors.EVENT_READ, lambda _: self._on_signals(os.read(read, 4096)))

    def _on_signals(self, numbers: bytes) -> None:
        for death in self._processes.reap():
            client = self._owners.pop(death.pid)
            del client.pids[death.id]
            client.say(death)
        if signal.SIGTERM in numbers and not self._ignores_sigterm:
            for client in self._clients:
                self._close(client)

    # Connections

    def _add_client(self, sock: socket.socket, first: bool = False) -> None:
        pid = local_sockets.peer(sock)[0]
        client = _Client(Channel(sock, msgspec.msgpack.Decoder(Request)), pid, first)
        self._clients.append(client)
        self._listen(client, selectors.EVENT_READ)
        if platform.HAS_PIDFD:
            # Copies of the client, forked by it, may hold the connection open when it is dead.
            with contextlib.suppress(OSError):  # a kernel before 5.3
                client.pidfd = os.pidfd_open(pid)
                self._selector.register(client.pidfd, selectors.EVENT_READ, lambda _: self._on_client_death(client))

    def _on_connection(self, _: int) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(OSError):  # it has disconnected already
            sock, _ = self._listener.accept()
            if local_sockets.peer(sock)[1] == os.geteuid():
                self._add_client(sock)
            else:
                sock.close()

    def _on_client_death(self, client: _Client) -> None:
        client.gone = True
        client.channel.drop_unsent()
        self._forget_pidfd(client)
        self._close(client)

    def _on_ready(self, client: _Client, events: int) -> None:
        if not events & selectors.EVENT_READ or client.closing:
            return  # _attend sends
        try:
            for request in client.channel.receive():
                self._on_request(client, request)
        except (EOFError, OSError):
            self._close(client)
        except Exception as error:  # BadMessageError or another effect of invalid bytes; other clients continue
            print(f"closed the connection of pid {client.pid}: {error!r}", file=sys.stderr, flush=True)
            self._close(client)

    def _on_request(self, client: _Client, request: Request) -> None:
        if isinstance(request, Kill):
            self._on_kill(client, request)
            return
        if request.id in client.pids or any(request.id == job.spec.id for job in client.waiting):
            raise BadMessageError(f"the id {request.id} is taken")
        has_files = (request.stdout, request.stderr, request.stdin)
        files = [client.channel.take_descriptor() if has_file else None for has_file in has_files]
        spec = msgspec.structs.replace(request, ignores_sigterm=self._ignores_sigterm)
        client.waiting.append(_Job(spec, files))

    def _on_kill(self, client: _Client, request: Kill) -> None:
        if request.id in client.pids:
            self._processes.kill(client.pids[request.id], request.signal, request.group)
        for job in client.waiting:
            if job.spec.id == request.id:
                client.waiting.remove(job)
                job.close()
                client.say(SpawnFailed(request.id, f"signal {request.signal} was sent to it before it was started"))
                return

    def _close(self, client: _Client) -> None:
        """Stop reading from ``client`` and kill its processes. The connection stays until their ends are sent."""
        if client.closing:
            return
        client.closing = True
        while client.waiting:
            job = client.waiting.popleft()
            job.close()
            client.say(SpawnFailed(job.spec.id, "its spawner was closed before it was started"))
        for pid in client.pids.values():
            self._processes.kill(pid, signal.SIGKILL)
        if client.first:
            for other in self._clients:
                self._close(other)
            if self._listener is not None:
                self._selector.unregister(self._listener)
                local_sockets.close(self._listener)
                self._listener = None

    def _attend(self, client: _Client) -> None:
        """Send what can be sent, drop a client that is done, else wait for the events that it needs."""
        try:
            client.channel.flush()
        except OSError:
            client.gone = True
            client.channel.drop_unsent()
            self._close(client)
        if client.closing and not client.pids and not client.channel.has_unsent:
            self._processes.tidy()  # the end of the connection reports that nothing is left
            self._listen(client, 0)
            self._forget_pidfd(client)
            self._clients.remove(client)
            client.channel.close()
            return
        reads = not client.closing and len(client.waiting) < _MAX_WAITING
        self._listen(client, reads * selectors.EVENT_READ | client.channel.has_unsent * selectors.EVENT_WRITE)

    def _listen(self, client: _Client, events: int) -> None:
        sock = client.channel.socket
        registered = self._selector.get_map().get(sock)
        if registered is not None and registered.events == events:
            return
        if registered is not None:
            self._selector.unregister(sock)
        if events:
            self._selector.register(sock, events, lambda ready: self._on_ready(client, ready))

    def _forget_pidfd(self, client: _Client) -> None:
        if client.pidfd is not None:
            self._selector.unregister(client.pidfd)
            os.close(client.pidfd)
            client.pidfd = None


def _open_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd" if platform.HAS_PROC else "/dev/fd"):
        with contextlib.suppress(OSError):  # the directory's own, closed by now
            os.fstat(int(name))
            found.add(int(name))
    return found
