"""Processes that do not read their messages: they are reported, and killed where they were to end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from monarch_backend._actor.processes.records import ProcessRecords
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

log = logging.getLogger("monarch_backend")

CHECK_INTERVAL_S = 1.0
"""Seconds between two checks."""

UNREAD_KILL_S = 2.0
"""Seconds without a read after which a process that was to end is killed."""

STUCK_READER_TIMEOUT_S = 5.0
"""Seconds without a read after which a process is reported."""


class StuckReaders:
    def __init__(self, program: Runtime, records: ProcessRecords) -> None:
        self._program, self._records = program, records
        self._watching = False
        self.unread: dict[str, tuple[int, float, bool]] = {}  # token -> unread bytes, since when, whether logged

    def watch(self) -> None:
        """Check from now on, as long as there are processes."""
        if not self._watching:
            self._watching = True
            self._program.progress.later(CHECK_INTERVAL_S, self._look)

    def _look(self) -> None:
        """Report processes that do not read messages. They are not killed: only the user knows what they do."""
        self._watching = bool(self._records.meshes)
        if self._watching:
            self._program.progress.later(CHECK_INTERVAL_S, self._look)
        program, now = self._program, self._program.clock.now()
        for member in list(self._records.by_token.values()):
            peer = member.peer
            if member.gone or peer.link < 0 or peer.gone is not None:
                continue
            unread = program.links.unread(peer.link)
            before, since, said = self.unread.get(peer.token, (0, now, False))
            if unread == 0 or unread < before:
                self.unread.pop(peer.token, None)
                continue
            if now - since >= STUCK_READER_TIMEOUT_S and not said:
                said = True
                log.warning(
                    "%s has not read its messages for %.0f s: C code holds the GIL, or it is stopped by a signal. "
                    "It is not killed; `py-spy dump --pid %d` shows what it does.", peer, now - since, peer.pid
                )  # fmt: skip
            self.unread[peer.token] = (unread, since, said)

    def kill_if_unresponsive(self, peer: Peer) -> bool:
        """Kill an owned process that has not read for a while. Return False if it has not started yet."""
        if peer.link < 0:
            return False
        member = self._records.by_token.get(peer.token)
        if member is not None and not member.gone:
            _, since, _ = self.unread.get(peer.token, (0, self._program.clock.now(), False))
            if self._program.hosts.of(peer.token) is not None:
                member.spawner.kill_if_unresponsive(member.number, True)
            elif self._program.clock.now() - since >= UNREAD_KILL_S:
                log.warning("%s is killed: its actor was to end, and it does not read its messages", peer)
                self._records.kill(member)
        return True
