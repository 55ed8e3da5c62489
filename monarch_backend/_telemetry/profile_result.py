"""Result of a profile: torch's operators of each process, in one timeline with what the processes have recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from monarch_backend._telemetry import profiles, program_recording, trace_export
from monarch_backend._telemetry.profiles import Profile
from monarch_backend._telemetry.program_recording import Recording


class ProfileResult:
    """Profiles of several processes. `ProcMesh.profile` returns it in a future.

    ``problems`` has the reason for each process without a profile, by its label; the others' profiles are kept.
    ``clock_error_bound_ns`` bounds the error between the times of different processes.

    >>> from monarch_backend.actor import this_host
    >>> with this_host().spawn_procs({"gpus": 2}, name="trainers") as procs:
    ...     result = procs.profile(seconds=0.1, ranks=[1]).get()
    >>> [*result.labels, *result.problems]
    ['gpus 1 of trainers']
    """

    def __init__(self, found: list[Profile], recording: Recording) -> None:
        self._profiles, self._recording = found, recording

    @property
    def problems(self) -> dict[str, str]:
        """Reasons for processes without a profile, by their labels."""
        return {each.label: each.problem for each in self._profiles if each.problem}

    @property
    def labels(self) -> list[str]:
        """Labels of the processes that were profiled."""
        return [each.label for each in self._profiles if not each.problem]

    @property
    def has_steps(self) -> bool:
        """Whether a process has made a step while it was profiled."""
        return any(each.steps for each in self._profiles)

    @property
    def clock_error_bound_ns(self) -> int:
        """Bound of the error of times, in nanoseconds."""
        return max((each.bound_ns for each in self._profiles), default=0)

    def trace(self) -> dict[str, Any]:
        """Return the timeline in the Trace Event Format, as a value for JSON."""
        return trace_export.as_trace(self._recording, self._profiles)

    def save(self, path: str) -> dict[str, int]:
        """Write the timeline for Perfetto. Return the number of its events by phase. Raises OSError."""
        with open(path, "w") as file:
            return trace_export.write(self._recording, file, self._profiles)

    def shortfalls(self, steps: int | None) -> list[str]:
        """Return a line for each process that has made fewer steps than were to be profiled."""
        return [
            f"{each.label} (pid {each.pid}) made {each.steps} of {steps} steps in {profiles.STEP_LIMIT_S:g} s"
            for each in self._profiles
            if steps is not None and not each.problem and each.steps < steps
        ]

    def __repr__(self) -> str:
        return f"ProfileResult({len(self.labels)} processes, {len(self.problems)} problems)"


def take(
    processes: Iterable[tuple[int, str]],
    *,
    seconds: float | None = None,
    steps: int | None = None,
    further: Iterable[Profile] = (),
) -> ProfileResult:
    """Profile processes of this machine, as `profiles.take` does, and read what they have recorded.

    ``further`` has problems of other processes.
    """
    found, recording = take_here(processes, seconds=seconds, steps=steps)
    return ProfileResult([*found, *further], recording)


def take_here(
    processes: Iterable[tuple[int, str]], *, seconds: float | None = None, steps: int | None = None
) -> tuple[list[Profile], Recording]:
    """Profile processes of this machine, and read what they have recorded."""
    ranks = list(processes)
    recordings: list[Recording] = []

    def read() -> None:
        recordings.append(program_recording.read_pids([pid for pid, _ in ranks]))

    found = profiles.take(ranks, seconds=seconds, steps=steps, on_end=read)
    if not recordings:  # none was over at the same time as the others
        read()
    return found, recordings[0]
