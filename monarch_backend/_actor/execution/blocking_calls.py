"""Interruption of blocking code on the main thread of a process of a mesh, and the place where a thread is blocked.

A signal ends the system call, and Python runs its handler before it repeats the call. The handler raises in
the interrupted frame (interruption.py). Python runs handlers on the main thread only, so other threads stay blocked.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch_backend._actor import context
from monarch_backend._actor.errors import CancelledError
from monarch_backend._core import fork
from monarch_backend._core.package_folder import PACKAGE_FOLDER
from monarch_backend._processes.debugging import channel

CANCEL_SIGNAL = signal.SIGURG
"""Signal that interrupts processes of a mesh; program_exit.py interrupts the main program. Ignored without handler."""

_STDLIB = sysconfig.get_path("stdlib") + "/"
_SITE = f"{_STDLIB}site-packages/"

STILL_S = 0.05
"""Seconds without progress after which standard library code counts as blocked and is interrupted."""

MAX_MOVING_S = 0.5
"""Seconds after which standard library code that makes progress is interrupted."""


_raise_in: Callable[[FrameType | None], None] | None = None


def install() -> None:
    """Install the handler and the hook, on the main thread of a process of a mesh."""
    signal.signal(CANCEL_SIGNAL, _on_signal)
    fork.register(fork.Step.CANCEL_SIGNAL, after_in_child=_uninstall)
    channel.set_interruption_check(_check_at_breakpoint)
    former = sys.unraisablehook

    def repeat_or_report(unraisable: sys.UnraisableHookArgs) -> None:
        """Interrupt again if the exception was lost, as in ``__del__``, where Python ignores every exception."""
        runner = context.runner.get()
        if runner is None or not runner.code.repeat(unraisable.exc_value):
            former(unraisable)

    sys.unraisablehook = repeat_or_report


def _check_at_breakpoint(frame: FrameType) -> None:
    """Raise a pending interruption of the actor whose thread waits at a breakpoint, in this frame."""
    runner = context.runner.get()
    if runner is not None:
        runner.code.raise_in(frame)


def _uninstall() -> None:
    """Remove the handler in a fork. It may become a main program, which installs its own only if there is none."""
    if signal.getsignal(CANCEL_SIGNAL) is _on_signal:
        signal.signal(CANCEL_SIGNAL, signal.SIG_DFL)


def can_interrupt(thread_id: int) -> bool:
    return thread_id == threading.main_thread().ident and signal.getsignal(CANCEL_SIGNAL) is _on_signal


def why_not(thread_id: int) -> str | None:
    if can_interrupt(thread_id):
        return None
    if thread_id == threading.main_thread().ident and signal.getsignal(CANCEL_SIGNAL) is not signal.SIG_DFL:
        return f"blocking code is interrupted by {CANCEL_SIGNAL.name}, which has another handler now"
    return (
        "blocking code is interrupted only on a process's main thread, where its first actor runs, and this is "
        "another thread"
    )


def interrupt(thread_id: int, raise_in: Callable[[FrameType | None], None]) -> None:
    """Call ``raise_in(frame)`` on the main thread, which has this id."""
    global _raise_in
    _raise_in = raise_in
    signal.pthread_kill(thread_id, CANCEL_SIGNAL)


def raise_soon(thread_id: int) -> None:
    """Raise CancelledError at the next Python instruction of this thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(CancelledError))


def discard_exception() -> None:
    """Discard the exception of `raise_soon` on this thread, if it has not been raised yet.

    An exception is set and caught. Setting None discards it as well, but up to Python 3.12 the interpreter's flag for
    "an exception is pending" then stays set. Every later check of the flag takes longer. In Python 3.11 the next call
    under ``sys.settrace``, of a debugger for example, never ends.
    """
    try:
        raise_soon(threading.get_ident())
        while True:
            pass
    except CancelledError:
        return


def _on_signal(_number: int, frame: FrameType | None) -> None:
    if _raise_in is not None:
        _raise_in(frame)


class Standstill:
    """Progress of one cancelled message, which decides where an exception may be raised.

    In the middle of subprocess.Popen(), for example, an exception would leave a process that is never waited for.
    """

    __slots__ = ("_begun", "_position", "_since")

    def __init__(self) -> None:
        self._begun = self._since = time.monotonic()
        self._position: tuple[int, int] | None = None

    def allows(self, frame: FrameType) -> bool:
        """Return whether the frame is user code, or has made no progress for a while."""
        if not _is_of_runtime(frame):
            return True
        now, position = time.monotonic(), (id(frame), frame.f_lasti)
        if position != self._position:
            self._position, self._since = position, now
        return now - self._since >= STILL_S or now - self._begun >= MAX_MOVING_S


def place(thread_id: int) -> str:
    """Return the user's innermost line of a thread, for messages: 'train.py:12 in step'."""
    frame = innermost = sys._current_frames().get(thread_id)
    while frame is not None:
        if not _is_of_runtime(frame):
            return _line(frame)
        frame = frame.f_back
    return "an unknown line" if innermost is None else _line(innermost)


def place_of_task(task: asyncio.Task[Any]) -> str:
    """Return the innermost line that a task awaits, as `place` does. Any thread may call it while the task runs."""
    found = "an unknown line"
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        if not _is_of_runtime(frame):
            found = _line(frame)
        coroutine = coroutine.cr_await
    return found


def _is_of_runtime(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((PACKAGE_FOLDER, "<frozen")) or (file.startswith(_STDLIB) and not file.startswith(_SITE))


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
