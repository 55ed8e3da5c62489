"""Why a message has failed, in SQL, in the dashboard and in reports of failures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_backend._core import platform
from monarch_backend._dashboard import failures
from monarch_backend._native import recording_layout
from monarch_backend._telemetry import last_messages, program_recording
from monarch_backend._telemetry.subject import ThisMachine
from monarch_backend.actor import Actor, ProcMesh, concurrent_endpoint, endpoint
from monarch_backend.telemetry import query
from tests.actor.actors import running
from tests.actor.support import PATIENCE
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Plain(Actor):
    @endpoint
    def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def fail_without_text(self) -> None:
        raise Unprintable

    @endpoint
    def last(self) -> tuple[str, ...]:
        return last_messages.of_actor("Plain")


class Async(Actor):
    @concurrent_endpoint
    async def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    async def fail_without_text(self) -> None:
        raise Unprintable


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 1}) as made:
        yield made


def _rows(sql: str) -> list[tuple[Any, ...]]:
    return query(sql, str(os.getpid())).rows


@pytest.mark.parametrize("cls", [Plain, Async])
def test_failed_messages_have_their_reasons(cls: type[Actor], procs: ProcMesh) -> None:
    name = cls.__name__
    actor = procs.spawn(name, cls)
    calls = [actor.fail.call_one(f"boom\n{number}") for number in range(3)]
    for each in [*calls, actor.fail.call_one("x" * 500), actor.fail_without_text.call_one()]:
        each.exception(PATIENCE)
    sql = f"select endpoint, status, reason from messages where actor = '{name}' order by timestamp_us"
    wait_until(lambda: [row[1] for row in _rows(sql)] == ["failed"] * 5, PATIENCE)
    long = ("ValueError: " + "x" * 500)[: recording_layout["text_bytes"]]
    unknown = "Unprintable (its text is unknown, because __str__ raised RuntimeError)"
    reasons = [reason for _, _, reason in _rows(sql)]
    assert sorted(reasons[:3]) == [f"ValueError: boom {number}" for number in range(3)]
    assert reasons[3:] == [long, unknown]
    pid = os.getpid()
    found = failures.find(program_recording.read(str(pid), failures.WANTED), ThisMachine(str(pid))).failures
    shown = [each.what.partition(" s: ")[2] for each in found if each.what.startswith(f"{name}.fail")]
    assert sorted(shown) == sorted(reasons)
    if cls is Plain:
        lines = [line for line in actor.last.call_one().get(PATIENCE) if line.startswith("Plain.fail: error")]
        assert lines[0].endswith(f" ago: {long}")
        assert lines[1].endswith(" ago: ValueError: boom 2")
    assert _rows(f"select count(reason) from messages where actor = '{name}' and status != 'failed'") == [(0,)]
    actor.stop().get(PATIENCE)
