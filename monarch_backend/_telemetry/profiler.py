"""Profile of this process by torch.profiler, on request of another process: profiles.py asks for it.

The profiler is started on a thread of its own and covers all threads. Marks with known times of the recording's clock,
at the beginning and at the end, let the requester find the offset of the profiler's clock.
"""

from __future__ import annotations

import functools
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from monarch_backend._core.errors import first_line
from monarch_backend._telemetry import steps
from monarch_backend._telemetry.recorder import monotonic_ns
from monarch_backend._telemetry.request_answers import Asked, RequestError, is_imported

MARK = "monarch clock"
"""First words of the names of marks; their number follows."""

MARKS = 10
"""Marks at the beginning, and as many at the end."""

_POLL_S = 0.1

_MAX_HOLD_S = 60.0
"""Seconds for which a session of the program waits at most for the end of one of this module."""

_one_at_a_time = threading.Lock()
_hold: _Hold | None = None


def answer(request: dict[str, Any], asked: Asked) -> tuple[dict[str, Any], bytes]:
    """Return what is known of the profile, and torch's trace. Raises RequestError with the reason of a refusal.

    It lasts for the ``seconds`` of the request, or for its ``steps`` and ``limit_s`` at most, or while it is wanted.
    """
    if not is_imported("torch"):
        raise RequestError("it has not imported torch")
    if not _one_at_a_time.acquire(blocking=False):
        raise RequestError("another profile of it is under way")
    try:
        return _profile(request, asked)
    finally:
        _one_at_a_time.release()


def _profile(request: dict[str, Any], asked: Asked) -> tuple[dict[str, Any], bytes]:
    with _others_wait() as is_asked_for:
        if _has_session():
            raise RequestError("its program uses torch.profiler itself at the moment")
        # In a function of its own, so that the session's objects are gone at the end of the block.
        found = _session(request, asked, is_asked_for)
    if found is None:
        raise RequestError("its program has started torch.profiler meanwhile")
    return found


def _session(
    request: dict[str, Any], asked: Asked, is_asked_for: Callable[[], bool]
) -> tuple[dict[str, Any], bytes] | None:
    """Return the profile, or None if the program wants a session of its own."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler.profiler import _KinetoProfile  # the public `profile` leaves reference cycles

    try:
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        raise RequestError(f"torch {torch.__version__} profiles only the thread that starts it") from None
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    profiler = _KinetoProfile(activities=activities, experimental_config=config)
    try:
        profiler.start()
    except RuntimeError as error:
        raise RequestError(f"torch's profiler can't be started: {first_line(error)}") from None
    try:
        with steps.watched() as watch:
            marks = list(_marks(0))
            _wait(request, watch, lambda: asked.is_wanted() and not is_asked_for())
            marks += _marks(len(marks))
        asked.end()
    finally:
        profiler.stop()
    if is_asked_for():
        return None
    about = {"marks": marks, "steps": watch.count, "torch": torch.__version__}
    with tempfile.TemporaryDirectory(prefix="monarch-profile-") as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, "rb") as file:
            return about, file.read()


def _has_session() -> bool:
    """Return whether the program has a session of torch's profiler, or has prepared one. It looks at all objects."""
    from torch.autograd import profiler

    return profiler._is_profiler_enabled or any(
        each.enabled and each.entered and each.kineto_results is None
        for each in gc.get_objects()
        if issubclass(type(each), profiler.profile)
    )


@dataclass
class _Hold:
    """A session of this module, for whose end the sessions of other threads wait."""

    thread: int = field(default_factory=threading.get_ident)
    is_wanted: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)


def let_sessions_wait(prepare: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a `_prepare_trace` that first waits for the end of a session of this module on another thread."""

    @functools.wraps(prepare)
    def prepare_later(self: Any) -> Any:
        hold = _hold
        if hold is not None and threading.get_ident() != hold.thread:
            hold.is_wanted.set()
            hold.is_over.wait(_MAX_HOLD_S)
        return prepare(self)

    return prepare_later


@contextmanager
def _others_wait() -> Iterator[Callable[[], bool]]:
    """Let sessions of other threads wait for the end of the block. The function returns whether one waits."""
    global _hold
    from monarch_backend._core import patches  # imports torch
    from monarch_backend._telemetry.profiler_manifest import PROFILER

    patches.apply(PROFILER)
    _hold = hold = _Hold()
    try:
        yield hold.is_wanted.is_set
    finally:
        _hold = None
        hold.is_over.set()


def _marks(first: int) -> Iterator[tuple[int, int]]:
    """Make marks. Yield the times of the recording's clock before and after each of them."""
    from torch.profiler import record_function

    for number in range(first, first + MARKS):
        before = monotonic_ns()
        with record_function(f"{MARK} {number}"):
            pass
        yield before, monotonic_ns()


def _wait(request: dict[str, Any], watch: steps.StepWatch, is_wanted: Callable[[], bool]) -> None:
    wanted = int(request.get("steps") or 0)
    end = time.monotonic() + float(request["limit_s"] if wanted else request["seconds"])
    while (left := end - time.monotonic()) > 0 and is_wanted():
        if wanted:
            if watch.wait(wanted, min(left, _POLL_S)):
                return
        else:
            time.sleep(min(left, _POLL_S))
