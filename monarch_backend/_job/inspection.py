"""What runs on all hosts of a job, read from any program that has the job's file.

A host of this machine is read directly. On each other one a reader is started as an actor, which reads there what the
processes have recorded. No process of the job has to answer, so it works while they hang.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from monarch_backend import _native
from monarch_backend._actor.actor import Actor, endpoint
from monarch_backend._core.errors import first_line
from monarch_backend._core.parallel import in_parallel
from monarch_backend._hosts.attach import attach_to_workers
from monarch_backend._hosts.connection_settings import parse_address
from monarch_backend._hosts.process_identity import Identity
from monarch_backend._job import state_file
from monarch_backend._job.state_file import HostEntry, JobFile
from monarch_backend._mesh.host_mesh import HostMesh
from monarch_backend._telemetry import gpu_memory, late_ranks, program_recording
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.program_recording import Recording, Unread
from monarch_backend._telemetry.programs import Program, programs
from monarch_backend._telemetry.reader import ALL_EVENTS, EventFilter
from monarch_backend._telemetry.stacks import Stacks, read_all
from monarch_backend._transport.network.auth import read_secret

TIMEOUT_S = 15.0
"""Seconds for a host to start a reader, and for each answer of it."""

MESSAGES = EventFilter((Kind.MESSAGE,))
"""Events that tell which processes call which."""

_CLOCK_ROUNDS = 10
_CONNECT_TIMEOUT_S = 3.0

_READER = "monarch reader"  # name of the mesh

_meshes: dict[tuple[int, str, Identity], HostMesh] = {}
"""Hosts that this process has attached, by its pid, the job and the host: an attachment lasts as long as a program."""


class HostReader(Actor):
    """Reader on one host. ``ahead_ns`` is by how much the host's clock is ahead of the caller's."""

    @endpoint
    def clock_ns(self) -> int:
        """Return the monotonic clock of this host."""
        return int(_native.monotonic_ns())

    @endpoint
    def recording(self, daemon: int, host: str, ahead_ns: int, wanted: EventFilter | None) -> Recording:
        """Return the wanted events of the processes below the host's daemon, without readers and idle agents.

        None: the recording is for a list of programs, with their late ranks, and has only the messages.
        ``wanted.since_ns`` is in the caller's time.
        """
        of_programs = wanted is None
        if wanted is not None and wanted.since_ns:
            wanted = replace(wanted, since_ns=wanted.since_ns + ahead_ns)
        found = program_recording.read_pids([daemon], wanted or MESSAGES)
        everything = [process for program in found.programs for process in program.processes]
        readers = [each for each in everything if each.label.endswith(_READER)]
        children = Counter(each.parent for each in everything)
        starters = Counter(each.parent for each in readers)
        agents = [each for each in everything if each.label.startswith("agent ")]
        if of_programs:
            late_ranks.add_to(found.programs)
            gpu_memory.add_to(found.programs)
        found.remove([*readers, *(each for each in agents if starters[each.pid] == children[each.pid])])
        pids = {each.pid for each in found.processes}
        handlers = found if of_programs else program_recording.read_pids([daemon], MESSAGES)
        found.callers = {sender for each in handlers.processes if each.pid in pids for sender in each.senders()} - {0}
        found.seen_from(host, ahead_ns)
        return found

    @endpoint
    def stacks(self, pids: Sequence[int], native: bool) -> list[Stacks]:
        """Return the stacks of processes of this host."""
        return read_all(pids, native=native)


class Inspection:
    """The hosts of a job and a reader on each one of another machine. ``unread`` has the hosts without one.

    ``path``: the job's file. Raises JobError if it is not one.
    ``controllers`` are pids of programs of this machine that use the job; None stands for those that are found in what
    the hosts have recorded.
    """

    def __init__(self, path: Path, controllers: Iterable[int] | None = None) -> None:
        file = state_file.read(path)
        hosts = [] if file is None else file.hosts
        self._here = [host.daemon.pid for host in hosts if not host.where]
        self._controllers = None if controllers is None else list(controllers)
        self._procs: list[Any] = []
        self._readers: dict[str, tuple[HostEntry, Any]] = {}
        self.unread: list[Unread] = []
        remote = [host for host in hosts if host.where]
        if file is not None and remote:
            self._attach(file, remote)

    def __enter__(self) -> Inspection:
        return self

    def __exit__(self, *_: object) -> None:
        stops = []
        for procs in self._procs:
            with contextlib.suppress(Exception):  # its host has been lost meanwhile
                stops.append(procs.stop("it has read"))
        for stop in stops:
            with contextlib.suppress(Exception):
                stop.get(timeout=TIMEOUT_S)

    def _attach(self, file: JobFile, hosts: Sequence[HostEntry]) -> None:
        secret = read_secret(Path(file.secret_file))
        reached = [each for each in in_parallel(_reach, hosts) if each is not None]
        for host in hosts:
            if host not in reached:
                self._not_read(host, f"it does not accept a connection at {host.address}")
        for host in reached:  # one by one, so that a host that fails does not hide the others
            key = os.getpid(), file.id, host.daemon
            try:
                mesh = _meshes.get(key)
                if mesh is None:
                    name = f"{host.mesh}{host.index}"
                    mesh = attach_to_workers([host.address], name, secret=secret, timeout=TIMEOUT_S)
                    _meshes[key] = mesh
                procs: Any = mesh.spawn_procs(name=_READER)
                self._procs.append(procs)
                reader = procs.spawn("reader", HostReader)
                reader.clock_ns.call_one().get(timeout=TIMEOUT_S)
            except Exception as error:  # any failure of one host
                _meshes.pop(key, None)
                self._not_read(host, first_line(error))
            else:
                self._readers[_name(host)] = host, reader

    def _not_read(self, host: HostEntry, reason: str) -> None:
        self.unread.append(Unread(0, host.label, reason))

    def programs(self) -> tuple[list[Program], list[Unread]]:
        """Return the programs of all hosts, and the hosts and processes that were not read."""
        found = self._read(None)
        here = [program for program in found.programs if not program.host]
        late_ranks.add_to(here)
        gpu_memory.add_to(here)
        return found.programs, found.unread

    def recording(self, wanted: EventFilter = ALL_EVENTS) -> Recording:
        """Return what all hosts and the programs of this machine that use the job have recorded.

        Each host sends the wanted events. ``wanted.since_ns`` is in this machine's time.
        """
        return self._read(wanted)

    def _read(self, wanted: EventFilter | None) -> Recording:
        read = in_parallel(lambda reader: self._recording_of(*reader, wanted), self._readers.values())
        found = [each for each in read if each is not None]
        here = self._recording_here(found, wanted)
        for each in found:
            here.add(each)
        here.unread += self.unread
        return here

    def _recording_here(self, elsewhere: Sequence[Recording], wanted: EventFilter | None) -> Recording:
        if self._controllers is not None:
            return program_recording.read_pids([*self._here, *self._controllers], wanted)
        everything = program_recording.read_programs(programs(), MESSAGES).processes
        hosts = [each for each in everything if each.program.has(self._here)]
        callers = {sender for each in hosts for sender in each.senders()} - {0}
        callers.update(*(recording.callers for recording in elsewhere))
        pids = [each.pid for each in everything if each.recorded.identity in callers and each.pid != os.getpid()]
        return program_recording.read_pids([*self._here, *pids], wanted)

    def _recording_of(self, host: HostEntry, actor: Any, wanted: EventFilter | None) -> Recording | None:
        try:
            ahead, error = _clock_offset(lambda: actor.clock_ns.call_one().get(timeout=TIMEOUT_S))
            found: Recording = actor.recording.call_one(host.daemon.pid, _name(host), ahead, wanted).get(
                timeout=TIMEOUT_S
            )
        except Exception as failure:
            self._not_read(host, first_line(failure))
            return None
        found.clock_error_ns = error
        return found

    def stacks(self, host: str, pids: Sequence[int], native: bool = False) -> list[Stacks]:
        """Return the stacks of processes of a host, "" for this machine."""
        if not host:
            return read_all(pids, native=native)
        actor = self._readers[host][1]
        found: list[Stacks] = actor.stacks.call_one(list(pids), native).get(timeout=TIMEOUT_S + len(pids))
        return found


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


def _name(host: HostEntry) -> str:
    return f"{host.mesh}[{host.index}] ({host.where})"


def _reach(host: HostEntry) -> HostEntry | None:
    try:
        socket.create_connection(parse_address(host.address), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return None
    return host
