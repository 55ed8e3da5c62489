"""The invariants of docs/architecture.md hold after each step of random runs, and broken code violates them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from monarch_backend._actor.calls import pending_calls
from monarch_backend._actor.execution import runner
from monarch_backend._actor.execution.message_queue import MessageQueue
from monarch_backend._actor.execution.runner import ActorRunner
from monarch_backend._actor.runtime import Runtime
from monarch_backend._actor.supervision import Supervision
from monarch_backend._transport.local.flow_control import FlowControl, RetryQueue
from monarch_backend._transport.local.peer_table import PeerTable
from monarch_backend._transport.local.router import Router
from monarch_backend._transport.local.tree_multicast import ReplyAggregator, TreeMulticast
from monarch_backend.testing import SimulationError
from tests.testing import random_world
from tests.testing.seed_runner import run_in_interpreters

SEEDS = 60
MANY_SEEDS, BIG_CHUNK = int(os.environ.get("MONARCH_TEST_SEEDS", "500")), 250  # `make test-seeds` runs 5,000
SMALL = ("any", "12", "24", "12", "24", "48")
"""Five of six worlds are small. They reach as many branches of the code, with five times as many seeds an hour."""


def test_invariants_hold_in_random_worlds() -> None:
    run_in_interpreters(range(SEEDS))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + MANY_SEEDS, BIG_CHUNK))
def test_invariants_hold_for_many_seeds(first: int) -> None:
    run_in_interpreters(range(first, first + BIG_CHUNK), *SMALL)


def test_invariants_hold_with_256_processes() -> None:
    ran = random_world.run(0, 256)
    assert len(ran.simulation.processes) > 256
    assert ran.watch.executed > 1000


def test_failure_names_its_seed_and_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlowControl, "refill", lambda *_: None)  # refilled credit is lost, so senders wait without end
    _, error = _first_failure(range(20), size=20)
    (told,) = error.__notes__
    seed, *steps = told.splitlines()
    assert seed.startswith("seed ")
    assert len(steps) == 50
    assert all(" ms  " in step for step in steps)


# ---- each of these breaks the code in one place, and a check must fail


def _unordered(router: Router, peer: Any, frame: Any, combiner: Any) -> bool:
    """Handle frames in the order of arrival, but none twice."""
    if peer.held.setdefault(frame.seq, frame) is not frame:
        return False
    router._take(peer, frame, combiner)
    return True


def _taken_twice(router: Router, peer: Any, frame: Any, combiner: Any) -> Any:
    """Handle a frame again that repeats an earlier sequence number."""
    if frame.seq > peer.received:
        return _IN_ORDER(router, peer, frame, combiner)
    router._take(peer, frame, combiner)
    return True


def _always_not_sent(failure: Any, endpoint: str, delivery: str) -> Any:
    return _ERROR(failure, endpoint, "not sent")


def _told_twice(supervision: Supervision, owner: Any, failure: Any) -> None:
    _FAILED(supervision, owner, failure)
    _FAILED(supervision, owner, failure)


def _without_cause(failure: Any) -> Any:
    failure.__cause__ = None
    return _PACK(failure)


def _nothing(*_: Any, **__: Any) -> None:
    return None


_IN_ORDER = Router.in_order
_ERROR = pending_calls.supervision_error
_FAILED = Supervision.failed
_PACK = runner.pack_failure

WAITS = "promise 3|no event is scheduled, so no wait can end"

BREAKS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "order": (Router, "in_order", _unordered, "promise 1"),
    "twice": (Router, "in_order", _taken_twice, "promise 2"),
    "delivery": (pending_calls, "supervision_error", _always_not_sent, "promise 2"),
    "recast": (TreeMulticast, "_bypass", _nothing, WAITS),
    "replies of a lost child": (ReplyAggregator, "lost", _nothing, f"that are over|{WAITS}"),
    "no room": (RetryQueue, "run", _nothing, f"{WAITS}|steps, and no end|although all its receivers live"),
    "where": (PeerTable, "on_reply", _nothing, WAITS),
    "met": (PeerTable, "on_request", _nothing, WAITS),
    "gone, one call": (pending_calls.UnaryCall, "on_gone", _nothing, WAITS),
    "gone, many": (pending_calls.BroadcastCall, "on_gone", _nothing, WAITS),
    "gone, a stream": (pending_calls.Stream, "on_gone", _nothing, WAITS),
    "the queue of a restarted actor": (ActorRunner, "take_over", _nothing, WAITS),
    "refusals": (MessageQueue, "_refuse", _nothing, WAITS),
    "not told": (Supervision, "_reached_program", _nothing, "promise 7"),
    "told twice": (Supervision, "failed", _told_twice, "promise 7"),
    "the root cause": (runner, "pack_failure", _without_cause, "promise 7"),
    "an owner's death": (Runtime, "on_process_lost", _nothing, WAITS),
}


@pytest.mark.parametrize("what", BREAKS)
def test_injected_fault_breaks_an_invariant(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken, promise = BREAKS[what]
    monkeypatch.setattr(where, name, broken)
    _, error = _first_failure(range(60), size=24)
    assert any(word in str(error) for word in promise.split("|")), error


def _first_failure(seeds: range, size: int) -> tuple[int, Any]:
    for seed in seeds:
        try:
            random_world.run(seed, size)
        except (AssertionError, SimulationError) as error:
            return seed, error
    raise AssertionError(f"none of {len(seeds)} seeds has noticed it")
