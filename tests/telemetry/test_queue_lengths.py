"""Lengths of the queues of busy actors in the recording: also messages count that arrive behind a running one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend._core import platform
from monarch_backend._telemetry import program_recording
from monarch_backend._telemetry.kinds import Kind
from monarch_backend.actor import Actor, ProcMesh
from tests.actor.actors import running
from tests.actor.support import PATIENCE
from tests.support.waiting import wait_until
from tests.telemetry.held_actors import Async, Plain

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 1}) as made:
        yield made


def _queue(actor: str) -> int | None:
    """Return the shown length of the queue of an actor of this program, None where no message runs."""
    recording = program_recording.read(str(os.getpid()))
    activities = [each for process in recording.processes for each in process.recorded.activities]
    shown = [each.waiting for each in activities if each.kind == Kind.MESSAGE and each.name == actor and each.state]
    return shown[0] if shown else None


def test_queue_behind_a_concurrent_message_gets_shorter(procs: ProcMesh, gates: Path) -> None:
    actor = procs.spawn("concurrent", Async)
    running = actor.wait_for.call_one(str(gates / "go"))
    wait_until(lambda: _queue("concurrent") == 0, PATIENCE)
    for each in [actor.pass_by.call_one() for _ in range(20)]:
        each.get(PATIENCE)
    wait_until(lambda: _queue("concurrent") == 0, PATIENCE)
    (gates / "go").touch()
    running.get(PATIENCE)
    actor.stop().get(PATIENCE)


@pytest.mark.parametrize("cls", [Plain, Async])
def test_messages_behind_a_running_one_are_shown(cls: type[Actor], procs: ProcMesh, gates: Path) -> None:
    actor = procs.spawn(cls.__name__, cls)
    running = actor.hold.call_one(str(gates / "go"))
    wait_until(lambda: _queue(cls.__name__) == 0, PATIENCE)
    queued = []
    for count, shown in ((1, 1), (5, 5), (8, 8), (20, 16)):
        queued += [actor.pass_by.call_one() for _ in range(count - len(queued))]
        wait_until(lambda shown=shown: _queue(cls.__name__) == shown, PATIENCE)  # type: ignore[misc]
    (gates / "go").touch()
    for each in [running, *queued]:
        each.get(PATIENCE)
    wait_until(lambda: _queue(cls.__name__) is None, PATIENCE)
    actor.stop().get(PATIENCE)
