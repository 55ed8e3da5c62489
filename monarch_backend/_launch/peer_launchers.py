"""Other launchers of a job, as one of them sees them: their hosts may be cut off, and they may report a failure.

Each launcher publishes its address in the store of the rendezvous and watches the others (_core/host_watch.py). A
launcher that fails sends the others its reason. So the others end ranks that would wait without end, such as stopped
ones. This module does not use torch.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from monarch_backend._core import host_watch
from monarch_backend._core.addresses import address_towards, numeric_address
from monarch_backend._core.host_watch import HostWatch, Watcher
from monarch_backend._core.limits import start_thread, within

_log = logging.getLogger("monarch_backend")

STORE_TIMEOUT_S = 1.0  # for the store of the rendezvous to answer
RANKS_FIRST_S = 0.7  # between the notice and the end of this host's ranks: their errors say what they were doing
_MEET_S = 60.0  # for the other launchers to publish their addresses; torchrun does not
_POLL_S = 0.2


class PeerLaunchers:
    """Watch of the other launchers, from a rendezvous to the next one."""

    def __init__(
        self, watch: HostWatch, store: Any, store_host: str, number: int, count: int, ranks: Sequence[int]
    ) -> None:
        """``store`` is a connection for this object only. ``number`` of ``count`` launchers, which has ``ranks``."""
        self._watch, self._store, self._number = watch, store, number
        self.reason = ""  # of the first failure
        self._since = 0.0
        self._watcher: Watcher | None = None
        self._others: dict[str, dict[str, Any]] = {}
        self._closed = threading.Event()
        address = address_towards(store_host)
        try:
            port = watch.listen()
        except OSError as error:  # no descriptor left: the others do not watch this launcher
            _log.warning("the other launchers will not notice if this host is lost: %s", error)
            port = 0
        me = {"address": address, "port": port, "host": socket.gethostname(), "pid": os.getpid()}
        self._me: dict[str, Any] = {**me, "ranks": list(ranks)}
        meet = threading.Thread(target=self._meet, args=(store_host, count), name="monarch_launchers", daemon=True)
        start_thread(meet)

    def failure(self) -> str:
        """Return why the job must end here or restart, once this host's ranks have had time to fail; else ""."""
        return self.reason if self.reason and time.monotonic() >= self._since + RANKS_FIRST_S else ""

    def reach_store(self) -> bool:
        """Return whether the store of the rendezvous answers. If not, its host's loss is known then, too."""
        try:
            within(STORE_TIMEOUT_S, lambda: self._store.check(["launchers"]))
        except (TimeoutError, RuntimeError):
            return False
        return True

    def close(self) -> None:
        self._closed.set()
        if self._watcher is not None:
            self._watch.close(self._watcher)

    def notify(self, reason: str) -> None:
        """Tell the other launchers that the job fails because of this host."""
        self._watch.notify(f"{_name(self._me)} has ended its job: {reason}")

    def _meet(self, store_host: str, count: int) -> None:
        try:
            self._store.set(f"launcher/{self._number}", json.dumps(self._me))
            give_up = time.monotonic() + _MEET_S
            missing = {f"launcher/{number}" for number in range(count) if number != self._number}
            while missing and time.monotonic() < give_up and not self._closed.wait(_POLL_S):
                for key in [key for key in missing if self._store.check([key])]:
                    missing.remove(key)
                    other = json.loads(self._store.get(key))
                    other["address"] = other["address"] or numeric_address(store_host)
                    if other["port"]:
                        self._others[f"{other['address']}:{other['port']}"] = other
        except (RuntimeError, ValueError) as error:  # the store has closed: the job ends
            _log.debug("the other launchers are not watched: %s", error)
            return
        if self._others and not self._closed.is_set():
            processes = {key: [(other["address"], other["port"])] for key, other in self._others.items()}
            self._watcher = Watcher(frozenset(self._others), self._lost, self._noticed)
            self._watch.watch(self._watcher, processes)

    def _lost(self, keys: list[str]) -> None:
        names = ", ".join(_name(other) for key, other in sorted(self._others.items()) if key in keys)
        alone = ": all other hosts are silent, so this one may be cut off" if len(keys) == len(self._others) > 1 else ""
        self._fail(f"no sign of life from {names} for {host_watch.silence()} s{alone}. Check the host and the network")

    def _noticed(self, _key: str, text: str) -> None:
        self._fail(text)

    def _fail(self, reason: str) -> None:
        if not self.reason:
            self._since, self.reason = time.monotonic(), reason
            _log.error("%s", reason)


def _name(launcher: dict[str, Any]) -> str:
    ranks = f"rank{'s' if len(launcher['ranks']) > 1 else ''} {', '.join(map(str, launcher['ranks']))}"
    return f"the launcher of {ranks} (host {launcher['host']}, {launcher['address']}, pid {launcher['pid']})"
