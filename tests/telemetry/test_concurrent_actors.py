"""What is recorded of actors that handle many messages at the same time."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend._core import platform
from monarch_backend._native import recording_layout
from monarch_backend.actor import Actor, ActorError, ProcMesh, concurrent_endpoint
from monarch_backend.telemetry import query
from tests.actor.actors import running
from tests.actor.support import PATIENCE

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")

MANY = recording_layout["cell_count"] + 16
"""More messages than a process can show at the same time."""


class Concurrent(Actor):
    @concurrent_endpoint
    async def wait_for(self, path: str) -> None:
        while not Path(path).exists():
            await asyncio.sleep(0.01)

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


def test_messages_without_a_cell_are_recorded_with_their_ends(procs: ProcMesh, tmp_path: Path) -> None:
    actor = procs.spawn("many", Concurrent)
    waits = [actor.wait_for.call_one(str(tmp_path / "go")) for _ in range(MANY)]
    for _ in range(3):
        with pytest.raises(ActorError):
            actor.fail.call_one().get(PATIENCE)
    assert _messages("many")["fail", "error"] == 3
    (tmp_path / "go").touch()
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
