"""A script that ends without destroy_process_group, or with its group in a variable, ends with status 0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Gloo's threads are busy freeing the tensors when the interpreter ends: with torch's "gloo" each of these
# processes ends with SIGABRT about every second time.
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


@pytest.mark.parametrize("how", ["never destroyed", pytest.param("held", marks=pytest.mark.slow)])
def test_a_script_that_ends_with_a_group_alive_ends_well(how: str, tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / f"store{pair}"), how],
            stderr=subprocess.PIPE,
            text=True,
        )
        for pair in range(3)
        for rank in range(2)
    ]
    try:
        ends = [(job.communicate(timeout=120)[1], job.returncode) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert ends == [("", 0)] * len(jobs)
