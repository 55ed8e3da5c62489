"""What a command looks at: the programs of this machine, or, with the same methods, all hosts of a job."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, Protocol

from monarch_backend._telemetry import (
    child_processes,
    gpu_memory,
    late_ranks,
    process_signals,
    profile_result,
    program_output,
    programs,
    py_spy,
)
from monarch_backend._telemetry import program_recording as recordings
from monarch_backend._telemetry.process_stacks import read_all
from monarch_backend._telemetry.profile_result import ProfileResult
from monarch_backend._telemetry.program_output import FollowedOutput, LineFilter, Lines
from monarch_backend._telemetry.program_recording import Recording, Unread
from monarch_backend._telemetry.programs import Process, Program
from monarch_backend._telemetry.rates import ProcessKey, RateMeter, Rates
from monarch_backend._telemetry.reader import ALL_EVENTS, EventFilter
from monarch_backend._telemetry.stacks import Stacks

Member = tuple[Program, Process]
"""A process with its program, which says on which host both are."""


class Subject(Protocol):
    """Programs that a command or the dashboard looks at. Use it in a ``with`` block.

    All methods may be called on several threads. They raise LookupError if there is no such program or process, and
    NotImplementedError without /proc.
    """

    is_of_hosts: bool
    """Whether looks are sent to other hosts, where they take longer."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...

    def programs(self) -> tuple[list[Program], list[Unread]]:
        """Return the programs with their late and slow ranks, GPU memory and child processes, and what was not read."""

    def look(self) -> tuple[list[Program], dict[ProcessKey, Rates], list[Unread]]:
        """Return the programs with their GPU memory, rates of processes since the last look, and what was not read."""

    def recording(
        self, wanted: EventFilter | None = ALL_EVENTS, of: Sequence[Program] | None = None
    ) -> Recording:  # fmt: skip
        """Return what the programs have recorded, or some ``of`` them, with the wanted events, or without events."""

    def stacks(
        self, host: str, pids: Sequence[int], /, *, native: bool = False, with_py_spy: bool = True,
        time_limit: float = float("inf"),
    ) -> list[Stacks]:  # fmt: skip
        """Return the stacks of processes of a host, "" for this machine."""

    def lines(self, program: Program, wanted: LineFilter) -> Lines:
        """Return the kept output of a program."""

    def follow(self, program: Program, wanted: LineFilter) -> Lines:
        """Return the output of a program since the last call, at first all that is kept."""

    def send_signal(self, program: Program, processes: list[Process], number: signal.Signals) -> str:
        """Send a signal as `process_signals.send` does. Raises as it does."""

    def profile(self, members: Sequence[Member], *, seconds: float | None, steps: int | None) -> ProfileResult:
        """Profile processes at the same time, as `profile_result.take` does."""

    def flame_graph(self, member: Member, seconds: float) -> bytes:
        """Return a flame graph of a process as SVG. It takes ``seconds``. Raises PySpyError."""


def add_unrecorded(chosen: Sequence[Program]) -> None:
    """Add what programs of this machine do not record: late and slow ranks, GPU memory and child processes."""
    late_ranks.add_to(chosen)
    gpu_memory.add_to(chosen)
    child_processes.add_to(chosen)


class ThisMachine:
    """The programs of this machine that a name stands for, as `programs.select` has it."""

    is_of_hosts = False

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._meter = RateMeter(lambda: programs.select(name))
        self._followed: dict[int, FollowedOutput] = {}

    def __enter__(self) -> ThisMachine:
        return self

    def __exit__(self, *_: object) -> None:
        while self._followed:
            self._followed.popitem()[1].close()

    def programs(self) -> tuple[list[Program], list[Unread]]:
        """See `Subject`."""
        chosen = programs.select(self._name)
        add_unrecorded(chosen)
        return chosen, []

    def look(self) -> tuple[list[Program], dict[ProcessKey, Rates], list[Unread]]:
        """See `Subject`."""
        return *self._meter.look(), []

    def recording(
        self, wanted: EventFilter | None = ALL_EVENTS, of: Sequence[Program] | None = None
    ) -> Recording:  # fmt: skip
        """See `Subject`."""
        return recordings.read(self._name, wanted) if of is None else recordings.read_programs(list(of), wanted)

    def stacks(
        self, _host: str, pids: Sequence[int], /, *, native: bool = False, with_py_spy: bool = True,
        time_limit: float = float("inf"),
    ) -> list[Stacks]:  # fmt: skip
        """See `Subject`."""
        return read_all(pids, native=native, with_py_spy=with_py_spy, time_limit=time_limit)

    def lines(self, program: Program, wanted: LineFilter) -> Lines:
        """See `Subject`."""
        return program_output.read(program, wanted)

    def follow(self, program: Program, wanted: LineFilter) -> Lines:
        """See `Subject`."""
        followed = self._followed.get(program.pid)
        if followed is None:
            followed = self._followed[program.pid] = FollowedOutput(lambda: running(program.pid))
        return followed.next(wanted)

    def send_signal(self, program: Program, processes: list[Process], number: signal.Signals) -> str:
        """See `Subject`."""
        return process_signals.send(program, processes, number)

    def profile(self, members: Sequence[Member], *, seconds: float | None, steps: int | None) -> ProfileResult:
        """See `Subject`."""
        return profile_result.take([(each.pid, each.label) for _, each in members], seconds=seconds, steps=steps)

    def flame_graph(self, member: Member, seconds: float) -> bytes:
        """See `Subject`."""
        return py_spy.flame_graph(member[1].pid, seconds)


def running(pid: int) -> Program | None:
    """Return the program of this machine with this pid, None if it has ended."""
    return next((each for each in programs.programs() if each.pid == pid), None)
