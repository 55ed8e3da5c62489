"""Coroutines that the async actors of this process run or await: where each one is. A thread's stack has none of them.

Another process asks for them (_telemetry/process_stacks.py). They are read on the thread of the request, so the answer
also comes while an event loop is blocked.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections.abc import Iterator
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any

from monarch_backend._actor import current_runtime
from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.calls.pending_calls import Stream, asked_of
from monarch_backend._actor.execution.async_runner import AsyncActorRunner
from monarch_backend._core.package_folder import PACKAGE_FOLDER
from monarch_backend._transport.local.peer import Peer

MAX_TASKS = 1000
"""Tasks in an answer. Further ones are left out."""

MAX_DEPTH = 200
"""Coroutines of a task that are followed."""

_ATTRIBUTES = {
    CoroutineType: ("cr_frame", "cr_await"),
    GeneratorType: ("gi_frame", "gi_yieldfrom"),
    AsyncGeneratorType: ("ag_frame", "ag_await"),
}


_C_ITERATORS = "coroutine_wrapper", "async_generator_asend", "async_generator_athrow", "anext_awaitable"
"""Iterators of C code around a coroutine or an async generator. Python has no names for their types."""


def answer(_request: Any, _asked: Any) -> tuple[dict[str, Any], bytes]:
    """Answer the request for the tasks of this process with facts of them as JSON, and whether there are more."""
    runtime = current_runtime.started()
    runners = [] if runtime is None else list(runtime.runners.values())
    tasks = (task for runner in runners if isinstance(runner, AsyncActorRunner) for task in _of_runner(runner))
    found = list(itertools.islice(tasks, MAX_TASKS + 1))
    return {"has_more": len(found) > MAX_TASKS}, json.dumps(found[:MAX_TASKS]).encode()


def _of_runner(runner: AsyncActorRunner) -> Iterator[dict[str, Any]]:
    """Yield the tasks of an actor that wait: first those of its messages, in the order of their start."""
    code = runner.code
    loop, messages = code.loop, code.tasks.copy()
    if loop is None:
        return
    others = asyncio.all_tasks(loop) - set(messages.values())
    tasks: list[tuple[Peer | None, int, asyncio.Task[Any]]] = [(*key, task) for key, task in messages.items()]
    tasks += [(None, 0, task) for task in sorted(others, key=lambda each: each.get_name())]
    for peer, number, task in tasks:
        coroutine = task.get_coro()
        if getattr(coroutine, "cr_running", False):  # it is in the stack of the loop's thread
            continue
        calls = _frames(coroutine)
        yield {
            "actor": runner.name, "rank": runner.rank, "name": task.get_name(), "is_message": peer is not None,
            "caller": 0 if peer is None else peer.identity, "number": number, "thread": code.thread_id,
            "awaits": _awaited(calls),
            "frames": [(each.f_code.co_filename, each.f_lineno or 0, each.f_code.co_name) for each in calls],
        }  # fmt: skip


def _frames(awaitable: Any) -> list[FrameType]:
    """Return the frames of a coroutine and of what it awaits, the outermost first."""
    frames: list[FrameType] = []
    for _ in range(MAX_DEPTH):
        attributes = _ATTRIBUTES.get(type(awaitable))
        if attributes is not None:
            frame, awaitable = (getattr(awaitable, name) for name in attributes)
            if frame is not None:
                frames.append(frame)
        elif awaitable is not None:
            awaitable = _hidden(awaitable)
    return frames


def _hidden(awaitable: Any) -> Any:
    """Return the coroutine or generator behind an iterator of Python's C code, as of ``async for``. None without one.

    An object of a program may refer to a generator that it does not await.
    """
    kind = type(awaitable)
    if kind.__module__ != "builtins" or kind.__name__ not in _C_ITERATORS:
        return None
    found = gc.get_referents(awaitable)
    steps = [each for each in found if type(each).__name__.startswith("async_generator_a")]  # behind anext()
    return next((each for each in found if type(each) in _ATTRIBUTES), steps[0] if steps else None)


def _awaited(frames: list[FrameType]) -> str:
    """Return "worker.step" if the innermost calls await a reply of this endpoint, else ""."""
    for frame in reversed(frames):
        if not frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
            break
        what = frame.f_locals.get("self")
        core = getattr(asked_of(what), "core", None) if isinstance(what, (Future, Stream)) else None
        if core is not None:
            return f"{core.name}.{asked_of(what).endpoint}"
    return ""
