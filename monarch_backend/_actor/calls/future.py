"""Results of calls: a value or an error that arrives later, for threads and for asyncio.

This module sends no messages. `_set`, `_fail`, `set_lazy_result` and `set_lazy_exception` finish a future.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, Generic, TypeVar

from monarch_backend._actor.calls.unread_errors import UnreadError, describe_local
from monarch_backend._actor.errors import CancelledError, MeshFailure, SupervisionError
from monarch_backend._actor.program_exit import is_ending
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._transport.local.event_loop import release

log = logging.getLogger("monarch_backend")

UNLABELLED = "an operation"
"""Label of a future that says nothing of what it waits for."""

T = TypeVar("T")


class Future(Generic[T]):
    """A value that arrives later, or the error in its place. Any thread may read it, any number of times.

    An error that is never read is logged once, when the future is collected or the program ends. `ignore` prevents
    that. A future can be awaited in asyncio; pickling it raises TypeError.

    >>> from monarch_backend.actor import Future
    >>> done = Future.of(3)
    >>> done.get(), done.exception()
    (3, None)
    """

    # _unread stays unset until the call fails: a call that succeeds spends no time on it.
    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_cancel",
        "_error",
        "_lock",
        "_raw",
        "_unread",
        "_value",
        "_wait",
        "ready",
        "wait_lock",
    )  # fmt: skip

    _unread: UnreadError | None

    def __init__(
        self, wait: Callable[[Any, float | None], bool], cancel: Callable[[str], object] | None = None
    ) -> None:
        self.ready = False
        self.wait_lock: threading.Lock | None = None
        self._wait = wait
        self._cancel = cancel
        self._value: Any = None
        self._error: BaseException | None = None
        self._raw: Callable[[], T] | None = None  # makes the value at the first read
        self._callbacks: list[Callable[[Future[T]], None]] | None = None
        self._lock: threading.Lock | None = None

    @classmethod
    def of(cls, value: T) -> Future[T]:
        """Return a future that has its value already.

        >>> from monarch_backend.actor import Future
        >>> Future.of(3).done()
        True
        """
        future: Future[T] = cls(no_wait)
        future._value, future.ready = value, True
        return future

    # ---- for users

    def get(self, timeout: float | None = None) -> T:
        """Wait for the value, at most ``timeout`` seconds, and return it. None waits without limit.

        Raises the error of the call. Raises TimeoutError if the value does not arrive in time; the call goes on, and
        `get` may be called again. Raises CancelledError if the message that the actor runs is cancelled meanwhile, or
        the actor is ended.
        Raises ValueError for a negative timeout or NaN, and TypeError for a value that is neither a number of seconds
        nor a timedelta.

        Warns with RuntimeWarning inside a running event loop, which it would block: ``await`` the future there.
        """
        if timeout is not None:
            timeout = check_timeout(timeout)
        if not self.ready:
            self._warn_in_loop()
            try:
                is_done = self._wait(self, timeout)
            except KeyboardInterrupt as error:
                if not self.ready and (text := self._late_text(0.0)) and sys.version_info >= (3, 11):
                    error.add_note(f"The call goes on{text}. Future.cancel() or ProcMesh.cancel() ends it.")
                raise
            if not is_done and not self.ready:
                limit = "" if timeout is None else f" within {timeout:g} s"  # None: a replay of changed code
                text = f"no answer{limit}; the call goes on, see Future.cancel()"
                raise TimeoutError(text + self._late_text(timeout or 0.0))
        return self.result()

    def result(self, timeout: float | None = None) -> T:
        """Wait, at most ``timeout`` seconds, and return the value. concurrent.futures has this name.

        Raises the error of the call, and otherwise as `get` does.
        """
        if not self.ready or timeout is not None:
            return self.get(timeout)
        if self._raw is not None:
            self._materialize()
        if self._error is not None:
            self._forget_unread()
            raise self._error
        value: T = self._value
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, at most ``timeout`` seconds. Return the error of the call, or None if it has a value.

        Raises TimeoutError, ValueError and TypeError as `get` does.
        """
        timeout = check_timeout(timeout)  # outside of `try`: its errors are not the call's
        try:
            self.get(timeout)
        except TimeoutError:
            if not self.ready:
                raise
        except BaseException:
            if not self.ready:
                raise
        return self._error

    def done(self) -> bool:
        """Return True if there is a value or an error."""
        return self.ready

    def cancel(self, reason: str = "cancelled by the caller") -> bool:
        """Cancel the call, also at the actor: a queued message is dropped, a running endpoint is interrupted.

        The future then raises `CancelledError`. Return False, and change nothing, if there is a value or an error
        already.
        """
        if self.ready:
            return False
        cancel = self._cancel
        self._fail(CancelledError(reason))
        if cancel is not None:
            cancel(reason)
        return True

    def add_done_callback(self, call: Callable[[Future[T]], None]) -> None:
        """Call ``call(future)`` when the future is done: at once if it is, else on the thread that reads messages.

        The callback must not block. An exception that it raises is logged.
        """
        with _guard:
            self._callbacks = [*(self._callbacks or ()), call]
        if self.ready:  # perhaps finished before the callback was in the list
            self._call_back()

    def ignore(self) -> Future[T]:
        """Log no report if this call fails and its error is never read. Returns the future itself.

        >>> from monarch_backend.actor import Future
        >>> Future.of(3).ignore().get()
        3
        """
        if not self.ready:
            Future.add_done_callback(self, Future._forget_unread)
        else:
            self._forget_unread()
        return self

    def _forget_unread(self) -> None:
        """Drop the report of the error: it was read, or is to be ignored."""
        unread: UnreadError | None = getattr(self, "_unread", None)
        if unread is not None:
            unread.forget()
            self._unread = None

    def as_asyncio(self) -> asyncio.Future[T]:
        """Return an asyncio future of the running loop that ends as this one does.

        Cancelling it cancels the call. Raises RuntimeError if no event loop runs.
        """
        return self._as_asyncio(self.result)

    def _as_asyncio(self, result: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def end() -> None:
            if future.done():
                return
            try:
                future.set_result(result())
            except CancelledError:
                future.cancel()
            except BaseException as error:
                if is_ending() and isinstance(error, SupervisionError):  # reported; the loop is being closed
                    future.cancel()
                else:
                    future.set_exception(error)

        def told(_: Future[T]) -> None:
            try:
                loop.call_soon_threadsafe(end)
            except RuntimeError:  # the loop is closed, and with it every task that waited
                return

        def over(outer: asyncio.Future[T]) -> None:
            self._end_await(outer)
            if outer.cancelled():
                self.cancel("its asyncio task was cancelled")

        future.add_done_callback(over)
        if self.ready:
            end()
        else:
            self._begin_await(future)
            self.add_done_callback(told)
        return future

    def __await__(self) -> Generator[Any, None, T]:
        return (yield from self.as_asyncio().__await__())

    def __reduce__(self) -> Any:
        raise TypeError("a Future cannot leave its process: send its value, future.get()")

    def __repr__(self) -> str:
        state = "waiting" if not self.ready else f"failed: {self._error!r}" if self._error is not None else "done"
        return f"<Future {state}>"

    # ---- for the sender of the result

    def _set(self, value: T) -> None:
        if not self.ready:
            self._value = value
            self._finish()

    def set_lazy_result(self, cook: Callable[[], T]) -> None:
        """Finish with a value that the first reader makes, on its own thread, by ``cook()``."""
        if not self.ready:
            self._raw = cook
            self._finish()

    def set_lazy_exception(self, make: Callable[[], BaseException], unread: UnreadError | None = None) -> None:
        """Finish with an error that the first reader makes: no user code runs on the thread that reads messages.

        ``unread`` reports the error if it is never read.
        """
        if not self.ready:
            self._unread = unread
        elif unread is not None:
            unread.forget()

        def cook() -> T:
            raise make()

        self.set_lazy_result(cook)

    def _fail(self, error: BaseException) -> None:
        if not self.ready:
            self._error = error
            if not isinstance(error, _REPORTED_ELSEWHERE):
                self._unread = UnreadError(partial(describe_local, self._label(), error), getattr(self, "site", None))
            self._finish()

    def _label(self) -> str:
        """Return what it waits for, for people. Waits for futures without a label get no notice."""
        return UNLABELLED

    def _late_text(self, _seconds: float) -> str:
        """Return what is known of a value that is late, for the end of an error's text."""
        return ""

    def _begin_await(self, awaited: asyncio.Future[T]) -> None:
        """Note that a coroutine awaits the value, by this asyncio future."""

    def _end_await(self, awaited: asyncio.Future[T]) -> None:
        """Note that no coroutine awaits it any more."""

    def _finish(self) -> None:
        self._cancel = None
        self.ready = True
        if self.wait_lock is not None:
            release(self)
        if self._callbacks is not None:
            self._call_back()

    def _call_back(self) -> None:
        with _guard:
            callbacks, self._callbacks = self._callbacks, None
        for call in callbacks or ():
            try:
                call(self)
            except BaseException:
                log.exception("a callback of a future failed")

    def _materialize(self) -> None:
        with _guard:
            lock = self._lock = self._lock or threading.Lock()
        with lock:
            cook = self._raw
            if cook is None:
                return
            try:
                self._value = cook()
            except (KeyboardInterrupt, SystemExit):  # of this thread, not of the call: the next read tries again
                raise
            except BaseException as error:
                self._error = error
            self._raw = None

    def _warn_in_loop(self) -> None:
        if "ipykernel" in sys.modules:
            return  # a notebook's loop runs during its cells, and blocking it is usual there
        if asyncio._get_running_loop() is None:  # get_running_loop() raises: too slow for each wait
            return
        warnings.warn(
            "Future.get() blocks the running event loop: await the future instead", RuntimeWarning, stacklevel=3
        )


_guard = threading.Lock()

_REPORTED_ELSEWHERE = (CancelledError, MeshFailure, SupervisionError)
"""Errors of futures without a report: a mesh's failure goes to its supervisor, a cancellation was requested."""


def no_wait(_what: Any, _seconds: float | None) -> bool:
    """Return True: the wait function of a future that is done."""
    return True


class LabelledFuture(Future[T]):
    """Future that says in notices and in `ps` what it waits for."""

    __slots__ = ("_what",)

    def __init__(self, wait: Callable[[Any, float | None], bool], what: str) -> None:
        super().__init__(wait)
        self._what = what

    def _label(self) -> str:
        return self._what


class DoneFuture(Future[None]):
    """`Future.of(None)` without its cost: all state is in the class."""

    __slots__ = ()

    ready = True
    wait_lock = _value = _error = _raw = _cancel = _callbacks = _lock = None
    _wait = staticmethod(no_wait)

    def __init__(self) -> None:
        """Set nothing: an instance has no state."""

    def get(self, timeout: float | None = None) -> None:
        check_timeout(timeout)

    def add_done_callback(self, call: Callable[[Future[None]], None]) -> None:
        Future.of(None).add_done_callback(lambda _: call(self))


def gather(futures: Iterable[Future[T]]) -> list[T]:
    """Wait for all futures and return their values, in the order of the futures.

    Raises the first error in that order; later errors are ignored.

    >>> from monarch_backend.actor import Future, gather
    >>> gather([Future.of(1), Future.of(2)])
    [1, 2]
    """
    waiting = list(futures)
    try:
        return [future.get() for future in waiting]
    except Exception:
        for future in waiting:
            future.ignore()
        raise
