"""Facts about locks of this process, on request of another one: lock_owners.py asks for them.

The request names a lock by its expression in a frame of a thread, as "self.lock". Only variables and attributes that
are stored are read: no code of the program runs.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import sys
import threading
import types
from typing import Any

from monarch_backend._telemetry.request_answers import Asked

_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())
_OWNER = re.compile(r"owner=(\d+)")
_NOTHING = object()


def answer(request: dict[str, Any], _asked: Asked) -> tuple[dict[str, Any], bytes]:
    """Return for each ``[thread, file, line, expression]`` of the request the lock's facts, or null if there is none.

    The facts are its identity, its type, whether it is locked, and of an RLock its owner, the ident of a thread. The
    names of the threads are in the body, too.
    """
    frames = sys._current_frames()
    try:
        found = [_facts(frames, *each) for each in request["locks"]]
    finally:
        frames.clear()  # a frame keeps the variables of its call
    names = {ident: thread.name for ident, thread in list(threading._active.items())}  # type: ignore[attr-defined]
    return {}, json.dumps({"locks": found, "names": names}).encode()


def _facts(
    frames: dict[int, types.FrameType], thread: int, file: str, line: int, expression: str
) -> tuple[int, str, bool, int] | None:
    frame = frames.get(thread)
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (file, line):
        frame = frame.f_back
    lock = _NOTHING if frame is None else _value(frame, expression)
    if type(lock) is threading.Condition:
        lock = lock.__dict__.get("_lock")
    if type(lock) is _RLOCK:
        text = repr(lock)
        owner = _OWNER.search(text)
        return id(lock), "RLock", "<locked" in text, int(owner[1]) if owner else 0
    return (id(lock), "Lock", lock.locked(), 0) if type(lock) is _LOCK else None


def _value(frame: types.FrameType, expression: str) -> Any:
    name, *attributes = expression.split(".")
    value = frame.f_locals.get(name, frame.f_globals.get(name, _NOTHING))
    for each in attributes:
        found = inspect.getattr_static(value, each, _NOTHING)
        if isinstance(found, types.MemberDescriptorType):  # of a class with __slots__
            with contextlib.suppress(AttributeError):
                found = found.__get__(value)
        value = found
    return value
