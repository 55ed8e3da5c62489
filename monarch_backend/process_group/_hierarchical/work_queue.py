"""The operations of one group, one after the other, whoever asks for them: what the compiled core does for shared
memory, for operations that are made of several blocking stages.

A synchronous operation runs in its caller's thread when its turn comes; asynchronous ones run in a thread of the
group, made with the first. Callbacks get threads of their own, because one that waits for the group's next operation
must not keep that from running. What an operation does is not known here.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

from monarch_backend._core import fork
from monarch_backend._core.limits import start_thread


class Operation:
    """One operation; ``fault`` is what it raised, and settled once ``done``."""

    def __init__(self, body: Callable[[], None], then: Callable[[], None] | None) -> None:
        self.done = False
        self.fault: BaseException | None = None
        self._body, self._then = body, then
        self._ended = threading.Event()

    @property
    def asynchronous(self) -> bool:
        """True for one that a thread of the group runs."""
        return self._then is not None

    def run(self) -> None:
        """Do it, here and now; keeps what it raises."""
        try:
            self._body()
        except BaseException as error:
            self.fault = error
        del self._body  # it holds the caller's tensors, and perhaps this: they must not wait for the garbage collector
        self.done = True
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Until it is done or the time is over; whether it is done."""
        return self._ended.wait(min(seconds, threading.TIMEOUT_MAX))


class OperationQueue:
    """A queue of operations, whose head is the one under way."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.sequence = 0  # operations that were asked for, counted by who asks
        self._queue: collections.deque[Operation] = collections.deque()
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def run(self, body: Callable[[], None]) -> BaseException | None:
        """Do ``body`` in this thread when everything before it is done; what it raised."""
        operation = Operation(body, None)
        with self._change:
            self._queue.append(operation)
            try:
                self._change.wait_for(lambda: self._queue[0] is operation)
            except BaseException:  # an interrupt: nobody else would run it
                self._queue.remove(operation)
                self._change.notify_all()
                raise
        self._execute(operation)
        return operation.fault

    def start(self, body: Callable[[], None], then: Callable[[], None]) -> Operation:
        """Have ``body`` done in the group's thread, and afterwards ``then`` in another."""
        operation = Operation(body, then)
        with self._change:
            self._queue.append(operation)
            if self._thread is None:
                # A daemon: a process may end with a group alive, whose other ranks never come.
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                start_thread(self._thread)
            self._change.notify_all()
        return operation

    def wait(self, operation: Operation, seconds: float) -> bool:
        """As the core's groups do it: whether the operation was done within the time."""
        return operation.wait(seconds)

    def idle(self) -> bool:
        """True when nothing is under way or waiting."""
        return not self._queue

    def stop(self) -> None:
        """Let the thread end once the queue is empty."""
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
            del operation  # and with it the caller's tensors


class _Callbacks:
    """Threads for callbacks: as many as are busy at once, gone after a while with nothing to do."""

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
        except RuntimeError:  # there are too many
            with self._change:
                if callback not in self._waiting:  # another thread has it
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
    """Have it done in a thread of its own, as callbacks are."""
    _callbacks.post(call)
