"""A script that ends without destroy_process_group, or with its group in a variable, exits with status 0."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.killed_processes import killed_at_end
from tests.support.ranks import without_gloos_lines

# Gloo's threads still free tensors when the interpreter ends. With torch's own "gloo" backend each of these processes
# ends with SIGABRT about every second time.
SCRIPT = """
import sys, torch, torch.distributed as dist
rank, how = int(sys.argv[1]), sys.argv[3]
dist.init_process_group("monarch", rank=rank, world_size=2, init_method=f"file://{sys.argv[2]}")
torch.set_num_threads(1)
tensors = [torch.ones(1 << 16) for _ in range(40)]
works = []
while tensors:
    works.append(dist.all_reduce(tensors.pop(), async_op=True))
for work in works:
    work.wait()
del works, work
if how == "held":
    group = dist.group.WORLD
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["never destroyed", pytest.param("held", marks=pytest.mark.slow)])
def test_script_that_ends_with_a_live_group_exits_with_0(how: str, tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / f"store{pair}"), how],
            stderr=subprocess.PIPE,
            text=True,
        )
        for pair in range(3)
        for rank in range(2)
    ]
    with killed_at_end(jobs):
        ends = [(job.communicate(timeout=120)[1], job.returncode) for job in jobs]
    assert ends == [("", 0)] * len(jobs)


FUTURES = """
import sys, torch, torch.distributed as dist
from monarch_backend.process_group import _c10d_internals
dist.init_process_group("monarch", rank=0, world_size=1, init_method=f"file://{sys.argv[1]}")
for _ in range(50):
    _c10d_internals.future_of_tensors([torch.ones(4) for _ in range(50)])
"""


@pytest.mark.slow
def test_script_that_ends_with_a_busy_thread_of_gloo_exits_with_0(tmp_path: Path) -> None:
    """DDP's hooks use such futures. A Gloo group that is destroyed at the exit may wait for a lock without end."""
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", FUTURES, str(tmp_path / f"store{n}")], stderr=subprocess.PIPE, text=True
        )
        for n in range(12)
    ]
    with killed_at_end(jobs):
        assert [(job.communicate(timeout=60)[1], job.returncode) for job in jobs] == [("", 0)] * len(jobs)


# Reports of an exception on the other ranks ---------------------------------------------------------------------------

FAILING = """
import sys, torch, torch.distributed as dist
rank, how = int(sys.argv[1]), sys.argv[3]
dist.init_process_group("monarch", rank=rank, world_size=2, init_method=f"file://{sys.argv[2]}")
dist.all_reduce(torch.ones(1))
if rank == 1:
    if how == "unhandled":
        raise ValueError("bad batch\\nin file 7")
    if how == "destroyed":
        try:
            raise KeyError("bad batch")
        finally:
            dist.destroy_process_group()
    if how == "handled":
        try:
            raise ValueError("bad batch")
        except ValueError:
            pass
        sys.exit(0)
    if how == "long":
        raise RuntimeError("\\u00e4" * 1000)
    if how == "faulty text":
        class Faulty(Exception):
            def __str__(self):
                raise TypeError
        raise Faulty
try:
    dist.all_reduce(torch.ones(1))
except Exception as error:
    print(type(error).__name__, error)
"""
HEARD = {
    "unhandled": "raised ValueError: bad batch in file 7, and ",
    "destroyed": "raised KeyError: 'bad batch', and ",
    "handled": "",
    "long": "raised RuntimeError: " + "\u00e4" * 115 + "..., and ",
    "faulty text": "raised Faulty, and ",
}


@pytest.mark.parametrize("how", ["unhandled", *(pytest.param(how, marks=pytest.mark.slow) for how in list(HEARD)[1:])])
def test_exception_of_rank_is_named_at_its_peers(how: str, tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", FAILING, str(rank), str(tmp_path / "store"), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    with killed_at_end(jobs):
        outputs = [without_gloos_lines(job.communicate(timeout=120)[0]) for job in jobs]
    said = rf"{re.escape(HEARD[how])}(closed the group|ended) without"
    assert re.match(rf"RankFailedError rank 1 \(host .*, pid {jobs[1].pid}\) {said}", outputs[0]), outputs
    assert [job.returncode for job in jobs] == [0, 0 if how == "handled" else 1]


SPAWNED = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def rank_of_pool(rank, store):
    dist.init_process_group("monarch", rank=rank, world_size=2, init_method=f"file://{store}")
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        raise ValueError("bad batch")
    try:
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        print(type(error).__name__, error, flush=True)

if __name__ == "__main__":
    context = mp.start_processes(rank_of_pool, (sys.argv[1],), 2, join=False, start_method="fork")
    for process in context.processes:
        process.join()
"""


@pytest.mark.slow
def test_exception_of_child_of_multiprocessing_is_named_at_its_peers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SPAWNED, str(tmp_path / "store")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert re.match(r"RankFailedError rank 1 \(host .*\) raised ValueError: bad batch, and ", run.stdout), run
