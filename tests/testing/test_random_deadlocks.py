"""No alarm is false in random worlds of actors that wait for each other, and weaker proofs of a cycle are noticed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_backend._actor import deadlocks
from monarch_backend._actor.deadlocks import DeadlockDetector, _CreditWait
from monarch_backend._actor.execution import runner as actor_runner
from monarch_backend._actor.execution.message_queue import MessageQueue
from monarch_backend._actor.execution.runner import StreamCredit
from monarch_backend._transport.local.frames import Deadlock, DeadlockMember, DeadlockStep
from tests.testing import random_deadlock_world
from tests.testing.seed_runner import run_in_interpreters

SEEDS = 100
MANY_SEEDS, BIG_CHUNK = int(os.environ.get("MONARCH_TEST_SEEDS", "500")), 250
SIZES = ("probes:any", "probes:12", "probes:4", "probes:2")


def test_no_alarm_is_false_in_random_worlds() -> None:
    run_in_interpreters(range(SEEDS), *SIZES)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + MANY_SEEDS, BIG_CHUNK))
def test_no_alarm_is_false_for_many_seeds(first: int) -> None:
    run_in_interpreters(range(first, first + BIG_CHUNK), *SIZES)


def test_worlds_have_cycles_of_each_kind() -> None:
    counts: Counter[str] = Counter()
    for seed in range(100):
        counts += random_deadlock_world.run(seed).counts
    assert all(counts[f"with {kind}"] > 2 for kind in ("credit", "a generator", "a port")), counts


def _one_credit_more(runner: Any, peer: Any, calls: Any) -> int:
    held = _HELD(runner, peer, calls)
    return held + (held > 0)


def _any_credit(runner: Any, peer: Any, calls: Any) -> int:
    return 1_000_000 * _HELD(runner, peer, calls)


def _all_calls(*_: Any) -> None:
    return None


def _always(_method: Any) -> bool:
    return True


_HELD = deadlocks._held

BREAKS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "one credit on its way": (deadlocks, "_held", _one_credit_more),
    "credit on its way": (deadlocks, "_held", _any_credit),
    "calls that are cancelled": (DeadlockDetector, "_waited_calls", _all_calls),
    "ports that other code has": (actor_runner, "only_sends", _always),
}


@pytest.mark.parametrize("what", BREAKS)
def test_weaker_proof_raises_a_false_alarm(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = BREAKS[what]
    monkeypatch.setattr(where, name, broken)
    assert any(_has_failed(seed) for seed in range(400))


def _has_failed(seed: int) -> bool:
    try:
        random_deadlock_world.run(seed)
    except AssertionError as error:
        return str(error).startswith(("false alarm", "not raised"))
    return False


# ---- one process at a time


class _Peer:
    token = "1" * 32


def _detector(sent: int | None) -> tuple[DeadlockDetector, Any, _Peer]:
    """Return a detector of a process whose actor 7 handles call 3 of the peer, and waits.

    ``sent``: values that it has sent, for a generator.
    """
    peer = _Peer()
    flow = StreamCredit()
    flow.sent = sent or 0
    code = SimpleNamespace(is_ending=lambda: False)
    runner = SimpleNamespace(
        actor=7, failure=None, code=code, running_message=lambda: ((peer, 3), None), inbox=MessageQueue(None),  # type: ignore[arg-type]
        streams={} if sent is None else {(peer.token, 3): flow},
    )  # fmt: skip
    wait = SimpleNamespace(runner=runner, is_over=False, keeps_reply=True)
    runtime: Any = SimpleNamespace(progress=None, runners={7: runner})
    detector = DeadlockDetector(runtime)
    detector._waits[7] = wait  # type: ignore[assignment]
    return detector, wait, peer


@pytest.mark.parametrize(
    ("sent", "received", "is_certain"), [(None, 0, True), (0, 0, True), (2, 2, True), (2, 1, False), (None, 2, False)]
)
def test_generator_counts_if_all_of_its_values_have_arrived(sent: int | None, received: int, is_certain: bool) -> None:
    detector, wait, peer = _detector(sent)
    member = DeadlockMember(peer.token, 1, 3, "a", 0, "read", "b.values", "host", 1)
    probe = Deadlock(DeadlockStep.PROBE, 1, 7, 3, [member], received)
    assert detector._blocked(peer, probe) is (wait if is_certain else None)  # type: ignore[arg-type]


def _credit_wait(runners: dict[int, Any], pending: dict[int, Any], root: Any) -> _CreditWait:
    runtime = SimpleNamespace(ids=iter(range(100)), root=root, runners=runners, pending=pending)
    runner: Any = SimpleNamespace(program=runtime, actor=7, failure=None, keeps_reply=lambda: True)
    runners[7] = runner
    return _CreditWait(runner, SimpleNamespace(receiver=_Peer(), ready=False))


def test_calls_count_only_where_no_other_code_can_cancel_them() -> None:
    root, alive, dead = object(), SimpleNamespace(failure=None), SimpleNamespace(failure="ended")
    assert _credit_wait({}, {}, root).counts_calls()
    assert _credit_wait({8: dead}, {}, root).counts_calls()
    assert not _credit_wait({}, {}, None).counts_calls()  # the main program
    assert not _credit_wait({8: alive}, {}, root).counts_calls()
    assert not _credit_wait({}, {1: object()}, root).counts_calls()  # a stream


def test_claimed_wait_for_credit_ignores_the_credit() -> None:
    ended = _credit_wait({}, {}, object())
    ended.end()
    assert not ended.claim()
    ready = _credit_wait({}, {}, object())
    ready.what.ready = True
    assert not ready.claim()
    wait = _credit_wait({}, {}, object())
    assert wait.claim()
    error = deadlocks.DeadlockError("a cycle")
    progress: Any = SimpleNamespace(wait=lambda what, _seconds, _given_up: what.fail(error))
    wait.runner.program.progress = progress
    wait.what.wait_lock = None
    wait.end()
    with pytest.raises(deadlocks.DeadlockError, match="a cycle"):
        wait.settle(None)


def _cycle(*tokens: str) -> list[DeadlockMember]:
    return [DeadlockMember(token * 32, 7, 3, token, 0, "ask", "next.ask", "host", 1) for token in tokens]


class _LivingPeer(str):
    """A process, by the first character of its token. ``gone``: it has not ended."""

    gone = None


def _claiming(sent: list[tuple[str, Deadlock]]) -> tuple[DeadlockDetector, Any]:
    """Return the detector of process "0", whose actor 7 waits for call 3. ``sent`` gets its messages and receivers."""
    detector, wait, peer = _detector(None)
    wait.ref, wait.claim, wait.fail = 3, lambda: True, lambda error: sent.append(("raised", error))
    runtime: Any = detector._runtime
    runtime.progress = SimpleNamespace(later=lambda *_: None, wake=lambda: None)
    runtime.router = SimpleNamespace(
        peer=lambda token: _LivingPeer(token[0]), tell=lambda to, message: sent.append((to, message))
    )
    runtime.runners.clear()
    return detector, peer


def test_member_of_two_cycles_passes_on_the_messages_of_both() -> None:
    sent: list[Any] = []
    detector, peer = _claiming(sent)
    for cycle in (_cycle("0", "1"), _cycle("0", "2")):
        detector._claim(peer, Deadlock(DeadlockStep.CLAIM, 0, 0, 0, cycle))
    assert [to for to, _ in sent] == ["1", "2"]
    sent.clear()
    for cycle in (_cycle("0", "1"), _cycle("0", "2")):
        detector._raise(Deadlock(DeadlockStep.RAISE, 0, 0, 0, cycle))
    assert [to for to, _ in sent] == ["1", "raised", "2"]


def test_members_raise_at_once_if_the_wait_of_another_has_ended() -> None:
    sent: list[Any] = []
    detector, peer = _claiming(sent)
    detector._waits.clear()
    detector._claim(peer, Deadlock(DeadlockStep.CLAIM, 1, 0, 0, _cycle("1", "0", "2")))
    [(to, message)] = sent
    assert (to, message.step, message.number, message.ref) == ("2", DeadlockStep.RAISE, 2, 1)
    sent.clear()
    detector._raise(message)  # as in process "2"
    assert [to for to, _ in sent] == ["1"]
    last = sent.pop()[1]
    detector._raise(last)  # as in process "1", whose next member is where it began
    assert not sent
