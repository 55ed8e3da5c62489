"""Errors of calls that are never read are reported once, with place, line of the call and remote traceback."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._actor.calls.unread_errors import UnreadError
from monarch_backend.actor import Accumulator, Actor, ActorError, Future, endpoint, gather, this_host
from tests.actor.script_runner import python
from tests.actor.support import Faults

LIMIT = 30.0


class Faulty(Actor):
    @endpoint
    def bad(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def bad_generator(self, text: str) -> Iterator[int]:
        yield 1
        raise ValueError(text)

    @endpoint
    def slow(self) -> None:
        time.sleep(1.0)

    @endpoint
    def die(self) -> None:
        os._exit(3)


@pytest.fixture(scope="module")
def actors() -> Iterator[Any]:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        actors = procs.spawn("faulty", Faulty)
        actors.initialized.get(LIMIT)
        yield actors


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Return ``reports(text, count=1)``, which waits for reports with this text and returns all reports."""

    def wait(text: str, count: int = 1) -> list[str]:
        deadline = time.monotonic() + LIMIT
        while True:
            gc.collect()
            found = [message for message in caplog.messages if "never read" in message]
            if sum(text in message for message in found) >= count:
                return found
            assert time.monotonic() < deadline, f"no report with {text!r} in {caplog.messages}"
            time.sleep(0.01)

    return wait


def _leave(stream: Any) -> None:
    for _ in stream:
        break


VERBS: dict[str, Callable[[Any, str], object]] = {
    "call": lambda actors, text: actors.bad.call(text),
    "call_one": lambda actors, text: actors.slice(gpus=1).bad.call_one(text),
    "choose": lambda actors, text: actors.bad.choose(text),
    "stream": lambda actors, text: actors.bad.stream(text),
    "stream whose futures are not read": lambda actors, text: list(actors.bad.stream(text)),
    "call of generators": lambda actors, text: actors.bad_generator.call(text),
    "accumulate": lambda actors, text: Accumulator(actors.bad, 0, int.__add__).accumulate(text),
    "polled": lambda actors, text: _poll(actors.bad.call(text)),
}


def _poll(future: Future[Any]) -> None:
    while not future.done():
        time.sleep(0.001)


@pytest.mark.parametrize("verb", VERBS)
def test_unread_error_is_reported_with_place_caller_and_traceback(
    verb: str, actors: Any, reports: Callable[..., list[str]]
) -> None:
    VERBS[verb](actors, f"my bug of {verb}")
    count = 2 if "stream" in verb else 1
    [report, *others] = reports("my bug", count)
    assert len(others) == count - 1, others
    assert f"ValueError: my bug of {verb}" in report
    assert "raise ValueError(text)" in report
    assert "raised on gpus " in report
    assert "(host " in report
    assert ", pid " in report
    assert __file__ in report.partition("The call was made here:")[2]
    assert "lambda actors, text:" in report.partition("The call was made here:")[2]


def test_unread_error_of_a_dropped_generator_stream_is_reported(actors: Any, reports: Callable[..., list[str]]) -> None:
    stream = actors.slice(gpus=0).bad_generator.stream("late bug")
    assert next(stream).get() == 1
    while not stream._queue:
        time.sleep(0.001)
    del stream
    assert len(reports("late bug")) == 1


def test_errors_that_were_read_or_ignored_are_not_reported(actors: Any, reports: Callable[..., list[str]]) -> None:
    def make() -> Any:
        return actors.bad.call("handled")

    for read in (Future.get, Future.result):
        with pytest.raises(ActorError):
            read(make())
    assert make().exception() is not None
    assert make().ignore().exception() is not None
    make().ignore()
    failed = make()
    _poll(failed)
    assert failed.ignore() is failed
    make().add_done_callback(Future.exception)
    make().cancel()
    with pytest.raises(ActorError):
        gather([make(), make(), make()])

    async def wait() -> None:
        for awaited in (make(), make().as_asyncio()):
            with pytest.raises(ActorError):
                await awaited
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(actors.slow.call(), 0.01)

    asyncio.run(wait())
    actors.bad_generator.call("handled").ignore()
    Accumulator(actors.bad, 0, int.__add__).accumulate("handled").ignore()
    for future in actors.bad.stream("handled"):
        assert future.exception() is not None
    with actors.bad.stream("handled") as stream:
        while len(stream._queue) < 2:
            time.sleep(0.001)
    actors.bad.call("of the last call")
    assert len(reports("of the last call")) == 1


def test_unread_timeout_is_reported(actors: Any, reports: Callable[..., list[str]]) -> None:
    actors.slow.options(timeout=0.05).call()
    [report] = reports("took longer than 0.05 s")
    assert "actors.slow.options(timeout=0.05).call()" in report


def test_failure_of_a_mesh_is_not_reported_again(reports: Callable[..., list[str]], faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 1}) as procs:
        actors = procs.spawn("faulty", Faulty)
        actors.die.call()
        faults.next()
        actors.bad.call("not sent")
        Future._fail(Future(lambda *_: True), ValueError("of the last one"))
        assert len(reports("of the last one")) == 1


def test_equal_reports_are_limited(reports: Callable[..., list[str]]) -> None:
    site = sys._getframe().f_code, 0
    for _ in range(100):
        UnreadError(lambda: "the same", site)
    assert len(reports("100 times by now")) == 3 + 2


def test_forked_process_does_not_report(capfd: pytest.CaptureFixture[str]) -> None:
    unread = UnreadError(lambda: "of the parent", None)
    pid = os.fork()
    if pid == 0:
        unread.report()
        os._exit(0)
    os.waitpid(pid, 0)
    unread.forget()
    assert "of the parent" not in capfd.readouterr().err


def test_error_unread_at_exit_is_reported_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import time
        from monarch_backend.actor import Actor, endpoint, this_host

        class C(Actor):
            @endpoint
            def bad(self):
                raise ValueError("my bug")

            @endpoint
            def call_other(self, other):
                self.kept = other.bad.call()
                while not self.kept.done():
                    time.sleep(0.001)

        actors = this_host().spawn_procs({"gpus": 2}).spawn("c", C)
        kept = actors.bad.call()
        actors.slice(gpus=0).call_other.call_one(actors.slice(gpus=1)).get()
        while not kept.done():
            time.sleep(0.001)
        """)
    )
    run = python(str(script))
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("never read") == 2, run.stderr
    assert "kept = actors.bad.call()" in run.stderr
    assert "self.kept = other.bad.call()" in run.stderr
