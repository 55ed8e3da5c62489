"""Dumps in the format of torch's flight recorder, analysed by torch itself."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monarch_backend._core import platform
from monarch_backend._telemetry import payloads, program_recording
from monarch_backend._telemetry.export import flight_recorder
from monarch_backend._telemetry.programs import select
from monarch_backend.cli import main
from monarch_backend.process_group._shm import shm_backend
from tests.support.hosts import hosts, refusal, run_on_hosts
from tests.support.waiting import wait_until

fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")

START = """
import sys, time
import torch, torch.distributed as dist

rank, size = int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("monarch", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=size)
x = torch.ones(4)
for number in range(20):  # some without events
    dist.all_reduce(x)
"""
END = """
print("ready", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def _ranks(folder: Path, body: str, size: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a script on each rank until it has printed a line. Yield the processes."""
    path = folder / f"ranks_{folder.name}.py"
    path.write_text(START + body + END)
    with contextlib.ExitStack() as stack:
        ranks: list[subprocess.Popen[str]] = []
        for rank in range(size):
            command = [sys.executable, str(path), str(folder / "store"), str(rank), str(size)]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ranks.append(stack.enter_context(child))
            stack.callback(child.kill)
        for child in ranks:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        yield ranks


def _dump(name: str, folder: Path, *options: str) -> dict[int, dict[str, Any]]:
    assert main(["flight-recorder", name, "-o", str(folder), *options]) == 0
    return {int(path.name.removeprefix("rank_")): pickle.loads(path.read_bytes()) for path in folder.iterdir()}


def _analyse(folder: Path) -> tuple[str, Any]:
    """Return what torch's analyser prints, and the tables that it makes."""
    tables = folder.with_name("tables")
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-o", str(tables)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr, pickle.loads(tables.read_bytes())[1]


def test_missing_rank_is_named_by_torch(tmp_path: Path) -> None:
    body = "work = dist.broadcast(x, 0, async_op=True) if rank != 1 else None\n"
    with _ranks(tmp_path, body, size=3):
        dumps = _dump(f"ranks_{tmp_path.name}.py", tmp_path / "dumps")
    said, tables = _analyse(tmp_path / "dumps")
    assert "Not all ranks joining collective, sequence number: 21" in said
    assert "collective: gloo:broadcast" in said and "missing ranks: {1}" in said
    assert [each.size for each in tables.groups] == [3]
    assert {each.pass_check for each in tables.collectives if each.collective_seq_id != 21} == {True}
    states = [[entry["state"] for entry in dumps[rank]["entries"]] for rank in range(3)]
    assert states[0][-1] == states[2][-1] == "started" and set(states[1]) == {"completed"}
    assert dumps[0]["pg_status"]["0"] == {
        "last_enqueued_collective": 21, "last_started_collective": 21, "last_completed_collective": 20,
    }  # fmt: skip
    assert [len(states[0]), len(states[1])] == [len(states[2]), len(states[2]) - 1]  # also those without events


def test_mismatched_collective_is_named_by_torch(tmp_path: Path) -> None:
    body = """
try:
    dist.all_reduce(x) if rank == 0 else dist.broadcast(x, 0)
except RuntimeError:
    pass
"""
    with _ranks(tmp_path, body):
        _dump(f"ranks_{tmp_path.name}.py", tmp_path / "dumps")
    said, _ = _analyse(tmp_path / "dumps")
    assert "Collective sequence number: 21 has errors" in said
    assert "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH" in said
    assert "Expected collective type: 'all_reduce' does not match found collective type: 'broadcast'" in said


def test_mismatched_dtype_is_named_by_torch(tmp_path: Path) -> None:
    body = """
try:
    dist.all_reduce(x if rank == 0 else x.int())
except RuntimeError:
    pass
"""
    with _ranks(tmp_path, body):
        dumps = _dump(f"ranks_{tmp_path.name}.py", tmp_path / "dumps")
    said, _ = _analyse(tmp_path / "dumps")
    assert "Culprit rank 1; Error type: COLLECTIVE_DTYPE_MISMATCH" in said
    assert "Expected dtypes: '{'Float'}' does not match found dtype: '{'Float'}/{'Int'}/{'Int'}'" in said
    assert [dumps[rank]["entries"][-1]["input_sizes"] for rank in range(2)] == [[[4]], [[4]]]


def test_rank_that_has_not_enqueued_a_collective_is_named_by_torch(tmp_path: Path) -> None:
    body = """
from monarch_backend.process_group._route_recording import RouteRecording
nccl = RouteRecording("group 0 on cuda", rank, 7, "nccl")
for _ in range(4 if rank == 1 else 5):
    with nccl.enter("all_reduce", [x]):
        pass
"""
    with _ranks(tmp_path, body, size=3):
        dumps = _dump(f"ranks_{tmp_path.name}.py", tmp_path / "dumps")
    said, _ = _analyse(tmp_path / "dumps")
    assert "Not all ranks joining collective, sequence number: 5" in said and "missing ranks: {1}" in said
    assert "group info: 0 on cuda" in said and "collective state: scheduled" in said
    states = [entry["state"] for entry in dumps[0]["entries"] if entry["process_group"][0] == "0 on cuda"]
    assert states == ["scheduled"] * 5


@pytest.mark.parametrize("name", flight_recorder._DTYPES)
def test_dtype_has_the_name_and_size_that_torch_has(name: str) -> None:
    tensor = torch.empty(1, dtype=getattr(torch, name))
    in_torch = tensor.type().removeprefix("torch.").removesuffix("Tensor")
    assert flight_recorder._DTYPES[name] == (in_torch, tensor.element_size())


def test_each_recorded_dtype_has_a_name_in_torch() -> None:
    assert [*flight_recorder._DTYPES] == [*payloads.DTYPES[1:-1]]
    assert payloads.DTYPES[1:-1] == tuple(str(each).removeprefix("torch.") for each in shm_backend._DTYPES)


def test_stacks_of_waiting_ranks_are_in_the_dump(tmp_path: Path) -> None:
    body = """
def waits():
    dist.broadcast(x, 0)

if rank == 0:
    print("ready", flush=True)
    waits()
"""
    name = f"ranks_{tmp_path.name}.py"
    with _ranks(tmp_path, body) as ranks:
        wait_until(
            lambda: "running" in [each["state"] for each in select(str(ranks[0].pid))[0].processes[0].activities]
        )
        dumps = _dump(name, tmp_path / "dumps", "--stacks")
    frames = dumps[0]["entries"][-1]["frames"]
    named = [(frame["name"], Path(frame["filename"]).name) for frame in frames]
    assert ("broadcast", "distributed_c10d.py") in named
    assert named[-2:] == [("waits", name), ("<module>", name)] and frames[-2]["line"] > 0
    assert not any(entry["frames"] for entry in dumps[1]["entries"])
    assert f"waits at {tmp_path / name}:" in _analyse(tmp_path / "dumps")[0]


def test_groups_have_their_ranks_of_the_world(tmp_path: Path) -> None:
    body = """
groups = [dist.new_group([0, 2]), dist.new_group([1, 2])]
if rank == 2:
    dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2), group=groups[1], async_op=True)
"""
    with _ranks(tmp_path, body, size=3):
        dumps = _dump(f"ranks_{tmp_path.name}.py", tmp_path / "dumps")
    assert {each["ranks"] for each in dumps[2]["pg_config"].values()} == {"[0, 1, 2]", "[0, 2]", "[1, 2]"}
    [entry] = [entry for entry in dumps[2]["entries"] if entry["state"] == "started"]
    assert (entry["input_sizes"], entry["output_sizes"], entry["collective_seq_id"]) == ([[2]], [[4]], 1)
    said, _ = _analyse(tmp_path / "dumps")
    assert "missing ranks: {1}" in said


EVERY_OPERATION = """
y, pair = torch.ones(8), [torch.ones(4), torch.ones(4)]
for operation in (
    lambda: dist.all_gather(pair, x), lambda: dist.all_gather_into_tensor(y, x),
    lambda: dist.reduce_scatter_tensor(x, y), lambda: dist.all_to_all_single(y, y.clone()),
    lambda: dist.gather(x, pair if rank == 0 else None), lambda: dist.scatter(x, pair if rank == 0 else None),
    dist.barrier, lambda: dist.broadcast(x, 0), lambda: dist.reduce(x, 0),
    lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0), lambda: dist.all_reduce(x),
):
    time.sleep(0.002)
    operation()
"""


@pytest.mark.slow
def test_torch_finds_no_error_where_all_ranks_agree(tmp_path: Path) -> None:
    with _ranks(tmp_path, EVERY_OPERATION):
        dumps = _dump(f"ranks_{tmp_path.name}.py", tmp_path / "dumps")
    said, tables = _analyse(tmp_path / "dumps")
    assert "sequence number" not in said
    assert all(each.pass_check for each in tables.collectives)
    names = [each.collective_name for each in tables.collectives if each.collective_seq_id > 20]
    operations = "all_gather all_gather reduce_scatter all_to_all gather scatter barrier broadcast reduce all_reduce"
    assert names == [f"gloo:{each}" for each in operations.split()]
    assert [len(dump["entries"]) for dump in dumps.values()] == [len(tables.collectives)] * 2


ACTORS = """
import os, signal, sys, threading
import torch, torch.distributed as dist
import monarch_backend.actor
from monarch_backend.actor import Actor, endpoint, this_host

ended = threading.Event()
monarch_backend.actor.unhandled_fault_hook = lambda failure: ended.set()

class Rank(Actor):
    @endpoint
    def join(self, store, rank):
        dist.init_process_group("monarch", init_method=f"file://{store}", rank=rank, world_size=2)
        dist.all_reduce(torch.ones(2))
        if rank == 0:
            dist.all_reduce(torch.ones(2), async_op=True)

    @endpoint
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    procs = this_host().spawn_procs({"gpus": 2}, name="ranks")
    ranks = procs.spawn("rank", Rank)
    for future in [ranks.slice(gpus=number).join.call_one(sys.argv[1], number) for number in range(2)]:
        future.get()
    ranks.die.broadcast()
    ended.wait()
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_killed_ranks_are_dumped_while_their_starter_runs(tmp_path: Path) -> None:
    path = tmp_path / "actors.py"
    path.write_text(ACTORS)
    command = [sys.executable, str(path), str(tmp_path / "store")]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            dumps = _dump(str(child.pid), tmp_path / "dumps")
        finally:
            child.kill()
    assert [[entry["state"] for entry in dumps[rank]["entries"]] for rank in (0, 1)] == [
        ["completed", "started"], ["completed"],
    ]  # fmt: skip
    assert "missing ranks: {1}" in _analyse(tmp_path / "dumps")[0]


@pytest.mark.slow
def test_several_jobs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    with contextlib.ExitStack() as stack:
        for folder in folders:
            folder.mkdir()
            stack.enter_context(_ranks(folder, ""))
        assert main(["flight-recorder", str(tmp_path), "-o", str(tmp_path / "dumps")]) == 1
        assert "is in several jobs" in capsys.readouterr().err
        assert main(["flight-recorder", str(folders[1]), "-o", str(tmp_path / "dumps")]) == 0


def test_folder_with_files_and_program_without_groups_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["flight-recorder", "no such program", "-o", str(tmp_path / "new")]) == 1
    assert "no running program is" in capsys.readouterr().err
    (tmp_path / "rank_7").touch()
    with _ranks(tmp_path, "", size=1) as [child]:
        assert main(["flight-recorder", str(child.pid), "-o", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err


def _on_hosts(rank: int, folder: str) -> None:
    x, pids = torch.ones(4), [0] * 4
    dist.all_gather_object(pids, os.getpid())
    for _ in range(3):
        time.sleep(0.002)
        dist.all_reduce(x)
    if rank == 0:
        flight_recorder.dumps(program_recording.read_pids(pids)).write(folder)
    dist.barrier()


@pytest.mark.slow
def test_ranks_of_each_host_are_a_group(tmp_path: Path) -> None:
    if why := refusal():
        pytest.skip(why)
    with hosts(2) as made:
        run_on_hosts(made, (0, 0, 1, 1), _on_hosts, str(tmp_path / "dumps"), env={"MONARCH_SHM": "1"})
    _, tables = _analyse(tmp_path / "dumps")
    assert [group.size for group in tables.groups] == [2, 2]
    assert {each.global_rank for each in tables.memberships} == {0, 1, 2, 3}
    dumps = [pickle.loads((tmp_path / "dumps" / f"rank_{rank}").read_bytes()) for rank in range(4)]
    assert [dump["pg_config"]["0"]["ranks"] for dump in dumps] == ["[0, 1]"] * 2 + ["[2, 3]"] * 2
    assert all(len(dump["entries"]) >= 3 for dump in dumps)
