"""A router without processes: waits for credit, and frames that come before the gateway of the host is known.

Hooks place each event at the critical moment. tests/actor/test_backpressure.py tests with processes, and tests/testing/
with simulated processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from monarch_backend._transport.local import flow_control
from monarch_backend._transport.local.frames import CARRIED, Kind
from monarch_backend._transport.local.links import Links
from monarch_backend._transport.local.peer import CreditWaiter, Peer, PeerGoneError
from monarch_backend._transport.local.router import Router
from monarch_backend._transport.network import envelope
from monarch_backend._transport.network.remote_links import RemoteLinks

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


def test_sender_is_woken_once_there_is_credit() -> None:
    router, peer = _router_with(_forever)
    peer.credit = -5  # after a large message
    waiter = router.flow._waiter_of(peer, Kind.CALL, 0)
    router.flow.refill(peer, 5)
    assert not waiter.ready
    router.flow.refill(peer, 1)
    assert waiter.ready


@pytest.mark.parametrize(("kind", "target"), [(Kind.PORT, 7), (Kind.CALL, 8)])
def test_waiter_of_several_receivers_has_no_target(kind: Kind, target: int) -> None:
    router, peer = _router_with(_forever)
    waiter = router.flow._waiter_of(peer, Kind.CALL, 7)
    assert router.flow._waiter_of(peer, Kind.CALL, 7) is waiter and (waiter.kind, waiter.target) == (Kind.CALL, 7)
    assert router.flow._waiter_of(peer, kind, target) is waiter and (waiter.kind, waiter.target) == (0, 0)
    assert router.flow._waiter_of(peer, Kind.CALL, 7) is waiter and (waiter.kind, waiter.target) == (0, 0)


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


class _Dropping(_NoLinks):
    """Links that only record which of them are dropped."""

    def __init__(self) -> None:
        self.mailbox = self
        self.dropped: list[int] = []

    def drop(self, link: int) -> None:
        self.dropped.append(link)


GATEWAY, SENDER = "0" * 8 + "a" * 24, "2" * 32


def _carried(link: int, kind: int, seq: int = 0, body: bytes = b"") -> tuple[Any, ...]:
    return link, kind, 7, 8, seq, 3, 0, (_NoLinks.token + SENDER).encode(), body, None


def _early_router() -> tuple[Router, _Dropping, list[tuple[str, bytes]]]:
    """Return a router that has received frames of its gateway before `RemoteLinks` exists, its links and its calls."""
    links, calls = _Dropping(), list[tuple[str, bytes]]()
    router = Router(cast(Links, links), lambda *_: True)
    router.handlers[Kind.CALL] = lambda peer, frame, _: calls.append((peer.token, frame.body))
    router.handle([(1, int(Kind.MET), GATEWAY, 99)])
    router.handle([_carried(1, envelope.MET), _carried(1, Kind.CALL | CARRIED, 1, b"one")])
    router.handle([_carried(1, Kind.CALL | CARRIED, 2, b"two")])
    return router, links, calls


def _remote_links(router: Router, links: _Dropping) -> RemoteLinks:
    return RemoteLinks(links, 1, GATEWAY, 0, lambda _: True, lambda _: None, router.take_early_frames)


@pytest.mark.parametrize(
    "later", [[], [_carried(1, Kind.CALL | CARRIED, 3, b"three")]], ids=["alone", "with a later one"]
)
def test_frames_before_the_gateway_is_known_are_held_in_order(later: list[Any]) -> None:
    router, links, calls = _early_router()
    assert calls == [] and links.dropped == []
    remote_links = _remote_links(router, links)
    router.handle(remote_links.translate(later))
    router.handle(remote_links.translate([_carried(1, Kind.CALL | CARRIED, 3 + len(later), b"last")]))
    assert calls == [(SENDER, body) for body in (b"one", b"two", b"three", b"last") if later or body != b"three"]
    assert links.dropped == []


def test_frames_that_only_gateways_send_close_the_link_of_another_process() -> None:
    router, links, calls = _early_router()
    router.handle([(2, int(Kind.MET), "3" * 32, 98), _carried(2, Kind.CALL | CARRIED, 1, b"early")])
    router.handle(_remote_links(router, links).translate(()))
    assert links.dropped == [2]
    router.handle([_carried(2, Kind.CALL | CARRIED, 2, b"late")])
    assert links.dropped == [2, 2]
    assert [body for _, body in calls] == [b"one", b"two"]


def test_held_frames_of_a_process_without_a_gateway_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_backend._transport.local.router.MAX_EARLY_FRAMES", 4)
    router, links, _ = _early_router()
    router.handle([_carried(1, Kind.CALL | CARRIED, 3)])
    assert links.dropped == []
    router.handle([_carried(1, Kind.CALL | CARRIED, 4)])
    assert links.dropped == [1]
