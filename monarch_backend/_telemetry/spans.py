"""Spans: parts of a program that are timed by name. `span` is a context manager, `traced` a decorator.

An open span occupies a cell of the recording, so that readers see it while it runs. The event of its end is in the
ring. Cells are reused, because taking one costs a lock.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import itertools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar, overload

from monarch_backend import _native
from monarch_backend._core import fork
from monarch_backend._telemetry import recorder, texts, trace_context
from monarch_backend._telemetry.kinds import Kind, State, Status
from monarch_backend._telemetry.recorder import begin_activity, end_activity, monotonic_ns, record_event

MAX_CELLS = 24
"""Cells that spans occupy at most. Others are needed for actors. A span without a cell shows only after its end."""

F = TypeVar("F", bound=Callable[..., Any])

_SPAN, _RUNNING = int(Kind.SPAN), int(State.RUNNING)
_OK, _ERROR, _CANCELLED = int(Status.OK), int(Status.ERROR), int(Status.CANCELLED)
_NO_CELL = 0

_current: contextvars.ContextVar[int] = contextvars.ContextVar("monarch_span", default=0)
current_span = _current.get
"""Return the number of the enclosing span of this thread or task, 0 for none."""

_numbers = itertools.count(1)
_is_recording = _native.is_recording
_thread_number = _native.thread_number


class _Cells:
    """Cells of spans by name. Those of a name that is not in use go to another name when none is left."""

    def __init__(self) -> None:
        self._idle: dict[str, list[int]] = {}
        self._count = 0
        self._lock = threading.RLock()  # a signal handler may have spans, too

    def take(self, name: str) -> int:
        idle = self._idle.get(name)
        if idle:
            try:
                return idle.pop()
            except IndexError:  # another thread was faster
                pass
        kept = texts.name(name)
        if not kept:
            return _NO_CELL
        with self._lock:
            if self._count >= MAX_CELLS:
                for cells in self._idle.values():
                    try:
                        recorder.release_cell(cells.pop())
                    except IndexError:  # none is idle, or another thread was faster
                        continue
                    self._count -= 1
                    break
                else:
                    return _NO_CELL
            cell = recorder.take_cell(_SPAN, kept)
            if cell:
                self._count += 1
                if name not in self._idle:
                    if len(self._idle) >= 4 * MAX_CELLS:
                        self._idle = {each: cells for each, cells in self._idle.items() if cells}
                    self._idle[name] = []
            return cell

    def give_back(self, name: str, cell: int) -> None:
        idle = self._idle.get(name)
        if idle is not None:
            idle.append(cell)
            return
        with self._lock:
            self._idle.setdefault(name, []).append(cell)


_cells = _Cells()


def _in_forked_child() -> None:
    global _cells
    _cells = _Cells()  # the former ones belong to the parent


fork.register(fork.Step.RECORDING, after_in_child=_in_forked_child)


class span:
    """Time a part of the program: ``with span("load", shard=3):``, also around ``await``.

    ``name`` is what `monarch-backend trace` and `sql` show. ``attributes`` are recorded as JSON. Other types than
    JSON's are recorded by their ``repr``. Spans nest: the enclosing span of the same thread or task is the parent.

    A span costs about a microsecond, and less while nothing is recorded. It never raises. An exception in its body is
    recorded as the span's status and continues.

    >>> from monarch_backend.telemetry import span
    >>> with span("load", shard=3):
    ...     with span("decode"):
    ...         pass
    """

    __slots__ = ("_attributes", "_cell", "_cells", "_detail", "_name", "_number", "_parent", "_start")

    def __init__(self, name: str, /, **attributes: Any) -> None:
        self._name, self._attributes = name if type(name) is str else str(name), attributes
        self._start = 0

    def __enter__(self) -> None:
        if not _is_recording() and not recorder.begin():
            self._start = 0
            return
        attributes = self._attributes
        self._parent = parent = _current.get()
        if not parent and "opentelemetry.trace" in sys.modules:
            attributes = trace_context.with_opentelemetry(attributes)
        self._detail = detail = texts.number(attributes) if attributes else 0
        self._number = number = next(_numbers)
        self._cells = cells = _cells
        self._cell = cell = cells.take(self._name)
        if cell:
            begin_activity(cell, _RUNNING, detail, number, 0, _thread_number() + 1, parent)
        _current.set(number)
        self._start = monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        start = self._start
        if not start:
            return
        self._start = 0
        _current.set(self._parent)
        status = _OK if kind is None else _CANCELLED if issubclass(kind, asyncio.CancelledError) else _ERROR
        if self._cells is not _cells:  # in the fork of a process whose span this is
            return
        cell = self._cell
        if cell:
            end_activity(cell, status)
            self._cells.give_back(self._name, cell)
        else:
            name = texts.name_number(self._name)
            thread = _thread_number() + 1
            record_event(_SPAN, status, name, self._detail, start, self._number, thread, self._parent)


class remote_parent:
    """Continue the trace of another program: ``with remote_parent(request.headers.get("traceparent")):``.

    Spans in the block, and messages that are sent in it, become a part of that trace, also in other processes. The
    argument is a W3C ``traceparent`` header. None and anything that is not such a header has no effect.

    >>> from monarch_backend.telemetry import remote_parent, span
    >>> with remote_parent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"), span("request"):
    ...     pass
    """

    __slots__ = ("_before", "_header", "_span")

    def __init__(self, traceparent: str | None, /) -> None:
        found = trace_context.parse(traceparent)
        flags = "" if found is None or traceparent is None else trace_context.flags_of(traceparent)
        self._header = "" if found is None else trace_context.as_header(*found, flags)
        self._span = span(trace_context.REMOTE_PARENT, **{trace_context.HEADER: self._header})

    def __enter__(self) -> None:
        self._before = trace_context.remote.get()
        if self._header:
            self._span.__enter__()
            trace_context.remote.set((self._header, current_span()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        if self._header:
            self._span.__exit__(kind, error, traceback)
            trace_context.remote.set(self._before)


@overload
def traced(function: F, /) -> F: ...


@overload
def traced(*, name: str | None = None, **attributes: Any) -> Callable[[F], F]: ...


def traced(function: Any = None, /, *, name: str | None = None, **attributes: Any) -> Any:
    """Make each call of a function or coroutine function a `span`.

    ``name`` is the span's, by default the function's qualified name. ``attributes`` are those of the span. On an
    endpoint, write it below ``@endpoint``. Raises TypeError for a generator function and for anything else.

    >>> from monarch_backend.telemetry import traced
    >>> @traced
    ... def double(n):
    ...     return 2 * n
    >>> @traced(name="halve", exact=True)
    ... async def half(n):
    ...     return n // 2
    >>> double(21), half.__name__
    (42, 'half')
    """
    if function is None:
        return functools.partial(_traced, name=name, attributes=attributes)
    return _traced(function, name, attributes)


def _traced(function: Any, name: str | None, attributes: dict[str, Any]) -> Any:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"@traced does not fit the generator function {function.__name__}: use span() in its body")
    if not isinstance(function, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        raise TypeError(f"@traced needs a function, not {function!r}: on an endpoint, write it below @endpoint")
    text = str(function.__qualname__ if name is None else name).replace("<locals>.", "")
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def traced_coroutine(*args: Any, **kwargs: Any) -> Any:
            with span(text, **attributes):
                return await function(*args, **kwargs)

        return traced_coroutine

    @functools.wraps(function)
    def traced_function(*args: Any, **kwargs: Any) -> Any:
        with span(text, **attributes):
            return function(*args, **kwargs)

    return traced_function
