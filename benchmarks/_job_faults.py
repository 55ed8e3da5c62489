"""Faults of jobs that this project and torchmonarch run on a scheduler: programs, measurement, table.

For slurm_jobs.py and kubernetes_jobs.py. A program of job_runners/ writes lines of JSON to its output:

- ``"begun"``, after its imports
- the seconds until two processes, on two nodes, have imported torch and replied, and the pids of the processes
- after the input "wait": the time and the text of the error of a pending call; after "end": the seconds of kill()
"""

from __future__ import annotations

import argparse
import json
import math
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEER = HERE.parent / ".envs" / "peer-torchmonarch" / "bin" / "python"
OURS_RUNNER, PEER_RUNNER = (HERE / "job_runners" / name for name in ("ours.py", "torchmonarch_peer.py"))
START_LIMIT_S = 90.0
LEFT_AFTER_S = 60.0
ENDS = ("kill()", "program killed")


class StartError(Exception):
    """A program that has not printed its line. It has the end of the error output."""


class Testbed:
    """A scheduler's cluster. ``systems``: the words after the runner's name for each system that is compared.

    A system whose name starts with "ours" runs in this environment, and others in the peer's. ``faults`` get the pids
    of the processes. Systems in ``only_left`` have no faults.
    """

    systems: Mapping[str, list[str]]
    faults: Mapping[str, Callable[[list[int]], object]]
    only_left: frozenset[str] = frozenset()

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, system: str, words: list[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command line that runs a program, and its environment."""
        raise NotImplementedError

    def provide(self, system: str) -> None:
        """Start what the scheduler's users have started before the program, when the program has begun."""

    def left(self) -> str:
        """Return what is on the scheduler and on its nodes, in words."""
        raise NotImplementedError

    def clean(self) -> None:
        """Remove everything of programs, and repair the nodes."""
        raise NotImplementedError


class Program:
    """A running program of a system."""

    def __init__(self, testbed: Testbed, system: str) -> None:
        kind, *options = testbed.systems[system]
        own = tempfile.mkdtemp(dir=testbed.folder)  # of this job, for its file and logs
        python, script = (sys.executable, OURS_RUNNER) if system.startswith("ours") else (PEER, PEER_RUNNER)
        command, environment = testbed.command(system, [str(python), str(script), kind, own, *options])
        self._testbed, self._system = testbed, system
        self._errors = open(Path(own) / "errors", "wb+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def start(self) -> tuple[float, list[int]]:
        """Return the seconds until the processes have replied, and their pids."""
        self._expect()
        self._testbed.provide(self._system)
        ready, pids = self._expect()
        return ready, pids

    def _expect(self) -> Any:
        if (found := self.read(START_LIMIT_S)) is None:
            raise StartError(f"not ready within {START_LIMIT_S:g} s; {self._error_output()}")
        return found

    def read(self, limit: float) -> Any:
        """Return the next line's content; None if there is none within ``limit`` seconds."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], limit)[0]:
            return None
        line = self.process.stdout.readline()
        if not line:
            raise StartError(self._error_output())
        return json.loads(line)

    def _error_output(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()[-600:]

    def send(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._errors.close()
        self._testbed.clean()


def measure(testbed: Testbed, system: str, fault: str, limit: float) -> dict[str, Any]:
    """Return ready, error and the text of the error after one fault."""
    program = Program(testbed, system)
    try:
        ready, pids = program.start()
        program.send("wait")
        time.sleep(1.5)  # between two heartbeats
        begun = time.time()
        testbed.faults[fault](pids)
        raised = program.read(limit)
        seconds, text = (None, "") if raised is None else (raised[0] - begun, raised[1])
        return {"ready": ready, "error": seconds, "text": text}
    finally:
        program.end()


def leftovers(testbed: Testbed, system: str, end: str) -> str:
    """Return what is left after kill(), or after a program that was killed."""
    program = Program(testbed, system)
    try:
        program.start()
        if end == "kill()":
            program.send("end")
            try:
                seconds = program.read(START_LIMIT_S)
            except StartError as error:
                return f"{testbed.left()}; {last_line(error)}"
            return f"{testbed.left()} at its return after {seconds:.1f} s"
        program.process.kill()
        time.sleep(LEFT_AFTER_S)
        return f"{testbed.left()} after {LEFT_AFTER_S:g} s"
    finally:
        program.end()


def last_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no output"])[-1]


class Comparison:
    """Results of all systems of a testbed."""

    def __init__(self, testbed: Testbed, limit: float) -> None:
        self.testbed, self.limit = testbed, limit
        self.systems = [each for each in testbed.systems if each.startswith("ours") or PEER.exists()]
        self.ready: dict[str, list[float | None]] = {each: [] for each in self.systems}
        self.error: dict[tuple[str, str], list[float | None]] = {}
        self.left: dict[tuple[str, str], str] = {}
        self.texts: list[str] = []
        if not PEER.exists():
            self.texts.append("torchmonarch: not installed; run: python tools/peer_env.py torchmonarch")

    def run(self, rounds: int, faults: list[str], ends: list[str]) -> None:
        systems = [each for each in self.systems if each not in self.testbed.only_left]
        for fault in faults:
            for turn in range(rounds):
                for system in systems[turn % len(systems) :] + systems[: turn % len(systems)]:
                    print(f"{fault}, round {turn + 1} of {rounds}: {system}", file=sys.stderr, flush=True)
                    try:
                        found = measure(self.testbed, system, fault, self.limit)
                    except StartError as error:
                        self.texts.append(f"{system}, {fault}: did not start: {last_line(error)}")
                        continue
                    print(f"    {found}", file=sys.stderr, flush=True)
                    self.ready[system].append(found["ready"])
                    self.error.setdefault((system, fault), []).append(found["error"])
                    if turn == 0 and found["text"]:
                        self.texts.append(f"{system}, {fault}: {' '.join(found['text'].split())[:400]}")
        for end in ends:
            for system in self.systems:
                print(f"left behind, {end}: {system}", file=sys.stderr, flush=True)
                try:
                    self.left[system, end] = leftovers(self.testbed, system, end)
                except StartError as error:
                    self.left[system, end] = f"did not start: {last_line(error)}"
                print(f"    {self.left[system, end]}", file=sys.stderr, flush=True)

    def table(self) -> str:
        """Return the results in Markdown. The ratio is that of the last two systems."""
        ratio = [f"{self.systems[-1]} / {self.systems[-2]}"] if len(self.systems) > 1 else []
        lines = [_row("", [*self.systems, *ratio]), "| --- |" + " --- |" * len(self.systems + ratio)]
        lines.append(self._seconds("ready, s", [self.ready[system] for system in self.systems]))
        for fault in self.testbed.faults:
            values = [self.error.get((system, fault), []) for system in self.systems]
            lines.append(self._seconds(f"{fault}: error after s", values))
        for end in ENDS:
            row = [self.left.get((system, end), "-") for system in self.systems]
            lines.append(_row(f"left behind, {end}", row + [""] * len(ratio)))
        return "\n".join([*lines, "", *(f"- {text}" for text in self.texts)])

    def _seconds(self, name: str, values: list[list[float | None]]) -> str:
        """Return a row of medians, and the ratio of the last two."""
        cells: list[str] = []
        medians: list[float] = []  # NaN without a value
        for each in values:
            known = [seconds for seconds in each if seconds is not None]
            late = len(each) - len(known)
            medians.append(self.limit if late else statistics.median(known) if known else math.nan)
            cell = f"> {self.limit:g} ({late} of {len(each)} times)" if late else f"{medians[-1]:.2f}" if known else "-"
            cells.append(cell)
        if len(medians) > 1:
            ours, peer = medians[-2:]
            is_known = not math.isnan(ours + peer) and not cells[-2].startswith(">")
            sign = "> " if cells[-1].startswith(">") else ""
            cells.append(f"{sign}{peer / ours:.{0 if peer > 10 * ours else 1}f}" if is_known else "-")
        return _row(name, cells)


def _row(name: str, cells: list[str]) -> str:
    return "| " + " | ".join([name, *cells]) + " |"


def arguments(description: str, faults: list[str]) -> argparse.Namespace:
    """Return the arguments of a benchmark's command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for an error")
    parser.add_argument("--faults", nargs="*", choices=faults, default=faults)
    parser.add_argument("--ends", nargs="*", choices=ENDS, default=list(ENDS))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def show(text: str, path: Path | None) -> None:
    """Print a table, and write it to a file."""
    print(text)
    if path:
        path.write_text(text + "\n")
