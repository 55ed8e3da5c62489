"""Spawner for processes on another host, with the methods of `Spawner`, which starts processes on this one.

Requests go to the host's agent, which has a Spawner there. Events and output of the processes come back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from monarch_backend._core.limits import start_thread
from monarch_backend._hosts.protocol import Exited, Kill, KillIfUnresponsive, Output, OutputTaken, SpawnFailed, Started
from monarch_backend._processes.spawner import HostLostError, LostWithHost, ProcessSpec, spawn_message


class RemoteSpawner:
    """Spawner for one other host. ``tell(message)`` sends to the agent, in order, and never waits. Ids are unique."""

    _hosts = itertools.count(1)

    def __init__(self, tell: Callable[[Any], None], on_event: Callable[[Any], None]) -> None:
        self._tell, self._on_event = tell, on_event
        self._ids = itertools.count(next(self._hosts) << 40)
        self._lock = threading.Lock()
        self._files: dict[int, dict[int, int]] = {}  # descriptors that take the output, by process and stream
        self._running: set[int] = set()
        self._lost: str | None = None
        self._output: queue.SimpleQueue[Output | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None

    @property
    def address(self) -> str:
        """Empty: the agent of the host knows its fork server."""
        return ""

    def spawn(self, specs: Sequence[ProcessSpec]) -> list[int]:
        messages = [spawn_message(next(self._ids), spec, None) for spec in specs]
        with self._lock:
            if self._lost is not None:
                raise HostLostError(f"no process can be started there any more: {self._lost}")
            for message, spec in zip(messages, specs, strict=True):
                self._running.add(message.id)
                wanted = {stream: fd for stream, fd in ((1, spec.stdout), (2, spec.stderr)) if fd is not None}
                self._files[message.id] = {stream: os.dup(fd) for stream, fd in wanted.items()}
        for message in messages:
            self._tell(message)
        return [message.id for message in messages]

    def kill(self, number: int, signal: int = 9) -> None:
        if self._lost is None:
            self._tell(Kill(number, signal))

    def kill_if_unresponsive(self, number: int, stop_read: bool) -> None:
        """Kill a process that does not read its messages. Only its host can find that out."""
        if self._lost is None:
            self._tell(KillIfUnresponsive(number, stop_read))

    def heard(self, message: Any) -> None:
        if isinstance(message, Output):
            self._put(message)
        elif isinstance(message, (Started, Exited, SpawnFailed)):
            if not isinstance(message, Started):
                self._over(message.id)
            self._on_event(message)

    def host_lost(self, why: str) -> None:
        with self._lock:
            self._lost = why
            running = sorted(self._running)
        for number in running:
            self._over(number)
            self._on_event(LostWithHost(number, why))
        self._output.put(None)

    def close(self) -> None:
        """Kill all processes. The agent ends with its controller, and kills those that are left."""
        with self._lock:
            running = sorted(self._running)
        for number in running:
            self.kill(number)
        if self._writer is not None:
            self._output.put(None)

    def _over(self, number: int) -> None:
        with self._lock:
            self._running.discard(number)
            streams = list(self._files.get(number, ()))
        for stream in streams:
            self._put(Output(number, stream, b""))

    def _put(self, output: Output) -> None:
        self._output.put(output)
        with self._lock:
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="monarch-remote-output", daemon=True)
                start_thread(self._writer)

    def _write(self) -> None:
        """Write output, on a separate thread: the reader of these pipes may be slow."""
        while (output := self._output.get()) is not None:
            with self._lock:
                files = self._files.get(output.id, {})
                fd = files.get(output.stream)
                if not output.data:
                    files.pop(output.stream, None)
                    if not files:
                        self._files.pop(output.id, None)
            if not output.data:
                if fd is not None:
                    os.close(fd)
                continue
            if fd is not None:
                view = memoryview(output.data)
                with contextlib.suppress(OSError):
                    while view:
                        view = view[os.write(fd, view) :]
            if self._lost is None:  # also for output without a descriptor: the agent counts unacknowledged bytes
                self._tell(OutputTaken(len(output.data)))
