"""Requests to the hosts of late ranks for the line of code at which these are, through the store of a group.

All requests take the store of the first group over hosts that a process has, by default the world. While there are such
groups, a thread of each process looks there every 2 seconds for a request to it. It has its own connection, so a store
that does not answer delays nothing else. After an error of a store, that of the next group is used.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import weakref
from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import Store

from monarch_backend._core import fork
from monarch_backend._core.limits import start_thread, within
from monarch_backend.process_group import _c10d_internals

Line = tuple[int, str]
"""A late rank of a group, and its line: "at train.py:33 in load"."""

LOOK_S = 2.0
"""Seconds between two looks for a request."""

ANSWER_TIMEOUT_S = 5.0
"""Seconds for an answer: a look, and half a second for the stack of the late rank."""

_STORE_TIMEOUT_S = 1.0


class Group(Protocol):
    """A group that can be asked."""

    def late_lines(self) -> list[Line]:
        """Return the late ranks of this host, and their lines."""


class LineRequests:
    """Requests of this process, and the thread that answers those of others.

    A process answers one request about each group, because a group ends with its first timeout.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups = weakref.WeakValueDictionary[int, Group]()
        self._stores: dict[int, Store] = {}  # by the identity of a group, in the order in which they were made
        self._changed = threading.Event()  # the first store, perhaps
        self._thread: threading.Thread | None = None

    def add(self, identity: int, group: Group, store: Store, member: str) -> None:
        """Answer requests to ``member``, this process, about a group. Other processes know it by its identity."""
        with self._lock:
            self._groups[identity], self._stores[identity] = group, store
            if self._thread is None:
                thread = threading.Thread(target=self._serve, args=(member,), name="monarch_line_requests", daemon=True)
                start_thread(thread)
                self._thread = thread

    def remove(self, identity: int) -> None:
        with self._lock:
            self._groups.pop(identity, None)
            self._stores.pop(identity, None)
        self._changed.set()

    def end(self) -> None:
        """End the thread, if its store answers: it must not run while the interpreter ends."""
        thread = self._thread
        with self._lock:
            self._stores.clear()
        self._changed.set()
        if thread is not None:
            thread.join(_STORE_TIMEOUT_S)

    def _first_store(self) -> tuple[int, Store] | None:
        """Return the first group that there still is, and its store."""
        for identity in [each for each in self._stores if each not in self._groups]:
            del self._stores[identity]
        return next(iter(self._stores.items()), None)

    def ask(self, member: str, identity: int, timeout: float) -> list[Line]:
        """Return the late ranks of a group on the host of a process, and their lines. [] without an answer.

        It takes at most ``timeout`` or `ANSWER_TIMEOUT_S` seconds, and a second if the store does not answer.
        """
        with self._lock:
            first = self._first_store()
        if first is None:
            return []
        seconds = min(timeout, ANSWER_TIMEOUT_S)

        def ask() -> list[Line]:
            own = _c10d_internals.own_connection(first[1])  # its wait keeps other requests on the connection waiting
            own.set(_key("requested", member), str(identity))
            own.wait([_key("line", member, identity)], timedelta(seconds=seconds))
            return [(int(rank), str(line)) for rank, line in json.loads(own.get(_key("line", member, identity)))]

        with contextlib.suppress(Exception):  # no answer, or the store is gone with its host
            return within(seconds + _STORE_TIMEOUT_S, ask, thread_name="monarch_line_request")
        return []

    def _serve(self, member: str) -> None:
        answered, of, own = set[int](), 0, None
        while True:
            with self._lock:
                first = self._first_store()
                if first is None:
                    self._thread = None
                    return
                self._changed.clear()
            try:
                if own is None or of != first[0]:
                    of, own = first[0], _c10d_internals.own_connection(first[1])
                self._answer(own, member, answered)
            except RuntimeError:  # the store is gone
                own = None
                with self._lock:
                    self._stores.pop(first[0], None)
            else:
                self._changed.wait(LOOK_S)

    def _answer(self, store: Store, member: str, answered: set[int]) -> None:
        """Answer the last request to this process, if it is new."""
        if not store.check([_key("requested", member)]):
            return
        identity = int(store.get(_key("requested", member)))
        group = self._groups.get(identity)
        if group is not None and identity not in answered:
            store.set(_key("line", member, identity), json.dumps(group.late_lines()))
            answered.add(identity)


def _key(*parts: object) -> str:
    return "/".join(("late", *map(str, parts)))


requests = LineRequests()
atexit.register(requests.end)
fork.register(fork.Step.GROUP_WATCH, after_in_child=requests.__init__)  # type: ignore[misc]  # no thread in the child
