"""Waits for credit in a router without links: the sender is woken whenever the credit arrives.

Hooks place each event at the critical moment. tests/actor/test_backpressure.py tests with processes, and tests/testing/
with simulated processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from monarch_backend._transport.local import flow_control
from monarch_backend._transport.local.frames import Kind
from monarch_backend._transport.local.links import Links
from monarch_backend._transport.local.peer import CreditWaiter, Peer, PeerGoneError
from monarch_backend._transport.local.router import Router

PATIENCE = 10.0
"""Seconds after which a wait has failed."""


class _Timer:
    def cancel(self) -> None:
        """Do nothing, since no timer runs here."""


class _NoLinks:
    token = "0" * 32


class _WaitsForEverError(Exception):
    """Raised by a wait that no event would end."""


def _router_with(wait: Callable[[CreditWaiter], object]) -> tuple[Router, Peer]:
    """Return a router, and a peer for which it has no credit."""

    def waited(room: CreditWaiter, _seconds: float | None, _whole: bool) -> bool:
        if not room.ready:
            wait(room)
        return room.ready

    router = Router(cast(Links, _NoLinks()), waited)
    router.later = lambda _seconds, _call: _Timer()  # type: ignore[method-assign]
    peer = router.peer("1" * 32)
    peer.credit = 0
    return router, peer


def _forever(_room: CreditWaiter) -> None:
    raise _WaitsForEverError


def _refill(router: Router, peer: Peer) -> None:
    router.flow.refill(peer, 1)


def test_credit_that_arrives_as_a_sender_starts_to_wait() -> None:
    router, peer = _router_with(_forever)
    router.on_wait = lambda *_: _refill(router, peer)
    router.flow.wait_for_credit(peer, Kind.CALL, 0)
    assert peer.credit == 1


def test_a_death_while_a_sender_begins_to_wait() -> None:
    router, peer = _router_with(_forever)
    router.on_wait = lambda *_: router.never_came(peer, "killed by signal 9")
    with pytest.raises(PeerGoneError, match="killed by signal 9"):
        router.flow.wait_for_credit(peer, Kind.CALL, 0)


def test_a_death_while_a_sender_waits() -> None:
    router, peer = _router_with(lambda _: router.never_came(peer, "killed by signal 9"))
    with pytest.raises(PeerGoneError, match="killed by signal 9"):
        router.flow.wait_for_credit(peer, Kind.CALL, 0)


def test_two_senders_that_begin_to_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread starts to wait when the first has created its waiter and not yet registered it."""
    second_waits, ends = threading.Event(), []

    def wait(room: CreditWaiter) -> None:
        if threading.current_thread() is second:
            room.wait_lock = threading.Lock()
            room.wait_lock.acquire()
            second_waits.set()
            ends.append(room.wait_lock.acquire(timeout=PATIENCE))
        else:
            _refill(router, peer)

    router, peer = _router_with(wait)
    second = threading.Thread(target=router.flow.wait_for_credit, args=(peer, Kind.CALL, 0))

    def make() -> Any:
        made = CreditWaiter()
        if not second.ident:
            second.start()
            assert second_waits.wait(PATIENCE)
        return made

    monkeypatch.setattr(flow_control, "CreditWaiter", make)
    router.flow.wait_for_credit(peer, Kind.CALL, 0)
    second.join()
    assert ends == [True], "the second one was never told"
