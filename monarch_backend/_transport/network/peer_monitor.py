"""Monitor of peers on other hosts: heartbeats, and the end of peers that are silent or have ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from monarch_backend._transport.network.connection import PeerConnection

if TYPE_CHECKING:
    from monarch_backend._transport.network.connection_manager import Tcp

AUTHENTICATION_TIMEOUT_S = 5.0
"""Time for the handshake of an accepted connection."""

RECONNECT_AFTER_CLOSE_S = 1.0
"""Time for a peer to reconnect after it has closed its connection. A dying process closes its connections, too."""


class PeerMonitor:
    """Monitor of one process's peers. All methods run on the thread of their connections."""

    def __init__(self, tcp: Tcp) -> None:
        self._tcp = tcp
        self.next_beat = 0.0
        """Time of the next heartbeat."""

    def beat(self, now: float) -> None:
        """Send heartbeats. Drop peers and unauthenticated connections that are silent for too long."""
        for connection in [s for s in self._tcp.unauthenticated if now - s.since > AUTHENTICATION_TIMEOUT_S]:
            self._tcp.drop(connection)
        for remote in list(self._tcp.remotes.values()):
            if now - remote.heard > remote.silence:
                self.lose_silent(remote, now)
                continue
            self._give_up_attempt(remote, now)
            if self._tcp.rdma_sender is not None:
                self._tcp.rdma_sender.beat(remote, now)
            with remote.lock:
                if remote.connection is not None and remote.up:
                    self._tcp.io.write(remote.connection, [remote.session.acknowledgement()])

    def _give_up_attempt(self, remote: PeerConnection, now: float) -> None:
        """Drop an attempt that gets no answer, then connect again: the packet that ended it may be lost."""
        attempt, most = remote.attempt, self._tcp.bounds.silence / (2 if remote.up else 1)
        if attempt is not None and not attempt.gone and now - attempt.since > most:
            remote.trouble = f"it did not answer a connection for {now - attempt.since:.1f} s"
            self._tcp.drop(attempt)

    def lose_silent(self, remote: PeerConnection, now: float) -> None:
        how = "nothing was heard from it" if remote.up else "it did not answer"
        why = f" ({remote.trouble})" if remote.trouble else ""
        self._tcp.lose(remote, f"{how} for {now - remote.heard:.1f} s{why}")

    def on_broken(self, remote: PeerConnection, error: Exception, ended: bool) -> None:
        """Detect the end of the peer's process: its system closes connections, while a network breaks them."""
        if ended:
            remote.closed = True
            times = remote.times
            self._tcp.timers.append(
                (time.monotonic() + RECONNECT_AFTER_CLOSE_S, lambda: self._still_closed(remote, times))
            )
        elif remote.closed and isinstance(error, ConnectionRefusedError):
            self._tcp.lose(remote, "its process has closed the connection and does not listen any more")

    def _still_closed(self, remote: PeerConnection, times: int) -> None:
        if remote.times == times and remote.lost is None:
            self._tcp.lose(remote, "its process has closed the connection and does not connect again")
