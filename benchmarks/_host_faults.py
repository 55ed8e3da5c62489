"""Time from a fault on one host until another host reports it: our actors and launcher, torchmonarch, torchrun.

In each system a process on host 0 waits for a process on host 1. The fault happens on host 1. The time ends when the
process on host 0 reports an error, or at the limit. All settings are defaults, except `--max-restarts=0`. Bandwidth is
measured in hosts.py.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _host_runners import RUNNERS, Ended, Runner, RunnerTimeout, daemon, kill, runners

from tests.support.hosts import Hosts, address, hosts

PEER = Path(__file__).resolve().parents[1] / ".envs" / "peer-torchmonarch" / "bin" / "python"
RUN = [sys.executable, "-m", "monarch_backend", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PORT = 26603
SETTLED = 1.5  # seconds from the start until the fault: between two heartbeats, the usual case
WORDS = 300

Make = Callable[..., Runner]
Fault = Callable[[Hosts, int], float]  # takes the hosts and the pid of the worker on host 1; returns the fault's time


def _kill(_: Hosts, pid: int) -> float:
    begun = time.time()
    kill([pid])
    return begun


def _kill_host(where: Hosts, _: int) -> float:
    pids = sorted(where.processes(1))  # kill the first process first, so that it cannot report the end of the others
    begun = time.time()
    kill(pids)
    return begun


def _cut(where: Hosts, _: int) -> float:
    begun = time.time()
    where.cables.ip(1, "link set eth0 down")
    return begun


FAULTS: dict[str, Fault] = {"worker killed": _kill, "host's processes killed": _kill_host, "network cut": _cut}


@dataclass
class RunningSystem:
    """A running system: the process on host 0 that waits and reports the fault, and the pid of the worker on host 1."""

    waits: Runner
    worker: int
    launcher: bool = False  # the waiting process is a launcher, so the time until it ends is measured too


def _actors(make: Make, there: str) -> RunningSystem:
    daemon(make, there, "1")
    caller = make(0, sys.executable, RUNNERS / "ours.py", there, MONARCH_TLS="1")
    return RunningSystem(caller, _pending(caller))


def _torchmonarch(make: Make, there: str) -> RunningSystem:
    script, here = RUNNERS / "torchmonarch_peer.py", f"tcp://{address(0)}:{PORT}"
    make(1, PEER, script, "serve", f"tcp://{there}", PYTHONPATH="").read_line()
    caller = make(0, PEER, script, "call", f"tcp://{there}", here, PYTHONPATH="")
    return RunningSystem(caller, _pending(caller))


def _pending(caller: Runner) -> int:
    """Start a call that does not return. Return the pid of the worker that runs it."""
    pid = int(caller.read_line())
    caller.send("death", 0, 0)
    caller.read_line()
    return pid


def _launched(command: Sequence[str], backend: str, make: Make, _: str) -> RunningSystem:
    def launcher(host: int) -> Runner:
        words = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=0", f"--local-addr={address(host)}"]
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={address(0)}:{PORT}", "--rdzv-id=faults"]
        return make(host, *command, *words, RUNNERS / "rank.py", backend, GLOO_SOCKET_IFNAME="eth0")

    launchers = [launcher(0), launcher(1)]
    _, worker = (int(each.read_line()) for each in launchers)
    return RunningSystem(launchers[0], worker, launcher=True)


SYSTEMS: dict[str, Callable[[Make, str], RunningSystem]] = {
    "ours: the call raises": _actors,
    "torchmonarch: the call raises": _torchmonarch,
    "monarch-backend run, monarch": functools.partial(_launched, RUN, "monarch"),
    "torchrun, gloo": functools.partial(_launched, TORCHRUN, "gloo"),
}


def absent() -> dict[str, str]:
    """Return the systems that cannot be measured here, with the reasons."""
    if PEER.exists():
        return {}
    return {"torchmonarch: the call raises": "not installed; run: python tools/peer_env.py torchmonarch"}


def detect(rounds: int, limit: float, secret: str) -> Results:
    """Measure all faults in all systems. Rounds are interleaved, and each round starts with another system."""
    results, names = Results(limit), [name for name in SYSTEMS if name not in absent()]
    for fault in FAULTS:
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                print(f"{fault}, round {turn + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
                _once(name, fault, secret, results)
    return results


def _once(name: str, fault: str, secret: str, results: Results) -> None:
    with tempfile.TemporaryDirectory(prefix="mbh-", ignore_cleanup_errors=True) as folder, hosts(2) as where:
        with runners(where, MONARCH_SECRET_FILE=secret, OMP_NUM_THREADS="1", TMPDIR=folder) as make:
            system = SYSTEMS[name](make, f"{address(1)}:{PORT}")
            time.sleep(SETTLED)
            begun = FAULTS[fault](where, system.worker)
            seconds, words = _wait_for_report(system.waits, begun, results.limit)
            results.add(f"{name}: the rank raises" if system.launcher else name, fault, seconds, words)
            if system.launcher:
                results.add(f"{name}: the launcher has ended", fault, _end(system.waits, begun, results.limit))


def _wait_for_report(waits: Runner, begun: float, limit: float) -> tuple[float | None, str]:
    """Wait for the report of the fault. Return its time after the fault and its text.

    The time is None if there is no report within the limit, and NaN if the process ended without one. The reporting
    process takes the time.
    """
    try:
        end, text = json.loads(waits.read_line(begun + limit - time.time()))
    except RunnerTimeout:
        return None, ""
    except Ended:
        return math.nan, ""
    return end - begun, str(text)


def _end(waits: Runner, begun: float, limit: float) -> float | None:
    try:
        return waits.end(begun + limit - time.time()) - begun
    except RunnerTimeout:
        return None


@dataclass
class Results:
    """Results of all rounds. None is a round without a report within the limit, NaN an end without a report."""

    limit: float
    seconds: dict[tuple[str, str], list[float | None]] = field(default_factory=dict)  # (system, fault) -> times
    words: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, system: str, fault: str, seconds: float | None, words: str = "") -> None:
        """Add the result of one round."""
        self.seconds.setdefault((system, fault), []).append(seconds)
        if words:
            self.words[system, fault] = " ".join(words.replace("|", "/").split())[:WORDS]

    def tables(self) -> list[str]:
        """Return the tables in Markdown."""
        lines = ["| seconds until | " + " | ".join(FAULTS) + " |", "| --- |" + " --- |" * len(FAULTS)]
        for system in dict.fromkeys(system for system, _ in self.seconds):
            lines.append(f"| {system} | " + " | ".join(self._cell(system, fault) for fault in FAULTS) + " |")
        lines += ["", "| seconds until | fault | report |", "| --- | --- | --- |"]
        for system, fault in sorted(self.words, key=list(self.seconds).index):
            lines.append(f"| {system} | {fault} | {self.words[system, fault]} |")
        return lines

    def _cell(self, system: str, fault: str) -> str:
        return ", ".join(map(self._text, self.seconds.get((system, fault), [])))

    def _text(self, value: float | None) -> str:
        if value is None:
            return f"> {self.limit:g}"
        return "ended without a report" if math.isnan(value) else f"{value:.3f}"
