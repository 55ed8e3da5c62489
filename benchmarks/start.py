"""Benchmark of start-up: time and memory of processes, of a device mesh, and of a host.

    python benchmarks/start.py [--workers 2] [--rounds 5] [--out FILE]

Every round runs each contender once, in a new interpreter, and starts with another one. All files are in the page
cache. The measures are:

processes    from `spawn_procs` until all processes run, with the start of their fork server
first value  from `device_mesh` until the controller has the value of an operation on a DTensor
own memory   private dirty memory of a worker after that. If the program imports DTensors after the start of its
             processes, the fork server has not preloaded them
host         from the start of `monarch-backend up` until it prints that it listens; and its resident memory

on a host    the same on a host that another controller has used before, so that its fork server runs already

The floor is an interpreter that imports only torch, or torch and DTensors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from _machine_report import Others, machine

PROGRAM = """
import json, sys, time
import torch
from monarch_backend.actor import Actor, endpoint, this_host
from monarch_backend.hosts import attach_to_workers
if "DTENSORS" == "before":
    import torch.distributed.tensor

class Memory(Actor):
    @endpoint
    def own(self):
        lines = open("/proc/self/smaps_rollup").read().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024

began = time.monotonic()
procs = PLACE.spawn_procs({"x": WORKERS})
procs.initialized.get()
there = time.monotonic()
import torch.distributed.tensor as dt
imported = time.monotonic()
mesh = procs.device_mesh("cpu")
x = dt.distribute_tensor(torch.ones(WORKERS), mesh, [dt.Shard(0)])
assert (x + x).full_tensor().sum().item() == 2 * WORKERS
value = time.monotonic()
own = max(procs.spawn("memory", Memory).own.call().get().values())
print(json.dumps({"processes, s": there - began, "first value, s": value - imported, "own memory, MiB": own}))
procs.stop().get()
"""
FLOORS = {"import torch": "import torch", "import torch and DTensors": "import torch, torch.distributed.tensor"}
HOST = [sys.executable, "-m", "monarch_backend", "up", "--address", "127.0.0.1:0"]


def _program(workers: int, dtensors: str, place: str = "this_host()") -> dict[str, float]:
    text = PROGRAM.replace("WORKERS", str(workers)).replace("DTENSORS", dtensors).replace("PLACE", place)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _floor(code: str) -> dict[str, float]:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code + "; import os; os._exit(0)"], check=True)
    return {"all of it, s": time.monotonic() - began}


@contextlib.contextmanager
def _up() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a host daemon. Yield its process and the line that it prints when it listens. End it at the end."""
    with subprocess.Popen(HOST, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as host:
        try:
            assert host.stdout is not None
            line = host.stdout.readline()
            assert "is up" in line, line
            yield host, line
        finally:
            host.terminate()


def _host() -> dict[str, float]:
    began = time.monotonic()
    with _up() as (host, _):
        ready = time.monotonic() - began
        pages = int(Path(f"/proc/{host.pid}/statm").read_text().split()[1])
    return {"host, s": ready, "resident, MiB": pages * 4 / 1024}


def _on_a_host(workers: int, dtensors: str) -> dict[str, float]:
    with _up() as (_, line):
        place = f"attach_to_workers([{line.split()[-1]!r}]).slice(hosts=0)"
        _program(workers, dtensors, place)
        return _program(workers, dtensors, place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    contenders = {
        "DTensors imported first": lambda: _program(args.workers, "before"),
        "DTensors imported after": lambda: _program(args.workers, "after"),
        "on a host, DTensors imported first": lambda: _on_a_host(args.workers, "before"),
        "on a host, DTensors imported after": lambda: _on_a_host(args.workers, "after"),
        "monarch-backend up": _host,
        **{name: lambda code=code: _floor(code) for name, code in FLOORS.items()},
    }
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    others, names = Others(), list(contenders)
    for turn in range(args.rounds + 1):  # round 0 fills the page cache
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for what, figure in contenders[name]().items():
                if turn:
                    found[name][what].append(figure)
    lines = [f"{machine()}; {args.workers} workers, {args.rounds} rounds; {others.note()}", ""]
    lines += ["| | | median | least | most |", "| --- | --- | ---: | ---: | ---: |"]
    for name, each in found.items():
        for what, figures in each.items():
            middle = statistics.median(figures)
            lines.append(f"| {name} | {what} | {middle:.2f} | {min(figures):.2f} | {max(figures):.2f} |")
    report = "\n".join(lines) + "\n"
    print(report)
    if args.out:
        args.out.write_text(report)


if __name__ == "__main__":
    main()
