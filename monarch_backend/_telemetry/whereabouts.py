"""What an actor of this machine does now: the endpoint that it runs, since when, and the line of its code."""

from __future__ import annotations

import linecache
import os
import time
from dataclasses import dataclass

from monarch_backend._telemetry import discovery, stacks
from monarch_backend._telemetry.kinds import Kind, SlotState, State
from monarch_backend._telemetry.reader import Activity, RecordedProcess

_RUNNER_FILES = tuple(
    os.path.join("monarch_backend", "_actor", "execution", name) for name in ("runner.py", "async_runner.py")
)


@dataclass(frozen=True)
class Call:
    """A call as its receiver's process records it: the actor, its rank in its mesh, the caller, and the number."""

    actor: str
    rank: int
    caller: int
    number: int


def processes() -> dict[int, RecordedProcess]:
    """Return the running processes of this machine and user that record, by the identity in their tokens."""
    return {
        each.identity: each for area in discovery.areas() for each in area.processes() if each.state == SlotState.ALIVE
    }


def describe(process: RecordedProcess, call: Call, timeout: float) -> str:
    """Return what a process does about a call, and the line of its code. It takes ``timeout`` seconds at most."""
    text, running = _activity(process, call)
    if running is None:
        state = stacks.state_of(process.pid)
        return text if state.startswith(("it runs", "it sleeps")) else f"{state}; {text}"
    place = _place(stacks.read(process.pid, timeout=timeout, with_py_spy=False), running)
    doing = f"it is {place}, {text}" if running.reference == call.number else f"{text}; it is {place}"
    return f"{doing}{_wait(process, running)}"


def place_of(process: RecordedProcess, timeout: float) -> str:
    """Return where a process is in its program: "at train.py:33 in load (source)". It takes ``timeout`` seconds."""
    running = [each for each in process.activities if each.kind == Kind.MESSAGE and each.state != State.IDLE]
    if running:
        return _place(stacks.read(process.pid, timeout=timeout, with_py_spy=False), running[0])
    state = stacks.state_of(process.pid)
    if not state.startswith(("it runs", "it sleeps")):
        return f"at an unknown line ({state})"
    found = stacks.read(process.pid, timeout=timeout, with_py_spy=False)
    if found.problem:
        return f"at an unknown line ({found.problem})"
    frames = [thread.innermost for thread in reversed(found.threads) if thread.innermost is not None]
    return _at(frames[0]) if frames else "idle: it runs no code of the program"


def _activity(process: RecordedProcess, call: Call) -> tuple[str, Activity | None]:
    """Return what the actor does, and the activity that keeps the call waiting."""
    own = [
        each
        for each in process.activities
        if each.kind == Kind.MESSAGE and each.name == call.actor and each.rank == call.rank
    ]
    busy = [each for each in own if each.state in (State.RUNNING, State.CONSTRUCTING)]
    for each in busy:
        if each.state == State.CONSTRUCTING:
            return f"constructing {call.actor} for {_seconds(each)}", each
        if each.reference == call.number and each.trace == call.caller:
            return f"running {each.detail} for {_seconds(each)}", each
    if busy:
        first = min(busy, key=lambda each: each.since_ns)
        return f"the call is queued behind {first.detail}, which runs for {_seconds(first)}", first
    if not own:
        return "no activity of the actor is recorded", None
    return "the actor is idle: the call has not arrived, or its reply is on the way", None


def _seconds(activity: Activity) -> str:
    return f"{max(0.0, (time.monotonic_ns() - activity.since_ns) / 1e9):.0f} s"


def _wait(process: RecordedProcess, running: Activity) -> str:
    """Return what the activity waits for itself, from the process's cells of waits."""
    for each in process.activities:
        if each.kind == Kind.WAIT and each.state == State.WAITING and each.value == running.number:
            what = f"{each.name}.{each.detail}" if each.detail else each.name
            return f", and waits for {what} for {_seconds(each)}"
    return ""


def _place(found: stacks.Stacks, running: Activity) -> str:
    if found.problem:
        return f"at an unknown line ({found.problem})"
    thread = _thread_of(found.threads, running.detail)
    frame = None if thread is None else thread.innermost
    if frame is None:
        return "between two lines of its code, as an async endpoint that waits"
    return _at(frame)


def _at(frame: stacks.Frame) -> str:
    source = linecache.getline(frame.file, frame.line).strip()
    return f"at {frame}" + (f" ({source})" if source else "")


def _thread_of(threads: list[stacks.Thread], endpoint: str) -> stacks.Thread | None:
    """Return the thread that runs an endpoint: the endpoint is the call after the runner's last one."""
    for thread in reversed(threads):
        called = [
            after.function
            for before, after in zip(thread.frames, thread.frames[1:], strict=False)
            if before.file.endswith(_RUNNER_FILES) and not after.is_runtime
        ]
        if endpoint in called or (endpoint == "__init__" and called):
            return thread
    return None
