"""Restarts of processes: dead ones get successors with new tokens, which other processes are told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

from monarch_backend._actor.processes.records import OwnedProcess, OwnedProcs, ProcessRecords, in_constructors
from monarch_backend._actor.processes.start import ProcessStarter, new_token
from monarch_backend._mesh.proc_mesh import ProcMeshState, label_of
from monarch_backend._processes.spawner import HostLostError
from monarch_backend._telemetry import kinds, texts
from monarch_backend._transport.local.frames import MAX_REPLACED_RANKS, Replaced
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

log = logging.getLogger("monarch_backend")


class ProcessRestarts:
    """Restarts processes. _actor/supervision.py has the policy.

    ``on_lost`` handles the end of a successor that was lost with its host before it had a record. ``report`` reports
    the end of a process whose restart has waited.
    """

    def __init__(
        self, program: Runtime, records: ProcessRecords, starter: ProcessStarter, on_lost: Callable[[Peer], None],
        report: Callable[[OwnedProcess], None],
    ) -> None:  # fmt: skip
        self._program, self._records, self._starter, self._on_lost = program, records, starter, on_lost
        self._report = report

    def replace(self, owned: OwnedProcs, member: OwnedProcess) -> None:
        """Replace a dead process, or all processes of its mesh, unless the restart limit is reached.

        A process of a lost host is replaced when it is known which host takes its place. The strategy "all" waits for
        those of all lost hosts.
        """
        core, program, limiter = owned.core, self._program, owned.limiter
        if limiter is None or member.replaced or member.waits_for_host:
            return
        is_all = limiter.policy.strategy == "all"
        awaited = program.hosts.awaited(list(core.tokens) if is_all else [member.peer.token])
        if awaited:
            member.waits_for_host = True
            left = len(awaited)

            def one_known() -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    self._replace_late(owned, member)

            for each in awaited:  # all searches start at once
                each.when_known(lambda: program.call_soon(one_known))
            return
        member.constructing = in_constructors(owned, member)
        delay = limiter.allow()
        if delay is None:
            member.restart = limiter.used_up()
            return
        member.restart = limiter.last_restart(delay)
        ranks = list(owned.members) if is_all else [member.rank]
        formers, killed = [core.peer(rank) for rank in ranks], set()
        for rank, former in zip(ranks, formers, strict=True):
            old = owned.members[rank]
            old.replaced = True
            if old is not member and not old.gone:
                self._records.kill(old)
                killed.add(old.peer.token)
            token = new_token(former.epoch + 1, program.hosts.home_again(old.peer.token, core.tokens))
            program.router.expect(token, old.peer.label)  # before the first message to it
            core.replace(rank, token)
        self._tell_successors(core, ranks, killed)
        for former in formers:
            if former.token not in self._records.by_token:  # it was never started, so its calls fail here
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
                restarted, which = wanted(), member.restart.removeprefix("restart ").partition(", in ")[0]
                self._starter.start(owned, restarted)
                for rank in restarted:
                    texts.life(kinds.Kind.PROCESS, label_of(core, rank)(), "restarted", which)
            except Exception as error:  # no room for them
                if not isinstance(error, HostLostError):  # other hosts may take them
                    log.exception("ranks of %s cannot be restarted", core.name)
                for rank in ranks:
                    if rank in wanted():
                        self._not_started(owned, rank, str(error))

        program.progress.later(delay, again)

    def _replace_late(self, owned: OwnedProcs, member: OwnedProcess) -> None:
        member.waits_for_host = False
        if not member.gone and owned.core.stopped is None and not self._program.closing:
            self.replace(owned, member)
        if member.ended_while_waiting and not member.waits_for_host:
            self._report(member)

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
        if peer.token not in self._records.by_token:
            self._records.add(owned, OwnedProcess(owned.core, rank, peer, failed=why))
            if peer.gone is None:
                self._program.router.never_came(peer, f"it could not be restarted: {why}")
            else:  # lost with its host, before it had a record
                self._on_lost(peer)

    def tell_successor(self, peer: Peer, token: str) -> None:
        """Send the successor of an owned process to a process that asks, because it may have missed the restart."""
        member = self._records.by_token.get(token)
        if member is not None and member.replaced:
            core, rank = member.core, member.rank
            self._program.router.tell(peer, Replaced(core.id, [rank], [core.tokens[rank]]))
