"""What runs on all hosts of a job, read from any program that has the job's file.

A host of this machine is read directly. On each other one a reader is started as an actor (host_reader.py), which reads
there what the processes have recorded. No process of the job has to answer, so it works while they hang.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from monarch_backend import _native
from monarch_backend._core.errors import first_line
from monarch_backend._core.parallel import in_parallel
from monarch_backend._hosts.attach import attach_as_reader
from monarch_backend._hosts.connection_settings import parse_address
from monarch_backend._hosts.process_identity import Identity
from monarch_backend._job import host_reader, state_file
from monarch_backend._job.host_reader import MESSAGES, HostReader, Refusal
from monarch_backend._job.state_file import HostEntry, JobFile
from monarch_backend._mesh.host_mesh import HostMesh
from monarch_backend._processes.debugging import client
from monarch_backend._processes.debugging.client import WaitingProcess
from monarch_backend._telemetry import late_ranks, process_signals, profiles, program_recording
from monarch_backend._telemetry.profile_result import ProfileResult, take_here
from monarch_backend._telemetry.profiles import Profile
from monarch_backend._telemetry.program_output import LineFilter, Lines
from monarch_backend._telemetry.program_recording import AskedHost, Recording, Unread
from monarch_backend._telemetry.programs import Process, Program, programs
from monarch_backend._telemetry.py_spy import RECORD_GRACE_S, PySpyError
from monarch_backend._telemetry.rates import ProcessKey, RateMeter, Rates
from monarch_backend._telemetry.reader import ALL_EVENTS, EventFilter
from monarch_backend._telemetry.stacks import Stacks
from monarch_backend._telemetry.subject import Member, ThisMachine, add_unrecorded
from monarch_backend._transport.network.auth import read_secret

TIMEOUT_S = 15.0
"""Seconds for a host to start a reader, and for each answer of it."""

RETRY_S = 30.0
"""Seconds in which a host that has not answered is not asked again."""

CONTROLLER_AGE_S = 10.0
"""Age at which the search for programs of this machine that use the job is repeated."""

_REFUSALS = {
    each.__name__: each
    for each in (LookupError, NotImplementedError, OSError, PermissionError, ProcessLookupError, TimeoutError)
}
"""Errors of `process_signals.send`, by name. A host's answer can raise no other type."""

_CLOCK_ROUNDS = 10
_CONNECT_TIMEOUT_S = 3.0

_meshes: dict[tuple[int, str, Identity | str], HostMesh] = {}
"""Hosts that this process has attached, by its pid, the job and the host: an attachment lasts as long as a program."""

T = TypeVar("T")


@dataclass
class _Reader:
    """A host with its readers: one for looks, and one for requests that take longer, which looks must not wait for."""

    host: HostEntry
    name: str
    looks: Any
    requests: Any
    reason: str = ""  # why it did not answer
    asked_again_at: float = 0.0


class Inspection:
    """The hosts of a job and a reader on each one of another machine, with the methods of `Subject`.

    ``path``: the job's file. Raises JobError if it is not one.
    ``controllers`` are pids of programs of this machine that use the job; None stands for those that are found in what
    the hosts have recorded.
    """

    is_of_hosts = True

    def __init__(self, path: Path, controllers: Iterable[int] | None = None) -> None:
        file = state_file.read(path)
        hosts = [] if file is None else file.hosts
        self._hosts_here = [host for host in hosts if not host.where]
        self._here = [host.daemon.pid for host in self._hosts_here]
        self._controllers = [] if controllers is None else list(controllers)
        self._searched_again_at = float("-inf") if controllers is None else float("inf")
        self._finding = threading.Lock()
        self._machine = ThisMachine(None)
        self._meter = RateMeter(self._programs_here)
        self._procs: list[Any] = []
        self._readers: dict[str, _Reader] = {}
        self._not_attached: list[Unread] = []
        remote = [host for host in hosts if host.where]
        if file is not None and remote:
            self._attach(file, remote)

    def __enter__(self) -> Inspection:
        return self

    def __exit__(self, *_: object) -> None:
        self._machine.__exit__()
        stops = []
        for procs in self._procs:
            with contextlib.suppress(Exception):  # its host has been lost meanwhile
                stops.append(procs.stop("it has read"))
        for stop in stops:
            with contextlib.suppress(Exception):
                stop.get(timeout=TIMEOUT_S)

    # ---- the readers

    def _attach(self, file: JobFile, hosts: Sequence[HostEntry]) -> None:
        """Start the readers, on all hosts at the same time. A host that fails does not hide the others."""
        try:
            secret = read_secret(Path(file.secret_file))
        except (OSError, ValueError) as error:
            for host in hosts:
                self._not_read(host, f"the job's secret cannot be read: {first_line(error)}")
            return
        reached = []
        for host, is_reached in zip(hosts, in_parallel(_is_reached, hosts), strict=True):
            if is_reached:
                reached.append(host)
            else:
                self._not_read(host, f"it does not accept a connection at {host.address}")
        started = []
        for host, mesh in zip(reached, _meshes_of(file, reached, secret), strict=True):
            if isinstance(mesh, str):
                self._not_read(host, mesh)
                continue
            try:
                started.append(self._start(host, mesh))
            except Exception as error:  # any failure of one host
                _meshes.pop(_key(file, host), None)
                self._not_read(host, first_line(error))
        deadline = time.monotonic() + TIMEOUT_S
        for reader in started:
            try:
                reader.looks.clock_ns.call_one().get(timeout=max(0.1, deadline - time.monotonic()))
            except Exception as error:
                _meshes.pop(_key(file, reader.host), None)
                self._not_read(reader.host, first_line(error))
            else:
                self._readers[reader.name] = reader

    def _start(self, host: HostEntry, mesh: HostMesh) -> _Reader:
        procs: Any = mesh.spawn_procs(name=host_reader.NAME)
        self._procs.append(procs)
        arguments = None if host.process is None else host.process.pid, _name(host)
        return _Reader(
            host, _name(host), procs.spawn("looks", HostReader, *arguments), procs.spawn("asks", HostReader, *arguments)
        )

    def _not_read(self, host: HostEntry, reason: str) -> None:
        self._not_attached.append(Unread(0, host.label, reason))

    def _of_hosts(
        self, call: Callable[[_Reader], T], names: Container[str] | None = None
    ) -> tuple[list[T], list[Unread]]:
        """Return the answers of the hosts, or of those with these names, and the hosts without one.

        A host that fails is left out for some time.
        """

        def ask(reader: _Reader) -> T | Unread:
            if time.monotonic() < reader.asked_again_at:
                return Unread(0, reader.host.label, reader.reason)
            try:
                return call(reader)
            except Exception as error:
                reader.reason, reader.asked_again_at = first_line(error), time.monotonic() + RETRY_S
                return Unread(0, reader.host.label, reader.reason)

        answers = in_parallel(ask, [each for each in self._readers.values() if names is None or each.name in names])
        unread = [*self._not_attached, *(each for each in answers if isinstance(each, Unread))]
        return [each for each in answers if not isinstance(each, Unread)], unread

    # ---- looks

    def programs(self) -> tuple[list[Program], list[Unread]]:
        """See `Subject`."""
        found = self._read(None, None, with_late=True)
        return found.programs, found.unread

    def recording(
        self, wanted: EventFilter | None = ALL_EVENTS, of: Sequence[Program] | None = None
    ) -> Recording:  # fmt: skip
        """See `Subject`."""
        return self._read(wanted, of, with_late=False)

    def look(self) -> tuple[list[Program], dict[ProcessKey, Rates], list[Unread]]:
        """See `Subject`."""
        answers, unread = self._of_hosts(lambda each: _get(each.looks.look.call_one()))
        found, rates = self._meter.look()
        for more, rates_there in answers:
            found += more
            rates |= rates_there
        return found, rates, unread

    def _read(self, wanted: EventFilter | None, of: Sequence[Program] | None, *, with_late: bool) -> Recording:
        def read(reader: _Reader) -> Recording:
            ahead, error = _clock_offset(lambda: _get(reader.looks.clock_ns.call_one()))
            pids = None if of is None else [each.pid for each in of if each.host == reader.name]
            found: Recording = _get(reader.looks.recording.call_one(ahead, error, wanted, with_late, pids))
            return found

        found, unread = self._of_hosts(read, None if of is None else {each.host for each in of})
        if of is None:
            here = program_recording.read_pids([*self._here, *self._controller_pids()], wanted)
        else:
            here = program_recording.read_programs([each for each in of if not each.host], wanted)
        if with_late:
            add_unrecorded(here.programs)
        for each in found:
            here.add(each)
        here.unread += unread
        here.hosts += [AskedHost(each.label, each.reason) for each in unread]
        here.hosts += [each for each in self._local_hosts(here.programs) if of is None or each.has_answered]
        if with_late and found:
            late_ranks.add_of_hosts(here, self._places)
        return here

    def _local_hosts(self, chosen: list[Program]) -> list[AskedHost]:
        """Return the hosts of the job on this machine. One has answered if its daemon is among what was read."""
        return [
            AskedHost(
                host.label,
                "" if any(each.has([host.daemon.pid]) for each in chosen)
                else f"its daemon (pid {host.daemon.pid}) records nothing, or has ended",
            )
            for host in self._hosts_here
        ]  # fmt: skip

    def _places(self, host: str, pids: list[int]) -> list[str]:
        if not host:
            return late_ranks.places_of(pids)
        try:
            found: list[str] = _get(self._readers[host].looks.places.call_one(pids))
        except Exception as error:  # a place is a part of a text only
            return [f"at an unknown line ({first_line(error)})"] * len(pids)
        return found

    def _programs_here(self) -> list[Program]:
        wanted = [*self._here, *self._controller_pids()]
        return [program for program in programs() if program.has(wanted)]

    def _controller_pids(self) -> list[int]:
        """Return the programs of this machine that use the job, as the senders of what its processes handle tell."""
        with self._finding:
            if time.monotonic() < self._searched_again_at:
                return self._controllers
            answers, _ = self._of_hosts(lambda each: _get(each.looks.senders.call_one()))
            everything = program_recording.read_programs(programs(), MESSAGES).processes
            callers = set[int]().union(*(each.senders() for each in everything if each.program.has(self._here)))
            callers = callers.union(*(senders for senders, _ in answers)) - {0}
            callers = callers.difference(*(of_host for _, of_host in answers))  # a host may be this machine
            self._controllers = [
                each.pid for each in everything if each.recorded.identity in callers and each.pid != os.getpid()
            ]
            self._searched_again_at = time.monotonic() + CONTROLLER_AGE_S
            return self._controllers

    # ---- requests to one host

    def _asked(self, host: str) -> Any:
        reader = self._readers.get(host)
        if reader is None:
            raise LookupError(f"host {host} was not reached")
        return reader.requests

    def stacks(
        self, host: str, pids: Sequence[int], /, *, native: bool = False, with_py_spy: bool = True,
        time_limit: float = float("inf"),
    ) -> list[Stacks]:  # fmt: skip
        """See `Subject`. Of a host that does not answer, each process has the reason."""
        if not host:
            return self._machine.stacks(host, pids, native=native, with_py_spy=with_py_spy, time_limit=time_limit)
        call = self._asked(host).stacks.call_one(list(pids), native, with_py_spy, time_limit)
        try:
            return list(_get(call, min(time_limit, len(pids))))
        except Exception as error:
            return [Stacks(pid, problem=f"host {host} has not answered: {first_line(error)}") for pid in pids]

    def lines(self, program: Program, wanted: LineFilter) -> Lines:
        """See `Subject`."""
        return self._machine.lines(program, wanted) if not program.host else self._lines(program, wanted, follow=False)

    def follow(self, program: Program, wanted: LineFilter) -> Lines:
        """See `Subject`."""
        return self._machine.follow(program, wanted) if not program.host else self._lines(program, wanted, follow=True)

    def _lines(self, program: Program, wanted: LineFilter, *, follow: bool) -> Lines:
        try:
            found: Lines | None = _get(self._asked(program.host).lines.call_one(program.pid, wanted, follow))
        except LookupError:
            raise
        except Exception as error:
            raise LookupError(f"host {program.host} has not answered: {first_line(error)}") from None
        return found or Lines([], 0, [], is_kept=False, has_ended=True)

    def send_signal(self, program: Program, processes: list[Process], number: signal.Signals) -> str:
        """See `Subject`. Raises LookupError for a host that does not answer."""
        if not program.host:
            return self._machine.send_signal(program, processes, number)
        call = self._asked(program.host).send_signal.call_one(program, processes, int(number))
        try:
            answer: str | Refusal = _get(call, process_signals.PATIENCE_S)
        except Exception as error:
            raise LookupError(
                f"host {program.host} has not answered, and may have sent the signal: {first_line(error)}"
            ) from None
        return answer if isinstance(answer, str) else _raise(answer)

    def waiting(self) -> tuple[list[tuple[str, WaitingProcess]], list[Unread]]:
        """Return the processes that wait at a breakpoint, and what was not read. A process has its host, "" here."""
        answers, unread = self._of_hosts(lambda each: [(each.name, one) for one in _get(each.looks.waiting.call_one())])
        pids = {process.pid for program in self._programs_here() for process in program.processes}
        here = [("", each) for each in client.waiting_processes() if each.pid in pids]
        return [*here, *(one for answer in answers for one in answer)], unread

    def debug(
        self, by_host: Mapping[str, list[WaitingProcess]], command: str, *, until_resumed: bool
    ) -> dict[WaitingProcess, str]:
        """Send a command of pdb to waiting processes, and return the answers. It has no limit of time.

        It waits on the calling thread, so that Ctrl-C ends it.
        """
        answers: dict[WaitingProcess, str] = {}
        calls: dict[str, Any] = {}

        def refuse(host: str, error: Exception) -> None:
            answers.update(dict.fromkeys(by_host[host], f"host {host} has not answered: {first_line(error)}"))

        for host in filter(None, by_host):
            try:
                calls[host] = self._asked(host).debug.call_one(by_host[host], command, until_resumed)
            except Exception as error:
                refuse(host, error)
        answers.update(client.send_command(by_host.get("", []), command, until_resumed=until_resumed))
        for host, call in calls.items():
            try:
                answers.update(call.get())
            except Exception as error:
                refuse(host, error)
        return answers

    def profile(self, members: Sequence[Member], *, seconds: float | None, steps: int | None) -> ProfileResult:
        """See `Subject`. The hosts begin at the same time, apart from the way of the request."""
        profiles.check(seconds, steps, profiles.STEP_LIMIT_S)
        of_host = defaultdict[str, list[tuple[int, str]]](list)
        for program, process in members:
            of_host[program.host].append((process.pid, process.label))
        limit = (seconds or profiles.STEP_LIMIT_S) + profiles.EXPORT_TIMEOUT_S

        def take(host: str) -> tuple[list[Profile], Recording | None]:
            ranks = of_host[host]
            if not host:
                return take_here(ranks, seconds=seconds, steps=steps)
            try:
                looks = self._readers[host].looks
                ahead, error = _clock_offset(lambda: _get(looks.clock_ns.call_one()))
                call = self._asked(host).profile.call_one(ranks, seconds, steps, ahead, error)
                found: tuple[list[Profile], Recording] = _get(call, limit)
            except Exception as failure:
                problem = f"host {host} has not answered: {first_line(failure)}"
                return [Profile(pid, label, problem, host) for pid, label in ranks], None
            return found

        here = program_recording.read_pids(self._controller_pids() if "" not in of_host else [])
        found: list[Profile] = []
        for taken, recording in in_parallel(take, of_host):
            found += taken
            if recording is not None:
                here.add(recording)
        return ProfileResult(found, here)

    def flame_graph(self, member: Member, seconds: float) -> bytes:
        """See `Subject`."""
        program, process = member
        if not program.host:
            return self._machine.flame_graph(member, seconds)
        try:
            call = self._asked(program.host).flame_graph.call_one(process.pid, seconds)
            answer: bytes | Refusal = _get(call, seconds + RECORD_GRACE_S)
        except Exception as error:
            raise PySpyError(f"host {program.host} has not answered: {first_line(error)}") from None
        if isinstance(answer, bytes):
            return answer
        raise PySpyError(answer[1])


def _get(call: Any, seconds: float = 0.0) -> Any:
    """Return the answer of a reader to a request that takes some seconds itself."""
    return call.get(timeout=TIMEOUT_S + seconds)


def _raise(refusal: Refusal) -> NoReturn:
    name, text = refusal
    known = _REFUSALS.get(name)
    raise LookupError(f"the host has answered with an error: {name}: {text}") if known is None else known(text)


def _clock_offset(clock_ns: Callable[[], int]) -> tuple[int, int]:
    """Return by how much another clock is ahead, and the bound of the error: half of the shortest round trip.

    Cristian's algorithm: F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989.
    """
    best: tuple[int, int] | None = None
    for _ in range(_CLOCK_ROUNDS):
        begun = _native.monotonic_ns()
        there = clock_ns()
        took = _native.monotonic_ns() - begun
        if best is None or took < 2 * best[1]:
            best = there - begun - took // 2, (took + 1) // 2
    assert best is not None
    return best


def _meshes_of(file: JobFile, hosts: Sequence[HostEntry], secret: bytes) -> list[HostMesh | str]:
    """Return the hosts as meshes of this process, which attaches those that it has not yet; or why it could not."""
    new = [host for host in hosts if _key(file, host) not in _meshes]
    named = [(f"{host.mesh}{host.index}", host.address) for host in new]
    reasons: dict[int, str] = {}
    try:
        answers = attach_as_reader(named, secret=secret, timeout=TIMEOUT_S) if named else []
    except Exception as error:  # this process can attach none
        answers = [first_line(error) for _ in new]
    for host, made in zip(new, answers, strict=True):
        if isinstance(made, str):
            reasons[id(host)] = made
        else:
            _meshes[_key(file, host)] = made
    return [reasons.get(id(host)) or _meshes[_key(file, host)] for host in hosts]


def _key(file: JobFile, host: HostEntry) -> tuple[int, str, Identity | str]:
    return os.getpid(), file.id, host.process or f"{host.label} {host.incarnation}"


def _name(host: HostEntry) -> str:
    return f"{host.mesh}[{host.index}] ({host.where})"


def _is_reached(host: HostEntry) -> bool:
    try:
        socket.create_connection(parse_address(host.address), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
