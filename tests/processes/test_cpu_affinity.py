"""The CPUs that `proc_bind=` gives to each process, on machines described by files, and on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from monarch_backend._processes import cpu_affinity
from monarch_backend._processes.cpu_affinity import ProcBind, plan


def machine(root: Path, nodes: Sequence[str], siblings: int | None = None) -> Path:
    """Create a /sys/devices/system with these CPUs per node.

    CPU n and n + ``siblings`` are hardware threads of one core.
    """
    for number, cpus in enumerate(nodes):
        node = root / f"node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpus + "\n")
        for cpu in cpu_affinity.parse(cpus):
            topology = root / f"cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{number}\n")
            (topology / "core_id").write_text(f"{cpu if siblings is None else cpu % siblings}\n")
    (root / "node/possible").write_text("0\n")
    return root


def written(planned: list[frozenset[int] | None]) -> list[str | None]:
    return [None if cpus is None else cpu_affinity.text(cpus) for cpus in planned]


def test_no_binding(tmp_path: Path) -> None:
    assert plan(None, 3, system=tmp_path, allowed={0}) == [None, None, None]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, ["0-7"]),
        (2, ["0-1,4-5", "2-3,6-7"]),
        (4, ["0,4", "1,5", "2,6", "3,7"]),
        (3, ["0,4", "1,5", "2-3,6-7"]),
        (8, ["0", "4", "1", "5", "2", "6", "3", "7"]),
        (16, ["0", "0", "4", "4", "1", "1", "5", "5", "2", "2", "6", "6", "3", "3", "7", "7"]),
    ],
)
def test_cores_keep_hardware_threads_together(tmp_path: Path, count: int, expected: list[str]) -> None:
    root = machine(tmp_path, ["0-1,4-5", "2-3,6-7"], siblings=4)
    assert written(plan("cores", count, system=root, allowed=range(8))) == expected


def test_cores_are_chosen_from_the_allowed_ones(tmp_path: Path) -> None:
    root = machine(tmp_path, ["0-7"])
    assert written(plan("cores", 2, system=root, allowed={1, 2, 5})) == ["1", "2,5"]
    assert written(plan("cores", 2, system=tmp_path / "nothing", allowed={1, 2})) == ["1", "2"]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 200])
def test_cores_are_all_used_and_evenly(tmp_path: Path, count: int) -> None:
    planned = plan("cores", count, system=machine(tmp_path, ["0-31", "32-63"]), allowed=range(64))
    got = [cpus for cpus in planned if cpus]
    assert len(got) == count
    assert frozenset().union(*got) == frozenset(range(64))
    assert max(map(len, got)) - min(map(len, got)) <= 1


def test_numa_spreads_in_blocks(tmp_path: Path) -> None:
    root = machine(tmp_path, ["0-3", "4-7", ""])  # the third node has memory only
    assert written(plan("numa", 4, system=root, allowed=range(8))) == ["0-3", "0-3", "4-7", "4-7"]
    assert written(plan("numa", 1, system=root, allowed=range(8))) == ["0-3"]
    assert written(plan("numa", 3, system=root, allowed={3, 4, 5})) == ["3", "3", "4-5"]
    assert written(plan("numa", 2, system=root, allowed={1})) == ["1", "1"]
    assert written(plan("numa", 2, system=tmp_path / "nothing", allowed={0, 1})) == ["0-1", "0-1"]


def test_lists_and_functions(tmp_path: Path) -> None:
    assert written(plan([[0, 1], "2-3", None], 3, allowed=range(4))) == ["0-1", "2-3", None]
    assert written(plan(lambda rank: {rank} if rank else None, 3, allowed=range(4))) == [None, "1", "2"]


@pytest.mark.parametrize(
    ("proc_bind", "message"),
    [
        ("sockets", 'proc_bind=\'sockets\': give "cores", "numa", a list'),
        (7, "proc_bind=7: give"),
        ([[0]], "has cpus for 1 processes, and 2 are to be spawned"),
        ([[0], []], "of process 1 has no cpu in it; None means anywhere"),
        ([[0], [0, 9, 10, 12]], r"of process 1: cpus 9-10,12 can't be used; this process may use 0-1"),
        ([[0], "a-b"], "of process 1 is 'a-b': give cpu numbers"),
        ([[0], 3], "of process 1 is 3: give cpu numbers"),
        ([[0], ["x"]], r"of process 1 is \['x'\]: give cpu numbers"),
        (lambda rank: [5], "of process 0: cpus 5 can't be used"),
    ],
)
def test_impossible_binding_is_reported(proc_bind: ProcBind, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(proc_bind, 2, allowed={0, 1})


def test_no_processes() -> None:
    with pytest.raises(ValueError, match="at least one process, not 0"):
        plan("cores", 0)


BIND = """
import os
from pathlib import Path
from monarch_backend._processes import cpu_affinity
cpu = min(os.sched_getaffinity(0))
cpu_affinity.bind(frozenset({{cpu}}), Path({system!r}))
print(os.sched_getaffinity(0) == {{cpu}}, "prefer" in Path("/proc/self/numa_maps").read_text())
"""


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="the kernel has no NUMA")
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.needs("affinity")
def test_bind_takes_cpus_and_with_several_nodes_their_memory(tmp_path: Path, nodes: int) -> None:
    cpus = cpu_affinity.text(os.sched_getaffinity(0))
    root = machine(tmp_path, [cpus] if nodes == 1 else [cpus, ""])
    script = BIND.format(system=str(root))
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert out.stdout.split() == ["True", str(nodes == 2)], out.stderr


@pytest.mark.needs("affinity")
def test_bind_refuses_invalid_values() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        cpu_affinity.bind(frozenset({100_000}))
