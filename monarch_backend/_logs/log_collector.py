"""Collector of workers' output: one thread in the controller that reads every worker's stdout and stderr.

It has the read ends of the workers' pipes. So it also shows the output of C libraries and of a dying interpreter,
without the worker's help. mesh_log.py processes the lines of a mesh.

Two locks. `_lock` guards the pipes and the lines that wait. Text that is ready to be written goes to `_outbox` under
it, in order. `_writing` is held while the outbox is written to the controller's stdout, for as long as the reader of
that stdout takes. Meanwhile the thread reads no pipes, pipes fill up, and workers wait in print().
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import selectors
import struct
import sys
import termios
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field

from monarch_backend._core import fork
from monarch_backend._core.limits import start_thread
from monarch_backend._core.platform import WAKE, wake_descriptors
from monarch_backend._logs.line_splitter import LineSplitter
from monarch_backend._logs.mesh_log import STDERR, STDOUT, LogOptions, MeshLog
from monarch_backend._telemetry import log_history

__all__ = ["STDERR", "STDOUT", "LogCollector", "LogOptions", "MeshLog"]

_READ_BYTES = 64 * 1024  # the default capacity of a pipe

# A line without its end (a prompt, a progress bar) is shown after this many seconds, or the mesh's window if that is
# longer. Less would tear the lines of a C program, whose stdio hands over 4096 bytes at a time, wherever they end.
_PARTIAL_LINE_TIMEOUT_S = 1.0

_FORK_TIMEOUT_S = 1.0


@dataclass(eq=False, slots=True)
class _Pipe:
    """The read end of one stream of one process."""

    fd: int
    mesh: MeshLog
    rank: int
    stream: int
    splitter: LineSplitter = field(default_factory=LineSplitter)


class LogCollector:
    r"""Reads the output of every process of every mesh and shows it on the controller's stdout and stderr.

    Lines are prefixed with text for the ranks that wrote them. Lines of one rank on one stream keep their order;
    nothing is promised between stdout and stderr, which are two pipes. The thread starts with the first pipe and ends,
    closing all descriptors, with the last one. When the interpreter exits, `close` is called: construct the collector
    before registering exit hooks that stop workers, so that those run first.

    >>> log = MeshLog("trainers", lambda ranks: "gpus " + ",".join(map(str, ranks)))
    >>> collector = LogCollector()
    >>> (out, worker_out), (err, worker_err) = os.pipe(), os.pipe()
    >>> os.write(worker_out, b"hello\n"), os.close(worker_out), os.close(worker_err)
    (6, None, None)
    >>> collector.add(log, 3, out, err); collector.flush(log)
    [gpus 3] hello
    True
    >>> collector.close()
    True
    """

    def __init__(self) -> None:
        self._reset()
        fork.register(
            fork.Step.LOG_COLLECTORS,
            before=self._before_fork,
            after_in_parent=self._after_fork_in_parent,
            after_in_child=self._forget_parent,
        )
        atexit.register(self.close)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._held: dict[int, list[threading.Lock]] = {}  # locks that the forking thread holds
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._pipes: dict[int, _Pipe] = {}
        self._partial: dict[_Pipe, float] = {}  # time at which a line without an end is shown
        self._waiting: dict[MeshLog, float] = {}  # time of each mesh's next output; past for one with new lines
        self._selector: selectors.BaseSelector | None = None
        self._waker: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._history: log_history.LogHistory | None = None

    def add(self, mesh: MeshLog, rank: int, stdout_fd: int, stderr_fd: int) -> None:
        """Read what ``rank`` of ``mesh`` writes, from the read ends of two pipes, which belong to the collector now.

        A rank may be added again, for the process that took the place of a dead one. Raises RuntimeError after `close`,
        or when no thread can be started; the descriptors stay the caller's. Raises OSError for a descriptor that cannot
        be waited for, such as one of a plain file.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(
                    f"the log collector is closed, so the output of rank {rank} of mesh {mesh.name!r} has no reader: "
                    "processes cannot be spawned while the program exits"
                )
            for fd in (stdout_fd, stderr_fd):
                os.set_blocking(fd, False)
                os.set_inheritable(fd, False)
            selector = self._selector or self._start()
            mesh.on_change = functools.partial(self._options_changed, mesh)
            mesh.history = self._history
            for fd, stream in ((stdout_fd, STDOUT), (stderr_fd, STDERR)):
                pipe = self._pipes[fd] = _Pipe(fd, mesh, rank, stream)
                mesh.open(rank, stream)
                selector.register(fd, selectors.EVENT_READ, pipe)

    def flush(self, mesh: MeshLog | None = None, timeout: float | None = 5.0) -> bool:
        """Write everything that the workers of ``mesh``, or of all, have written until now. Return whether it is done.

        Not for signal handlers: it waits for locks that the interrupted code may hold. ``timeout``: seconds to wait at
        most, for a controller whose stdout is not being read; None: no limit. What was not written in time stays
        queued.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:  # writes to the controller's stdout do not hold it
            self._drain(mesh)
        return self._write(_left(deadline))

    def remove(self, mesh: MeshLog, timeout: float | None = 5.0) -> bool:
        """Flush, then close the pipes of ``mesh``, also those whose other end a worker's child still holds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=_left(deadline)):
            return False
        try:
            self._drain(mesh, end=True)
            self._wake()
        finally:
            self._lock.release()
        return self._write(_left(deadline))

    def close(self, timeout: float | None = 5.0) -> bool:
        """Flush, close every pipe and end the thread; `add` raises from now on. Return the result of `flush`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        atexit.unregister(self.close)
        if not self._lock.acquire(timeout=_left(deadline)):
            return False
        try:
            self._closed = True
            thread = self._thread
            self._drain(None, end=True)
            self._close_history()
            self._wake()
        finally:
            self._lock.release()
        written = self._write(_left(deadline))
        if thread is not None:
            thread.join(max(0.0, _left(deadline)) if deadline is not None else None)
        return written

    def tail(self, mesh: MeshLog, rank: int) -> list[str]:
        """Return the last lines (20 at most) that ``rank`` wrote to stderr, also after its death. Call `flush`
        before.
        """
        with self._lock:
            return mesh.tail(rank)

    def last_lines(self, mesh: MeshLog, rank: int) -> list[str]:
        """Return the last lines (20 at most) that ``rank`` wrote to stdout and stderr, as `tail` does."""
        with self._lock:
            return mesh.last_lines(rank)

    def _start(self) -> selectors.BaseSelector:
        selector = self._selector = selectors.DefaultSelector()
        if self._history is None:
            self._history = log_history.make()
        self._waker = wake_descriptors()
        selector.register(self._waker[0], selectors.EVENT_READ, None)
        thread = threading.Thread(target=self._run, args=(selector,), name="monarch-logs", daemon=True)
        try:
            start_thread(thread)
        except BaseException:
            self._close_selector()
            raise
        self._thread = thread
        return selector

    def _run(self, selector: selectors.BaseSelector) -> None:
        timeout: float | None = None
        while True:
            events = selector.select(timeout)
            timeout = _PARTIAL_LINE_TIMEOUT_S
            try:
                with self._lock:
                    timeout = self._round(events)
                    if not self._pipes:
                        self._finish()
                        break
                self._write()
            except Exception:  # a reader that ends would hang every worker in print()
                with contextlib.suppress(Exception):
                    traceback.print_exc(file=sys.stderr)
        self._write()

    def _round(self, events: list[tuple[selectors.SelectorKey, int]]) -> float | None:
        """Read what is ready and put what is due into the outbox. Return in how many seconds the next output is due."""
        now = time.monotonic()
        for key, _ in events:
            pipe: _Pipe | None = key.data
            if pipe is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, _READ_BYTES)
            elif self._pipes.get(pipe.fd) is pipe:  # otherwise it was closed meanwhile
                self._read(pipe, now)
        for partial in [pipe for pipe, due in self._partial.items() if due <= now]:
            self._say_partial(partial, now, final=False)
        for mesh in [mesh for mesh, due in self._waiting.items() if due <= now]:
            self._outbox.extend(mesh.due(now))
            deadline = mesh.deadline()
            if deadline is None:
                del self._waiting[mesh]
            else:
                self._waiting[mesh] = deadline
        due = min((*self._waiting.values(), *self._partial.values()), default=None)
        return None if due is None else max(0.0, due - now)

    def _read(self, pipe: _Pipe, now: float, most: int = _READ_BYTES) -> int:
        try:
            data = os.read(pipe.fd, most)
        except BlockingIOError:
            return 0
        except OSError:  # a terminal reports EIO where a pipe reports its end
            data = b""
        if not data:
            self._end(pipe, now)
            return 0
        splitter = pipe.splitter
        lines = splitter.feed(data)
        if lines:
            pipe.mesh.say(pipe.rank, pipe.stream, lines, splitter, now)
            self._waiting[pipe.mesh] = now
            self._partial.pop(pipe, None)
        if splitter.has_partial and pipe not in self._partial:
            self._partial[pipe] = now + max(_PARTIAL_LINE_TIMEOUT_S, pipe.mesh.options.aggregate_window_sec or 0.0)
        return len(data)

    def _say_partial(self, pipe: _Pipe, now: float, *, final: bool) -> None:
        self._partial.pop(pipe, None)
        line = pipe.splitter.take_partial(final=final)
        if line is not None:
            pipe.mesh.say(pipe.rank, pipe.stream, [line], pipe.splitter, now)
            self._waiting[pipe.mesh] = now

    def _end(self, pipe: _Pipe, now: float) -> None:
        self._say_partial(pipe, now, final=True)
        del self._pipes[pipe.fd]
        assert self._selector is not None
        self._selector.unregister(pipe.fd)
        os.close(pipe.fd)
        pipe.mesh.end(pipe.rank, pipe.stream)
        self._waiting[pipe.mesh] = now

    def _drain(self, mesh: MeshLog | None, *, end: bool = False) -> None:
        """Read what is in the pipes at this moment, and no more. Put all waiting lines into the outbox.

        ``end``: also close the pipes.
        """
        now = time.monotonic()
        for pipe in [pipe for pipe in self._pipes.values() if mesh is None or pipe.mesh is mesh]:
            left = _bytes_in(pipe.fd)
            while left > 0 and (read := self._read(pipe, now, min(left, _READ_BYTES))):
                left -= read
            if end and self._pipes.get(pipe.fd) is pipe:
                self._end(pipe, now)
            elif pipe in self._partial:
                self._say_partial(pipe, now, final=False)
        for each in list(self._waiting) if mesh is None else [mesh]:
            self._outbox.extend(each.flush(now))
            self._waiting.pop(each, None)

    def _options_changed(self, mesh: MeshLog) -> None:
        with self._lock:
            mesh.options_changed()
            self._waiting[mesh] = 0.0
            self._wake()

    def _wake(self) -> None:
        if self._waker is not None:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes it, too
                os.write(self._waker[1], WAKE)

    def _finish(self) -> None:
        """Show all waiting lines after the last pipe has ended."""
        self._drain(None)
        self._close_selector()
        self._thread = None

    def _close_selector(self) -> None:
        if self._selector is not None and self._waker is not None:
            self._selector.close()
            for fd in set(self._waker):
                os.close(fd)
        self._selector = self._waker = None

    def _close_history(self) -> None:
        if self._history is not None:
            self._history.close()
            self._history = None

    def _write(self, timeout: float = -1.0) -> bool:
        """Write the outbox. Return False when another thread was still writing after ``timeout`` seconds."""
        while True:
            if not self._writing.acquire(timeout=timeout):
                return False
            try:
                self._write_outbox()
            finally:
                self._writing.release()
            if not self._outbox:  # otherwise a thread timed out waiting for this lock
                return True

    def _write_outbox(self) -> None:
        outbox = self._outbox
        while outbox:
            stream, texts = outbox[0][0], []
            while outbox and outbox[0][0] == stream:
                texts.append(outbox.popleft()[1])
            _show(stream, b"".join(texts).decode(errors="replace"))

    # A fork copies locks and the buffer of sys.stdout in the state that they have. So the forking thread takes the
    # locks first, with a timeout.
    def _before_fork(self) -> None:
        locks = (self._lock, self._writing)
        self._held[threading.get_ident()] = [lock for lock in locks if lock.acquire(timeout=_FORK_TIMEOUT_S)]

    def _after_fork_in_parent(self) -> None:
        for lock in self._held.pop(threading.get_ident(), ()):
            lock.release()

    def _forget_parent(self) -> None:
        """Drop pipes and thread in a child of fork: its parent reads the pipes."""
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):
                os.close(pipe.fd)
            pipe.mesh.close_files()
        self._close_selector()
        self._close_history()
        self._reset()


def _show(stream: int, text: str) -> None:
    """Write to the current stdout or stderr of the controller: a notebook's, a test's, or none."""
    out = sys.stdout if stream == STDOUT else sys.stderr
    with contextlib.suppress(Exception):  # closed or broken; the workers must go on and the others be read
        try:
            out.write(text)
        except UnicodeEncodeError as error:
            out.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        out.flush()


def _bytes_in(fd: int) -> int:
    count: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0]
    return count


def _left(deadline: float | None) -> float:
    """Return the seconds for `Lock.acquire`: -1 for no limit."""
    return -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
