"""End of the main program at an unhandled failure: `finally` blocks and atexit hooks run, then it exits with status 1.

`FailureExit` is raised in the main thread, as KeyboardInterrupt is at Ctrl-C. The time is bounded: a program that
catches it and goes on, or whose blocks hang, is ended by os._exit.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
import time
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.errors import MeshFailure, SupervisionError

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

EXIT_SIGNAL = signal.SIGURG
"""Signal that interrupts the main thread. The system ignores it where no handler is installed."""

UNWIND_TIMEOUT_S = 10.0
"""Seconds for `finally` blocks and atexit hooks. After it the program is ended by os._exit."""

FLUSH_TIMEOUT_S = 2.0
"""Seconds for flushing files at the end: a pipe without a reader must not keep the program alive."""

RETRY_S = 0.001
"""Seconds to the next attempt, where the main thread was sending or reading a message."""

_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class FailureExit(SystemExit):
    """Raised in the main thread of a program that ends because of an unhandled failure."""

    is_uncaught = False

    @property
    def code(self) -> int:  # type: ignore[override] # an attribute of SystemExit
        """Exit status 1. The interpreter reads it when nothing has caught the exception."""
        FailureExit.is_uncaught = True
        return 1


_ending: Runtime | None = None
_since = 0.0


def is_ending() -> bool:
    return _ending is not None


def prepare() -> None:
    """Install the handler of EXIT_SIGNAL, on the main thread only, unless there is another handler."""
    if signal.getsignal(EXIT_SIGNAL) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(EXIT_SIGNAL, _on_signal)


def end_main_thread(program: Runtime) -> bool:
    """Raise FailureExit in the main thread. Return False if the main thread cannot be interrupted."""
    global _ending, _since
    interrupts = program.interrupts
    if signal.getsignal(EXIT_SIGNAL) is not _on_signal and interrupts.waiting_for is None:
        return False
    _ending, _since = program, time.monotonic()
    threading.excepthook = _without_the_failure(threading.excepthook)
    threading.Thread(target=_end_late, name="monarch-exit", daemon=True).start()
    interrupts.exit_request = FailureExit()
    interrupts.noted = True
    _interrupt_main(program)
    return True


def exit_now() -> None:
    """End this process with status 1. Only open files are flushed."""
    flush_files()
    os._exit(1)


def flush_files() -> bool:
    """Flush open files. Return False if some still block.

    Each has a thread of its own, so that one that blocks does not delay the others.
    """

    def flush(file: Any) -> None:
        with contextlib.suppress(Exception):
            file.flush()

    files = [thing for thing in gc.get_objects() if issubclass(type(thing), _FILES)]  # isinstance could run user code
    threads = [threading.Thread(target=flush, args=(file,), daemon=True) for file in (sys.stdout, *files)]
    deadline = time.monotonic() + FLUSH_TIMEOUT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _interrupt_main(program: Runtime) -> None:
    interrupts = program.interrupts
    if interrupts.exit_request is None:
        return  # raised already
    interrupts.release_main()
    if signal.getsignal(EXIT_SIGNAL) is _on_signal:
        signal.pthread_kill(interrupts.main, EXIT_SIGNAL)


def _on_signal(_number: int, frame: FrameType | None) -> None:
    program = _ending
    if program is None or program.disowned or program.interrupts.exit_request is None:
        return
    if _runs(frame, threading._shutdown.__code__):  # type: ignore[attr-defined]
        # The main module has ended. Hooks run when the threads have ended for which it waits.
        program.interrupts.exit_request, program.interrupts.noted = None, False
        return
    if program.interrupts.may_raise_in(frame, _since):
        program.interrupts.raise_here()
    program.interrupts.release_main()
    program.progress.later(RETRY_S, lambda: _interrupt_main(program))


def _runs(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _without_the_failure(hook: Any) -> Any:
    """Return threading.excepthook without the errors of the failure in other threads: it was reported."""

    def report(arguments: Any) -> None:
        if not issubclass(arguments.exc_type, (SupervisionError, MeshFailure)):
            hook(arguments)

    return report


def _end_late() -> None:
    time.sleep(UNWIND_TIMEOUT_S)
    sys.stderr.write(
        f"monarch_backend: `finally` blocks and atexit hooks have run for {UNWIND_TIMEOUT_S:g} s since the failure; "
        "the program exits now\n"
    )
    exit_now()


@atexit.register
def _end() -> None:
    """Exit with status 1. Runs after all hooks that were registered after the import of this package."""
    if _ending is None or _ending.pid != os.getpid():
        return
    # A file that blocks would block the interpreter's end, too. A caught exception has left another status.
    if not flush_files() or not FailureExit.is_uncaught:
        os._exit(1)
