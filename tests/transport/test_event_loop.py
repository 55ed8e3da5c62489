"""Waits beside a reading thread: no waiting thread is lost when several start at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from monarch_backend._transport.local import event_loop
from monarch_backend._transport.local.event_loop import ProgressLoop


class MailboxWithAnotherReader:
    """A mailbox whose turn another thread always holds."""

    def acquire_turn(self) -> bool:
        return False


class Waited:
    def __init__(self) -> None:
        self.wait_lock: Any = None
        self.ready = False


def test_gate_opened_by_another_thread_first_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    what, real = Waited(), threading.Lock

    class Overtaken:
        """A lock that another thread releases between a waiting thread's `acquire` and its `release`."""

        def __init__(self) -> None:
            self._lock = real()

        def locked(self) -> bool:
            return self._lock.locked()

        def acquire(self, timeout: float | None = None) -> bool:
            if timeout is None:
                return self._lock.acquire()
            what.ready = True
            event_loop.release(what)  # the result is ready
            assert self._lock.acquire(timeout=60)
            event_loop.release(what)  # a second release by the next message, a moment later
            return True

        def release(self) -> None:
            self._lock.release()

    monkeypatch.setattr(event_loop.threading, "Lock", Overtaken)
    assert ProgressLoop(MailboxWithAnotherReader(), lambda _: None).wait(what)
    assert not what.wait_lock.locked()
