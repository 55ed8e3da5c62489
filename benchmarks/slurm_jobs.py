"""Jobs on a Slurm cluster of this machine: this project's SlurmJob and torchmonarch's.

    python tools/peer_env.py torchmonarch       # once: the peer's own environment
    python benchmarks/slurm_jobs.py [--rounds N] [--limit SECONDS] [--out FILE]

Needs root, and Slurm's packages (tests/support/slurm_cluster.py). Each system has two nodes of three. A program on the
login node submits the job, starts one process on each node, and calls an endpoint that does not return.

ready        seconds from the program's first line until both processes have imported torch and replied
error        seconds from a fault until the pending call raises in the program; "> LIMIT" if it does not raise
left behind  jobs of Slurm and processes on the nodes, when kill() returns, and a minute after the program was killed

torchmonarch reads the JSON of `squeue` of newer releases. Debian's Slurm is 22.05, where its `state()` raises. So it
runs with a `squeue` that converts the output (_slurm_squeue.py), and without it once to record the error.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.slurm_cluster import SlurmCluster, refusal, slurm_cluster

HERE = Path(__file__).resolve().parent
PEER = HERE.parent / ".envs" / "peer-torchmonarch" / "bin" / "python"
START_LIMIT_S = 90.0
LEFT_AFTER_S = 60.0
SYSTEMS = {
    "ours": (Path(sys.executable), HERE / "slurm_runners" / "ours.py"),
    "torchmonarch": (PEER, HERE / "slurm_runners" / "torchmonarch_peer.py"),
}
Fault = Callable[[SlurmCluster, list[int]], None]
FAULTS: dict[str, Fault] = {
    "worker killed": lambda _, pids: os.kill(pids[1], signal.SIGKILL),
    "scancel": lambda cluster, _: cluster.run("scancel", "--user=root") and None,
    "node crashed": lambda cluster, _: cluster.crash_node(1),
}


class StartError(Exception):
    """A program that has not printed its line. It has the end of the error output."""


class Runner:
    """A program on the login node."""

    def __init__(self, cluster: SlurmCluster, system: str, folder: Path, *, converts: bool = True) -> None:
        python, script = SYSTEMS[system]
        own = tempfile.mkdtemp(dir=folder)  # of this job, for its file and logs
        environment = dict(cluster.environment)
        if system != "ours":
            environment["PYTHONPATH"] = ""
            if converts:
                environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
        self._errors = open(folder / f"{system}.err", "wb+")  # noqa: SIM115
        self.process = subprocess.Popen(
            cluster.where.command(0, str(python), str(script), own),
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    def read(self, limit: float) -> Any:
        """Return the next line's content; None if there is none within ``limit`` seconds."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], limit)[0]:
            return None
        line = self.process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise StartError(self._errors.read().decode(errors="replace").strip()[-600:])
        return json.loads(line)

    def send(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._errors.close()


def left(cluster: SlurmCluster) -> str:
    """Return the number of jobs and of processes that are there, without those of Slurm."""
    mine = [words for words in cluster.processes().values() if "slurm" not in words.split()[0]]
    return f"{len(cluster.jobs())} jobs, {len(mine)} processes"


def clean(cluster: SlurmCluster) -> None:
    cluster.run("scancel", "--user=root", check=False)
    if not cluster.where.processes(2):
        cluster.repair_node(1)
    cluster.wait_until_idle()
    for pid in cluster.processes():
        os.kill(pid, signal.SIGKILL)


def measure(cluster: SlurmCluster, system: str, fault: str, folder: Path, limit: float) -> dict[str, Any]:
    """Return ready, error and the text of the error after one fault."""
    runner = Runner(cluster, system, folder)
    try:
        answer = runner.read(START_LIMIT_S)
        if answer is None:
            raise StartError(f"not ready within {START_LIMIT_S:g} s")
        ready, pids = answer
        found: dict[str, Any] = {"ready": ready}
        runner.send("wait")
        time.sleep(1.5)  # between two heartbeats
        begun = time.time()
        FAULTS[fault](cluster, pids)
        raised = runner.read(limit)
        found["error"], found["text"] = (None, "") if raised is None else (raised[0] - begun, raised[1])
        return found
    finally:
        runner.end()
        clean(cluster)


def leftovers(cluster: SlurmCluster, system: str, end: str, folder: Path) -> str:
    """Return what is left after kill(), or after a program that was killed."""
    runner = Runner(cluster, system, folder)
    try:
        if runner.read(START_LIMIT_S) is None:
            raise StartError(f"not ready within {START_LIMIT_S:g} s")
        if end == "kill()":
            runner.send("end")
            seconds = runner.read(START_LIMIT_S)
            return f"{left(cluster)} at its return after {seconds:.1f} s"
        runner.process.kill()
        time.sleep(LEFT_AFTER_S)
        return f"{left(cluster)} after {LEFT_AFTER_S:g} s"
    finally:
        runner.end()
        clean(cluster)


def _last_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no output"])[-1]


def without_conversion(cluster: SlurmCluster, folder: Path) -> str:
    runner = Runner(cluster, "torchmonarch", folder, converts=False)
    try:
        answer = runner.read(START_LIMIT_S)
        return "not ready" if answer is None else f"ready after {answer[0]:.1f} s"
    except StartError as error:
        return _last_line(error)
    finally:
        runner.end()
        clean(cluster)


def report(results: dict[str, Any], limit: float) -> str:
    def seconds(values: list[float | None]) -> str:
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return f"> {limit:g} ({len(values) - len(known)} of {len(values)} times)"
        return f"{statistics.median(known):.2f}" if known else "-"

    systems = list(results["ready"])
    lines = ["| | " + " | ".join(systems) + " |", "| --- |" + " --- |" * len(systems)]
    lines.append("| ready, s | " + " | ".join(seconds(results["ready"][system]) for system in systems) + " |")
    for fault in FAULTS:
        row = " | ".join(seconds(results["error"][system].get(fault, [])) for system in systems)
        lines.append(f"| {fault}: error after s | {row} |")
    for end in ("kill()", "program killed"):
        row = " | ".join(results["left"][system].get(end, "-") for system in systems)
        lines.append(f"| left behind, {end} | {row} |")
    lines += ["", *(f"- {text}" for text in results["texts"])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for an error")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if why := refusal():
        sys.exit(f"no Slurm cluster: {why}")
    systems = list(SYSTEMS) if PEER.exists() else ["ours"]
    results: dict[str, Any] = {
        "ready": {each: [] for each in systems}, "error": {each: {} for each in systems},
        "left": {each: {} for each in systems}, "texts": [],
    }  # fmt: skip
    if len(systems) == 1:
        results["texts"].append("torchmonarch: not installed; run: python tools/peer_env.py torchmonarch")
    with tempfile.TemporaryDirectory() as name, slurm_cluster(3) as cluster:
        folder = Path(name)
        (folder / "bin").mkdir()
        shutil.copy(HERE / "_slurm_squeue.py", folder / "bin" / "squeue")
        (folder / "bin" / "squeue").chmod(0o755)
        if "torchmonarch" in systems:
            results["texts"].append(
                f"torchmonarch on 22.05 without the conversion: {without_conversion(cluster, folder)}"
            )
        for fault in FAULTS:
            for turn in range(args.rounds):
                for system in systems[turn % len(systems) :] + systems[: turn % len(systems)]:
                    print(f"{fault}, round {turn + 1} of {args.rounds}: {system}", file=sys.stderr, flush=True)
                    try:
                        found = measure(cluster, system, fault, folder, args.limit)
                    except StartError as error:
                        results["texts"].append(f"{system}, {fault}: did not start: {_last_line(error)}")
                        continue
                    results["ready"][system].append(found["ready"])
                    results["error"][system].setdefault(fault, []).append(found["error"])
                    if turn == 0 and found["text"]:
                        results["texts"].append(f"{system}, {fault}: {' '.join(found['text'].split())[:400]}")
        for end in ("kill()", "program killed"):
            for system in systems:
                print(f"left behind, {end}: {system}", file=sys.stderr, flush=True)
                try:
                    results["left"][system][end] = leftovers(cluster, system, end, folder)
                except StartError as error:
                    results["left"][system][end] = f"did not start: {_last_line(error)}"
    text = report(results, args.limit)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
