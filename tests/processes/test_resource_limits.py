"""Resource limits of the system, read from files made for the test, and detection of out-of-memory kills."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_backend._processes import cgroup, resource_limits
from monarch_backend._processes.resource_limits import SpawnLimitError


def system(tmp_path: Path, files: dict[str, str], **options: object) -> resource_limits.System:
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    values = {"rlimit": lambda _: (-1, -1), **options}
    return resource_limits.System(proc=tmp_path / "proc", cgroups=tmp_path / "cgroup", **values)  # type: ignore[arg-type]


MACHINE = {
    "proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable:    1024000 kB\n",
    "proc/loadavg": "0.00 0.01 0.05 1/300 12345\n",
    "proc/sys/kernel/threads-max": "50000\n",
    "proc/sys/kernel/pid_max": "4000\n",
}


def text_of(count: int, of: resource_limits.System, **options: int) -> str:
    try:
        resource_limits.check(count, of.limits(count, **options))
    except SpawnLimitError as error:
        return str(error)
    return ""


def test_memory_and_pids_of_the_host(tmp_path: Path) -> None:
    machine = system(tmp_path, MACHINE)
    each = 4 << 20
    assert text_of(250, machine, memory_each=each) == ""
    message = text_of(251, machine, memory_each=each)
    assert "they need 1004 MiB of memory, and the host leaves 1000. Start at most 250," in message
    assert "/proc/sys/kernel/pid_max leaves 3700. Start at most 1850" in text_of(2000, machine, memory_each=1)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_s_limits(tmp_path: Path, version: int) -> None:
    if version == 2:
        files = {
            "proc/self/cgroup": "0::/a/b\n",
            "cgroup/a/memory.max": f"{100 << 20}",
            "cgroup/a/memory.current": f"{90 << 20}",
            "cgroup/a/memory.stat": f"anon 1\ninactive_file {30 << 20}\n",
            "cgroup/a/b/memory.max": "max",
            "cgroup/a/b/memory.current": "0",
            "cgroup/a/b/pids.max": "20",
            "cgroup/a/b/pids.current": "5",
        }
    else:
        files = {
            "proc/self/cgroup": "5:pids:/a/b\n4:cpu,memory:/nowhere/in/this/container\n0::/\n",
            "cgroup/memory/memory.limit_in_bytes": f"{100 << 20}",
            "cgroup/memory/memory.usage_in_bytes": f"{90 << 20}",
            "cgroup/memory/memory.stat": f"inactive_file {30 << 20}\n",
            "cgroup/pids/a/b/pids.max": "20",
            "cgroup/pids/a/b/pids.current": "5",
        }
    machine = system(tmp_path, MACHINE | files)
    name = "memory.max" if version == 2 else "memory.limit_in_bytes"
    message = text_of(11, machine, memory_each=4 << 20)
    assert f"they need 44 MiB of memory, and {name} of the control group" in message
    assert "leaves 40. Start at most 10," in message
    assert "leaves 15. Start at most 7," in text_of(8, machine, memory_each=1)
    assert text_of(7, machine, memory_each=4 << 20) == ""


def test_limits_of_the_user(tmp_path: Path) -> None:
    threads = {f"proc/{pid}/status": f"Name:\tx\nUid:\t{uid}\t0\t0\t0\nThreads:\t9\n" for pid, uid in [(1, 5), (2, 6)]}
    (tmp_path / "proc/self/fd").mkdir(parents=True)
    for number in range(4):
        (tmp_path / f"proc/self/fd/{number}").touch()
    soft = {resource_limits.resource.RLIMIT_NPROC: (50, 50), resource_limits.resource.RLIMIT_NOFILE: (64, 64)}
    machine = system(tmp_path, MACHINE | threads, rlimit=soft.__getitem__, uid=5)
    assert "RLIMIT_NPROC (ulimit -u) leaves 41. Start at most 20," in text_of(21, machine)
    assert text_of(20, machine, memory_each=1) == ""
    assert "RLIMIT_NOFILE (ulimit -n) leaves 60. Start at most 30," in text_of(
        31, system(tmp_path, {}, rlimit=soft.__getitem__, uid=0), descriptors_each=2
    )


def test_system_without_reported_limits_has_no_limits(tmp_path: Path) -> None:
    assert text_of(1_000_000, system(tmp_path, {})) == ""


@pytest.mark.needs("proc")
def test_this_system_can_start_a_few_processes() -> None:
    resource_limits.check_spawn(2, plain=True, descriptors_each=2)
    with pytest.raises(SpawnLimitError, match="can't start 100000000 processes"):
        resource_limits.check_spawn(100_000_000, plain=False, descriptors_each=0)


# Out-of-memory kills

OOM = """
import os, signal, sys
from monarch_backend._processes import cgroup
from monarch_backend._processes import child_bootstrap
from monarch_backend._processes import child_table
from monarch_backend._processes.spawn_protocol import Spawn
from pathlib import Path
import cloudpickle

root = Path(sys.argv[1])
counter = root / "cgroup/box/memory.events"
processes = child_table.Processes()
processes._oom_kills = cgroup.OomKills(root / "cgroup", root / "self", root / "vmstat")
environment = dict(os.environb)
spec = Spawn(1, "x", cloudpickle.dumps(signal.pause), environment, [], [], b"/", None, None, 1, False, False, "fork")
for kills, ours in ((3, False), (4, False), (4, False), (5, True)):
    child_started = processes.start(spec, 1, 2)
    if child_started.pid == 0:
        child_bootstrap.run(spec)
    counter.write_text(f"oom 9\\noom_kill {kills}\\n")
    if ours:
        processes.kill(child_started.pid, signal.SIGKILL)
    else:
        os.kill(child_started.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child_started.pid, os.WEXITED | os.WNOWAIT)
    (death,) = processes.reap()
    print(death.returncode, death.oom_killed)
"""


@pytest.mark.needs("fork")
def test_out_of_memory_kill_is_distinguished(tmp_path: Path) -> None:
    files = {"self": "0::/box\n", "cgroup/box/memory.events": "oom_kill 3\n", "vmstat": "oom_kill 0\n"}
    system(tmp_path, files)
    command = [sys.executable, "-c", OOM, str(tmp_path)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a thread of OpenBLAS would prevent the fork
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert out.stdout == "-9 False\n-9 True\n-9 False\n-9 False\n", out.stderr


def test_where_kills_are_counted(tmp_path: Path) -> None:
    system(tmp_path, {"v1": "4:memory:/a\n", "cgroup/memory/a/memory.oom_control": "under_oom 0\noom_kill 1\n"})
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill 1\n")
    v1 = cgroup.OomKills(tmp_path / "cgroup", tmp_path / "v1", vmstat)
    nowhere = cgroup.OomKills(tmp_path / "cgroup", tmp_path / "no such file", vmstat)
    vmstat.write_text("oom_kill 2\n")
    assert not v1.again()
    assert nowhere.again() and not nowhere.again()


def test_limits_without_proc_are_those_of_the_machine_and_rlimits() -> None:
    rlimits = {resource.RLIMIT_NOFILE: (400, 500), resource.RLIMIT_NPROC: (30, -1)}
    it = resource_limits.System(rlimit=rlimits.__getitem__)
    memory, files, processes = it.limits_without_proc(8)
    assert memory.name == "the memory of the host" and memory.room > memory.each == 150 << 20
    assert (files.name, files.room, files.each) == ("RLIMIT_NOFILE (ulimit -n)", 400, 8)
    assert (processes.name, processes.room, processes.each) == ("RLIMIT_NPROC (ulimit -u)", 30, 1)
    with pytest.raises(SpawnLimitError, match=r"can't start 31 processes: .* RLIMIT_NPROC \(ulimit -u\) leaves 30"):
        resource_limits.check(31, it.limits_without_proc(8))
    unlimited = resource_limits.System(rlimit=lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises(SpawnLimitError, match="MiB of memory, and the memory of the host leaves"):
        resource_limits.check(10**7, unlimited.limits_without_proc(8))
