"""Memory of actor messages: committed ahead within a bound, given back when it is idle, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from monarch_backend import _native
from monarch_backend._actor.processes.message_memory import MESH_SHARES, PrefaultBudget
from monarch_backend._core import platform
from monarch_backend._transport.local.links import idle_memory_timeout
from monarch_backend._verbs import eligibility
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(platform.IS_PORTABLE, reason="only Linux gives shared memory back")

MIB = 1 << 20
SCRIPT = """
import os, sys
from monarch_backend.actor import Actor, endpoint, this_host

class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

if __name__ == "__main__":
    workers = this_host().spawn_procs({"procs": 2}).spawn("worker", Worker)
    print(os.getpid(), *workers.pid.call().get().values(), flush=True)
    sys.stdin.read()
"""


def arenas(pid: int | str) -> dict[int, int]:
    """Return the committed bytes of the arenas that a process has open, by inode."""
    found = {}
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(file).startswith("/memfd:monarch ("):
                status = file.stat()
                found[status.st_ino] = status.st_blocks * 512
        except OSError:  # closed meanwhile
            continue
    return found


def committed(pid: int | str, without: Collection[int] = ()) -> int:
    """Return the committed bytes of a process's arenas, without those of some inodes."""
    return sum(nbytes for inode, nbytes in arenas(pid).items() if inode not in without)


def test_prefaulted_memory_is_bounded_and_returned_when_idle() -> None:
    others = arenas("self")
    host = _native.Host(256 * MIB)
    host.prefault(8 * MIB)
    host.prefault(64 * MIB)  # no effect
    wait_until(lambda: committed("self", others) >= 8 * MIB - (64 << 10))
    assert committed("self", others) <= 8 * MIB
    host.return_idle_memory(0.05)
    wait_until(lambda: committed("self", others) < 64 << 10)


def test_idle_memory_is_kept_where_there_are_rdma_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MONARCH_IDLE_MEMORY_TIMEOUT", "7")
    monkeypatch.setattr(eligibility, "DEVICES", str(tmp_path))
    assert idle_memory_timeout() == 7
    (tmp_path / "mlx5_0").mkdir()
    assert idle_memory_timeout() == 0
    monkeypatch.setenv("MONARCH_PREFAULT_BYTES", str(MIB))
    assert PrefaultBudget(_Clock()).grant(1) == MIB


def test_contents_stay_intact_while_memory_is_prefaulted_and_returned() -> None:
    others = arenas("self")
    host = _native.Host(256 * MIB)
    used, freed = _native.ArenaBuffer(host, 2 * MIB), _native.ArenaBuffer(host, 4 * MIB)
    memoryview(used)[:] = pattern = bytes(range(256)) * (2 * MIB // 256)
    memoryview(freed)[:] = bytes(4 * MIB)
    host.prefault(16 * MIB)
    host.return_idle_memory(0.05)
    del freed
    wait_until(lambda: host.used() <= 2 * MIB and committed("self", others) < 4 * MIB)
    assert bytes(memoryview(used)) == pattern


def test_process_ends_in_order_while_it_prefaults() -> None:
    code = (
        "import os; from monarch_backend import _native; host = _native.Host(1 << 30); host.prefault(512 << 20)\n"
        "child = os.fork()\n"
        "if child == 0:\n    host.abandon(); os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0; del host"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


class _Clock:
    time = 0.0

    def now(self) -> float:
        return self.time


def test_budget_of_many_processes_stays_bounded_until_it_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_PREFAULT_BYTES", str(64 * MIB))
    monkeypatch.setenv("MONARCH_IDLE_MEMORY_TIMEOUT", "10")
    clock = _Clock()
    budget = PrefaultBudget(clock)
    assert budget.grant(1) == 64 * MIB
    granted = 64 * MIB + sum(count * budget.grant(count) for count in (4, 8, 1000, 1, 1))
    assert granted <= MESH_SHARES * 64 * MIB
    clock.time = 20.1
    assert budget.grant(2) == 64 * MIB
    monkeypatch.setenv("MONARCH_PREFAULT_BYTES", "0")
    assert budget.grant(1) == 0


@pytest.mark.parametrize("nbytes", [0, 8 * MIB])
def test_program_leaves_no_shared_memory_after_kill(nbytes: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    before = set(os.listdir("/dev/shm"))
    environment = {**os.environ, "MONARCH_PREFAULT_BYTES": str(nbytes), "MONARCH_IDLE_MEMORY_TIMEOUT": "1000"}
    program = subprocess.Popen(
        [sys.executable, tmp_path / "program.py"], env=environment, stdin=-1, stdout=-1, text=True
    )
    assert program.stdin is not None and program.stdout is not None
    with program:
        pids = [int(word) for word in program.stdout.readline().split()]
        assert len(pids) == 3
        if nbytes:
            wait_until(lambda: all(committed(pid) >= nbytes - (64 << 10) for pid in pids))
        assert all(committed(pid) <= nbytes + MIB for pid in pids)
        program.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert set(os.listdir("/dev/shm")) <= before
