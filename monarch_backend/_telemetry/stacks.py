"""Stacks of processes of this machine, read from outside: by the stack signal, or by py-spy.

A process whose threads hang in C code, in a lock or in a system call answers, too. A stopped process does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from monarch_backend import _native
from monarch_backend._core.package_folder import PACKAGE_FOLDER
from monarch_backend._telemetry import py_spy
from monarch_backend._telemetry.discovery import descriptor_named
from monarch_backend._telemetry.stack_signal import FILE_NAME, stack_signal

ANSWER_TIMEOUT_S = 1.0
"""Seconds in which a process must answer the signal."""
ASK_AGAIN_S = 0.25
"""Seconds after which the threads of a process that does not answer are asked, one after the other."""

HAS_ENDED = "it has ended"
"""Problem of a process that has ended."""

_BEGIN, _END = (mark.encode() for mark in _native.dump_marks)
_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_START = os.path.join(PACKAGE_FOLDER, "_processes") + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_MULTIPROCESSING = os.path.join(_STDLIB, "multiprocessing") + os.sep
_SITE = _STDLIB + "site-packages" + os.sep
_WORKER = os.path.join(_MULTIPROCESSING, "process.py")
_INTERNAL_THREADS = "_feed", "_serve", "_handle_workers", "_handle_tasks", "_handle_results"
_TORCHRUN = "/torch/distributed/elastic/", "/torch/distributed/launcher/", "/torch/distributed/run.py"


class NoAnswerError(Exception):
    """A process has not written its stacks. The text says why."""


@dataclass(frozen=True)
class Frame:
    """A call. ``line`` is 0 for code without lines."""

    file: str
    line: int
    function: str

    @property
    def is_runtime(self) -> bool:
        """Whether the code is this package's, its command's or torchrun's."""
        return (
            self.file.startswith((PACKAGE_FOLDER, "<frozen"))
            or self.file.endswith(f"{os.sep}monarch-backend")
            or any(part in self.file for part in _TORCHRUN)
        )

    @property
    def is_user(self) -> bool:
        """Whether the code is neither this package's nor the standard library's."""
        return not self.is_runtime and (not self.file.startswith(_STDLIB) or self.file.startswith(_SITE))

    @property
    def is_library(self) -> bool:
        """Whether the code is an installed package's."""
        return f"{os.sep}site-packages{os.sep}" in self.file or f"{os.sep}dist-packages{os.sep}" in self.file

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Thread:
    """A thread and its calls, the outermost first. ``lock``: the lock that it waits for, and what has it."""

    frames: tuple[Frame, ...]
    name: str = ""
    ident: int = 0
    lock: str = field(default="", kw_only=True)

    @property
    def is_runtime(self) -> bool:
        """Whether the thread runs nothing of the program."""
        return any(frame.is_runtime for frame in self.frames) and not any(frame.is_user for frame in self.frames)

    @property
    def is_of_multiprocessing(self) -> bool:
        """Whether multiprocessing has started the thread for itself, such as the feeder of a queue."""
        return any(
            frame.file.startswith(_MULTIPROCESSING) and frame.function.rpartition(".")[2] in _INTERNAL_THREADS
            for frame in self.frames
        )

    @property
    def innermost(self) -> Frame | None:
        """The innermost call of the program's own code, else of a library; None without one."""
        calls = [frame for frame in reversed(self.frames) if frame.is_user]
        return next((frame for frame in calls if not frame.is_library), calls[0] if calls else None)

    @property
    def leaf(self) -> Frame | None:
        return self.frames[-1] if self.frames else None


@dataclass(frozen=True)
class Task(Thread):
    """A task of an async actor that waits, and its coroutines, the outermost first. Its name says what it does.

    ``ident`` is of the thread with the event loop. ``awaits`` is "worker.step" for a reply of this endpoint. A task of
    a message has its ``endpoint``, the identity of its ``caller`` and the call's ``number``.
    """

    actor: str = ""
    rank: int = 0
    endpoint: str = ""
    caller: int = 0
    number: int = 0
    awaits: str = ""

    @property
    def is_runtime(self) -> bool:
        """Whether the task runs nothing of the program, and waits for no reply."""
        return not self.awaits and super().is_runtime


@dataclass
class Stacks:
    """Threads of a process, the main thread last. ``problem`` says why there are none.

    Tasks of async actors are before the threads. ``unread_tasks`` says that some are missing, and why.
    """

    pid: int
    threads: list[Thread] = field(default_factory=list)
    problem: str = ""
    unread_tasks: str = ""


def read(pid: int, *, native: bool = False, timeout: float = ANSWER_TIMEOUT_S, with_py_spy: bool = True) -> Stacks:
    """Return the stacks of the threads of a process. ``native`` adds C frames and needs py-spy.

    A process that does not answer within ``timeout`` seconds is read with py-spy, if that is wanted and installed.
    """
    if native:
        return _with_py_spy(pid, native=True)
    try:
        return Stacks(pid, parse(dump(pid, timeout)))
    except NoAnswerError as error:
        if not with_py_spy:
            return Stacks(pid, problem=str(error))
        found = _with_py_spy(pid)
        if found.problem:
            found.problem = f"{error}; {found.problem}" if is_alive(pid) else HAS_ENDED
        return found


def dump(pid: int, timeout: float = ANSWER_TIMEOUT_S) -> str:
    """Let a process write its stacks, and return the text of faulthandler. Raises NoAnswerError."""
    deadline = time.monotonic() + timeout
    try:
        descriptor = _open(pid)
    except OSError as error:
        raise NoAnswerError(f"it can't be asked: {error.strerror}") from None
    if descriptor is None:
        raise NoAnswerError("it writes no stacks: it records nothing, or has its own handler of the stack signal")
    try:
        if not _lock(descriptor, deadline):
            raise NoAnswerError("others read its stacks")
        os.ftruncate(descriptor, 0)
        asked, others = _ask_first(pid, deadline)
        later = time.monotonic() + min(ASK_AGAIN_S, timeout / 4)
        pause = 0.0005
        while (text := _complete(descriptor)) is None:
            if time.monotonic() >= deadline:
                raise NoAnswerError(f"it does not answer: {state_of(pid)}")
            if time.monotonic() >= later:  # C code has the GIL: that thread can dump
                if others:
                    thread = others.pop(0)
                    if _ask(pid, thread):
                        asked.add(thread)
                else:  # one may have begun since; one that runs may have got the GIL since
                    others = [each for each in _threads(pid) if each not in asked or _runs(pid, each)]
                    later = time.monotonic() + ASK_AGAIN_S
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        os.ftruncate(descriptor, 0)  # gives the memory back
        return text
    finally:
        os.close(descriptor)  # and with it the lock


def parse(text: str) -> list[Thread]:
    """Return the threads in a dump of faulthandler that run Python code.

    >>> [thread] = parse('Thread 0x0001 (most recent call first):\\n  File "a.py", line 3 in f\\n')
    >>> str(thread.leaf)
    'a.py:3 in f'
    """
    threads: list[tuple[str, int, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append((head[3] or "", int(head[2], 16), []))
        elif threads and (call := _FRAME.match(line)):
            file, number, function = call.groups()
            threads[-1][2].append(Frame(_unescape(file), int(number) if number.isdigit() else 0, _unescape(function)))
    return [Thread(tuple(_without_start(frames[::-1])), name, ident) for name, ident, frames in threads if frames]


def _without_start(frames: list[Frame]) -> list[Frame]:
    """Drop calls that a process has not made itself, the outermost first.

    A worker of multiprocessing has the calls of the process that has forked it, or those that start a new interpreter.
    A process of a mesh is started by a one-line program, which looks like the user's `python -c`.
    """
    for place in reversed(range(len(frames))):
        if frames[place].file == _WORKER and frames[place].function.endswith("_bootstrap"):
            return frames[place + 1 :]
    for place, (first, second) in enumerate(itertools.pairwise(frames)):
        if first.file == "<string>" and second.file.startswith(_START):
            return frames[place + 1 :]
    return frames


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def state_of(pid: int) -> str:
    """Return what the kernel says of a process: "stopped", or "waits in the kernel (in nfs_wait)"."""
    fields = _status(f"/proc/{pid}/status")
    if not fields:
        return HAS_ENDED
    letter = fields["State"][:1]
    words = {
        "R": "it runs", "S": "it sleeps", "D": "it waits in the kernel and can't be interrupted", "T": "it is stopped",
        "t": "a debugger has stopped it", "Z": HAS_ENDED, "X": HAS_ENDED,
    }.get(letter, f"state {letter}")  # fmt: skip
    if letter in "SD":
        with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
            where = file.read().strip()
            if where not in ("", "0"):
                words += f" (in {where})"
    return words


def _open(pid: int) -> int | None:
    os.scandir(f"/proc/{pid}/fd").close()  # raises for a process that has ended, or is another user's
    number = descriptor_named(pid, FILE_NAME)
    return None if number is None else os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)


def _lock(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        else:
            return True


def refusal(pid: int) -> str | None:
    """Return why the stack signal must not be sent to a process now, or None."""
    process = _status(f"/proc/{pid}/status")
    if not process:
        return HAS_ENDED
    if process["State"][:1] in "TtZX":
        return f"it does not answer: {state_of(pid)}"
    if not int(process["SigCgt"], 16) & 1 << (stack_signal() - 1):  # the signal would end a process without a handler
        return "it has no handler of the stack signal any more"
    return None


def _ask_first(pid: int, deadline: float) -> tuple[set[int], list[int]]:
    """Send the signal to the first thread that can take it. Raises NoAnswerError without one.

    Return the thread that was asked, and those after it.
    """
    if (why := refusal(pid)) is not None:
        raise NoAnswerError(why)
    while True:
        threads = list(_threads(pid))
        while threads:
            thread = threads.pop(0)
            if _ask(pid, thread):
                return {thread}, threads
        if time.monotonic() >= deadline:
            raise NoAnswerError(f"it does not answer: its threads block the signal, and {state_of(pid)}")
        time.sleep(0.01)  # threads may be in the kernel for a moment


def _ask(pid: int, thread: int) -> bool:
    """Send the signal to a thread. Return False if it can't take it now."""
    bit = 1 << (stack_signal() - 1)
    status = _status(f"/proc/{pid}/task/{thread}/status")
    if not status or status["State"][:1] not in "RS" or int(status["SigBlk"], 16) & bit:
        return False
    if int(status["SigPnd"], 16) & bit:  # an earlier one was not answered; it may be still
        return True
    return bool(ctypes.CDLL(None).tgkill(pid, thread, stack_signal()) == 0)


def _threads(pid: int) -> Iterator[int]:
    """Yield the threads of a process: the main thread, those that run, the others."""
    try:
        found = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return
    runs = {thread: _runs(pid, thread) for thread in found}
    yield from sorted(found, key=lambda thread: (thread != pid, not runs[thread]))


def _runs(pid: int, thread: int) -> bool:
    return _status(f"/proc/{pid}/task/{thread}/status").get("State", "")[:1] == "R"


def _status(path: str) -> dict[str, str]:
    try:
        with open(path) as file:
            return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    except OSError:
        return {}


def _complete(descriptor: int) -> str | None:
    """Return the last complete dump in the file. A dump that began before the lock lacks its first mark."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    end = content.rfind(_END)
    begin = content.rfind(_BEGIN, 0, max(end, 0))
    return None if begin < 0 else content[begin + len(_BEGIN) : end].decode("ascii", "replace")


def _unescape(text: str) -> str:
    """Undo faulthandler's escapes of characters beyond ASCII."""
    return re.sub(
        r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))",
        lambda found: chr(int(found[1] or found[2] or found[3], 16)), text,
    )  # fmt: skip


def _py_spy_frame(call: dict[str, Any]) -> Frame:
    return Frame(call["filename"], call["line"] or 0, call["name"])


def _with_py_spy(pid: int, *, native: bool = False) -> Stacks:
    try:
        found = py_spy.dump(pid, native=native)
    except py_spy.PySpyError as error:
        return Stacks(pid, problem=str(error))
    threads = [
        Thread(
            tuple(_without_start([_py_spy_frame(call) for call in reversed(thread["frames"])])),
            thread["thread_name"] or "",
            thread["thread_id"],
        )
        for thread in found
    ]  # fmt: skip
    return Stacks(pid, threads)
