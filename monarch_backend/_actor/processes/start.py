"""Start of processes, on this host by its fork server and on others by their agents, until they are ready.

A process is ready when it has connected and its bootstrap has returned.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]

from monarch_backend._actor.calls.future import Future, LabelledFuture
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._actor.processes.message_memory import Prefaulter
from monarch_backend._actor.processes.records import OwnedProcess, OwnedProcs, ProcessRecords
from monarch_backend._actor.processes.stuck_readers import StuckReaders
from monarch_backend._actor.restart_policy import Restart, RestartLimiter, check_policy
from monarch_backend._core import env as settings
from monarch_backend._core import platform
from monarch_backend._core.extension_points import extension
from monarch_backend._logs.log_collector import LogCollector
from monarch_backend._logs.mesh_log import MeshLog
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.proc_mesh import ProcMesh, ProcMeshState, label_of
from monarch_backend._mesh.rank_text import ranks_in_words
from monarch_backend._processes import cpu_affinity
from monarch_backend._processes.main_module import main_module, refuse_import_of_main
from monarch_backend._processes.resource_limits import allow_descriptors, check_count, check_spawn
from monarch_backend._processes.spawner import RANKS_HERE, ProcessSpec, Spawner
from monarch_backend._serialization.pickling import dumps_in_band
from monarch_backend._telemetry import kinds, recorder, texts
from monarch_backend._transport.local.peer import Peer
from monarch_backend._transport.tokens import host_of

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

PRELOAD = (
    "monarch_backend._wiring",
    "monarch_backend._actor.worker_main",
    "monarch_backend._actor.process_groups",
    "monarch_backend.process_group",
)
"""Modules that the fork server imports once."""

PRELOAD_WITH_DTENSORS = "monarch_backend.dtensor._preload"
"""Module imported before the first process starts, if this program has DTensors.

The import takes half a second, and the processes share its 64 MB. The server does not import it at its own start,
because it may only serve a gateway to other hosts.
"""

DESCRIPTORS_PER_PROCESS = 8
"""Open files of this process for each process: two pipes at its start; then two of its output, a link, a pidfd."""


class Plan(NamedTuple):
    """Arguments of a new process of a mesh, which _actor/worker_main.py reads."""

    token: str
    owner: str
    rank: int
    mesh: str
    name: str
    server: str
    root: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    oversubscribed: bool
    gateway: str = ""  # token of its host's gateway, if there are other hosts
    die_with: str = ""  # token of the process on this host with which it ends
    local_processes: int = 0  # on a remote host: processes of the mesh there
    has_bootstrap: bool = False  # the owner waits until it has succeeded


class ProcessStarter:
    """Starts processes, for the first time and again, and collects their output.

    ``on_event`` gets the events of this process's spawner, on the spawner's thread. ``on_early_event`` gets the events
    of a new process that arrived before its record was made.
    """

    def __init__(
        self,
        program: Runtime,
        records: ProcessRecords,
        stuck: StuckReaders,
        on_event: Callable[[Any], None],
        on_early_event: Callable[[Any], None],
    ) -> None:
        self._program, self._records, self._stuck = program, records, stuck
        self._on_event, self._on_early_event = on_event, on_early_event
        # A simulator replaces these: its processes write no output.
        self.make_spawner: Callable[[Callable[[Any], None], str | None], Any]
        self.make_spawner = functools.partial(Spawner, preload=PRELOAD)
        self.collect_output = True
        self._making = threading.RLock()  # of spawner and logs
        self.spawner: Any = None
        self.logs: LogCollector | None = None
        self._prefaulter = Prefaulter(program)
        self.early: dict[int, list[Any]] = {}  # events of processes that have no record yet, by number

    def spawn(
        self,
        extent: Extent,
        owner_runner: Any,
        *,
        bootstrap: Callable[[], object] | None,
        name: str,
        proc_bind: Any,
        restart: Restart | None,
        env: Mapping[str, str] | None,
        hosts: tuple[str, ...] | None = None,
    ) -> ProcMesh:
        """Start a process for each rank, consecutive ranks on each of ``hosts``. See `HostMesh.spawn_procs`."""
        program = self._program
        check_policy(restart)
        _check_start(bootstrap, env)
        if hosts is not None and proc_bind is not None:
            raise ValueError("proc_bind works for processes of this host only; on others, bind them in bootstrap=")
        count = extent.nelements
        check_count(count // len(hosts or (0,)), here=hosts is None and self.collect_output)
        homes = program.hosts.homes(hosts, count)
        spawner = self._spawner_of_this_process()
        allow_descriptors()
        name = name or f"procs-{len(self._records.meshes)}"
        core = ProcMeshState(
            secrets.token_hex(8),
            name,
            extent,
            program.router.me,
            [new_token(0, home) for home in homes],
            lambda core, rank: program.router.peer(core.tokens[rank]),
            spawner.address,
        )
        label = functools.partial(ranks_in_words, extent)
        logs = MeshLog(name, label, pid_of=lambda rank: core.peer(rank).pid)
        make = self._recipe(core, bootstrap, cpu_affinity.plan(proc_bind, count), env)
        siblings = program.children_of(owner_runner)
        owned = OwnedProcs(
            core, owner_runner, siblings, make, logs, RestartLimiter(restart, program.clock) if restart else None,
            has_bootstrap=bootstrap is not None,
        )  # fmt: skip
        core.owned = owned
        for rank in range(count):
            program.router.expect(core.tokens[rank], label_of(core, rank))
        if self._may_prefault:
            self._prefaulter.postpone()
        try:
            self.start(owned, range(count))
        except BaseException:
            for peer in core.peers:
                peer.gone = "it was never started"
            for member in owned.members.values():  # processes that other hosts have started already
                self._records.kill(member)
                self._records.by_token.pop(member.peer.token, None)
                self._records.by_number.pop(member.number, None)
            raise
        self._records.meshes.append(owned)
        if self.collect_output:
            self._stuck.watch()
        if self._may_prefault:
            self._prefaulter.add([core.peer(rank) for rank in range(count)])
        program.procs[core.id] = core
        siblings.append(core)
        recorder.mesh(name, "ProcMesh", extent)
        return ProcMesh(core)

    @property
    def _may_prefault(self) -> bool:
        """True in the main program: processes that others start would multiply the memory again."""
        is_main = self.collect_output and self._program.root is None
        return is_main and settings.get("MONARCH_PREFAULT_BYTES") > 0

    def _recipe(
        self, core: ProcMeshState, bootstrap: Any, cpus: list[Any], env: Mapping[str, str] | None
    ) -> Callable[[int, Peer], ProcessSpec]:
        program, packed = self._program, None
        if bootstrap is not None:
            packed = cloudpickle.dumps(functools.partial(extension("bootstrap"), _packed(bootstrap)))
        count = core.extent.nelements
        processors = platform.usable_cpus()
        environment = {**settings.without_secrets(os.environ), **(env or {})}
        path, argv, cwd = list(sys.path), list(sys.argv), os.getcwd()
        imports = [PRELOAD_WITH_DTENSORS] if "torch.distributed.tensor" in sys.modules else []
        main_of_program = main_module()
        local_processes = count // max(1, len({host_of(token) for token in core.tokens}))  # number on each host

        def make(rank: int, peer: Peer) -> ProcessSpec:
            host = program.hosts.of(peer.token)
            plan = Plan(
                token=peer.token, owner=program.router.token, rank=rank, mesh=core.id, name=core.name,
                server=core.server if host is None else "", root=(program.root or program.router.me).token,
                labels=tuple(core.extent.labels), sizes=tuple(core.extent.sizes), oversubscribed=count + 1 > processors,
                gateway=program.gateway if host is None else host.token,
                die_with=program.router.token if host is None else host.token,
                local_processes=0 if host is None else local_processes, has_bootstrap=packed is not None,
            )  # fmt: skip
            return ProcessSpec(
                label=core.where(rank), main=cloudpickle.dumps(functools.partial(extension("worker"), plan)),
                environment=environment if host is None else {**(env or {}), RANKS_HERE: str(local_processes)},
                path=path, argv=argv, cwd=cwd, bootstrap=packed, cpus=cpus[rank],
                threads=len(cpus[rank]) if cpus[rank] else max(1, processors // count),
                imports=imports, main_module=main_of_program,
            )  # fmt: skip

        return make

    def start(self, owned: OwnedProcs, ranks: Any) -> None:
        """Start these ranks of a mesh. Raises SpawnLimitError if the system has no room for them."""
        if self.collect_output:
            check_spawn(len(ranks), plain=False, descriptors_each=DESCRIPTORS_PER_PROCESS)
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(host_of(owned.core.tokens[rank]), []).append(rank)
        by_spawner: list[tuple[Any, list[int]]] = []  # all are found before the first one starts processes
        for those in by_host.values():
            host = self._program.hosts.of(owned.core.tokens[those[0]])
            by_spawner.append((self._spawner_of_this_process() if host is None else host.spawner, those))
        for spawner, those in by_spawner:
            self._start_with(spawner, owned, those)

    def _start_with(self, spawner: Any, owned: OwnedProcs, ranks: list[int]) -> None:
        specs, pipes = [], []
        for rank in ranks:
            spec = owned.make(rank, owned.core.peer(rank))
            ends = _pipes() if self.collect_output else ()
            pipes.append(ends)
            specs.append(replace(spec, stdout=ends[1], stderr=ends[3]) if ends else spec)
        try:
            numbers = spawner.spawn(specs)
        except BaseException:
            for ends in pipes:
                for fd in ends:
                    os.close(fd)
            raise
        for rank, number, ends in zip(ranks, numbers, pipes, strict=True):
            if ends:
                os.close(ends[1])
                os.close(ends[3])
                self._collector().add(owned.logs, rank, ends[0], ends[2])
            self._records.add(owned, OwnedProcess(owned.core, rank, owned.core.peer(rank), number, spawner))
            for event in self.early.pop(number, ()):
                self._on_early_event(event)

    def fork_server_address(self) -> str:
        """Return the address of this host's fork server, for other processes of this user."""
        address: str = self._spawner_of_this_process().address
        return address

    def tell_all(self, message: Any) -> None:
        """Send a message to every process that this one has started on this host."""
        for member in list(self._records.by_token.values()):
            if not member.gone and self._program.hosts.of(member.peer.token) is None:
                self._program.router.tell(member.peer, message)

    def _spawner_of_this_process(self) -> Any:
        refuse_import_of_main()
        with self._making:
            if self.spawner is None:
                self.spawner = self.make_spawner(self._on_event, self._program.server_address or None)
                self._program.shutdown.end_first()
            return self.spawner

    def _collector(self) -> LogCollector:
        with self._making:
            if self.logs is None:
                self.logs = LogCollector()
                self._program.shutdown.end_first()
            return self.logs

    def flush_logs(self) -> None:
        """Wait until the output of the processes was written, at most 2 s."""
        if self.logs is not None:
            self.logs.flush(timeout=2.0)

    def close(self) -> None:
        """Kill all processes that are left, and the fork server if this process has started it."""
        if self.spawner is not None:
            self.spawner.close()
        if self.logs is not None:
            self.logs.close(timeout=2.0)


class ProcessReadiness:
    """Notes which processes are ready, and completes the futures that wait for it."""

    def __init__(self, program: Runtime, records: ProcessRecords) -> None:
        self._program, self._records = program, records

    def ready(self, core: ProcMeshState) -> Future[None]:
        """Return a Future that is done when all processes have started. Raises RuntimeError if others own the mesh."""
        future: Future[None] = LabelledFuture(self._program.wait, f"the start of {core.name}")
        owned = core.owned
        if owned is None:
            raise RuntimeError("only the program or actor that has spawned processes can wait for their start")
        owned.ready.append(future)  # before the check, so that it gets events in between
        dead = [m for m in owned.members.values() if m.gone and not m.replaced]
        if dead:
            future._fail(self._program.death_of(core, dead[0].rank, dead[0].peer))
        elif self._is_up(owned):
            future._set(None)
        if future.ready:
            with contextlib.suppress(ValueError):
                owned.ready.remove(future)
        return future

    def met(self, peer: Peer) -> None:
        member = self._records.by_token.get(peer.token)
        if member is not None:
            owned = member.core.owned
            if peer.epoch and not member.was_ready and (member.is_bootstrapped or not owned.has_bootstrap):
                member.was_ready = True
                texts.life(kinds.Kind.PROCESS, label_of(member.core, member.rank)(), "ready", pid=peer.pid)
            if self._is_up(owned):
                for future in owned.ready:
                    future._set(None)
                owned.ready.clear()

    def _is_up(self, owned: OwnedProcs) -> bool:
        if all(peer.link >= 0 for peer in owned.core.peers) and (
            not owned.has_bootstrap or all(member.is_bootstrapped for member in owned.members.values())
        ):
            if not owned.was_up:
                owned.was_up = True
                texts.life(kinds.Kind.MESH, owned.core.name, "ready")
            return True
        return False

    def bootstrapped(self, peer: Peer) -> None:
        member = self._records.by_token.get(peer.token)
        if member is not None:
            member.is_bootstrapped = True
            self.met(peer)

    def bootstrap_failed(self, peer: Peer, failure: BaseException) -> None:
        """Note that the bootstrap of a process has raised. The process ends."""
        member = self._records.by_token.get(peer.token)
        if member is not None and isinstance(failure, MeshFailure):
            member.bootstrap_failure = failure

    def failed_to_start(self, peer: Peer) -> bool:
        """Return whether the process ended before its bootstrap returned, in a mesh that was never ready.

        Such a failure is raised where the program waits. It is reported to a supervisor only if the program has one.
        """
        member = self._records.by_token.get(peer.token)
        if member is None:
            return False
        owned = member.core.owned
        return owned.has_bootstrap and not owned.was_up and not member.is_bootstrapped and peer.gone is not None

    def bootstrap_error(self, peer: Peer) -> tuple[BaseException | None, str]:
        member = self._records.by_token.get(peer.token)
        failure = None if member is None else member.bootstrap_failure
        return (None, "") if failure is None else (failure.__cause__, failure.deaths[0].trace)


def new_token(epoch: int, home: str) -> str:
    """Return the token of a new process: its host, 80 random bits, and the number of its restarts."""
    return home + secrets.token_hex(10) + f"{epoch & 0xFFFF:04x}"


def _check_start(bootstrap: Any, env: Mapping[str, str] | None) -> None:
    """Check arguments here that would otherwise fail in the new process only."""
    if bootstrap is not None and not callable(bootstrap):
        raise TypeError(f"bootstrap={bootstrap!r}: give a function without arguments")
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env={{{name!r}: {value!r}}}: names and values of variables are strings")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env: {name!r} can't be the name of a variable")
    settings.check(env or {})


def _packed(bootstrap: Any) -> bytes:
    try:
        return dumps_in_band(bootstrap)
    except Exception as error:
        raise TypeError(f"bootstrap can't be sent to the new processes: {type(error).__name__}: {error}") from error


def _pipes() -> tuple[int, int, int, int]:
    """Return descriptors of two pipes: read and write ends of stdout, then of stderr."""
    first = os.pipe()
    try:
        return (*first, *os.pipe())
    except OSError:
        for fd in first:
            os.close(fd)
        raise
