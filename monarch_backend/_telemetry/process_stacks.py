"""Stacks of processes with the tasks of their async actors, whose coroutines are in no thread's stack while they wait.

The process is asked for its tasks if a thread runs the event loop of an actor. It needs the GIL to answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from monarch_backend._core.parallel import in_parallel
from monarch_backend._telemetry import lock_owners, stacks
from monarch_backend._telemetry.process_requests import Request
from monarch_backend._telemetry.request_answers import RequestError
from monarch_backend._telemetry.stacks import ANSWER_TIMEOUT_S, Frame, Stacks, Task, Thread

MIN_TASKS_TIMEOUT_S = 0.25
"""Seconds that a process has to answer for its tasks or locks, also if its threads took all the time."""

_LOOP_FILE = os.path.join("monarch_backend", "_actor", "execution", "async_runner.py")
_UNNAMED = re.compile(r"Task-\d+")


def read(pid: int, *, native: bool = False, timeout: float = ANSWER_TIMEOUT_S, with_py_spy: bool = True) -> Stacks:
    """Return the stacks of a process as `stacks.read` does, with the tasks of its async actors."""
    end = time.monotonic() + timeout
    found = stacks.read(pid, native=native, timeout=timeout, with_py_spy=with_py_spy)
    if any(_runs_tasks(thread) for thread in found.threads):
        try:
            tasks, has_more = _tasks(pid, max(end, time.monotonic() + MIN_TASKS_TIMEOUT_S))
        except (RequestError, OSError) as error:
            found.unread_tasks = f"the tasks of its async actors are unknown: {error}"
        else:
            found.threads[:0] = reversed(tasks)
            found.unread_tasks = f"its async actors have more tasks than these {len(tasks)}" if has_more else ""
    _add_locks(pid, found, end)
    return found


def read_all(
    pids: Sequence[int], *, native: bool = False, with_py_spy: bool = True, time_limit: float = float("inf")
) -> list[Stacks]:
    """Read all processes at once: each one that hangs takes a second. After the time limit no other one is asked."""
    end = time.monotonic() + time_limit

    def read_one(pid: int) -> Stacks:
        if time.monotonic() >= end:
            return Stacks(pid, problem=f"it was not asked: the others have taken {time_limit:g} s")
        return read(pid, native=native, with_py_spy=with_py_spy)

    return in_parallel(read_one, pids)


def _runs_tasks(thread: Thread) -> bool:
    return any(frame.file.endswith(_LOOP_FILE) for frame in thread.frames)


def _add_locks(pid: int, found: Stacks, end: float) -> None:
    """Add the locks for which threads wait. Without an answer they are unknown: the lines are there anyway."""
    asked = lock_owners.expressions(found.threads)
    if not asked:
        return
    about = [(each.thread.ident, each.frame.file, each.frame.line, each.text) for each in asked]
    with contextlib.suppress(RequestError, OSError):
        _, body = _answer(pid, max(end, time.monotonic() + MIN_TASKS_TIMEOUT_S), do="locks", locks=about)
        facts = json.loads(body)
        locks = [None if each is None else lock_owners.Lock(*each) for each in facts["locks"]]
        lock_owners.with_locks(found, asked, locks, {int(ident): name for ident, name in facts["names"].items()})


def _tasks(pid: int, end: float) -> tuple[list[Task], bool]:
    """Return the first waiting tasks of a process, and whether it has more. Raises RequestError and OSError."""
    about, body = _answer(pid, end, do="tasks")
    return [_task(each) for each in json.loads(body)], bool(about["has_more"])


def _answer(pid: int, end: float, **about: Any) -> tuple[dict[str, Any], bytes]:
    pause = 0.001
    with Request(pid, **about) as request:
        while (answer := request.answer()) is None:
            if time.monotonic() >= end:
                raise RequestError(f"it does not answer: {stacks.state_of(pid)}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
    return answer


def _task(facts: dict[str, Any]) -> Task:
    name, actor = facts["name"], facts["actor"]
    if facts["is_message"]:
        title = f"async endpoint {name} of {actor}"
    else:
        title = f"{'another task' if _UNNAMED.fullmatch(name) else f'task {name}'} of {actor}"
    return Task(
        tuple(Frame(*frame) for frame in facts["frames"]), title, facts["thread"], actor, facts["rank"],
        name if facts["is_message"] else "", facts["caller"], facts["number"], facts["awaits"],
    )  # fmt: skip
