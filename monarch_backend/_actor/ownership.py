"""Meshes that this process has spawned: records of processes and actors, their exits and restarts.

Only the process that has spawned a mesh keeps such records. supervision.py decides about failures.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]

from monarch_backend._actor.errors import Death, MeshFailure, in_words
from monarch_backend._actor.future import Future
from monarch_backend._actor.mesh_state import ActorMeshState
from monarch_backend._actor.supervision import Restart, RestartLimiter, check_policy
from monarch_backend._core import env as settings
from monarch_backend._core.extension_points import extension
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._logs.log_collector import LogCollector
from monarch_backend._logs.mesh_log import MeshLog
from monarch_backend._mesh.extent import Extent, ranks_in_words
from monarch_backend._mesh.proc_mesh import ProcMesh, ProcMeshState, label_of
from monarch_backend._processes import cpu_affinity, linux
from monarch_backend._processes.main_module import main_module, refuse_import_of_main
from monarch_backend._processes.resource_limits import allow_descriptors, check_count, check_spawn
from monarch_backend._processes.spawner import (
    RANKS_HERE,
    Exited,
    HostLostError,
    LostWithHost,
    ProcessSpec,
    Spawner,
    SpawnFailed,
    Started,
)
from monarch_backend._serialization.pickling import dumps_in_band
from monarch_backend._transport.local.frames import MAX_REPLACED_RANKS, REPORT_BUSY, Replaced, Setting, Stop
from monarch_backend._transport.local.peer import Peer
from monarch_backend._transport.network.envelope import host_of

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

log = logging.getLogger("monarch_backend")

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

SHUTDOWN_GRACE_S = 10.0
"""Seconds that processes have to end. Then those that were aborted or do not read messages are killed."""

DESCRIPTORS_PER_PROCESS = 8
"""Open files of this process for each process: two pipes at its start; then two of its output, a link, a pidfd."""

CHECK_INTERVAL_S = 1.0
UNREADY_REPORT_S = 2.0
STUCK_READER_TIMEOUT_S = 5.0
"""CHECK_INTERVAL_S: seconds between checks for processes that do not read messages. UNREADY_REPORT_S: seconds after
which such a process is killed if it was to end. STUCK_READER_TIMEOUT_S: seconds after which it is reported.
"""

EXIT_STATUS_TIMEOUT_S = 0.04
"""Seconds for the fork server to report the exit status of a process whose link has closed."""

SIGKILL_STATUS_TIMEOUT_S = 2.0
"""The same where only the fork server knows the cause, such as lack of memory, or the fork server itself has died."""


class OwnedActors:
    """The owner's record of an actor mesh."""

    def __init__(
        self,
        core: ActorMeshState,
        owner_cell: Any,
        siblings: list[Any],
        body: bytes,
        buffers: Any,
        intensity: RestartLimiter | None,
        built: Future[None],
    ) -> None:
        self.core, self.owner_cell, self._siblings = core, owner_cell, siblings
        self.body, self.buffers = body, buffers  # the constructor's arguments
        self.intensity, self.built = intensity, built
        self.generations = [0] * len(core.bases)
        self.left = set(range(len(core.bases)))  # ranks that have not ended
        self._unbuilt = set(range(len(core.bases)))
        self.constructing: set[int] = set()
        self.homes: dict[int, Peer] = {}  # process that constructs each rank; it may be replaced meanwhile
        self.ended: Future[None] = Future(built._wait)

    def is_built(self, rank: int) -> None:
        """Note that the constructor of a rank has returned."""
        self._unbuilt.discard(rank)
        self.constructing.discard(rank)
        if not self._unbuilt:
            self.built._set(None)
            below = self.core.procs.owned
            if self.intensity is None and (below is None or below.intensity is None):
                self.body, self.buffers = b"", None  # it is never constructed again

    def is_gone(self, rank: int) -> None:
        """Note that a rank has stopped or failed."""
        self.left.discard(rank)
        self.settle()

    def settle(self) -> None:
        """Finish the future of `stop` when all ranks have ended."""
        if not self.left and self.core.stopped is not None:
            self.ended._set(None)
            self.let_go()

    def let_go(self) -> None:
        """Drop the records of an ended mesh, so that only its references keep it alive."""
        self.body, self.buffers = b"", None
        below = self.core.procs.owned
        for holder in (self._siblings, below.actors if below is not None else []):
            with contextlib.suppress(ValueError):
                holder.remove(self.core)


@dataclass
class _Member:
    """Record of one process."""

    core: ProcMeshState
    rank: int
    peer: Peer
    number: int = -1  # in the spawner
    spawner: Any = None
    lost: str | None = None  # why its host is lost, if it is
    exited: Exited | None = None
    failed: str | None = None  # why it was never started
    gone: bool = False  # its end was reported
    replaced: bool = False  # it has a successor, or gets one
    is_bootstrapped: bool = False
    bootstrap_failure: MeshFailure | None = None
    restart: str = ""  # text: the restart, or why there is none
    constructing: str | None = None  # text: actors whose constructors ran when it ended
    knocked: bool = False  # it has read the message to stop
    killed_at: float | None = None  # when SIGKILL was sent because it did not stop

    @property
    def is_over(self) -> bool:
        """True if its spawner will report nothing more of it."""
        return self.exited is not None or self.failed is not None or self.lost is not None


@dataclass
class OwnedProcs:
    """The owner's record of a mesh of processes."""

    core: ProcMeshState
    owner_cell: Any
    siblings: list[Any]
    make: Callable[[int, Peer], ProcessSpec]
    logs: MeshLog
    intensity: RestartLimiter | None
    members: dict[int, _Member] = field(default_factory=dict)  # by rank
    actors: list[ActorMeshState] = field(default_factory=list)
    ready: list[Future[None]] = field(default_factory=list)
    ended: list[Future[None]] = field(default_factory=list)
    looks: list[Any] = field(default_factory=list)  # timers of `_hurry`
    over: bool = False  # stopped, and all of its processes have ended
    has_bootstrap: bool = False
    was_up: bool = False  # all of its processes were ready at the same time
    says_start_failed: bool = False  # a failed start was logged


def _with_dtensors() -> list[str]:
    return [PRELOAD_WITH_DTENSORS] if "torch.distributed.tensor" in sys.modules else []


def _spawner(on_event: Callable[[Any], None], server: str | None) -> Spawner:
    return Spawner(on_event, server, preload=PRELOAD)


class ProcessOwner:
    """Owner of the processes that this process has spawned."""

    def __init__(self, program: Runtime) -> None:
        self._program = program
        # A simulator replaces these: its processes write no output.
        self.make_spawner: Callable[[Callable[[Any], None], str | None], Any] = _spawner
        self.stands_still = linux.stands_still
        self.collect_output = True
        self._making = threading.RLock()  # of _spawner and _logs
        self._spawner: Any = None
        self._logs: LogCollector | None = None
        self._by_number: dict[int, _Member] = {}
        self._by_token: dict[str, _Member] = {}
        self._meshes: list[OwnedProcs] = []
        self._early: dict[int, list[Any]] = {}
        self._watching = False
        self._unread: dict[str, tuple[int, float, bool]] = {}  # token -> unread bytes, since when, whether logged

    # ---- starting

    def spawn(
        self,
        extent: Extent,
        owner_cell: Any,
        *,
        bootstrap: Callable[[], object] | None,
        name: str,
        proc_bind: Any,
        restart: Restart | None,
        env: Mapping[str, str] | None,
        hosts: tuple[str, ...] | None = None,
    ) -> ProcMesh:
        """Start a process for each rank of the extent, consecutive ranks on each of ``hosts``. Return its `ProcMesh` at
        once.

        Raises TypeError and ValueError for invalid arguments, SpawnLimitError if the system has no room for the
        processes, and RuntimeError for a host that is lost.
        """
        program = self._program
        check_policy(restart)
        _check_start(bootstrap, env)
        if hosts is not None and proc_bind is not None:
            raise ValueError("proc_bind works for processes of this host only; on others, bind them in bootstrap=")
        count = extent.nelements
        check_count(count // len(hosts or (0,)), here=hosts is None and self.collect_output)
        homes = program.placement.homes(hosts, count)
        spawner = self._spawner_of_this_process()
        allow_descriptors()
        name = name or f"procs-{len(self._meshes)}"
        core = ProcMeshState(
            secrets.token_hex(8),
            name,
            extent,
            program.router.me,
            [_token(0, home) for home in homes],
            lambda core, rank: program.router.peer(core.tokens[rank]),
            spawner.address,
        )
        label = functools.partial(ranks_in_words, extent)
        logs = MeshLog(name, label)
        make = self._recipe(core, bootstrap, cpu_affinity.plan(proc_bind, count), env)
        siblings = program.children_of(owner_cell)
        owned = OwnedProcs(
            core, owner_cell, siblings, make, logs, RestartLimiter(restart, program.clock) if restart else None,
            has_bootstrap=bootstrap is not None,
        )  # fmt: skip
        core.owned = owned
        for rank in range(count):
            program.router.expect(core.tokens[rank], label_of(core, rank))
        try:
            self._start(owned, range(count))
        except BaseException:
            for peer in core.peers:
                peer.gone = "it was never started"
            for member in owned.members.values():  # processes that other hosts have started already
                self._kill(member)
                self._by_token.pop(member.peer.token, None)
                self._by_number.pop(member.number, None)
            raise
        self._meshes.append(owned)
        if not self._watching and self.collect_output:
            self._watching = True
            program.pump.later(CHECK_INTERVAL_S, self._look_for_the_stuck)
        program.procs[core.id] = core
        siblings.append(core)
        return ProcMesh(core)

    def _recipe(
        self, core: ProcMeshState, bootstrap: Any, cpus: list[Any], env: Mapping[str, str] | None
    ) -> Callable[[int, Peer], ProcessSpec]:
        from monarch_backend._actor.worker_main import Plan, run_bootstrap

        program, packed = self._program, None
        if bootstrap is not None:
            packed = cloudpickle.dumps(functools.partial(run_bootstrap, _packed(bootstrap)))
        count = core.extent.nelements
        processors = len(os.sched_getaffinity(0))
        environment = {**settings.without_secrets(os.environ), **(env or {})}
        path, argv, cwd = list(sys.path), list(sys.argv), os.getcwd()
        imports, main_of_program = _with_dtensors(), main_module()
        neighbours = count // max(1, len({host_of(token) for token in core.tokens}))  # number on each host

        def make(rank: int, peer: Peer) -> ProcessSpec:
            host = program.host(peer.token)
            plan = Plan(
                token=peer.token, owner=program.router.token, rank=rank, mesh=core.id, name=core.name,
                server=core.server if host is None else "", root=(program.root or program.router.me).token,
                labels=tuple(core.extent.labels), sizes=tuple(core.extent.sizes), crowded=count + 1 > processors,
                gateway=program.gateway if host is None else host.token,
                tether=program.router.token if host is None else host.token,
                neighbours=0 if host is None else neighbours, has_bootstrap=packed is not None,
            )  # fmt: skip
            return ProcessSpec(
                label=core.where(rank), main=cloudpickle.dumps(functools.partial(extension("worker"), plan)),
                environment=environment if host is None else {**(env or {}), RANKS_HERE: str(neighbours)},
                path=path, argv=argv, cwd=cwd, bootstrap=packed, cpus=cpus[rank],
                threads=len(cpus[rank]) if cpus[rank] else max(1, processors // count),
                imports=imports, main_module=main_of_program,
            )  # fmt: skip

        return make

    def _start(self, owned: OwnedProcs, ranks: Any) -> None:
        if self.collect_output:
            check_spawn(len(ranks), plain=False, descriptors_each=DESCRIPTORS_PER_PROCESS)
        for spawner, those in self._by_spawner(owned, ranks):
            self._start_with(spawner, owned, those)

    def _by_spawner(self, owned: OwnedProcs, ranks: Any) -> list[tuple[Any, list[int]]]:
        """Return the spawner of each host and its ranks."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(host_of(owned.core.tokens[rank]), []).append(rank)
        found = []
        for those in by_host.values():
            host = self._program.host(owned.core.tokens[those[0]])
            found.append((self._spawner_of_this_process() if host is None else host.spawner, those))
        return found

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
            member = _Member(owned.core, rank, owned.core.peer(rank), number, spawner)
            owned.members[rank] = member
            self._by_token[member.peer.token] = member
            self._by_number[number] = member
            for event in self._early.pop(number, ()):
                self._heard(event)

    def fork_server_address(self) -> str:
        """Return the address of this host's fork server, for other processes of this user."""
        address: str = self._spawner_of_this_process().address
        return address

    def tell_all(self, message: Any) -> None:
        """Send a message to every process that this one has started on this host."""
        for member in list(self._by_token.values()):
            if not member.gone and self._program.host(member.peer.token) is None:
                self._program.router.tell(member.peer, message)

    def _spawner_of_this_process(self) -> Any:
        refuse_import_of_main()
        with self._making:
            if self._spawner is None:
                self._spawner = self.make_spawner(self._event, self._program.server_address or None)
                self._program.end_first()
            return self._spawner

    def _collector(self) -> LogCollector:
        with self._making:
            if self._logs is None:
                self._logs = LogCollector()
                self._program.end_first()
            return self._logs

    # ---- exits and restarts

    def _event(self, event: Any) -> None:
        """Handle an event of a spawner. Called on the spawner's thread."""
        self._program.soon(lambda: self._heard(event))

    def _heard(self, event: Any) -> None:
        member = self._by_number.get(event.id)
        if member is None:
            self._early.setdefault(event.id, []).append(event)
            return
        if isinstance(event, Started):
            member.peer.pid = event.pid
            return
        if isinstance(event, SpawnFailed):
            member.failed = event.reason
        elif isinstance(event, LostWithHost):
            member.lost = event.reason
        elif isinstance(event, Exited):
            member.exited = event
            if member.core.owned.over:  # its last event
                self._by_number.pop(event.id, None)
                return
        how, _ = self.how_it_ended(member.peer)
        if member.peer.gone is None and member.peer.link < 0 and member.lost is None:
            self._program.router.never_came(member.peer, how)
        elif member.peer.gone is not None:
            self._tell(member)
        elif self._program.host(member.peer.token) is not None:  # its gateway reports it, after its last frames
            self._program.pump.later(
                SIGKILL_STATUS_TIMEOUT_S, lambda: self._program.router.never_came(member.peer, how)
            )

    def member(self, peer: Peer) -> _Member | None:
        """Return the record of a process that this one has spawned, or None."""
        return self._by_token.get(peer.token)

    def how_it_ended(self, peer: Peer) -> tuple[str, int | None]:
        """Return the end of a process as text, and its return code if that is known."""
        member = self._by_token.get(peer.token)
        if member is not None and member.failed is not None:
            return f"it could not be started: {member.failed}", None
        if member is not None and member.lost is not None:
            return member.lost, None
        if member is not None and member.bootstrap_failure is not None:
            return member.bootstrap_failure.deaths[0].what, 1
        if member is not None and member.exited is not None:
            end = member.exited
            words = in_words(end.returncode, end.oom_killed) + (f" ({end.reason})" if end.reason else "")
            return words, end.returncode
        epitaph = peer.gone or "it is gone"
        found = re.match(r"(killed by signal|exited with status) (\d+)", epitaph)
        if found is None:
            return epitaph, None
        code = -int(found[2]) if found[1] == "killed by signal" else int(found[2])
        return in_words(code), code

    def tell_successor(self, peer: Peer, token: str) -> None:
        """Send the successor of an owned process to a process that asks, because it may have missed the restart."""
        member = self._by_token.get(token)
        if member is not None and member.replaced:
            core, rank = member.core, member.rank
            self._program.router.tell(peer, Replaced(core.id, [rank], [core.tokens[rank]]))

    def met(self, peer: Peer) -> None:
        """Note that a process has connected."""
        member = self._by_token.get(peer.token)
        if member is not None:
            owned = member.core.owned
            if self._is_up(owned):
                for future in owned.ready:
                    future._set(None)
                owned.ready.clear()

    def _is_up(self, owned: OwnedProcs) -> bool:
        """Return whether all processes have connected, and their bootstraps have returned."""
        if all(peer.link >= 0 for peer in owned.core.peers) and (
            not owned.has_bootstrap or all(member.is_bootstrapped for member in owned.members.values())
        ):
            owned.was_up = True
            return True
        return False

    def bootstrapped(self, peer: Peer) -> None:
        """Note that the bootstrap of a process has returned."""
        member = self._by_token.get(peer.token)
        if member is not None:
            member.is_bootstrapped = True
            self.met(peer)

    def bootstrap_failed(self, peer: Peer, failure: BaseException) -> None:
        """Note that the bootstrap of a process has raised. The process ends."""
        member = self._by_token.get(peer.token)
        if member is not None and isinstance(failure, MeshFailure):
            member.bootstrap_failure = failure

    def failed_to_start(self, peer: Peer) -> bool:
        """Return whether the process ended before its bootstrap returned, in a mesh that was never ready.

        Such a failure is raised where the program waits. It is reported to a supervisor only if the program has one.
        """
        member = self._by_token.get(peer.token)
        if member is None:
            return False
        owned = member.core.owned
        return owned.has_bootstrap and not owned.was_up and not member.is_bootstrapped and peer.gone is not None

    def bootstrap_error(self, peer: Peer) -> tuple[BaseException | None, str]:
        """Return the exception of its bootstrap, and the remote traceback."""
        member = self._by_token.get(peer.token)
        failure = None if member is None else member.bootstrap_failure
        return (None, "") if failure is None else (failure.__cause__, failure.deaths[0].trace)

    def ended(self, peer: Peer) -> None:
        """Handle a closed link, or a process that never connected. The fork server may report the cause later."""
        member = self._by_token[peer.token]
        owned = member.core.owned
        if (
            not member.gone
            and member.core.stopped is None
            and not self._program.closing
            and owned.intensity is not None
        ):
            # Before the end is reported, so that a repeated call finds the successor.
            self._replace(owned, member)
        if member.is_over:
            self._tell(member)
        else:
            unsure = self.how_it_ended(peer)[1] in (None, -signal.SIGKILL)
            self._program.pump.later(
                SIGKILL_STATUS_TIMEOUT_S if unsure else EXIT_STATUS_TIMEOUT_S, lambda: self._tell(member)
            )

    def _tell(self, member: _Member) -> None:
        if member.gone:
            return
        member.gone = True
        core, rank, owned = member.core, member.rank, member.core.owned
        if core.stopped is not None or self._program.closing:
            failure = self._program.death_of(core, rank, member.peer)
            self._program.on_process_lost(member.peer, failure)
            for future in owned.ready:
                future._fail(failure)
            owned.ready.clear()
            for actors in list(owned.actors):
                actors.owned.built._fail(failure)
                for other, base in enumerate(actors.bases):
                    if base == rank and not member.replaced:
                        actors.owned.is_gone(other)
            self._settle(owned)
            return
        self._failed(owned, member)

    def _failed(self, owned: OwnedProcs, member: _Member) -> None:
        core, rank, program = owned.core, member.rank, self._program
        what, code = self.how_it_ended(member.peer)
        what += _in_constructors(owned, member) if member.constructing is None else member.constructing
        if member.restart:
            if member.replaced:
                log.info("%s: %s; %s", member.peer, what, member.restart)
            what += f"; {member.restart}"
        last_words: tuple[str, ...] = ()
        if self._logs is not None and (code is None or code != 0):
            self._logs.flush(owned.logs, 0.01)
            last_words = _last_words(self._logs.tail(owned.logs, rank))
        failure = MeshFailure(
            core.name,
            [
                Death(
                    rank,
                    core.where(rank),
                    program.host_name(member.peer.token),
                    member.peer.pid,
                    what,
                    code,
                    last_words=last_words,
                )
            ],
            ProcMesh(core),
        )
        if member.replaced:
            program.on_process_lost(member.peer, failure)
            self._abort_groups(owned, failure)
            return
        at_start = self.failed_to_start(member.peer)
        is_failure = not (code == -signal.SIGKILL and _was_to_end(owned, rank))
        if at_start:
            failure = self._start_failure(failure, member)
            is_failure = program.supervision.is_asked(owned.owner_cell)
            if not is_failure and not owned.says_start_failed:
                owned.says_start_failed = True
                log.error(
                    "%s did not start: %s. `initialized` and calls raise this. Output of its bootstrap is above",
                    member.peer, what,
                )  # fmt: skip
        if is_failure and program.supervision.is_final(owned.owner_cell):
            program.supervision.failed(owned.owner_cell, failure)
        for actors in list(owned.actors):
            for other, base in enumerate(actors.bases):
                if base == rank:
                    actors.dead[other] = failure
                    actors.owned.is_gone(other)
                    actors.owned.built._fail(failure)
        for future in owned.ready:
            future._fail(failure)
        owned.ready.clear()
        program.on_process_lost(member.peer, failure)
        self._abort_groups(owned, failure)
        self._settle(owned)
        if is_failure and not program.supervision.is_final(owned.owner_cell):
            program.supervision.failed(owned.owner_cell, failure)

    def _start_failure(self, failure: MeshFailure, member: _Member) -> MeshFailure:
        error, trace = self.bootstrap_error(member.peer)
        death = replace(failure.deaths[0], error=error, trace=trace, at_start=True)
        if trace:
            death = replace(death, last_words=())  # they are the end of the traceback
        found = MeshFailure(failure.mesh_name, [death], failure.mesh)
        found.__cause__ = error
        return found

    def _abort_groups(self, owned: OwnedProcs, failure: MeshFailure) -> None:
        if owned.core.groups:
            for other in owned.members.values():
                if not other.gone and other.peer.link >= 0:
                    self._program.router.tell(other.peer, Setting("abort_groups", str(failure)))

    def _replace(self, owned: OwnedProcs, member: _Member) -> None:
        """Replace a dead process, or all processes of its mesh, unless the restart limit is reached."""
        core, program, intensity = owned.core, self._program, owned.intensity
        if intensity is None or member.replaced:
            return
        member.constructing = _in_constructors(owned, member)
        delay = intensity.allow()
        if delay is None:
            member.restart = intensity.used_up()
            return
        member.restart = intensity.last_restart(delay)
        ranks = list(owned.members) if intensity.policy.strategy == "all" else [member.rank]
        formers, killed = [core.peer(rank) for rank in ranks], set()
        for rank, former in zip(ranks, formers, strict=True):
            old = owned.members[rank]
            old.replaced = True
            if old is not member and not old.gone:
                self._kill(old)
                killed.add(old.peer.token)
            token = _token(former.epoch + 1, program.placement.home_again(old.peer.token, core.tokens))
            program.router.expect(token, old.peer.label)  # before the first message to it
            core.replace(rank, token)
        self._tell_successors(core, ranks, killed)
        for former in formers:
            if former.token not in self._by_token:  # it was never started, so its calls fail here
                program.router.never_came(former, "it was replaced before it was started")
        for actors in list(owned.actors):
            for other, base in enumerate(actors.bases):
                if base in ranks and actors.stopped is None:
                    actors.dead.pop(other, None)
                    program.actor_owner.construct(actors, other)

        chosen = {rank: core.tokens[rank] for rank in ranks}

        def wanted() -> list[int]:  # ranks that were not replaced again
            return [rank for rank, token in chosen.items() if core.tokens[rank] == token]

        def again() -> None:
            if core.stopped is not None or program.closing:
                return
            try:
                self._start(owned, wanted())
            except Exception as error:  # no room for them
                if not isinstance(error, HostLostError):  # other hosts may take them
                    log.exception("ranks of %s cannot be restarted", core.name)
                for rank in ranks:
                    if rank in wanted():
                        self._not_started(owned, rank, str(error))

        program.pump.later(delay, again)

    def _tell_successors(self, core: ProcMeshState, ranks: Sequence[int], killed: Container[str]) -> None:
        """Send the tokens of all successors to all processes, in few messages.

        If each successor reported itself, a large mesh would send a message from each to each. Processes in ``killed``
        were killed for this restart and need no message.
        """
        router, tokens = self._program.router, core.tokens
        for first in range(0, len(ranks), MAX_REPLACED_RANKS):
            some = list(ranks[first : first + MAX_REPLACED_RANKS])
            message = Replaced(core.id, some, [tokens[rank] for rank in some])
            for peer in list(router.peers.values()):
                if peer.link >= 0 and peer.gone is None and peer.token not in killed:
                    router.tell(peer, message)

    def _not_started(self, owned: OwnedProcs, rank: int, why: str) -> None:
        """Note that a successor cannot be started, unless its host has started it before another host failed."""
        peer = owned.core.peer(rank)
        if peer.token not in self._by_token:
            member = _Member(owned.core, rank, peer, failed=why)
            owned.members[rank] = self._by_token[peer.token] = member
            if peer.gone is None:
                self._program.router.never_came(peer, f"it could not be restarted: {why}")
            else:  # lost with its host, before it had a record
                self.ended(peer)

    def _look_for_the_stuck(self) -> None:
        """Report processes that do not read messages. They are not killed: only the user knows what they do."""
        self._watching = bool(self._meshes)
        if self._watching:
            self._program.pump.later(CHECK_INTERVAL_S, self._look_for_the_stuck)
        program, now = self._program, self._program.clock.now()
        for member in list(self._by_token.values()):
            peer = member.peer
            if member.gone or peer.link < 0 or peer.gone is not None:
                continue
            unread = program.links.unread(peer.link)
            before, since, said = self._unread.get(peer.token, (0, now, False))
            if unread == 0 or unread < before:
                self._unread.pop(peer.token, None)
                continue
            if now - since >= STUCK_READER_TIMEOUT_S and not said:
                said = True
                log.warning(
                    "%s has not read its messages for %.0f s: C code holds the GIL, or it is stopped by a signal. "
                    "It is not killed; `py-spy dump --pid %d` shows what it does.", peer, now - since, peer.pid
                )  # fmt: skip
            self._unread[peer.token] = (unread, since, said)

    # ---- stopping

    def ready(self, core: ProcMeshState) -> Future[None]:
        """Return a Future that is done when all processes have started. Raises RuntimeError if others own the mesh."""
        future: Future[None] = Future(self._program.wait)
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

    def stop(
        self, core: ProcMeshState | None, how: str, reason: str, timeout: float | None = None, hosts: Any = None
    ) -> Future[None]:
        """Stop processes. Kill those that do not read messages, and all after ``timeout`` seconds.

        Without ``core``: all meshes, or those on ``hosts``. Return a Future that is done when the processes have ended.
        """
        program, timeout = self._program, check_timeout(timeout)
        meshes = list(self._meshes) if core is None else [m for m in self._meshes if m.core is core]
        if hosts is not None:
            meshes = [owned for owned in meshes if program.placement.is_on(owned.core.tokens, hosts)]
        if core is not None and core.owned is None:
            raise RuntimeError(f"only the program or actor that has spawned mesh {core.name!r} can stop it")
        future: Future[None] = Future(program.wait)
        waiting = [owned for owned in meshes if any(not m.gone for m in owned.members.values())]
        left = len(waiting)
        if not left:
            future._set(None)

        def one_less(_: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                future._set(None)

        for owned in meshes:
            owned.core.stopped = owned.core.stopped or reason
            for peer in owned.core.peers:
                if peer.token not in self._by_token and peer.gone is None:  # a successor that is not started yet
                    program.router.never_came(peer, f"it was stopped: {reason}")
        for owned in meshes:
            if owned not in waiting:
                self._settle(owned)
        for owned in waiting:
            done: Future[None] = Future(program.wait)
            owned.ended.append(done)
            done.add_done_callback(one_less)
            if how == "kill":
                for member in [each for each in owned.members.values() if not each.gone]:
                    self._kill(member)
            else:
                tell = functools.partial(self._tell_to_end, owned, how, reason)
                _after(owned.core.before_stop if how == "stop" else (), tell)
                end = None if timeout is None else program.clock.now() + timeout
                self._look_again(owned, how, end)
            self._settle(owned)  # the last of them may have ended meanwhile
        return future

    def _tell_to_end(self, owned: OwnedProcs, how: str, reason: str) -> None:
        for member in list(owned.members.values()):
            if not member.gone:
                self._program.router.tell(member.peer, Stop(0, how, reason))

    def _look_again(self, owned: OwnedProcs, how: str, end: float | None) -> None:
        now = self._program.clock.now()
        # After the deadline all are killed. The next check is only for those that the kernel cannot end.
        left = SHUTDOWN_GRACE_S if end is None or now >= end else min(SHUTDOWN_GRACE_S, end - now)
        owned.looks.append(self._program.pump.later(left, functools.partial(self._hurry, owned, how, end)))

    def _hurry(self, owned: OwnedProcs, how: str, end: float | None) -> None:
        """Check processes that were told to end: wait for those that may be at work, and kill others."""
        program, busy, now = self._program, [], self._program.clock.now()
        late = how == "abort" or (end is not None and now >= end)
        # A process at work may wait for a dead one without end, in a collective.
        bereft = any(each.gone and not each.replaced and not each.peer.peace for each in owned.members.values())
        for member in owned.members.values():
            if member.gone:
                continue
            peer = member.peer
            if member.killed_at is not None:
                log.warning(
                    "%s was killed %.0f s ago and has not ended: a system call keeps it, or its host does not answer",
                    peer,
                    now - member.killed_at,
                )
                self._kill(member)
                continue
            unread = peer.link >= 0 and program.links.unread(peer.link) > 0
            # A process that has read the message to stop, and holds the GIL since then, is at work.
            deaf = peer.link < 0 or (unread and (not member.knocked or self.stands_still(peer.pid)))
            if late or deaf or bereft:
                why = "it does not read its messages" if deaf else "it is still at work"
                if peer.link < 0:
                    why = "it has not started yet"
                why += ", and another process of its mesh has died" if bereft and not (late or deaf) else ""
                log.warning(
                    "%s is killed (%s): %s", peer, "its time to stop is over" if late else "it was to stop", why
                )
                member.killed_at = now
                self._kill(member)
            else:
                if program.host(peer.token) is not None:
                    member.spawner.kill_if_deaf(member.number, member.knocked)
                busy.append(str(peer))
                # A process that a signal has stopped after it read the message to stop would be "at work" without end.
                # One that works has read the following message by the next check.
                member.knocked = True
                if not unread:
                    program.router.tell(peer, Setting(REPORT_BUSY, None))
        if busy:
            log.warning(
                "%s is to stop and still has messages to finish; kill() ends it at once: %s",
                owned.core.name,
                _some(busy),
            )
        if any(not member.gone for member in owned.members.values()):
            self._look_again(owned, how, end)

    def kill_if_deaf(self, peer: Peer) -> bool:
        """Kill an owned process that has not read for a while. Return False if it has not started yet."""
        if peer.link < 0:
            return False
        member = self._by_token.get(peer.token)
        if member is not None and not member.gone:
            _, since, _ = self._unread.get(peer.token, (0, self._program.clock.now(), False))
            if self._program.host(peer.token) is not None:
                member.spawner.kill_if_deaf(member.number, True)
            elif self._program.clock.now() - since >= UNREADY_REPORT_S:
                log.warning("%s is killed: its actor was to end, and it does not read its messages", peer)
                self._kill(member)
        return True

    def at_work(self) -> str:
        """Return text that lists the processes which still run."""
        return _some([str(m.peer) for owned in self._meshes for m in owned.members.values() if not m.gone])

    def _kill(self, member: _Member) -> None:
        if member.spawner is not None and not member.is_over:
            member.spawner.kill(member.number, signal.SIGKILL)

    def _settle(self, owned: OwnedProcs) -> None:
        if all(m.gone for m in owned.members.values()):
            for future in owned.ended:
                future._set(None)
            owned.ended.clear()
            if owned.core.stopped is not None and owned in self._meshes:
                self._forget(owned)

    def _forget(self, owned: OwnedProcs) -> None:
        try:
            self._meshes.remove(owned)
        except ValueError:
            return  # another thread has just done it
        owned.over = True
        for look in owned.looks:
            look.cancel()
        for actors in list(owned.actors):
            actors.owned.built._fail(self._program.death_of(owned.core, 0, owned.core.peer(0), actors.name))
            actors.owned.left.clear()
            actors.owned.ended._set(None)
            actors.owned.let_go()
        with contextlib.suppress(ValueError):
            owned.siblings.remove(owned.core)
        for number, member in list(self._by_number.items()):
            if member.core is owned.core and member.is_over:
                self._by_number.pop(number, None)
        for token in (*owned.core.former, *owned.core.tokens):
            self._by_token.pop(token, None)
            self._unread.pop(token, None)
            self._program.router.forget(token)
        if self._logs is not None:
            logs, collector = owned.logs, self._logs
            self._program.aside(lambda: collector.remove(logs))

    def any(self) -> bool:
        """Return True while there are processes."""
        return bool(self._meshes)

    def flush_logs(self) -> None:
        """Wait until the output of the processes was written, at most 2 s."""
        if self._logs is not None:
            self._logs.flush(timeout=2.0)

    def close(self) -> None:
        """Kill all processes that are left, and the fork server if this process has started it."""
        if self._spawner is not None:
            self._spawner.close()
        if self._logs is not None:
            self._logs.close(timeout=2.0)


def _in_constructors(owned: OwnedProcs, member: _Member) -> str:
    """Return text that names the actors whose constructors ran when this process ended."""
    if member.peer.link < 0 or (owned.has_bootstrap and not member.is_bootstrapped):
        return ""
    names = [
        actors.name
        for actors in owned.actors
        if any(actors.bases[rank] == member.rank for rank in list(actors.owned.constructing))
    ]
    return f" in the constructor of {_some(names)}" if names else ""


def _was_to_end(owned: OwnedProcs, rank: int) -> bool:
    """Return whether all actors of this process were to end, and one did not: the process was killed for it."""
    here = [actors for actors in owned.actors if rank in actors.bases]
    return bool(here) and all(
        actors.stopped is not None and actors.bases.index(rank) in actors.owned.left for actors in here
    )


def _token(epoch: int, home: str) -> str:
    """Return the token of a new process: its host, 80 random bits, and the number of its restarts."""
    return home + secrets.token_hex(10) + f"{epoch & 0xFFFF:04x}"


def _after(first: Sequence[Callable[[Callable[[], None]], None]], then: Callable[[], None]) -> None:
    """Call each of ``first`` with a continuation that calls the next one, and ``then`` at the end."""
    calls = list(first)
    if calls:
        calls[0](lambda: _after(calls[1:], then))
    else:
        then()


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


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


def _last_words(tail: list[str]) -> tuple[str, ...]:
    """Return the end of a dead process's stderr for a report: the text of faulthandler, or the last lines."""
    for i, line in enumerate(tail):
        if line.startswith("Fatal Python error"):
            return tuple(tail[i : i + 12])
    return tuple(tail[-8:])
