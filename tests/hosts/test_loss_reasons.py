"""LossReasons: one thread for all lost hosts of a job, late reasons, errors, and schedulers without an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_backend._actor.processes.exits import SIGKILL_STATUS_TIMEOUT_S, ProcessExits
from monarch_backend._hosts.loss_reasons import LossReason, LossReasons
from tests.support.waiting import wait_until


class Timers:
    """Timers that the test lets expire."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def later(self, _seconds: float, call: Callable[[], None]) -> None:
        self.calls.append(call)


def nothing() -> None:
    """Wait for nothing."""


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "monarch-reason"]


def test_many_lost_hosts_are_asked_for_on_one_thread() -> None:
    asked, is_known = list[Sequence[int]](), threading.Event()

    def ask(hosts: Sequence[int]) -> list[LossReason]:
        asked.append(hosts)
        assert is_known.wait(30)
        return [LossReason(f"node {host} has failed", True) for host in hosts]

    reasons, reported, timers = LossReasons(ask, 30.0, nothing), dict[int, str](), Timers()
    for host in range(100):
        reasons.find(host, lambda text, host=host: reported.update({host: text}), timers.later)  # type: ignore[misc]
    assert len(threads()) == 1
    is_known.set()
    wait_until(lambda: len(reported) == 100)
    assert reported[99] == "node 99 has failed"
    assert len(asked) <= 2
    wait_until(lambda: not threads())
    reasons.find(100, lambda text: reported.update({100: text}), timers.later)  # starts a thread again
    wait_until(lambda: 100 in reported)


def test_reason_that_is_not_final_is_asked_for_again() -> None:
    answers, reported = [LossReason("host 1 runs", False), LossReason("host 1 was preempted", True)], list[str]()
    LossReasons(lambda _: [answers.pop(0)], 30.0, nothing).find(1, reported.append, Timers().later)
    wait_until(lambda: reported)
    assert reported == ["host 1 was preempted"]


def test_reason_that_stays_open_is_reported_in_time() -> None:
    reported = list[str]()
    LossReasons(lambda _: [LossReason("host 1 runs", False)], 0.0, nothing).find(1, reported.append, Timers().later)
    wait_until(lambda: reported)
    assert reported == ["host 1 runs"]


def test_scheduler_that_does_not_answer_does_not_delay_the_report() -> None:
    is_over, reported, timers = threading.Event(), list[str](), Timers()

    def ask(_: Sequence[int]) -> list[LossReason]:
        assert is_over.wait(30)
        return [LossReason("too late", True)]

    LossReasons(ask, 2.0, nothing).find(1, reported.append, timers.later)
    for call in timers.calls:
        call()
    is_over.set()
    wait_until(lambda: not threads())
    assert reported == ["the scheduler was asked why, and did not answer within 3 s"]


@pytest.mark.parametrize("error", [None, ConnectionError("no route")])
def test_last_answer_is_the_reason_if_the_next_one_is_late_or_fails(error: Exception | None) -> None:
    is_asked_again, is_over, reported, timers = threading.Event(), threading.Event(), list[str](), Timers()

    def ask(_: Sequence[int]) -> list[LossReason]:
        if not is_answered:
            is_answered.append(True)
            return [LossReason("host 1 is completing", False)]
        is_asked_again.set()
        if error is not None:
            raise error
        assert is_over.wait(30)
        return [LossReason("too late", True)]

    is_answered = list[bool]()
    LossReasons(ask, 30.0, nothing).find(1, reported.append, timers.later)
    assert is_asked_again.wait(30)
    if error is None:
        for call in timers.calls:
            call()
    is_over.set()
    wait_until(lambda: reported and not threads())
    assert reported == ["host 1 is completing"]


def test_error_of_the_question_is_the_reason() -> None:
    reported = list[str]()

    def ask(_: Sequence[int]) -> list[LossReason]:
        raise ConnectionError("no route")

    LossReasons(ask, 2.0, nothing).find(1, reported.append, Timers().later)
    wait_until(lambda: reported)
    assert reported == ["the reason could not be asked: no route"]


def test_failed_report_is_logged_and_the_others_follow(caplog: pytest.LogCaptureFixture) -> None:
    reported, are_two_lost = list[str](), threading.Event()

    def ask(hosts: Sequence[int]) -> list[LossReason]:
        assert are_two_lost.wait(30)
        return [LossReason(f"node {host} has failed", True) for host in hosts]

    def fail(_: str) -> None:
        raise RuntimeError("no such mesh")

    reasons, timers = LossReasons(ask, 30.0, nothing), Timers()
    reasons.find(1, fail, timers.later)
    reasons.find(2, reported.append, timers.later)
    are_two_lost.set()
    wait_until(lambda: reported)
    assert reported == ["node 2 has failed"]
    assert "the loss of host 1 could not be reported (node 1 has failed)" in caplog.text
    assert "RuntimeError: no such mesh" in caplog.text


def test_missing_answers_are_an_error_of_the_question() -> None:
    reported = list[str]()
    LossReasons(lambda _: [], 2.0, nothing).find(1, reported.append, Timers().later)
    wait_until(lambda: reported)
    assert reported[0].startswith("the reason could not be asked: zip() argument 2 is shorter")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_loss_after_the_end_of_the_thread_is_asked_for() -> None:
    reported = list[str]()

    def end(_: str) -> None:
        raise SystemExit

    reasons, timers = LossReasons(lambda hosts: [LossReason("failed", True)] * len(hosts), 30.0, nothing), Timers()
    reasons.find(1, end, timers.later)
    wait_until(lambda: not threads())
    reasons.find(2, reported.append, timers.later)
    wait_until(lambda: reported)
    assert reported == ["failed"]


def test_process_of_a_lost_host_waits_until_the_reason_is_reported() -> None:
    """Otherwise its end is reported without the reason, which comes at the limit at the latest."""
    reasons = LossReasons[int](lambda hosts: [LossReason("down", True)] * len(hosts), 40.0, nothing)
    host: Any = SimpleNamespace(explain_limit=reasons.limit)
    program: Any = SimpleNamespace(hosts=SimpleNamespace(of=lambda token: host if token == "there" else None))
    unused: Any = None
    exits = ProcessExits(program, unused, unused, unused, unused, unused)
    there: Any = SimpleNamespace(token="there")
    here: Any = SimpleNamespace(token="here")
    assert exits._status_timeout(there) > reasons.limit > 40.0
    assert exits._status_timeout(here) == SIGKILL_STATUS_TIMEOUT_S
