"""Transfers are recorded with their route, size, other process and outcome, on every route."""

from __future__ import annotations

import pytest

from monarch_backend._core import platform
from monarch_backend.actor import ActorError, ActorMesh
from monarch_backend.rdma import RDMABuffer
from monarch_backend.telemetry import query
from tests.rdma.actors import case

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")

LARGE, SMALL = 1 << 20, 1 << 10
Pair = tuple[ActorMesh, ActorMesh]


def _transfers(reader: ActorMesh) -> list[tuple[str, str, int, str]]:
    pid = reader.pid.call_one().get()
    rows = query(f"select name, status, bytes, detail from transfers where pid = {pid} order by id").rows
    return [(str(name), str(status), int(nbytes), str(detail)) for name, status, nbytes, detail in rows]


def _read(reader: ActorMesh, buffer: RDMABuffer, timeout: float | None) -> None:
    assert reader.read.call_one(buffer, timeout=timeout).get()


@pytest.mark.parametrize("timeout", [30, None])
def test_large_transfer_is_recorded(pair: Pair, request: pytest.FixtureRequest, timeout: float | None) -> None:
    owner, reader = pair
    buffer, pid = owner.own.call_one("tensor", LARGE).get(), owner.pid.call_one().get()
    before = len(_transfers(reader))
    for _ in range(2):
        _read(reader, buffer, timeout)
    first, second = _transfers(reader)[before:]
    assert first == second
    route, status, nbytes, detail = first
    assert (route, status, nbytes) == (case(request.node.callspec.params["pair"]).name, "ok", LARGE)
    assert detail.startswith(f"read from pid {pid} on ")


def test_transfer_has_its_source_and_target(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own.call_one("tensor", LARGE).get()
    _read(reader, buffer, 30)
    reader.write.call_one(buffer, timeout=30).get()
    pids = owner.pid.call_one().get(), reader.pid.call_one().get()
    columns = "from_pid, to_pid, source, target"
    read, write = query(f"select {columns} from transfers where pid = {pids[1]} order by id desc limit 2").rows[::-1]
    labels = dict(query("select pid, label from processes").rows)
    assert (read, write) == (
        (pids[0], pids[1], labels[pids[0]], labels[pids[1]]),
        (pids[1], pids[0], labels[pids[1]], labels[pids[0]]),
    )


def test_small_transfer_is_not_recorded(pair: Pair) -> None:
    owner, reader = pair
    before = len(_transfers(reader))
    _read(reader, owner.own.call_one("tensor", SMALL).get(), 30)
    assert len(_transfers(reader)) == before


def test_failed_transfer_is_recorded_as_an_error(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own.call_one("tensor", LARGE).get()
    owner.drop.call_one(buffer).get()
    before = len(_transfers(reader))
    with pytest.raises(ActorError, match="not registered any more"):
        _read(reader, buffer, 30)
    assert [row[1] for row in _transfers(reader)[before:]] == ["error"]
