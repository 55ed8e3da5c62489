"""The reader on one host of a job: an actor that reads there what the processes have recorded, and asks them."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from monarch_backend import _native
from monarch_backend._actor.actor import Actor, endpoint
from monarch_backend._processes.debugging import client
from monarch_backend._processes.debugging.client import WaitingProcess
from monarch_backend._telemetry import (
    late_ranks,
    process_signals,
    profile_result,
    program_output,
    program_recording,
    py_spy,
)
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.process_stacks import read_all
from monarch_backend._telemetry.profiles import Profile
from monarch_backend._telemetry.program_output import FollowedOutput, LineFilter, Lines
from monarch_backend._telemetry.program_recording import Recording, Unread
from monarch_backend._telemetry.programs import Process, Program, of_pid, programs
from monarch_backend._telemetry.rates import ProcessKey, RateMeter, Rates
from monarch_backend._telemetry.reader import EventFilter
from monarch_backend._telemetry.stacks import Stacks
from monarch_backend._telemetry.subject import add_unrecorded

NAME = "monarch reader"
"""Name of the mesh of a reader. Its processes are left out of all that is read."""

MESSAGES = EventFilter((Kind.MESSAGE,))
"""Events that tell which processes call which."""

Refusal = tuple[str, str]
"""Name of an exception, and its text."""


class HostReader(Actor):
    """Reader below a host's daemon. ``host`` is the name of the host for the caller.

    ``ahead_ns`` is by how much the host's clock is ahead of the caller's, with an error of ``error_ns`` at most.
    """

    def __init__(self, daemon: int | None, host: str) -> None:
        # A scheduler's host has an unknown daemon: it is found as the program to which this process belongs, too.
        self._root, self._host = daemon or os.getpid(), host
        self._meter = RateMeter(self._programs)
        self._followed: dict[int, FollowedOutput] = {}

    @endpoint
    def clock_ns(self) -> int:
        """Return the monotonic clock of this host."""
        return int(_native.monotonic_ns())

    @endpoint
    def senders(self) -> tuple[set[int], set[int]]:
        """Return the identities of the senders of messages to the processes of this host, and those of its own."""
        found = program_recording.read_programs(self._programs(), MESSAGES).processes
        return set().union(*(each.senders() for each in found)), {each.recorded.identity for each in found}

    @endpoint
    def recording(
        self, ahead_ns: int, error_ns: int, wanted: EventFilter | None, with_late: bool, pids: list[int] | None
    ) -> Recording:
        """Return what the processes have recorded, of programs with these pids or of all.

        ``with_late``: the programs have their late and slow ranks, GPU memory and child processes.
        """
        if wanted is not None and wanted.since_ns:
            wanted = replace(wanted, since_ns=max(1, wanted.since_ns + ahead_ns))
        chosen = [each for each in self._programs() if pids is None or each.pid in pids]
        found = program_recording.read_programs(chosen, wanted)
        if not found.programs and pids is None:
            found.unread.append(Unread(self._root, "the host's daemon", "it records nothing, or has ended"))
        if with_late:
            add_unrecorded(found.programs)
        found.seen_from(self._host, ahead_ns)
        found.clock_error_ns = error_ns
        return found

    @endpoint
    def places(self, pids: list[int]) -> list[str]:
        """Return where processes of this host are in their programs."""
        return late_ranks.places_of(pids)

    @endpoint
    def look(self) -> tuple[list[Program], dict[ProcessKey, Rates]]:
        """Return the programs, and the rates of their processes since the last look."""
        found, rates = self._meter.look()
        for program in found:
            program.host = self._host
        return found, {(self._host, pid): each for (_, pid), each in rates.items()}

    @endpoint
    def stacks(self, pids: Sequence[int], native: bool, with_py_spy: bool, time_limit: float) -> list[Stacks]:
        """Return the stacks of processes of this host."""
        return read_all(pids, native=native, with_py_spy=with_py_spy, time_limit=time_limit)

    @endpoint
    def lines(self, program: int, wanted: LineFilter, follow: bool) -> Lines | None:
        """Return the kept output of a program, or with ``follow`` that since the last call. None: it has ended."""
        if follow and program in self._followed:
            return self._followed[program].next(wanted)
        found = self._program(program)
        if found is None:
            return None
        if not follow:
            return program_output.read(found, wanted)
        self._followed[program] = FollowedOutput(lambda: self._program(program))
        return self._followed[program].next(wanted)

    @endpoint
    def send_signal(self, program: Program, processes: list[Process], number: int) -> str | Refusal:
        """Send a signal, as `process_signals.send` does."""
        try:
            return process_signals.send(program, processes, signal.Signals(number))
        except (LookupError, NotImplementedError, OSError) as error:
            return type(error).__name__, str(error)

    @endpoint
    def profile(
        self, ranks: list[tuple[int, str]], seconds: float | None, steps: int | None, ahead_ns: int, error_ns: int
    ) -> tuple[list[Profile], Recording]:
        """Return profiles of processes, and what they have recorded."""
        found, recording = profile_result.take_here(ranks, seconds=seconds, steps=steps)
        for each in found:
            each.seen_from(self._host, ahead_ns, error_ns)
        recording.remove(list(_readers_and_idle_agents([p for each in recording.programs for p in each.processes])))
        recording.seen_from(self._host, ahead_ns)
        recording.clock_error_ns = error_ns
        return found, recording

    @endpoint
    def flame_graph(self, pid: int, seconds: float) -> bytes | Refusal:
        """Return a flame graph of a process as SVG."""
        try:
            return py_spy.flame_graph(pid, seconds)
        except py_spy.PySpyError as error:
            return type(error).__name__, str(error)

    @endpoint
    def waiting(self) -> list[WaitingProcess]:
        """Return the processes of this host that wait at a breakpoint."""
        pids = {process.pid for program in self._programs() for process in program.processes}
        return [each for each in client.waiting_processes() if each.pid in pids]

    @endpoint
    def debug(
        self, processes: list[WaitingProcess], command: str, until_resumed: bool
    ) -> list[tuple[WaitingProcess, str]]:
        """Send a command of pdb to waiting processes, and return the answers."""
        return list(client.send_command(processes, command, until_resumed=until_resumed))

    def _program(self, pid: int) -> Program | None:
        return next((each for each in self._programs() if each.pid == pid), None)

    def _programs(self) -> list[Program]:
        """Return the programs below the host's daemon, without readers and idle agents."""
        found = of_pid(programs(), self._root)
        everything = [process for program in found for process in program.processes]
        left_out = {each.pid for each in _readers_and_idle_agents(everything)}
        for program in found:
            program.processes = [each for each in program.processes if each.pid not in left_out]
            program.starting = [each for each in program.starting if not each["label"].endswith(NAME)]
        return found


def _readers_and_idle_agents(processes: Sequence[Process]) -> Iterable[Process]:
    readers = [each for each in processes if each.label.endswith(NAME)]
    children = Counter(each.parent for each in processes)
    starters = Counter(each.parent for each in readers)
    agents = [each for each in processes if each.label.startswith("agent ")]
    return [*readers, *(each for each in agents if starters[each.pid] == children[each.pid])]
