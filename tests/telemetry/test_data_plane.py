"""Collectives, transfers, batches and compilations of a real program, in SQL and in traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._core import platform
from monarch_backend._core.torch_version import torch_version
from monarch_backend._telemetry import program_recording, sql
from monarch_backend._telemetry.program_recording import Recording
from tests.support.running_script import running_script

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")
HAS_CAPTURED_STEPS = torch_version() >= (2, 13)

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
    rows = sql.answer("select process, detail, bytes, status, duration_us > 0 from collectives", recording).rows
    assert sorted(row for row in rows if row[2] == BYTES) == [
        (f"gpus {rank} of trainers", "all_reduce", BYTES, "ok", 1) for rank in range(2)
    ]


def test_transfers_have_rows_with_their_route(recording: Recording) -> None:
    [row] = sql.answer("select process, bytes, status, duration_us > 0, name from transfers", recording).rows
    assert row[:4] == ("gpus 1 of trainers", BYTES, "ok", 1) and row[4]


@pytest.mark.skipif(not HAS_CAPTURED_STEPS, reason="captured steps need torch 2.13")
def test_batches_and_recompilations_have_rows(recording: Recording) -> None:
    batches = sql.answer("select workers, bytes from batches", recording).rows
    assert batches and all(name and size > 0 for name, size in batches)
    [row] = sql.answer("select event, status from recompilations", recording).rows
    assert row == ("compile", "ok")


def test_trace_has_collectives_and_transfers_with_their_bytes(running: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    command = [sys.executable, "-m", "monarch_backend.cli", "trace", str(running.pid), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60, env=dict(os.environ))
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each.get("name") == "process_name"}
    found = [
        (names[each["pid"]], each["cat"]) for each in events
        if each["ph"] == "X" and each.get("args", {}).get("bytes") == BYTES and each["dur"] > 0
    ]  # fmt: skip
    assert sorted((name.partition(" (")[0], kind) for name, kind in found) == [
        ("gpus 0 of trainers", "collective"), ("gpus 1 of trainers", "collective"), ("gpus 1 of trainers", "transfer"),
    ]  # fmt: skip
