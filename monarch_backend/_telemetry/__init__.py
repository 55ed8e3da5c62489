"""Recording of what processes do, and its readers: events, current activities, stacks. It stands on _core only."""

from __future__ import annotations

from typing import Any

from monarch_backend._core.extension_points import provide


def _answer_profile() -> Any:
    from monarch_backend._telemetry import profiler

    return profiler.answer


def _answer_locks() -> Any:
    from monarch_backend._telemetry import lock_answers

    return lock_answers.answer


provide("request profile", _answer_profile)
provide("request locks", _answer_locks)
