"""Connections of one engine, by peer, with the methods of the engine that they call."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

from monarch_backend import _native
from monarch_backend._verbs.config import Settings
from monarch_backend._verbs.connections.connection import PeerConnection
from monarch_backend._verbs.engine_thread import EngineThread
from monarch_backend._verbs.errors import VerbsError
from monarch_backend._verbs.open_device import Device
from monarch_backend._verbs.work_requests import Done, Request


class PeerConnections:
    """Connections to peers, and their `Host`. The engine's lock is held in all methods but `tick`, which takes it.

    ``devices``: see Host. ``dial``: see Engine.
    """

    def __init__(
        self,
        lock: Any,
        settings: Settings,
        dial: Callable[[Any], None] | None,
        devices: Callable[[], list[Device]],
        thread: EngineThread,
    ) -> None:
        self._lock, self._dial, self._thread = lock, dial, thread
        self.settings, self.devices = settings, devices
        self.by_peer: dict[Hashable, PeerConnection] = {}
        self.ends: Callable[[Request, Done, Any], None]
        """See Completions.ends. Set by the engine."""

    def progress(self) -> None:
        for link in self.by_peer.values():
            link.progress()

    def tick(self) -> None:
        with self._lock:
            for link in self.by_peer.values():
                link.tick(self.now())

    def is_restless(self) -> bool:
        return any(link.is_restless for link in self.by_peer.values())

    def detach_after_fork(self, lock: Any) -> None:
        _native.keep_for_ever(self.by_peer)
        self.by_peer, self._lock = {}, lock

    # ---- as the connections' Host

    def finish(self, request: Request) -> None:
        done, outcome = request.done, request.close()
        self.ends(request, done, outcome)

    def dial(self, peer: Hashable) -> bool:
        if self._dial is None:
            return False
        self._thread.call_soon(lambda: self._dial_now(peer))
        return True

    def _dial_now(self, peer: Hashable) -> None:
        assert self._dial is not None
        try:
            self._dial(peer)
        except Exception as error:
            failed = VerbsError(f"{peer} could not be dialed: {error}", "", "", str(peer))
            failed.__cause__ = error
            with self._lock:
                link = self.by_peer.get(peer)
                if link is not None:
                    link.fail(failed)

    def now(self) -> float:
        return time.monotonic()
