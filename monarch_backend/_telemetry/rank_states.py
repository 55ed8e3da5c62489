"""State of a process in one word, from what its parts do now."""

from __future__ import annotations

import signal
from typing import Any

from monarch_backend._telemetry.programs import HELD_STATES, Process

_STOPPED = {HELD_STATES["T"], HELD_STATES["t"]}


def state_of(process: Process) -> tuple[str, dict[str, Any] | None]:
    """Return the state of a process, and the activity that it is in for longest.

    The state is ended, failed, stopped, breakpoint, constructing, collective, waiting, running or idle.
    """
    if process.exit_code is not None:
        busy = [each for each in process.activities if each["state"] != "idle"]
        return "failed" if process.exit_code else "ended", _longest(busy)
    if process.state in _STOPPED:
        return "stopped", _longest([each for each in process.activities if each["state"] != "idle"])
    for state, found in _states(process.activities).items():
        if found:
            return state, _longest(found)
    return "idle", None


def _states(activities: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the activities that make each state, the state that says most first."""
    busy = [each for each in activities if each["state"] != "idle"]
    return {
        "failed": [each for each in busy if each["state"] == "failed"],
        "breakpoint": [each for each in busy if each["kind"] == "wait" and each["name"] == "breakpoint"],
        "constructing": [each for each in busy if each["state"] == "constructing"],
        "collective": [each for each in busy if each["kind"] in ("collective", "transfer")],
        "waiting": [each for each in busy if each["kind"] == "wait"],
        "running": busy,
    }


def _longest(activities: list[dict[str, Any]]) -> dict[str, Any] | None:
    messages = [each for each in activities if each["kind"] != "span"]  # a span says less than its message
    return max(messages or activities, key=lambda each: float(each["seconds"]), default=None)


def exit_text(code: int) -> str:
    """Return how a process has ended.

    >>> exit_text(-9), exit_text(1)
    ('by SIGKILL', 'exit code 1')
    """
    try:
        return f"by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    except ValueError:
        return f"by signal {-code}"


def title_of(activity: dict[str, Any]) -> str:
    """Return what an activity is about: "trainer.step", or "all_reduce in group 0"."""
    name, detail = str(activity["name"]), str(activity["detail"])
    if activity["kind"] == "span" or not detail:
        return name
    if activity["kind"] == "collective":
        return f"{detail} in {name}"
    return f"{name} at {detail}" if name == "breakpoint" else f"{name}.{detail}"
