"""Lifetime of the store that rank 0 of a default group hosts.

The store is needed after rank 0 has destroyed its group. Other ranks may still make a group without rank 0. Ranks that
already make the next group on the same port are connected to it. So rank 0 keeps it until all others have left, for a
limited time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
import weakref

from torch._C._distributed_c10d import PrefixStore, Store

from monarch_backend._core.limits import start_thread, within
from monarch_backend.process_group._handshake import Deadline

_LINGER_S = 0.2  # after the last rank has left: a program that makes its next group at once finds the same server
_LONGEST_STAY_S = 30.0  # for ranks that never report that they have left, such as killed ones
_AT_EXIT_S = 5.0  # the same at the end of the program
_REPORT_S = 1.0  # for one key to be sent
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1


class Arrival:
    """Result of a rendezvous: the ``store`` of a new default group. No key in it is of an earlier group.

    ``hosted``: rank 0 hosts the store, not torchrun's agent.
    """

    def __init__(self, root: Store, name: str, rank: int, size: int, deadline: Deadline, *, hosted: bool) -> None:
        self.store = PrefixStore(name, root)
        self.deadline = deadline
        self._rank, self._size = rank, size
        self._joined = hosted and size > 1
        if self._joined:
            _register()
            _joined.add(self)

    def is_of(self, store: Store) -> bool:
        """True if ``store`` is this one or a part of it."""
        while isinstance(store, PrefixStore) and store is not self.store:
            store = store.underlying_store
        return store is self.store

    def leave(self, *, stay: bool) -> None:
        """Report that this rank needs the store no more. Its host keeps it until all others have left, if ``stay``."""
        joined, self._joined = self._joined, False
        if joined and self._rank != 0:
            with contextlib.suppress(RuntimeError, TimeoutError):  # the host may have ended
                within(_REPORT_S, lambda: self.store.set(f"left/{self._rank}", ""))
        elif joined and stay:
            _keep(self.store, [f"left/{rank}" for rank in range(1, self._size)], self.deadline)


_joined: weakref.WeakSet[Arrival] = weakref.WeakSet()
_waiting: set[threading.Event] = set()  # for ranks to leave


def _keep(store: Store, keys: list[str], deadline: Deadline) -> None:
    left = threading.Event()

    def keep() -> None:
        end = time.monotonic() + min(_LONGEST_STAY_S, deadline.timeout.total_seconds())
        pause = _FIRST_PAUSE_S
        with contextlib.suppress(RuntimeError):
            # Store.wait would block the connection for other threads of the program.
            while not store.check(keys) and time.monotonic() < end:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        _waiting.discard(left)
        left.set()
        time.sleep(_LINGER_S)  # holds the store

    _waiting.add(left)
    start_thread(threading.Thread(target=keep, name="monarch-store-host", daemon=True))


@functools.cache
def _register() -> None:
    atexit.register(_at_exit)


def _at_exit() -> None:
    for arrival in list(_joined):
        arrival.leave(stay=False)
    end = time.monotonic() + _AT_EXIT_S
    for left in list(_waiting):
        left.wait(max(0.0, end - time.monotonic()))
