"""What an actor of this machine does now: the endpoint that it runs, since when, and the line of its code."""

from __future__ import annotations

import linecache
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from monarch_backend._telemetry import discovery, process_stacks, stacks
from monarch_backend._telemetry.kinds import Kind, SlotState, State
from monarch_backend._telemetry.program_recording import CONSTRUCTOR
from monarch_backend._telemetry.programs import IS_ASYNC, Process, name_of_call
from monarch_backend._telemetry.reader import Activity, RecordedProcess

_RUNNER_FILES = tuple(
    os.path.join("monarch_backend", "_actor", "execution", name) for name in ("runner.py", "async_runner.py")
)

_CALLERS = "_call", "_call_async", "_drain", "_drain_async"
"""Functions of the runners that call endpoints, and take values of their generators."""

MAX_PLACES = 3
"""Lines that are shown where several threads may run an endpoint."""

_CONSTRUCTS = "construct"
"""Function of the runners that constructs actors, in several calls."""


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


def of_starting(pid: int, timeout: float) -> str:
    """Return "its process is starting, it is at ...", for one that has no identity yet. It takes ``timeout`` seconds.

    Such a process imports the program or runs its ``bootstrap``.
    """
    found = (each for area in discovery.areas() for each in area.processes() if each.pid == pid and not each.identity)
    process = next((each for each in found if each.state == SlotState.ALIVE), None)
    return f"its process is starting, it is {place_of(process, timeout)}" if process else "its process has not started"


def describe(process: RecordedProcess, call: Call, timeout: float) -> str:
    """Return what a process does about a call, and the line of its code. It takes ``timeout`` seconds at most."""
    text, running = _activity(process, call)
    if running is None:
        state = stacks.state_of(process.pid)
        return text if state.startswith(("it runs", "it sleeps")) else f"{state}; {text}"
    found = process_stacks.read(process.pid, timeout=timeout, with_py_spy=False)
    place = _place(process, found, running)
    is_it = (running.trace, running.reference) == (call.caller, call.number)
    doing = f"it is {place}, {text}" if is_it else f"{text}; it is {place}"
    return f"{doing}{_wait(process, running, found)}"


def place_of(process: RecordedProcess, timeout: float) -> str:
    """Return where a process is in its program: "at train.py:33 in load (source)". It takes ``timeout`` seconds."""
    running = [each for each in process.activities if each.kind == Kind.MESSAGE and each.state != State.IDLE]
    if running:
        return _place(process, process_stacks.read(process.pid, timeout=timeout, with_py_spy=False), running[0])
    state = stacks.state_of(process.pid)
    if not state.startswith(("it runs", "it sleeps")):
        return f"at an unknown line ({state})"
    found = process_stacks.read(process.pid, timeout=timeout, with_py_spy=False)
    if found.problem:
        return f"at an unknown line ({found.problem})"
    for thread in reversed(found.threads):
        if thread.innermost is not None:
            return _at_in(thread, thread.innermost)
    return "idle: it runs no code of the program"


def add_places(process: Process, found: stacks.Stacks) -> None:
    """Add to the messages of async actors of a process where they wait, and for what: "at train.py:33 in load"."""
    for each in process.activities:
        if IS_ASYNC in each:
            tasks = [
                task
                for task in _tasks_of(found, each["name"], each["rank"], each["detail"])
                if not each["call"] or each["call"] == name_of_call(task.caller, task.number)
            ]
            task = next((task for task in tasks if task.innermost is not None), None)
            if task is not None and task.innermost is not None:
                each["place"] = _at(task.innermost)
                each["awaits"] = task.awaits


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


def _wait(process: RecordedProcess, running: Activity, found: stacks.Stacks) -> str:
    """Return what the activity waits for itself, from the process's cells of waits, or from its task."""
    for each in process.activities:
        if each.kind == Kind.WAIT and each.state == State.WAITING and each.value == running.number:
            what = f"{each.name}.{each.detail}" if each.detail else each.name
            return f", and waits for {what} for {_seconds(each)}"
    task = _task_of(found, running)
    return f", and waits for {task.awaits}" if task is not None and task.awaits else ""


def _place(process: RecordedProcess, found: stacks.Stacks, running: Activity) -> str:
    if found.problem:
        return f"at an unknown line ({found.problem})"
    task = _task_of(found, running)
    if task is not None and task.innermost is not None:
        loop = next((each for each in _threads(found) if each.ident == task.ident), None)
        blocked = None if loop is None else loop.innermost
        return _at(task.innermost) + (f" while its event loop is {_at(blocked)}" if blocked is not None else "")
    others = {
        each.detail
        for each in process.activities
        if each.kind == Kind.MESSAGE and each.state == State.RUNNING and each.number != running.number
    }
    candidates = _threads_of(_threads(found), running.detail, others)
    # A controller's worker runs no code of the program.
    places = [_at_in(each, frame) for each in candidates if (frame := each.innermost or each.leaf) is not None]
    if places:
        return " or ".join(places[:MAX_PLACES])
    return f"at an unknown line ({found.unread_tasks})" if found.unread_tasks else "between two lines of its code"


def _at(frame: stacks.Frame) -> str:
    source = linecache.getline(frame.file, frame.line).strip()
    return f"at {frame}" + (f" ({source})" if source else "")


def _at_in(thread: stacks.Thread, frame: stacks.Frame) -> str:
    """Return the line of a frame, and the lock for which its thread waits."""
    return _at(frame) + (f", and waits for {thread.lock}" if thread.lock else "")


def _threads(found: stacks.Stacks) -> list[stacks.Thread]:
    return [each for each in found.threads if not isinstance(each, stacks.Task)]


def _task_of(found: stacks.Stacks, running: Activity) -> stacks.Task | None:
    key = running.trace, running.reference
    tasks = _tasks_of(found, running.name, running.rank, running.detail)
    return next((each for each in tasks if not running.reference or (each.caller, each.number) == key), None)


def _tasks_of(found: stacks.Stacks, actor: str, rank: int, endpoint: str) -> Iterator[stacks.Task]:
    """Yield the waiting tasks of an endpoint's messages. Messages without a reply cannot be told apart."""
    for each in found.threads:
        if isinstance(each, stacks.Task) and (each.actor, each.rank, each.endpoint) == (actor, rank, endpoint):
            yield each


def _threads_of(threads: list[stacks.Thread], endpoint: str, others: Collection[str] = ()) -> list[stacks.Thread]:
    """Return the thread that runs an endpoint: the endpoint is the call after the runner's last one.

    A decorated endpoint comes later, or not yet. Then it may be each thread that runs none of the endpoints ``others``,
    which also run in the process. A constructor may be each one that runs.
    """
    runners = [(thread, calls) for thread in reversed(threads) if (calls := _calls(thread, endpoint)) is not None]
    inner = [thread for thread, calls in runners if any(frame.function == endpoint for frame in calls)]
    if endpoint == CONSTRUCTOR:
        return inner or [thread for thread, _ in runners if thread.innermost is not None]
    direct = [thread for thread, calls in runners if calls and calls[0].function == endpoint]
    left = [
        thread
        for thread, calls in runners
        if thread.innermost is not None and (not calls or calls[0].function not in others)
    ]
    return direct[:1] or inner[:1] or left


def _calls(thread: stacks.Thread, endpoint: str) -> tuple[stacks.Frame, ...] | None:
    """Return the calls below the runner's last one that runs the program's code, None for a thread without it."""
    callers = (_CONSTRUCTS,) if endpoint == CONSTRUCTOR else _CALLERS
    for place in reversed(range(len(thread.frames))):
        frame = thread.frames[place]
        if _is_runner(frame) and frame.function in callers:
            return thread.frames[place + 1 :]
    return None


def _is_runner(frame: stacks.Frame) -> bool:
    return frame.file.endswith(_RUNNER_FILES)
