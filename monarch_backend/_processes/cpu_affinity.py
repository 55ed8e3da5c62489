"""CPU and memory affinity of each process of a host: the implementation of ``proc_bind=``.

`plan` decides for all processes, where they are spawned. `bind` applies it in each process. The machine's layout is
read from /sys/devices/system.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from monarch_backend._core import platform as system_abilities
from monarch_backend._processes.cgroup import number

Cpus: TypeAlias = frozenset[int]
Wish: TypeAlias = str | Iterable[int] | None  # of one process: "0-3,8", or numbers, or anywhere
ProcBind: TypeAlias = str | Sequence[Wish] | Callable[[int], Wish] | None

SYSTEM = Path("/sys/devices/system")

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1


def plan(
    proc_bind: ProcBind, count: int, *, system: Path = SYSTEM, allowed: Iterable[int] | None = None
) -> list[Cpus | None]:
    """Return the CPUs of each of ``count`` processes; None for a process that runs anywhere.

    ``proc_bind`` is one of:

    - None: no process is bound.
    - "cores": the CPUs that this process may use, split evenly. Hardware threads of a core stay together if possible.
    - "numa": blocks of processes on the memory nodes. Each process gets all allowed CPUs of its node.
    - a list with one entry for each process, or a function from the process's rank to its entry. An entry is
      CPU numbers, a text like "0-3,8", or None.

    ``allowed`` is this process's affinity unless given. Raises ValueError for another ``proc_bind``, a missing entry,
    or a CPU that is not allowed.

    >>> plan("cores", 2, allowed={0, 1})
    [frozenset({0}), frozenset({1})]
    >>> plan(["0", None], 2, allowed={0, 1})
    [frozenset({0}), None]
    """
    if count < 1:
        raise ValueError(f"proc_bind needs at least one process, not {count}")
    if proc_bind is None:
        return [None] * count
    if allowed is None:
        allowed = os.sched_getaffinity(0) if system_abilities.HAS_AFFINITY else range(os.cpu_count() or 1)
    usable = frozenset(allowed)
    if proc_bind == "cores":
        return _by_cores(count, usable, system)
    if proc_bind == "numa":
        nodes = [cpus & usable for cpus in _nodes(system).values() if cpus & usable] or [usable]
        return [nodes[rank * len(nodes) // count] for rank in range(count)]
    return [_checked(wish, rank, usable) for rank, wish in enumerate(_wishes(proc_bind, count))]


def _wishes(proc_bind: ProcBind, count: int) -> list[Wish]:
    if callable(proc_bind):
        return [proc_bind(rank) for rank in range(count)]
    if isinstance(proc_bind, str) or not isinstance(proc_bind, Sequence):
        raise ValueError(f'proc_bind={proc_bind!r}: give "cores", "numa", a list of cpus per process, or a function')
    if len(proc_bind) != count:
        raise ValueError(f"proc_bind has cpus for {len(proc_bind)} processes, and {count} are to be spawned")
    return list(proc_bind)


def _checked(wish: Wish, rank: int, usable: Cpus) -> Cpus | None:
    if wish is None:
        return None
    try:
        cpus = parse(wish) if isinstance(wish, str) else frozenset(wish)
        if not all(isinstance(cpu, int) for cpu in cpus):
            raise TypeError
    except (TypeError, ValueError):
        raise ValueError(f'proc_bind of process {rank} is {wish!r}: give cpu numbers or a text like "0-3,8"') from None
    if not cpus:
        raise ValueError(f"proc_bind of process {rank} has no cpu in it; None means anywhere")
    if cpus - usable:
        raise ValueError(
            f"proc_bind of process {rank}: cpus {text(cpus - usable)} can't be used; "
            f"this process may use {text(usable)}"
        )
    return cpus


def _by_cores(count: int, usable: Cpus, system: Path) -> list[Cpus | None]:
    cores = _cores(usable, system)
    if count > len(cores):  # only hardware threads are left to split
        cores = [frozenset({cpu}) for core in cores for cpu in sorted(core)]
    if count > len(cores):  # some processes share one
        return [cores[rank * len(cores) // count] for rank in range(count)]
    bounds = [rank * len(cores) // count for rank in range(count + 1)]
    return [frozenset().union(*cores[start:end]) for start, end in itertools.pairwise(bounds)]


def _cores(usable: Cpus, system: Path) -> list[Cpus]:
    """Return the cores with their usable hardware threads. Neighbours are close: same node, same package."""
    node_of = {cpu: node for node, cpus in _nodes(system).items() for cpu in cpus}
    cores: dict[tuple[int, int, int], set[int]] = {}
    for cpu in sorted(usable):
        topology = system / f"cpu/cpu{cpu}/topology"
        package, core = number(topology / "physical_package_id"), number(topology / "core_id")
        cores.setdefault((node_of.get(cpu, 0), package or 0, cpu if core is None else core), set()).add(cpu)
    return [frozenset(cores[key]) for key in sorted(cores)]


def _nodes(system: Path) -> dict[int, Cpus]:
    """Return the cpus of each memory node; empty on a kernel without NUMA."""
    found = {}
    for directory in system.glob("node/node[0-9]*"):
        try:
            found[int(directory.name.removeprefix("node"))] = parse((directory / "cpulist").read_text())
        except (OSError, ValueError):
            continue
    return dict(sorted(found.items()))


def parse(cpus: str) -> Cpus:
    """Return the numbers in a CPU list as Linux writes it. Raises ValueError for another text.

    >>> sorted(parse("0-2,8"))
    [0, 1, 2, 8]
    """
    found: set[int] = set()
    for part in filter(None, cpus.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def text(cpus: Iterable[int]) -> str:
    """Return a CPU list as Linux writes it.

    >>> text({8, 0, 1, 2})
    '0-2,8'
    """
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def bind(cpus: Cpus, system: Path = SYSTEM) -> None:
    """Run this process on ``cpus`` from now on. If there are several memory nodes, prefer memory of theirs.

    Raises OSError if the CPUs are not available. A failure of the memory preference is ignored: the kernel uses another
    node's memory when this one's is full, and some containers forbid the call. Does nothing on systems where a process
    cannot choose its CPUs.
    """
    if not system_abilities.HAS_AFFINITY:
        return
    os.sched_setaffinity(0, cpus)
    nodes = _nodes(system)
    holding = [node for node, its in nodes.items() if its & cpus]
    if len(nodes) > 1 and len(holding) == 1:
        _prefer_memory_of(holding[0])


def _prefer_memory_of(node: int) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    # The kernel reads one bit less than the given number.
    ctypes.CDLL(None).syscall(number, _MPOL_PREFERRED, words, len(words) * 64 + 1)
