"""Stop of processes: they are told to end, and killed if they do not read that or exceed a limit of time."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.calls.future import Future, LabelledFuture
from monarch_backend._actor.processes.records import OwnedProcs, ProcessRecords, listed
from monarch_backend._actor.processes.start import ProcessStarter
from monarch_backend._actor.processes.stuck_readers import StuckReaders
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._mesh.proc_mesh import ProcMeshState
from monarch_backend._processes import system_calls
from monarch_backend._telemetry import kinds, texts
from monarch_backend._transport.local.frames import REPORT_BUSY, Setting, Stop

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

log = logging.getLogger("monarch_backend")

SHUTDOWN_GRACE_S = 10.0
"""Seconds that processes have to end. Then those that were aborted or do not read messages are killed."""


class ProcessStop:
    """Stops meshes of processes. ``settle_lost`` reports the processes of a mesh that have ended with their hosts."""

    def __init__(
        self, program: Runtime, records: ProcessRecords, starter: ProcessStarter, stuck: StuckReaders,
        settle_lost: Callable[[OwnedProcs], None],
    ) -> None:  # fmt: skip
        self._program, self._records, self._starter, self._stuck = program, records, starter, stuck
        self._settle_lost = settle_lost
        self.stands_still = system_calls.stands_still  # a simulator replaces it

    def stop(
        self, core: ProcMeshState | None, how: str, reason: str, timeout: float | None = None, hosts: Any = None
    ) -> Future[None]:
        """Stop processes. Kill those that do not read messages, and all after ``timeout`` seconds.

        Without ``core``: all meshes, or those on ``hosts``. Return a Future that is done when the processes have ended.
        """
        program, timeout = self._program, check_timeout(timeout)
        meshes = list(self._records.meshes) if core is None else [m for m in self._records.meshes if m.core is core]
        if hosts is not None:
            meshes = [owned for owned in meshes if program.hosts.is_on(owned.core.tokens, hosts)]
        if core is not None and core.owned is None:
            raise RuntimeError(f"only the program or actor that has spawned mesh {core.name!r} can stop it")
        future: Future[None] = LabelledFuture(program.wait, f"the end of {_in_words(meshes)}")
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
            if owned.core.stopped is None:
                texts.life(kinds.Kind.MESH, owned.core.name, "stopped", reason)
            owned.core.stopped = owned.core.stopped or reason
            for peer in owned.core.peers:
                if (
                    peer.token not in self._records.by_token and peer.gone is None
                ):  # a successor that is not started yet
                    program.router.never_came(peer, f"it was stopped: {reason}")
        for owned in meshes:
            if owned not in waiting:
                self.settle(owned)
        for owned in waiting:
            done: Future[None] = Future(program.wait)
            owned.ended.append(done)
            done.add_done_callback(one_less)
            if how == "kill":
                for member in [each for each in owned.members.values() if not each.gone]:
                    self._records.kill(member)
            else:
                tell = functools.partial(self._tell_to_end, owned, how, reason)
                _after(owned.core.before_stop if how == "stop" else (), tell)
                end = None if timeout is None else program.clock.now() + timeout
                self._look_again(owned, how, end)
            self.settle(owned)  # the last of them may have ended meanwhile
            if any(not m.gone and program.hosts.of(m.peer.token) is not None for m in owned.members.values()):
                program.call_soon(functools.partial(self._settle_lost, owned))
        return future

    def _tell_to_end(self, owned: OwnedProcs, how: str, reason: str) -> None:
        for member in list(owned.members.values()):
            if not member.gone:
                self._program.router.tell(member.peer, Stop(0, how, reason))

    def _look_again(self, owned: OwnedProcs, how: str, end: float | None) -> None:
        now = self._program.clock.now()
        # After the deadline all are killed. The next check is only for those that the kernel cannot end.
        left = SHUTDOWN_GRACE_S if end is None or now >= end else min(SHUTDOWN_GRACE_S, end - now)
        owned.looks.append(self._program.progress.later(left, functools.partial(self._hurry, owned, how, end)))

    def _hurry(self, owned: OwnedProcs, how: str, end: float | None) -> None:
        """Check processes that were told to end: wait for those that may be at work, and kill others."""
        program, busy, now = self._program, [], self._program.clock.now()
        late = how == "abort" or (end is not None and now >= end)
        # A process at work may wait for a dead one without end, in a collective.
        has_dead_peer = any(
            each.gone and not each.replaced and not each.peer.orderly for each in owned.members.values()
        )
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
                self._records.kill(member)
                continue
            unread = peer.link >= 0 and program.links.unread(peer.link) > 0
            # A process that has read the message to stop, and holds the GIL since then, is at work.
            unresponsive = peer.link < 0 or (unread and (not member.stop_read or self.stands_still(peer.pid)))
            if late or unresponsive or has_dead_peer:
                why = "it does not read its messages" if unresponsive else "it is still at work"
                if peer.link < 0:
                    why = "it has not started yet"
                why += (
                    ", and another process of its mesh has died" if has_dead_peer and not (late or unresponsive) else ""
                )
                log.warning(
                    "%s is killed (%s): %s", peer, "its time to stop is over" if late else "it was to stop", why
                )
                member.killed_at = now
                self._records.kill(member)
            else:
                if program.hosts.of(peer.token) is not None:
                    member.spawner.kill_if_unresponsive(member.number, member.stop_read)
                busy.append(str(peer))
                # A process that a signal has stopped after it read the message to stop would be "at work" without end.
                # One that works has read the following message by the next check.
                member.stop_read = True
                if not unread:
                    program.router.tell(peer, Setting(REPORT_BUSY, None))
        if busy:
            log.warning(
                "%s is to stop and still has messages to finish; kill() ends it at once: %s",
                owned.core.name,
                listed(busy),
            )
        if any(not member.gone for member in owned.members.values()):
            self._look_again(owned, how, end)

    def settle(self, owned: OwnedProcs) -> None:
        """Complete the futures of `stop` and forget the mesh, if all of its processes have ended."""
        if all(m.gone for m in owned.members.values()):
            for future in owned.ended:
                future._set(None)
            owned.ended.clear()
            if owned.core.stopped is not None and owned in self._records.meshes:
                self._forget(owned)

    def _forget(self, owned: OwnedProcs) -> None:
        try:
            self._records.meshes.remove(owned)
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
        self._records.remove(owned)
        for token in (*owned.core.former, *owned.core.tokens):
            self._stuck.unread.pop(token, None)
            self._program.router.forget(token)
        if self._starter.logs is not None:
            logs, collector = owned.logs, self._starter.logs
            self._program.run_in_thread(lambda: collector.remove(logs))


def _in_words(meshes: Sequence[OwnedProcs]) -> str:
    names = [owned.core.name for owned in meshes]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more meshes" if len(names) > 3 else "")


def _after(first: Sequence[Callable[[Callable[[], None]], None]], then: Callable[[], None]) -> None:
    """Call each of ``first`` with a continuation that calls the next one, and ``then`` at the end."""
    calls = list(first)
    if calls:
        calls[0](lambda: _after(calls[1:], then))
    else:
        then()
