"""Queue that runs the operations of one group one after the other, for all calling threads.

The compiled core orders operations of shared memory in the same way. This queue does so for operations of several
blocking stages.

A synchronous operation runs in its caller's thread when its turn comes. Asynchronous ones run in a thread of the group,
which is started with the first. Callbacks have threads of their own, because a callback may wait for the group's next
operation. The queue does not know what an operation does.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from monarch_backend._core import fork
from monarch_backend._core.limits import start_thread


class Operation:
    """One operation. Once ``done`` is set, ``failure`` is the exception that it raised, or None."""

    def __init__(self, body: Callable[[], None], then: Callable[[], None] | None) -> None:
        self.done = False
        self.failure: BaseException | None = None
        self._body, self._then = body, then
        self._ended = threading.Event()

    @property
    def asynchronous(self) -> bool:
        """True if a thread of the group runs it."""
        return self._then is not None

    def run(self) -> None:
        """Run the operation in this thread; an exception is kept in ``failure``."""
        try:
            self._body()
        except BaseException as error:
            self.failure = error
        del self._body  # it refers to the caller's tensors, and perhaps to this object in a cycle
        self.done = True
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        return self._ended.wait(min(seconds, threading.TIMEOUT_MAX))


class OperationQueue:
    """Queue of operations. The head is in progress."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.sequence = 0  # operations requested so far, counted by the callers
        self._queue: collections.deque[Operation] = collections.deque()
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def run(self, body: Callable[[], None]) -> BaseException | None:
        """Run ``body`` in this thread after all earlier operations; return the exception that it raised."""
        operation = Operation(body, None)
        with self._change:
            self._queue.append(operation)
            try:
                self._change.wait_for(lambda: self._queue[0] is operation)
            except BaseException:  # an interrupt: no other thread would run it
                self._queue.remove(operation)
                self._change.notify_all()
                raise
        self._execute(operation)
        return operation.failure

    def start(self, body: Callable[[], None], then: Callable[[], None]) -> Operation:
        """Run ``body`` in the group's thread, and afterwards ``then`` in another one."""
        operation = Operation(body, then)
        with self._change:
            self._queue.append(operation)
            if self._thread is None:
                # A daemon thread: a process may end with a group alive whose other ranks never call the operation.
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                start_thread(self._thread)
            self._change.notify_all()
        return operation

    def wait(self, operation: Operation, seconds: float) -> bool:
        """Return whether the operation is done within the time, as the core's groups do."""
        return operation.wait(seconds)

    def idle(self) -> bool:
        return not self._queue

    def stop(self) -> None:
        with self._change:
            self._stopped = True
            self._change.notify_all()

    def _execute(self, operation: Operation) -> None:
        operation.run()
        with self._change:
            self._queue.popleft()
            self._change.notify_all()

    def _serve(self) -> None:
        def mine() -> bool:
            return bool(self._queue) and self._queue[0].asynchronous

        while True:
            with self._change:
                self._change.wait_for(lambda: mine() or (self._stopped and not self._queue))
                if not self._queue:
                    self._thread = None
                    return
                operation = self._queue[0]
            self._execute(operation)
            if operation._then is not None:
                _callbacks.post(operation._then)
            del operation  # frees the caller's tensors


class _Callbacks:
    """Threads for callbacks: one for each that runs at the same time. Idle threads end after a while."""

    _PATIENCE = 10.0  # seconds

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._idle = 0

    def post(self, callback: Callable[[], None]) -> None:
        with self._change:
            self._waiting.append(callback)
            if self._idle >= len(self._waiting):
                self._change.notify()
                return
        try:
            start_thread(threading.Thread(target=self._serve, name="monarch_callback", daemon=True))
        except RuntimeError:  # too many threads
            with self._change:
                if callback not in self._waiting:  # another thread has taken it
                    return
                self._waiting.remove(callback)
            raise

    def _serve(self) -> None:
        while True:
            with self._change:
                self._idle += 1
                found = self._change.wait_for(lambda: bool(self._waiting), self._PATIENCE)
                self._idle -= 1
                if not found:
                    return
                callback = self._waiting.popleft()
            callback()
            del callback


_callbacks = _Callbacks()
fork.register(fork.Step.CALLBACK_THREADS, after_in_child=_callbacks.__init__)  # type: ignore[misc] # no threads in the child


def in_a_thread(call: Callable[[], None]) -> None:
    _callbacks.post(call)
