"""What a call gives at once: a value that comes later. For threads and for asyncio alike.

No messages here: whoever answers calls `_set` or `_fail`.
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

from monarch_backend._actor.errors import CancelledError, MeshFailure, SupervisionError
from monarch_backend._actor.program_exit import is_ending
from monarch_backend._actor.unread_errors import UnreadError, describe_local
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._transport.local.event_loop import release

log = logging.getLogger("monarch_backend")

T = TypeVar("T")


class Future(Generic[T]):
    """A value to come, or the error in its place. May be observed any number of times, from any thread.

    An error that is never read is logged once, when the future is collected or the program ends; see `ignore`.

    >>> from monarch_backend.actor import Future
    >>> done = Future.of(3)
    >>> done.get(), done.exception()
    (3, None)
    """

    # _unread is not set before the call fails: calls that succeed spend no time on it.
    __slots__ = (
        "__weakref__", "_callbacks", "_cancel", "_error", "_lock", "_raw", "_unread", "_value", "_wait", "gate",
        "ready",
    )  # fmt: skip

    _unread: UnreadError | None

    def __init__(
        self, wait: Callable[[Any, float | None], bool], cancel: Callable[[str], object] | None = None
    ) -> None:
        self.ready = False
        self.gate: threading.Lock | None = None
        self._wait = wait
        self._cancel = cancel
        self._value: Any = None
        self._error: BaseException | None = None
        self._raw: Callable[[], T] | None = None  # makes the value, the first time that somebody wants it
        self._callbacks: list[Callable[[Future[T]], None]] | None = None
        self._lock: threading.Lock | None = None

    @classmethod
    def of(cls, value: T) -> Future[T]:
        """One that has its value already."""
        future: Future[T] = cls(no_wait)
        future._value, future.ready = value, True
        return future

    # ---- for users

    def get(self, timeout: float | None = None) -> T:
        """Wait for the value, at most so many seconds, and return it.

        Raises what the call raised; TimeoutError when it is late, after which one may wait again. Warns inside a
        running event loop, which it would hold up: there, ``await`` the future.

        Raises ValueError for a negative timeout or NaN, TypeError for what is no number of seconds nor a timedelta.
        """
        if timeout is not None:
            timeout = check_timeout(timeout)
        if not self.ready:
            self._warn_in_loop()
            if not self._wait(self, timeout) and not self.ready:
                raise TimeoutError(f"no answer within {timeout:g} s; the call goes on, see Future.cancel()")
        return self.result()

    def result(self, timeout: float | None = None) -> T:
        """As `get`, under the name of concurrent.futures."""
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
        """Wait as `get`, and return the error in place of the value, or None."""
        timeout = check_timeout(timeout)  # outside: a bad argument is not the call's error
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
        """True once there is a value or an error."""
        return self.ready

    def cancel(self, reason: str = "cancelled by the caller") -> bool:
        """Give up the call, also at the actor: a waiting message is dropped, a running endpoint is interrupted.

        Returns False if there was a result already. Afterwards the future raises CancelledError.
        """
        if self.ready:
            return False
        cancel = self._cancel
        self._fail(CancelledError(reason))
        if cancel is not None:
            cancel(reason)
        return True

    def add_done_callback(self, call: Callable[[Future[T]], None]) -> None:
        """Call it with this future when it is done: at once if it is, else on the thread that reads; it must not
        wait.
        """
        with _guard:
            self._callbacks = [*(self._callbacks or ()), call]
        if self.ready:  # perhaps since a moment ago, by somebody who did not see the callback
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
        """The error was read, or is of no interest."""
        unread: UnreadError | None = getattr(self, "_unread", None)
        if unread is not None:
            unread.forget()
            self._unread = None

    def as_asyncio(self) -> asyncio.Future[T]:
        """An asyncio future of the running loop that ends as this one does; cancelling it cancels the call."""
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
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

        def given_up(outer: asyncio.Future[T]) -> None:
            if outer.cancelled():
                self.cancel("its asyncio task was cancelled")

        future.add_done_callback(given_up)
        if self.ready:
            end()
        else:
            self.add_done_callback(told)
        return future

    def __await__(self) -> Generator[Any, None, T]:
        return (yield from self.as_asyncio().__await__())

    def __reduce__(self) -> Any:
        raise TypeError("a Future stays in its process: send what it gives, future.get()")

    def __repr__(self) -> str:
        state = "waiting" if not self.ready else f"failed: {self._error!r}" if self._error is not None else "done"
        return f"<Future {state}>"

    # ---- for whoever answers

    def _set(self, value: T) -> None:
        if not self.ready:
            self._value = value
            self._finish()

    def set_lazy_result(self, cook: Callable[[], T]) -> None:
        """The value is made when somebody asks for it, on their thread."""
        if not self.ready:
            self._raw = cook
            self._finish()

    def set_lazy_exception(self, make: Callable[[], BaseException], unread: UnreadError | None = None) -> None:
        """Fail with an error that is made when it is read: no code of a user's runs on the thread that reads.

        ``unread`` reports it if it is never read.
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
        """The name of what has failed, for reports."""
        return "an operation"

    def _finish(self) -> None:
        self._cancel = None
        self.ready = True
        if self.gate is not None:
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
            except (
                KeyboardInterrupt,
                SystemExit,
            ):  # of this thread, not of the call: the next one to ask gets the value
                raise
            except BaseException as error:
                self._error = error
            self._raw = None

    def _warn_in_loop(self) -> None:
        if "ipykernel" in sys.modules:
            return  # a notebook's loop runs while its cells do, and nobody minds
        if asyncio._get_running_loop() is None:  # and not the one that raises: this is on the way of each wait
            return
        warnings.warn(
            "Future.get() holds up the running event loop: await the future instead", RuntimeWarning, stacklevel=3
        )


_guard = threading.Lock()

_REPORTED_ELSEWHERE = (CancelledError, MeshFailure, SupervisionError)
"""Errors of futures that need no report: the failure of a mesh goes to its supervisor, a cancellation was asked for."""


def no_wait(_what: Any, _seconds: float | None) -> bool:
    """Of a future that is done."""
    return True


class DoneFuture(Future[None]):
    """`Future.of(None)` for whom that takes too long: all that is to be known of it is known of the class."""

    __slots__ = ()

    ready = True
    gate = _value = _error = _raw = _cancel = _callbacks = _lock = None
    _wait = staticmethod(no_wait)

    def __init__(self) -> None:
        """Nothing is its own."""

    def get(self, timeout: float | None = None) -> None:
        """None."""
        check_timeout(timeout)

    def add_done_callback(self, call: Callable[[Future[None]], None]) -> None:
        """As Future's."""
        Future.of(None).add_done_callback(lambda _: call(self))


def gather(futures: Iterable[Future[T]]) -> list[T]:
    """The values of all, in their order. Raises the first error of them, in their order; later errors are ignored."""
    waiting = list(futures)
    try:
        return [future.get() for future in waiting]
    except Exception:
        for future in waiting:
            future.ignore()
        raise
