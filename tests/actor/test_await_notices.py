"""Notices of awaits where the system allows no further thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_backend._actor.calls import await_notices
from monarch_backend._actor.calls.future import Future, LabelledFuture
from monarch_backend._core import env


@pytest.mark.parametrize("ages", [[10.0], [10.0, 0.0]], ids=["due", "due and recent"])
def test_await_is_logged_later_without_a_thread(ages: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Callable[[], None]] = []
    logged: list[Any] = []
    time_s = 100.0

    def start(thread: threading.Thread) -> None:
        if is_full:
            raise RuntimeError("can't start new thread")
        thread.run()

    monkeypatch.setattr(env, "get", lambda _: 5.0)
    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(await_notices, "log_long_wait", lambda what, *_: logged.append(what))
    monkeypatch.setattr(await_notices.time, "monotonic", lambda: time_s)
    progress = SimpleNamespace(later=lambda _, look: looks.append(look))
    runtime: Any = SimpleNamespace(waiting=SimpleNamespace(is_real=True), progress=progress)
    notices = await_notices.AwaitNotices(runtime)
    start_s = time_s
    for age in ages:
        time_s = start_s - age
        notices.begin(Future(lambda *_: False), age)
    time_s = start_s
    is_full = True
    looks.pop()()
    assert logged == [] and len(looks) == 1
    is_full = False
    looks.pop()()
    assert logged == [10.0] and len(notices._begun) == len(ages) - 1


def test_cell_of_an_await_is_freed_by_its_end_or_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Callable[[], None]] = []
    cells = {"shown": 0, "hidden": 0}

    def count(what: str) -> int:
        cells[what] += 1
        return cells[what]

    monkeypatch.setattr(await_notices, "begin_shown_wait", lambda *_: count("shown"))
    monkeypatch.setattr(await_notices, "end_shown_wait", lambda *_, **__: count("hidden"))
    monkeypatch.setattr(env, "get", lambda _: 0.0)
    time_s = 100.0
    monkeypatch.setattr(await_notices.time, "monotonic", lambda: time_s)
    progress = SimpleNamespace(later=lambda _, look: looks.append(look))
    notices = await_notices.AwaitNotices(
        SimpleNamespace(waiting=SimpleNamespace(is_real=True), progress=progress)  # type: ignore[arg-type]
    )
    ended, replied, over = (LabelledFuture[None](lambda *_: False, "a message") for _ in range(3))
    for each in (ended, replied, over):
        notices.begin(each, each)
    notices.end(over)
    time_s += await_notices.MIN_LOOK_S
    looks.pop()()
    assert cells == {"shown": 2, "hidden": 0} and not looks and not notices._begun
    notices.end(ended)
    replied._set(None)  # its event loop was abandoned, and no `end` follows
    assert cells == {"shown": 2, "hidden": 2} and not notices._shown
