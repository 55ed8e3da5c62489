"""Lines of actors' code that a waiting caller is told, in processes with several actors."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._core import platform
from monarch_backend._telemetry import program_recording, whereabouts
from monarch_backend._telemetry.kinds import Kind
from monarch_backend.actor import Actor, ProcMesh, endpoint
from tests.actor.actors import running
from tests.actor.support import PATIENCE
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="places of other processes need memfd_create")


def decorated(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any) -> Any:
        return method(*args)

    return wrapper


def decorated_slowly(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def slow_wrapper(self: Any, path: str) -> Any:
        while not Path(path).exists():
            time.sleep(0.005)
        return method(self, path)

    return slow_wrapper


class Other(Actor):
    @endpoint
    def answer(self) -> int:
        return 1

    @endpoint
    def work(self, path: str) -> None:
        while not Path(path).exists():
            time.sleep(0.005)


class Constructed(Actor):
    def __init__(self, path: str) -> None:
        while not Path(path).exists():
            time.sleep(0.005)

    @endpoint
    def answer(self) -> int:
        return 1


class Decorated(Actor):
    @endpoint
    @decorated
    def step(self, path: str) -> None:
        while not Path(path).exists():
            time.sleep(0.005)

    @endpoint
    @decorated_slowly
    def slow_step(self, path: str) -> None:
        pass


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 1}) as made:
        yield made


def _place(actor: str) -> str:
    """Return where an actor of this program runs, "" while it does not run."""
    for process in program_recording.read(str(os.getpid()), None).processes:
        for each in process.recorded.activities:
            if each.kind == Kind.MESSAGE and each.name == actor and each.state:
                call = whereabouts.Call(actor, each.rank, each.trace, each.reference)
                return whereabouts.describe(process.recorded, call, 5.0)
    return ""


def test_line_of_a_constructor_beside_another_actor(procs: ProcMesh, gates: Path) -> None:
    other = procs.spawn("idle", Other)
    other.answer.call_one().get(PATIENCE)
    actor = procs.spawn("constructed", Constructed, str(gates / "go"))
    answer = actor.answer.call_one()
    place = wait_until(lambda: _place("constructed"), PATIENCE)
    assert re.search(r"at \S*test_places\.py:\d+ in __init__ ", place)
    (gates / "go").touch()
    answer.get(PATIENCE)
    for each in (actor, other):
        each.stop().get(PATIENCE)


@pytest.mark.parametrize(("name", "line"), [("step", "in step"), ("slow_step", "in slow_wrapper")])
@pytest.mark.parametrize("other_is_busy", [False, True])
def test_line_of_a_decorated_endpoint_beside_another_actor(
    other_is_busy: bool, name: str, line: str, procs: ProcMesh, gates: Path
) -> None:
    path = str(gates / "go")
    other, actor = procs.spawn("other", Other), procs.spawn("decorated", Decorated)
    calls = [
        getattr(actor, name).call_one(path),
        other.work.call_one(path) if other_is_busy else other.answer.call_one(),
    ]
    if other_is_busy:
        assert re.search(r"at \S*test_places\.py:\d+ in work ", wait_until(lambda: _place("other"), PATIENCE))
    else:
        calls.pop().get(PATIENCE)
    assert re.search(rf"at \S*test_places\.py:\d+ {line} ", wait_until(lambda: _place("decorated"), PATIENCE))
    (gates / "go").touch()
    for each in calls:
        each.get(PATIENCE)
    for mesh in (actor, other):
        mesh.stop().get(PATIENCE)
