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


def test_wait_given_up_before_its_gate_is_there_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    what, real, is_given_up = Waited(), threading.Lock, False
    loop = ProgressLoop(MailboxWithAnotherReader(), lambda _: None)

    class Late:
        """A lock that is there after the other thread has looked for it."""

        def __init__(self) -> None:
            nonlocal is_given_up
            self._lock = real()
            is_given_up = True
            event_loop.release(what)

        def acquire(self, timeout: float | None = None) -> bool:
            assert timeout is None, "it sleeps"
            return self._lock.acquire()

    monkeypatch.setattr(event_loop.threading, "Lock", Late)
    assert not loop.wait(what, None, lambda: is_given_up)
