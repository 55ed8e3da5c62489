"""Benchmark of launchers: time until the ranks compute, and time until a rank's death ends the other ranks.

    python benchmarks/launch.py [--ranks 8] [--rounds 5] [--deaths 10] [--out FILE]

Every round runs each contender once and starts with another one. All files are in the page cache. The times are:

first all_reduce  from the start of the command to the end of the first all_reduce on the last rank
command           from the start to the end of the command, with the exit of all ranks
death             from SIGKILL of one of two ranks until the other rank gets SIGTERM from the launcher. That rank
                  sleeps, and neither rank has imported torch
death, end        from the same SIGKILL until the launcher has ended

The floors are: one interpreter that imports torch; one idle interpreter per rank, all at the same time; the time until
the kernel wakes a parent that sleeps on a child's pidfd.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

RUN = [sys.executable, "-m", "monarch_backend", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
GLOO, MONARCH = "monarch-backend run, gloo", "monarch-backend run, monarch"
STOCK = "torchrun, gloo"

NOTES = (
    "- first all_reduce: from the start of the command until the last rank has it; of a floor it is the whole time",
    "- death: one of two ranks is killed, until the other has the launcher's SIGTERM; end: until the launcher ends",
    "- our dying rank is a copy of a process with torch, which the kernel takes longer to take apart than torchrun's,",
    "  a bare interpreter here; the floor's is such a copy, too",
)

SUM = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group(os.environ["BENCH_BACKEND"])
dist.all_reduce(torch.ones(4))
now = time.monotonic()
with open(os.path.join(os.environ["BENCH_FOLDER"], os.environ["RANK"]), "w") as file:
    file.write(str(now))
dist.destroy_process_group()
"""

DEATH = """
import os, signal, sys, time
folder = os.environ["BENCH_FOLDER"]
def say(what):
    with open(os.path.join(folder, what), "w") as file:
        file.write(str(time.monotonic()))
def end(number, frame):
    say("told")
    sys.exit(0)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, end)
    say("ready")
    while True:
        signal.pause()
while not os.path.exists(os.path.join(folder, "ready")):
    time.sleep(0.001)
time.sleep(0.3)  # both launchers have gone to wait
say("death")
os.kill(os.getpid(), signal.SIGKILL)
"""


def _run(command: Sequence[str], script: str, folder: Path, ranks: int, backend: str, code: int) -> tuple[float, float]:
    """Run a launcher. Return the times of its start and its end."""
    (folder / "script.py").write_text(script)
    mine = {"BENCH_FOLDER": str(folder), "BENCH_BACKEND": backend, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    environment = {**os.environ, **mine}
    words = [*command, "--standalone", f"--nproc-per-node={ranks}", str(folder / "script.py")]
    began = time.monotonic()
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    ended = time.monotonic()
    if done.returncode != code:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return began, ended


def _start(command: Sequence[str], backend: str, ranks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began, ended = _run(command, SUM, folder, ranks, backend, 0)
        last = max(float((folder / str(rank)).read_text()) for rank in range(ranks))
        return {"first all_reduce, s": last - began, "command, s": ended - began}


def _death(command: Sequence[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, ended = _run(command, DEATH, folder, 2, "", 1)
        death, told = (float((folder / what).read_text()) for what in ("death", "told"))
        return {"death, ms": (told - death) * 1e3, "death, end, ms": (ended - death) * 1e3}


def _interpreters(program: str, count: int) -> dict[str, float]:
    began = time.monotonic()
    started = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    for process in started:
        process.wait()
    return {"first all_reduce, s": time.monotonic() - began}


def _pidfd() -> dict[str, float]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        time.sleep(0.05)
        os.write(write, json.dumps(time.monotonic()).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    watch = os.pidfd_open(pid)
    select.select([watch], [], [])
    knew = time.monotonic()
    os.waitpid(pid, 0)
    death = json.loads(os.read(read, 100))
    for descriptor in (read, write, watch):
        os.close(descriptor)
    return {"death, ms": (knew - death) * 1e3}


Values = dict[str, dict[str, list[float]]]  # contender -> measure -> a value for each round


def _rounds(contenders: dict[str, Callable[[], dict[str, float]]], rounds: int, found: Values) -> None:
    names = list(contenders)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            for what, value in contenders[name]().items():
                found.setdefault(name, {}).setdefault(what, []).append(value)
            print(f"round {turn + 1} of {rounds}: {name}", file=sys.stderr, flush=True)


def _markdown(found: Values) -> list[str]:
    columns = list(dict.fromkeys(what for values in found.values() for what in values))
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for name, values in found.items():
        lines.append(f"| {name} | " + " | ".join(_cell(found, values, what) for what in columns) + " |")
    return lines


def _cell(found: Values, values: dict[str, list[float]], what: str) -> str:
    if what not in values:
        return ""
    text = f"{_digits(statistics.median(values[what]))} ({_digits(min(values[what]))} to {_digits(max(values[what]))})"
    stock = found.get(STOCK, {}).get(what)
    if stock is None or stock is values[what]:
        return text
    ratio = statistics.median(mine / its for mine, its in zip(values[what], stock, strict=False))
    return f"{text}, {ratio:.2f} of torchrun's"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return (
        f"{model}, {cores} cores, load {load:.1f} at the end; Linux {platform.release()}; "
        f"Python {platform.python_version()}; torch {torch.__version__}"
    )


def main() -> None:
    """Run the benchmark, print the report, and with --out write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deaths", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the tables to this file, too")
    args = parser.parse_args()
    if sys.platform != "linux":
        sys.exit("the fork server and pidfds are Linux's")
    found: Values = {}
    starts: dict[str, Callable[[], dict[str, float]]] = {
        GLOO: lambda: _start(RUN, "gloo", args.ranks),
        MONARCH: lambda: _start(RUN, "monarch", args.ranks),
        STOCK: lambda: _start(TORCHRUN, "gloo", args.ranks),
        "floor: one import of torch": lambda: _interpreters("import torch", 1),
        f"floor: {args.ranks} idle interpreters": lambda: _interpreters("pass", args.ranks),
    }
    _interpreters("import torch, monarch_backend.process_group", 1)  # fills the page cache
    _rounds(starts, args.rounds, found)
    deaths = {GLOO: lambda: _death(RUN), STOCK: lambda: _death(TORCHRUN), "floor: pidfd": _pidfd}
    _rounds(deaths, args.deaths, found)
    lines = [f"# Starting {args.ranks} ranks", "", _machine(), ""]
    lines += [
        f"Medians (least to most), and the median of the rounds' ratios; {args.rounds} starts, {args.deaths} deaths."
    ]
    lines += ["", *_markdown(found), "", *NOTES, ""]
    print("\n".join(lines))
    if args.out is not None:
        args.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
