"""Floors of collectives.py: c10d's dispatch, copies, additions, and a word that two cores exchange.

dispatch (C++): `dist.all_reduce` through torch's dispatcher to torch's fake backend, which does nothing.
dispatch (Python): the same with a ProcessGroup written in Python that does nothing. torch skips its dispatcher for it.
copy, add: `Tensor.copy_` and `torch.add(a, b, out=a)` of the same number of bytes, in one thread, in reused memory.
spin: one round trip of a word in shared memory between two spinning processes, pinned to two cores (_spin.c).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class _Done(dist.Work):
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        return True


class _Empty(dist.ProcessGroup):
    def getBackendName(self) -> str:
        return "empty"

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # noqa: ARG002
        return _Done()


def _groups(ranks: int) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def empty(options: Any, _: Any = None) -> dist.ProcessGroup:
        return _Empty(options.group_rank, options.group_size)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    dist.Backend.register_backend("empty", empty, extended_api=True, devices=["cpu"])
    return {"dispatch (C++)": dist.group.WORLD, "dispatch (Python)": dist.new_group(backend="empty")}


class Floors:
    """Requests that the rank of the peer "floors" handles."""

    def __init__(self, ranks: int) -> None:
        self._groups = _groups(ranks)
        self._call: Callable[[], object] = lambda: None

    def check(self, what: str, size: int) -> bool:
        """Prepare the call of a floor. Return True, like a check of values."""
        a, b = torch.ones(max(size // 4, 1)), torch.zeros(max(size // 4, 1))
        if what == "copy":
            self._call = lambda: a.copy_(b)
        elif what == "add":
            self._call = lambda: torch.add(a, b, out=a)
        elif what != "spin":
            group = self._groups[what]
            self._call = lambda: dist.all_reduce(a, group=group)
        return True

    def batch(self, what: str, calls: int, warm: int) -> list[int]:
        """Return the nanoseconds of each call. For "spin", return the means of batches of 1000 round trips."""
        if what == "spin":
            out = subprocess.run([sys.argv[3] + "/spin", "20"], check=True, capture_output=True, text=True, timeout=60)
            return [int(line) for line in out.stdout.split()]
        clock, call, times = time.perf_counter_ns, self._call, []
        for _ in range(warm):
            call()
        for _ in range(calls):
            start = clock()
            call()
            times.append(clock() - start)
        return times
