"""What is recorded of actors that handle many messages at the same time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend._core import platform
from monarch_backend._telemetry import programs
from monarch_backend.actor import ActorError, ProcMesh, concurrent_endpoint
from monarch_backend.cli import ps
from monarch_backend.telemetry import query
from tests.actor.actors import running
from tests.actor.support import PATIENCE
from tests.support.waiting import wait_until
from tests.telemetry.held_actors import MANY, Async

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")


class Concurrent(Async):
    @concurrent_endpoint
    async def fail(self) -> None:
        raise ValueError("boom")


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 1}) as made:
        yield made


def _messages(actor: str) -> Counter[tuple[str, str]]:
    """Return the number of messages by endpoint and status."""
    rows = query("select endpoint, status, actor from messages", str(os.getpid())).rows
    return Counter((endpoint, status) for endpoint, status, name in rows if name == actor)


def _counts(actor: str) -> tuple[int, int, int]:
    """Return how many messages run, have ended and wait, in all cells of an actor."""
    rows = query("select name, state != 'idle', ended, queue from activities", str(os.getpid())).rows
    running, ended, queue = zip(*(row[1:] for row in rows if row[0] == actor), strict=True)
    return sum(running), sum(ended), sum(queue)


def _lines(actor: str) -> list[str]:
    text = ps.as_text(programs.select(str(os.getpid()))[0])
    return [line.strip() for line in text.splitlines() if line.strip().startswith(f"{actor} rank 0: ")]


def test_messages_without_a_cell_are_recorded_with_their_ends(procs: ProcMesh, gates: Path) -> None:
    actor = procs.spawn("many", Concurrent)
    waits = [actor.wait_for.call_one(str(gates / "go")) for _ in range(MANY)]
    for _ in range(3):
        with pytest.raises(ActorError):
            actor.fail.call_one().get(PATIENCE)
    wait_until(lambda: _messages("many")["fail", "failed"] == 3, PATIENCE)
    (gates / "go").touch()
    for each in waits:
        each.get(PATIENCE)
    actor.fail.call_one().exception(PATIENCE)  # the recording of the ends before it is complete
    assert _messages("many")["wait_for", "complete"] == MANY
    [[bytes_of_one, shortest]] = query(
        "select max(bytes), min(duration_us) from messages where actor = 'many' and endpoint = 'wait_for'"
    ).rows
    assert bytes_of_one > 0
    assert shortest > 0
    actor.stop().get(PATIENCE)


def test_done_messages_of_a_concurrent_actor_are_counted_once(procs: ProcMesh, gates: Path) -> None:
    actor = procs.spawn("counted", Concurrent)
    actor.fail.call_one().exception(PATIENCE)
    waits = [actor.wait_for.call_one(str(gates / "go")) for _ in range(MANY)]
    for _ in range(3):
        actor.fail.call_one().exception(PATIENCE)
    wait_until(lambda: _counts("counted")[1:] == (4, 0), PATIENCE)
    first, *others = _lines("counted")
    assert first.endswith(", 4 done")
    assert len(others) > 1
    assert not any("done" in line for line in others)
    (gates / "go").touch()
    for each in waits:
        each.get(PATIENCE)
    wait_until(lambda: _counts("counted") == (0, MANY + 4, 0), PATIENCE)
    [line] = _lines("counted")
    assert line.endswith(f", {MANY + 4} done")
    actor.stop().get(PATIENCE)


def test_queue_behind_several_open_messages_is_shown_once(procs: ProcMesh, gates: Path) -> None:
    actor = procs.spawn("queued", Concurrent)
    waits = [actor.wait_for.call_one(str(gates / "wait")) for _ in range(3)]
    held = [actor.hold.call_one(str(gates / "hold")) for _ in range(6)]
    wait_until(lambda: _counts("queued") == (4, 0, 5), PATIENCE)
    assert _lines("queued")[0].endswith(", 0 done, 5 in the queue")
    (gates / "wait").touch()
    for each in waits:
        each.get(PATIENCE)
    wait_until(lambda: _counts("queued") == (1, 3, 5), PATIENCE)
    [line] = _lines("queued")
    assert line.endswith(", 3 done, 5 in the queue")
    (gates / "hold").touch()
    for each in held:
        each.get(PATIENCE)
    actor.stop().get(PATIENCE)
