"""pdb for a process without a terminal: it waits at a breakpoint until clients send commands (client.py)."""

from __future__ import annotations

import bdb
import contextlib
import os
import socket
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from monarch_backend._processes.debugging import channel
from monarch_backend._processes.debugging.user_code import UserCodePdb, is_of_package
from monarch_backend._telemetry import kinds, recorder

_here = threading.local()
_lock = threading.Lock()
_count = 0


def set_trace(frame: FrameType, *, header: str | None = None, commands: Any = None) -> None:
    """Stop at the next line of ``frame`` and wait there for clients.

    ``header`` and ``commands`` are those of `pdb.set_trace`. After `channel.end_waits` it has no effect.
    """
    if channel.is_ending():
        return
    debugger = getattr(_here, "debugger", None)
    if debugger is None or debugger.pid != os.getpid():
        debugger = _here.debugger = RemotePdb(frame)
    if header is not None:
        debugger.message(header)
    debugger.rcLines.extend(commands or ())
    debugger.set_trace(frame)


def post_mortem(error: BaseException) -> None:
    """Wait for clients at the frame that has raised ``error``. Return when one has sent `continue` or `quit`."""
    if isinstance(error, bdb.BdbQuit):
        return
    trace = error.__traceback__
    while trace is not None and is_of_package(trace.tb_frame):
        trace = trace.tb_next  # the callers of the endpoint
    if trace is None or channel.is_ending():
        return
    debugger = RemotePdb(trace.tb_frame)
    debugger.after = f" after {type(error).__name__}"
    debugger.message(f"{type(error).__name__}: {error}")
    debugger.reset()
    debugger.interaction(None, trace)


class RemotePdb(UserCodePdb):
    """Debugger of one thread. It steps over functions of this package, and ends where the endpoint returns."""

    after = ""
    """Why it waits, other than at a breakpoint, for clients."""

    def __init__(self, frame: FrameType) -> None:
        global _count
        with _lock:
            _count += 1
            self._number = _count
        self.pid = os.getpid()
        self._channel = channel.Channel(
            self._status, self._names, self._describe, lambda: self._announce("still waits")
        )
        self._over: str | None = None
        self._place, self._since = ("", 0, ""), 0.0
        self._caller: FrameType | None = None  # of the endpoint
        skip = None if is_of_package(frame) else ["monarch_backend", "monarch_backend.*"]
        super().__init__(stdin=self._channel, stdout=self._channel, skip=skip, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.use_rawinput = False

    # ---- stops

    def dispatch_line(self, frame: FrameType) -> Any:
        """Handle a line event. The first one in the caller of the endpoint ends the debugger."""
        if frame is self._caller:
            self._caller = None
            self.set_continue()
            self._finish()
            return None
        return super().dispatch_line(frame)

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:
        """Wait for commands until one lets the program go on."""
        self._place, self._since = _place(frame, traceback), time.time()
        self._caller = _caller(frame)
        self._channel.open()
        cell = recorder.take_cell(kinds.Kind.WAIT, "breakpoint")
        detail = recorder.name_number(self._where())
        recorder.begin_activity(cell, int(kinds.State.WAITING), detail, 0, 0, 0, 0)
        try:
            if not self._channel.is_attended:
                self._announce()
            super().interaction(frame, traceback)
            if traceback is not None:
                self._over = "the program continues"
        except BaseException as error:
            self._over = f"{type(error).__name__}: {error}"
            raise
        finally:
            recorder.end_activity(cell, int(kinds.Status.OK))
            recorder.release_cell(cell)
            self._finish()

    def set_continue(self) -> None:
        """Go on to the next breakpoint. Without breakpoints of this debugger, it ends."""
        super().set_continue()
        if not self.breaks:
            self._over = "the program continues"

    def set_quit(self) -> None:
        """End the endpoint with `bdb.BdbQuit`, which its caller gets as an error."""
        super().set_quit()
        self._over = "the endpoint ends with BdbQuit"

    def _finish(self) -> None:
        """Tell clients that the program goes on. If the debugger has ended, drop its references to frames."""
        self._channel.close(self._over)
        if self._over is not None:
            self._over, self._caller = None, None
            quitting = self.quitting
            self.reset()
            self.quitting = quitting  # bdb raises BdbQuit after the interaction
            if getattr(_here, "debugger", None) is self:
                _here.debugger = None

    # ---- what clients see

    def _where(self) -> str:
        file, line, function = self._place
        with contextlib.suppress(OSError):
            file = file.removeprefix(os.getcwd() + os.sep)
        return f"{file}:{line} in {function}"

    def _announce(self, waits: str = "waits") -> None:
        line = f"{channel.label} (pid {self.pid}) {waits} at {self._where()}{self.after}: monarch-backend debug\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode(errors="replace"))

    def _describe(self) -> None:
        self.print_stack_entry(self.stack[self.curindex])

    def _status(self) -> dict[str, Any]:
        file, line, function = self._place
        return {
            "id": f"{self.pid}.{self._number}",
            "pid": self.pid,
            "label": channel.label,
            "host": socket.gethostname(),
            "thread": threading.current_thread().name,
            "file": file,
            "line": line,
            "function": function,
            "where": self._where() + self.after,
            "since": self._since,
            "attached": self._channel.attached_pid,
        }

    def _names(self, text: str, line: str, begin: int, end: int) -> list[str]:
        """Return completions of ``text``, which is ``line[begin:end]``, as `cmd.Cmd.complete` finds them."""
        stripped = line.lstrip()
        removed = len(line) - len(stripped)
        begin, end = begin - removed, end - removed
        complete: Any = self.completenames
        if begin > 0:
            command, _, _ = self.parseline(stripped)
            complete = getattr(self, f"complete_{command}", self.completedefault) if command else self.completedefault
        return [str(name) for name in complete(text, stripped, begin, end)]

    # ---- commands

    def emptyline(self) -> Any:
        """Repeat the last command of the same client. That of another client is not repeated."""
        return super().emptyline() if self._channel.is_same_client else None

    def do_interact(self, _arg: str) -> None:
        """interact: not available here, because code.interact reads the terminal of the process."""
        self.error("interact needs a terminal of the process: use statements, such as !x = 1")


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the frame of this package that has called the user's code, if there is one."""
    if frame is None or is_of_package(frame):
        return None
    caller: FrameType | None = frame
    while caller is not None and not is_of_package(caller):
        caller = caller.f_back
    return caller


def _place(frame: FrameType | None, traceback: Any) -> tuple[str, int, str]:
    """Return file, line and function where the debugger stops. ``traceback`` is one, or an exception, of pdb."""
    if isinstance(traceback, BaseException):
        traceback = traceback.__traceback__
    line = frame.f_lineno if frame is not None else 0
    while isinstance(traceback, TracebackType):
        if not is_of_package(traceback.tb_frame):
            frame, line = traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
    frame = frame or sys._getframe()
    return frame.f_code.co_filename, line, frame.f_code.co_name
