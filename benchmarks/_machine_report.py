"""Description of the machine in a report, and the load of other processes during the run."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path

from _actor_runners import machine_cpu_seconds, tree_cpu_seconds


class Others:
    """CPU time of processes that do not belong to the benchmark. The report gives it as a measure of noise."""

    def __init__(self) -> None:
        self._start, self._before = time.monotonic(), self._used()

    @staticmethod
    def _used() -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        mine = time.process_time() + ended.ru_utime + ended.ru_stime + tree_cpu_seconds(os.getpid())
        return machine_cpu_seconds() - mine

    def note(self) -> str:
        """Return a line with the mean number of cores that other processes have used since the start."""
        cores = (self._used() - self._before) / (time.monotonic() - self._start)
        return f"other processes of the machine used {max(cores, 0):.2f} cores meanwhile"


def machine() -> str:
    """Return a description of processor, memory, kernel and interpreter."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    cores, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{model}, {cores} cores, {memory:.0f} GiB; Linux {platform.release()}; Python {platform.python_version()}"
