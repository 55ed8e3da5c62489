"""The package works with a full /dev/shm, as in containers with a small one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
import torch
import torch.distributed as dist
import monarch_backend
from monarch_backend.actor import Actor, endpoint, this_host
from monarch_backend.rdma import RDMABuffer, empty


class Worker(Actor):
    @endpoint
    def reduce(self, x):
        dist.all_reduce(x)
        return x.sum().item()

    @endpoint
    def reduce_shared(self):
        x = monarch_backend.empty_shared(1_000_000).fill_(1)
        dist.all_reduce(x)
        return x.sum().item()

    @endpoint
    def echo(self, x):
        return x

    @endpoint
    def read(self, buffer):
        found = torch.zeros(1000)
        buffer.read_into(found).get()
        return found.sum().item()


assert os.statvfs("/dev/shm").f_bavail == 0
procs = this_host().spawn_procs({"gpus": 2})
workers = procs.spawn("workers", Worker)
procs.process_group().get(60)
print(*workers.reduce.call(torch.ones(3_000_000)).get(60).values())
print(*workers.reduce_shared.call().get(60).values())
print(*(x.sum().item() for x in workers.echo.call(torch.ones(3_000_000)).get(60).values()))
for memory in (torch.ones(1000), empty(1000).fill_(2)):
    buffer = RDMABuffer(memory)
    print(*workers.read.call(buffer).get(60).values())
    buffer.drop()
procs.stop().get(60)
"""
FILL = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && { cat /dev/zero > /dev/shm/full 2>/dev/null; exec "$@"; }'


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("unshare") or os.geteuid() != 0, reason="a full /dev/shm needs unshare and root")
def test_full_dev_shm_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["unshare", "-m", "sh", "-c", FILL, "sh", sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        [value] * 2 for value in ("6000000.0", "2000000.0", "3000000.0", "1000.0", "2000.0")
    ]
