"""Profiles of running processes by torch.profiler, taken at the same time and put on the clock of the recordings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from monarch_backend._telemetry.process_requests import Request
from monarch_backend._telemetry.profiler import MARK
from monarch_backend._telemetry.request_answers import ASKED, TAKEN, RequestError

STEP_LIMIT_S = 60.0
"""Seconds after which a profile of steps ends without them."""

EXPORT_TIMEOUT_S = 120.0
"""Seconds that a process has to write its profile after the profile's end."""

_POLL_S = 0.02


@dataclass
class Profile:
    """Profile of one process of a host, "" for this machine. ``problem`` says why there is none.

    ``events`` are torch's, whose ``ts`` is in microseconds. A time there plus ``offset_ns`` is one of CLOCK_MONOTONIC,
    with an error of at most ``bound_ns``.
    """

    pid: int
    label: str
    problem: str = ""
    host: str = ""
    steps: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    offset_ns: int = 0
    bound_ns: int = 0

    def seen_from(self, host: str, ahead_ns: int, clock_error_ns: int) -> None:
        """Name the host, and convert the times: its clock is ahead of the reader's by ``ahead_ns``."""
        self.host = host
        self.offset_ns -= ahead_ns
        self.bound_ns += clock_error_ns

    def __str__(self) -> str:
        return f"{self.label} (pid {self.pid}): {self.problem or f'{len(self.events)} events'}"


def take(
    processes: Iterable[tuple[int, str]],
    *,
    seconds: float | None = None,
    steps: int | None = None,
    step_limit: float = STEP_LIMIT_S,
    on_end: Callable[[], object] = bool,
) -> list[Profile]:
    """Profile processes of this machine, by pid and label, for some seconds or for some calls of `telemetry.step`.

    ``on_end`` is called when all profiles are over, in most cases before the processes write them. Recordings still
    have the time of the profile then. A process that does not answer has a problem in its profile, and delays the
    result by a few seconds. Raises ValueError unless exactly one of ``seconds`` and ``steps`` is given and positive.
    """
    about = check(seconds, steps, step_limit)
    profiles = [Profile(pid, label) for pid, label in processes]
    waiting: list[tuple[Profile, Request]] = []
    deadline = time.monotonic() + (seconds or step_limit) + EXPORT_TIMEOUT_S
    try:
        for profile in profiles:
            try:
                waiting.append((profile, Request(profile.pid, do="profile", **about)))
            except (RequestError, OSError) as error:
                profile.problem = str(error)
        is_over = False
        while waiting:
            states = {request.state() for _, request in waiting} - {ASKED}  # one that hangs delays nothing
            if not is_over and states and TAKEN not in states:
                is_over = True
                on_end()
            for entry in list(waiting):
                if _is_answered(*entry):
                    waiting.remove(entry)
                    entry[1].close()
            if time.monotonic() > deadline:
                for profile, _ in waiting:
                    profile.problem = "its profile has not arrived in time"
                break
            time.sleep(_POLL_S if waiting else 0.0)
    finally:
        for _, request in waiting:
            request.close()
    return profiles


def check(seconds: float | None, steps: int | None, step_limit: float) -> dict[str, Any]:
    """Return the request of a profile. Raises ValueError and TypeError."""
    if (seconds is None) == (steps is None):
        raise ValueError("give either seconds or steps of a profile")
    if seconds is not None:
        if not 0 < seconds <= 3600:
            raise ValueError(f"a profile lasts more than 0 and at most 3600 seconds, not {seconds}")
        return {"seconds": float(seconds)}
    assert steps is not None
    if isinstance(steps, bool) or int(steps) != steps or not 0 < steps <= 10**6:
        raise ValueError(f"a profile covers 1 to 1000000 steps, not {steps}")
    return {"steps": int(steps), "limit_s": float(step_limit)}


def _is_answered(profile: Profile, request: Request) -> bool:
    try:
        found = request.answer()
        if found is None:
            return False
        about, body = found
        profile.steps = int(about["steps"])
        profile.events = json.loads(body)["traceEvents"]
        profile.offset_ns, profile.bound_ns = _offset(profile.events, about["marks"])
    except RequestError as error:
        profile.problem = str(error)
    except (ValueError, KeyError, TypeError, MemoryError) as error:
        profile.events = []
        profile.problem = f"its profile can't be read: {type(error).__name__}: {error}"
    return True


def _offset(events: list[dict[str, Any]], marks: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the offset of the profiler's clock, and the bound of its error. Raises ValueError without marks.

    A mark began after the first time of the recording's clock, and ended before the second one. So each mark bounds the
    offset. The best marks of the beginning and of the end are used: the offset is in the middle of both, and the bound
    covers both.

    >>> _offset([{"ph": "X", "name": "monarch clock 0", "ts": 1.0, "dur": 2.0}], [(5000, 8000)])
    (4500, 500)
    """
    found = list[tuple[int, int, int]]()
    for event in events:
        name = str(event.get("name"))
        if not name.startswith(MARK) or event.get("ph") != "X":
            continue
        text = name.removeprefix(MARK).strip()
        if not text.isdecimal():  # a range of the program with a similar name
            continue
        number = int(text)
        if number < len(marks):
            before, after = marks[number]
            start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            found.append((number, before - start, after - end))
    if not found:
        raise ValueError("it has no marks of the clock")
    half = len(marks) // 2
    best = [
        min(part, key=lambda each: each[2] - each[1])
        for part in ([e for e in found if e[0] < half], [e for e in found if e[0] >= half])
        if part
    ]
    low, high = min(each[1] for each in best), max(each[2] for each in best)
    return (low + high) // 2, (max(high - low, 0) + 1) // 2
