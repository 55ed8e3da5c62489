"""Collectives, transfers, batches and compilations of a real program, in SQL and in traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monarch_backend._core import platform
from monarch_backend._core.torch_version import torch_version
from monarch_backend._telemetry import payloads, program_recording, sql, trace_export
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.program_recording import Recording
from monarch_backend._telemetry.reader import RecordedEvent
from tests.support.hosts import hosts, refusal, run_on_hosts
from tests.support.ranks import run_ranks
from tests.support.running_script import running_script
from tests.telemetry.recordings import recording_of

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")
HAS_CAPTURED_STEPS = torch_version() >= (2, 13)

APART_S = 0.001  # operations that follow each other faster may have no event
DTYPES = payloads.DTYPES[1:-1]
GLOOS_DTYPES = "float64", "float32", "bfloat16", "float16", "int8", "uint8", "int32", "int64", "bool"
GIVEN_AS = {"complex64": "float32", "complex128": "float64"}  # torch gives pairs to a group
BYTES = 1 << 20
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from monarch_backend.actor import Actor, endpoint, this_host
from monarch_backend.rdma import RDMABuffer


class Worker(Actor):
    @endpoint
    def reduce(self):
        dist.all_reduce(torch.ones(1 << 18))

    @endpoint
    def offer(self):
        self.weights = torch.ones(1 << 18)
        return RDMABuffer(self.weights)

    @endpoint
    def fetch(self, buffer):
        mine = torch.zeros(1 << 18)
        buffer.read_into(mine, timeout=30).get()
        assert mine.sum().item() == 1 << 18

    @endpoint
    def store(self, buffer):
        buffer.write_from(torch.zeros(1 << 18), timeout=30).get()


def control(procs):
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.ones(4, 3), procs.device_mesh("cpu"), [Shard(0)])

    @torch.compile(backend="monarch", options={"inductor": False}, dynamic=False)
    def step(x):
        return x * 2 + 1

    assert step(x).sum().item() == 36


def main():
    procs = this_host().spawn_procs({"gpus": 2}, name="trainers")
    procs.process_group().get()
    workers = procs.spawn("worker", Worker)
    workers.reduce.call().get()
    buffer = workers.slice(gpus=0).offer.call_one().get()
    workers.slice(gpus=1).fetch.call_one(buffer).get()
    workers.slice(gpus=1).store.call_one(buffer).get()
    if HAS_CAPTURED_STEPS:
        control(procs)
    print("ready", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    path = tmp_path_factory.mktemp("program") / "data_plane_program.py"
    with running_script(path, f"HAS_CAPTURED_STEPS = {HAS_CAPTURED_STEPS}\n{SCRIPT}") as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process


@pytest.fixture(scope="module")
def recording(running: subprocess.Popen[str]) -> Recording:
    return program_recording.read(str(running.pid))


def test_collectives_have_rows(recording: Recording) -> None:
    query = "select process, detail, bytes, status, duration_us > 0, dtype, route from collectives"
    rows = sql.answer(query, recording).rows
    assert sorted(row for row in rows if row[2] == BYTES) == [
        (f"gpus {rank} of trainers", "all_reduce", BYTES, "ok", 1, "float32", "shm") for rank in range(2)
    ]


def _operations(dtypes: tuple[str, ...]) -> set[tuple[str, str | None, str]]:
    """Run collectives and messages of all ranks with these dtypes. Return the recorded ones of this process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in dtypes:
        x = torch.ones(2 * size).to(getattr(torch, dtype))
        for operation in (
            lambda x=x: dist.all_reduce(x),
            lambda x=x: dist.reduce_scatter(x[:2].clone(), list(x.chunk(size))),
            lambda x=x: dist.broadcast(x, 0),
            lambda x=x: dist.all_gather([x.clone() for _ in range(size)], x, async_op=True).wait(),
            dist.barrier,
        ):
            time.sleep(APART_S)
            operation()
    time.sleep(APART_S)
    peer = {0: 1, 1: 0}.get(rank)
    if peer is not None:
        dist.send(torch.ones(2, dtype=torch.int64), peer) if rank == 0 else dist.recv(torch.ones(2).long(), peer)
    own = program_recording.read_pids([os.getpid()])
    rows = sql.answer("select distinct detail, dtype, route from collectives where status = 'ok'", own).rows
    return {(operation, dtype, route) for operation, dtype, route in rows}


def _expected(dtypes: tuple[str, ...], route: str) -> set[tuple[str, str | None, str]]:
    operations = "all_reduce", "reduce_scatter", "broadcast", "all_gather"
    moved = {(operation, GIVEN_AS.get(dtype, dtype), route) for operation in operations for dtype in dtypes}
    return moved | {("barrier", None, route)}


def _on_shared_memory(rank: int) -> None:
    message = "send" if rank == 0 else "recv", "int64", "shm"
    assert _operations(DTYPES) == _expected(DTYPES, "shm") | {message}


def test_collectives_have_their_dtype_and_route_in_shared_memory() -> None:
    run_ranks(_on_shared_memory, 2)


def _on_gloo(_rank: int) -> None:
    assert _operations(GLOOS_DTYPES) == _expected(GLOOS_DTYPES, "gloo")


def test_collectives_have_their_dtype_and_route_over_gloo_alone() -> None:
    run_ranks(_on_gloo, 2, env={"MONARCH_SHM": "0"})


def _on_hosts(_rank: int) -> None:
    assert _operations(GLOOS_DTYPES) == _expected(GLOOS_DTYPES, "shm+gloo")


@pytest.mark.slow
def test_collectives_have_their_dtype_and_route_over_hosts() -> None:
    if why := refusal():
        pytest.skip(why)
    with hosts(2) as made:
        run_on_hosts(made, (0, 0, 1), _on_hosts, env={"MONARCH_SHM": "1"})


def _under_way(rank: int) -> None:
    x = torch.ones(2, dtype=torch.int32)
    work = None if rank else dist.all_reduce(x, async_op=True)
    if work is not None:
        own = program_recording.read_pids([os.getpid()])
        query = "select detail, dtype, route from collectives where status = 'open'"
        assert sql.answer(query, own).rows == [("all_reduce", "int32", "shm")]
        assert sql.answer("select sum(queue) from activities", own).rows == [(0,)]
        slices = [each for each in trace_export.as_trace(own)["traceEvents"] if each["ph"] == "X"]
        [args] = [each["args"] for each in slices if each["args"]["status"] == "open"]
        assert (args["dtype"], args["route"]) == ("int32", "shm")
        dist.send(torch.ones(1), 1)  # the other rank may go on
        work.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(x)


def test_collective_under_way_has_its_dtype_and_route() -> None:
    run_ranks(_under_way, 2)


def _mismatched(rank: int) -> None:
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(2, dtype=torch.int32 if rank else torch.float32))
    own = program_recording.read_pids([os.getpid()])
    rows = sql.answer("select dtype, route from collectives where status = 'error'", own).rows
    assert rows == [("int32" if rank else "float32", "shm")]


def test_failed_collective_has_the_dtype_of_its_rank() -> None:
    run_ranks(_mismatched, 2)


def test_transfers_have_rows_with_their_route_and_both_ends(recording: Recording) -> None:
    query = (
        "select transfers.process, bytes, transfers.status, duration_us > 0, transfers.name, source, target, "
        "a.label, b.label from transfers join processes a on a.pid = from_pid join processes b on b.pid = to_pid "
        "order by transfers.timestamp_us"
    )
    own, other = "gpus 1 of trainers", "gpus 0 of trainers"
    assert sql.answer(query, recording).rows == [
        (own, BYTES, "ok", 1, "same host", source, target, source, target)
        for source, target in ((other, own), (own, other))
    ]


def _transfer(detail: str, route: str) -> RecordedEvent:
    return RecordedEvent(1, 5, 1, Kind.TRANSFER, 0, 0, route, detail, 0, BYTES, 0)


@pytest.mark.parametrize(
    ("detail", "route", "ends"),
    [
        ("read from pid 7 on b", "tcp", ("process 7", "process 1", 7, 1)),
        ("write to pid 7 on b", "tcp", ("process 1", "process 7", 1, 7)),
        ("write to pid 8 on b and 2 more", "tcp", ("process 1", "pid 8 on b and 2 more", 1, 8)),
        ("read from pid 7 on elsewhere", "tcp", ("pid 7 on elsewhere", "process 1", 7, 1)),
        ("read from pid 2 on a name that readers lack", "same host", ("process 2", "process 1", 2, 1)),
        ("", "", (None, None, None, None)),  # later texts have overwritten it
    ],
)
def test_ends_of_a_transfer_are_labels_where_the_process_is_recorded(detail: str, route: str, ends: object) -> None:
    made = recording_of({"": [1, 2], "b": [7]}, [])
    made.processes[0].recorded.events = [_transfer(detail, route)]
    made.processes[0] = replace(made.processes[0])  # it keeps its events by kind
    [row] = sql.answer("select source, target, from_pid, to_pid from transfers", made).rows
    assert row == ends


@pytest.mark.skipif(not HAS_CAPTURED_STEPS, reason="captured steps need torch 2.13")
def test_batches_and_recompilations_have_rows(recording: Recording) -> None:
    batches = sql.answer("select workers, bytes from batches", recording).rows
    assert batches and all(name and size > 0 for name, size in batches)
    [row] = sql.answer("select event, status from recompilations", recording).rows
    assert row == ("compile", "ok")


def test_trace_has_collectives_and_transfers_with_their_data(running: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    command = [sys.executable, "-m", "monarch_backend.cli", "trace", str(running.pid), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60, env=dict(os.environ))
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each.get("name") == "process_name"}
    found = [
        (names[each["pid"]].partition(" (")[0], each["cat"], each["args"]) for each in events
        if each["ph"] == "X" and each.get("args", {}).get("bytes") == BYTES and each["dur"] > 0
    ]  # fmt: skip
    ends = sorted((name, args["source"], args["target"]) for name, kind, args in found if kind == "transfer")
    zero, one = "gpus 0 of trainers", "gpus 1 of trainers"
    assert ends == [(one, zero, one), (one, one, zero)]
    collectives = sorted((name, args["dtype"], args["route"]) for name, kind, args in found if kind == "collective")
    assert collectives == [(zero, "float32", "shm"), (one, "float32", "shm")]
