"""Ends of owned processes: their causes, their reports, and the calls and actors that fail with them.

_actor/supervision.py decides about failures.
"""

from __future__ import annotations

import functools
import logging
import re
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.errors import Death, MeshFailure
from monarch_backend._actor.processes.records import (
    OwnedProcess,
    OwnedProcs,
    ProcessRecords,
    in_constructors,
    was_to_end,
)
from monarch_backend._actor.processes.restarts import ProcessRestarts
from monarch_backend._actor.processes.start import ProcessReadiness, ProcessStarter
from monarch_backend._actor.processes.stop import ProcessStop
from monarch_backend._actor.processes.stuck_readers import StuckReaders
from monarch_backend._mesh.proc_mesh import ProcMesh, label_of
from monarch_backend._processes.spawner import Exited, LostWithHost, SpawnFailed, Started
from monarch_backend._telemetry import kinds, last_messages, texts
from monarch_backend._transport.local.frames import Setting
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

log = logging.getLogger("monarch_backend")

EXIT_STATUS_TIMEOUT_S = 0.04
"""Seconds for the fork server to report the exit status of a process whose link has closed."""

SIGKILL_STATUS_TIMEOUT_S = 2.0
"""The same where only the fork server knows the cause, such as lack of memory, or the fork server itself has died."""


MAX_TRACEBACK_LINES = 40
"""Lines of a traceback in the report of a process that an exception has ended."""


_OF_PROFILER = re.compile(r"USDT:.* profiler_st(art|op)$|ERROR: External init callback must run in same thread")
"""Lines that torch's profiler writes to stderr in each session. The second: it starts on another thread than torch."""


class ProcessExits:
    """Handles the events of spawners and the ends of links to owned processes."""

    def __init__(
        self,
        program: Runtime,
        records: ProcessRecords,
        starter: ProcessStarter,
        readiness: ProcessReadiness,
        restarts: ProcessRestarts,
        stops: ProcessStop,
    ) -> None:
        self._program, self._records, self._starter = program, records, starter
        self._readiness, self._restarts, self._stops = readiness, restarts, stops

    def on_event(self, event: Any) -> None:
        """Handle an event of a spawner. Called on the spawner's thread."""
        self._program.call_soon(lambda: self.handle_event(event))

    def handle_event(self, event: Any) -> None:
        """Handle an event of a spawner, or keep it until the process has a record. Called on the reading thread."""
        member = self._records.by_number.get(event.id)
        if member is None:
            self._starter.early.setdefault(event.id, []).append(event)
            return
        if isinstance(event, Started):
            member.peer.pid = event.pid
            return
        if isinstance(event, SpawnFailed):
            member.failed = event.reason
        elif isinstance(event, LostWithHost):
            member.lost = event.reason
            if member.core.owned.over:  # it was reported when its mesh was stopped
                self._records.by_number.pop(event.id, None)
                return
        elif isinstance(event, Exited):
            member.exited = event
            if member.core.owned.over:  # its last event
                self._records.by_number.pop(event.id, None)
                return
        how, _ = self._records.how_it_ended(member.peer)
        if member.peer.gone is None and member.peer.link < 0 and member.lost is None:
            self._program.router.never_came(member.peer, how)
        elif member.peer.gone is not None:
            self.report(member)
        elif self._program.hosts.of(member.peer.token) is not None:  # its gateway reports it, after its last frames
            self._program.progress.later(
                SIGKILL_STATUS_TIMEOUT_S, lambda: self._program.router.never_came(member.peer, how)
            )

    def ended(self, peer: Peer) -> None:
        """Handle a closed link, or a process that never connected. The fork server may report the cause later."""
        member = self._records.by_token[peer.token]
        owned = member.core.owned
        if not member.gone and member.core.stopped is None and not self._program.closing and owned.limiter is not None:
            # Before the end is reported, so that a repeated call finds the successor.
            self._restarts.replace(owned, member)
        if member.is_over:
            self.report(member)
        else:
            unsure = self._records.how_it_ended(peer)[1] in (None, -signal.SIGKILL)
            seconds = EXIT_STATUS_TIMEOUT_S
            if unsure:  # the cause does not matter any more after a stop
                seconds = SIGKILL_STATUS_TIMEOUT_S if owned.core.stopped is not None else self._status_timeout(peer)
            self._program.progress.later(seconds, lambda: self.report(member))

    def settle_lost(self, owned: OwnedProcs) -> None:
        """Report processes of a stopped mesh that have ended with their hosts. Their reasons can take minutes.

        Called on the reading thread.
        """
        for member in list(owned.members.values()):
            host = self._program.hosts.of(member.peer.token)
            if member.gone or host is None:
                continue
            if host.lost is not None and member.peer.gone is None and member.peer.link < 0:
                self._program.router.never_came(member.peer, host.lost)
            elif host.lost is not None and member.peer.gone is not None:
                self.report(member)
            elif member.peer.gone is not None:  # the host may be found lost soon
                self._program.progress.later(SIGKILL_STATUS_TIMEOUT_S, functools.partial(self.report, member))

    def _status_timeout(self, peer: Peer) -> float:
        """Return the seconds for the cause of an end. If its host is lost, a scheduler is asked for the reason."""
        host = self._program.hosts.of(peer.token)
        return SIGKILL_STATUS_TIMEOUT_S + (0.0 if host is None else host.explain_limit)

    def report(self, member: OwnedProcess) -> None:
        """Report the end of a process, unless it was reported, or its restart waits for a host.

        Called on the reading thread.
        """
        if member.gone:
            return
        core, rank, owned = member.core, member.rank, member.core.owned
        is_ending = core.stopped is not None or self._program.closing
        if member.waits_for_host and not is_ending:
            member.ended_while_waiting = True
            return
        member.gone = True
        if is_ending:
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
            self._stops.settle(owned)
            return
        self._failed(owned, member)

    def _failed(self, owned: OwnedProcs, member: OwnedProcess) -> None:
        core, rank, program = owned.core, member.rank, self._program
        what, code = self._records.how_it_ended(member.peer)
        what += in_constructors(owned, member) if member.constructing is None else member.constructing
        if member.restart:
            if member.replaced:
                log.info("%s: %s; %s", member.peer, what, member.restart)
            what += f"; {member.restart}"
        label, pid = label_of(core, rank)(), member.peer.pid
        texts.life(kinds.Kind.PROCESS, label, "failed", what, is_failure=True, pid=pid)
        last_words: tuple[str, ...] = ()
        if self._starter.logs is not None and (code is None or code != 0):
            self._starter.logs.flush(owned.logs, 0.01)
            logs = self._starter.logs
            last_words = _last_words(logs.tail(owned.logs, rank), logs.last_lines(owned.logs, rank))
        host = program.hosts.name_of(member.peer.token)
        is_here = program.waiting.is_real and program.hosts.of(member.peer.token) is None
        messages = member.exited.messages if member.exited is not None else ()  # from the agent of another host
        if is_here and pid and code != 0:
            messages = last_messages.of_started(pid)
        death = Death(rank, core.where(rank), host, pid, what, code, last_words=last_words, messages=messages)
        failure = MeshFailure(core.name, [death], ProcMesh(core))
        if member.replaced:
            program.on_process_lost(member.peer, failure)
            self._abort_groups(owned, failure)
            return
        at_start = self._readiness.failed_to_start(member.peer)
        is_failure = not (code == -signal.SIGKILL and was_to_end(owned, rank))
        if at_start:
            error, trace = self._readiness.bootstrap_error(member.peer)
            # The last words are the end of the traceback.
            death = replace(death, error=error, trace=trace, at_start=True, last_words=() if trace else last_words)
            failure = MeshFailure(core.name, [death], ProcMesh(core))
            failure.__cause__ = error
            is_failure = program.supervision.is_asked(owned.owner_runner)
            if not is_failure and not owned.says_start_failed:
                owned.says_start_failed = True
                log.error(
                    "%s did not start: %s. `initialized` and calls raise this. Output of its bootstrap is above",
                    member.peer, what,
                )  # fmt: skip
        if is_failure and program.supervision.is_final(owned.owner_runner):
            program.supervision.failed(owned.owner_runner, failure)
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
        self._stops.settle(owned)
        if is_failure and not program.supervision.is_final(owned.owner_runner):
            program.supervision.failed(owned.owner_runner, failure)

    def _abort_groups(self, owned: OwnedProcs, failure: MeshFailure) -> None:
        if owned.core.groups:
            for other in owned.members.values():
                if not other.gone and other.peer.link >= 0:
                    self._program.router.tell(other.peer, Setting("abort_groups", str(failure)))


class ProcessOwner:
    """Owner of the processes that this process has spawned, by its parts."""

    def __init__(self, program: Runtime) -> None:
        self.records = records = ProcessRecords()
        self.stuck = StuckReaders(program, records)
        # The starter and the restarts are made before the exits that handle their events.
        self.starter = ProcessStarter(
            program, records, self.stuck, lambda e: self.exits.on_event(e), lambda e: self.exits.handle_event(e)
        )
        self.readiness = ProcessReadiness(program, records)
        self.stops = ProcessStop(
            program, records, self.starter, self.stuck, lambda owned: self.exits.settle_lost(owned)
        )
        self.restarts = ProcessRestarts(
            program, records, self.starter, lambda peer: self.exits.ended(peer), lambda each: self.exits.report(each)
        )
        self.exits = ProcessExits(program, records, self.starter, self.readiness, self.restarts, self.stops)


def _last_words(tail: list[str], last_lines: list[str]) -> tuple[str, ...]:
    """Return the end of a dead process's output: faulthandler's text, the last traceback, or its last lines.

    ``tail`` is of stderr, ``last_lines`` of both streams. Lines of torch's profiler say nothing of the end, and are
    left out.
    """
    tail = [line for line in tail if not _OF_PROFILER.match(line)]
    for i, line in enumerate(tail):
        if line.startswith("Fatal Python error"):
            return tuple(tail[i : i + 12])
    starts = [i for i, line in enumerate(tail) if line.startswith("Traceback (most recent call last)")]
    if starts and starts[-1] < len(tail) - 8:
        return tuple(tail[starts[-1] :][-MAX_TRACEBACK_LINES:])
    if starts:
        return tuple(tail[-8:])
    return tuple([line for line in last_lines if not _OF_PROFILER.match(line)][-8:])
