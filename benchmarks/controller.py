"""Benchmark of DTensors from one controller: operations, their floor, torchmonarch, and a model's step.

    python tools/peer_env.py torchmonarch           # once: the peer's own environment
    python benchmarks/controller.py [--rounds N] [--only operations kinds workers model] [--sizes 2 4] [--out DIR]

operations   additions of 8 x 16 float32 from one thread: until all are issued, and until two workers have done all.
             Compared with a plain tensor, and with a tensor subclass in Python that does nothing, the floor of any such
             design. "CPU" is CPU time, of the controller's threads and of a worker's. It depends less on other load
redistribute from Shard(0) to Replicate, many in a row without waiting for results. Compared with torch's own DTensor of
             meta tensors on torch's fake group. Both include torch's Python up to the plan; the rest is ours
kinds        other operations on DTensors: with numbers, in place, views, indices, cat. Each is compared with torch's
             own DTensor with one rank's shards on the CPU, torch's fake group and no workers. That is the floor of any
             design that uses torch's dispatch. An operation that gathers first runs a collective of two processes
             here, and no communication there
workers      cost of an operation in the controller with 2, 8, 32 and 1,024 simulated workers
model        a step of examples/train_lm.py with tensor parallelism: under torchrun, eager and with torch.compile; from
             one controller, operation by operation and captured by torch.compile(backend="monarch"). Also the number of
             records of a captured step

Each contender has its own process, which sleeps between requests. A round measures all contenders. Figures are medians
over the rounds, and ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _controller_runner import operation_names
from _machine_report import Others, machine

ROOT = Path(__file__).parents[1]
RUNNER = Path(__file__).with_name("_controller_runner.py")
WORKERS = (2, 8, 32, 1024)
OPERATIONS, REDISTRIBUTIONS, STEPS = 4000, 300, 8


class Runner:
    """The process of a contender. ``why`` is the reason if it cannot be measured, otherwise empty."""

    def __init__(self, name: str, python: str = sys.executable, launcher: Sequence[str] = ()) -> None:
        self.name, self.why = name, ""
        self._process: Any = None
        if not Path(python).exists():
            self.why = "not installed; run: python tools/peer_env.py torchmonarch"
            return
        command = [python, *launcher, str(RUNNER), name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
        )
        if self._read() != "ready":
            self.why = self.why or "it did not start"

    def _read(self) -> Any:
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self.why = ([*self._process.communicate()[1].strip().splitlines(), "?"][:-1] or ["?"])[-1]
        return None

    def ask(self, case: str, count: int) -> Any:
        """Send a request and return the answer, or None if this contender cannot be measured."""
        if self.why:
            return None
        print(json.dumps({"case": case, "count": count}), file=self._process.stdin, flush=True)
        return self._read()

    def end(self) -> None:
        """Close the process's standard input, which ends it, and wait."""
        if self._process is not None and self._process.poll() is None:
            self._process.stdin.close()
            self._process.wait(60)


Found = defaultdict[str, list[Any]]


Case = tuple[Runner, str, int]


def rounds(runners: Sequence[Runner], cases: Sequence[Case], count: int, before_the_end: Sequence[Case] = ()) -> Found:
    """Measure the cases in each round. Return "runner case" -> the answers of all rounds."""
    found: Found = defaultdict(list)
    for runner, case, few in cases:
        runner.ask(case, max(1, few // 4))  # warm up signatures, threads and caches
    for turn in range(count):
        for runner, case, number in [*cases[turn % len(cases) :], *cases[: turn % len(cases)]]:
            found[f"{runner.name} {case}"].append(runner.ask(case, number))
    for runner, case, number in before_the_end:
        found[f"{runner.name} {case}"].append(runner.ask(case, number))
    for runner in runners:
        runner.end()
    return found


def middle(values: list[Any], at: int | None = None) -> float:
    """Return the median in microseconds."""
    return 1e6 * statistics.median(each if at is None else each[at] for each in values)


def ratio(one: list[Any], other: list[Any], at: int | None = None) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(
        (a if at is None else a[at]) / (b if at is None else b[at]) for a, b in zip(one, other, strict=True)
    )


def operations(count: int) -> list[str]:
    """Return the table of the cases "operations" and "redistribute"."""
    peer = str(ROOT / ".envs" / "peer-torchmonarch" / "bin" / "python")
    plain, alone, ours, monarch = Runner("plain"), Runner("dtensor"), Runner("ours"), Runner("monarch", peer)
    cases = [
        (plain, "add", OPERATIONS), (plain, "subclass", OPERATIONS), (alone, "dtensor", OPERATIONS),
        (ours, "add", OPERATIONS), (ours, "dtensor", OPERATIONS), (ours, "item", 200),
        (alone, "redistribute", REDISTRIBUTIONS), (ours, "redistribute", REDISTRIBUTIONS),
        (ours, "redistribute, ours", REDISTRIBUTIONS), (monarch, "add", 100),
    ]  # fmt: skip
    found = rounds([plain, alone, ours, monarch], cases, count)
    lines = ["| operation | issued, us | done, us | a second | CPU here, us | CPU of a worker, us | |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")

    def row(name: str, key: str, note: str = "") -> None:
        issued, done, here, there = (middle(found[key], at) for at in range(4))
        lines.append(f"| {name} | {issued:.2f} | {done:.2f} | {1e6 / done:,.0f} | {here:.2f} | {there:.2f} | {note} |")

    row("plain tensor", "plain add", "limit: the kernel and torch's dispatcher")
    row("a subclass that does nothing", "plain subclass", "floor of any tensor subclass in Python")
    row("DTensor of meta tensors, no workers", "dtensor dtensor", "torch's own part")
    ours_add = found["ours add"]
    row("**remote tensor, 2 workers**", "ours add", f"{ratio(ours_add, found['plain subclass'], 1):.2f} of the floor")
    row("**DTensor, 2 workers**", "ours dtensor", "")
    row("**sum and read it**", "ours item", "the only thing that waits")
    if monarch.why:
        lines.append(f"| torchmonarch's engine, 2 workers | - | - | - | - | - | {monarch.why} |")
    else:
        times = ratio(found["monarch add"], ours_add, 1)
        row("torchmonarch's engine, 2 workers", "monarch add", f"{times:,.0f} times ours")
    ours_all, own_all = found["ours redistribute"], found["dtensor redistribute"]
    issued, done, here, there = (middle(ours_all, at) for at in range(4))
    lines.append(
        f"\nredistribute: issued in {issued:.0f} us, done by two workers in {done:.0f}; CPU: {here:.0f} us here, "
        f"{there:.0f} in a worker. What is ours of it, from torch's call for its plan to the result: issued in "
        f"{middle(found['ours redistribute, ours'], 0):.0f} us. torch's own DTensor of meta tensors on its fake "
        f"group: issued in {middle(own_all, 0):.0f} us, {middle(own_all, 2):.0f} of CPU"
    )
    return ["## Operations", "", *lines, ""]


def kinds(count: int) -> list[str]:
    """Return the table of the case "kinds"."""
    alone, ours = Runner("dtensor"), Runner("ours")
    names = operation_names()
    numbers = {name: OPERATIONS // (10 if "gathered" in name else 1) for name in names}
    found = rounds([alone, ours], [(each, name, numbers[name]) for name in names for each in (alone, ours)], count)
    lines = ["| DTensor, 2 workers | issued, us | issued a second | done a second | CPU here, us | torch's own, us | |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name in names:
        mine, own = found[f"ours {name}"], found[f"dtensor {name}"]
        issued, done, here = (middle(mine, at) for at in range(3))
        cells = [f"{issued:.1f}", f"{1e6 / issued:,.0f}", f"{1e6 / done:,.0f}", f"{here:.1f}", f"{middle(own, 0):.1f}"]
        cells.append(f"{ratio(mine, own, 0):.2f} of torch's own; CPU {ratio(mine, own, 2):.2f}")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return ["## Kinds of operations", "", *lines, ""]


def workers(count: int) -> list[str]:
    """Return the table of the case "workers"."""
    lines = ["| workers (simulated) | remote tensor, us | DTensor, us | uneven DTensor, us | redistribute, us |"]
    lines.append("| --- | --- | --- | --- | --- |")
    runners = [Runner(f"simulated:{size}") for size in WORKERS]
    kinds = {"add": OPERATIONS, "dtensor": OPERATIONS, "uneven": OPERATIONS, "redistribute": REDISTRIBUTIONS}
    found = rounds(runners, [(each, kind, number) for kind, number in kinds.items() for each in runners], count)
    for size in WORKERS:
        figures = [f"{middle(found[f'simulated:{size} {kind}'], 0):.2f}" for kind in kinds]
        lines.append(f"| {size:,} | {' | '.join(figures)} |")
    return ["## Cost by number of workers", "", *lines, ""]


def model(count: int, sizes: Sequence[int]) -> list[str]:
    """Return the table of the case "model"."""
    lines = ["| workers | | ms | of torchrun's step | of torchrun's compiled step | records a step |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for size in sizes:
        lines += _steps(count, size)
    return ["## A step of the language model", "", *lines, ""]


def _steps(count: int, size: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    launcher.append(f"--log-dir={ROOT / 'build' / 'torchrun-logs'}")  # without it torchrun leaves a folder in /tmp
    theirs, compiled = (Runner(f"lm:{how}", launcher=launcher) for how in ("torchrun", "torchrun-compiled"))
    one, captured = Runner(f"lm:one:{size}"), Runner(f"lm:compiled:{size}")
    names = {theirs: "torchrun", compiled: "torchrun, torch.compile", one: "one controller", captured: "captured"}
    able = [each for each in names if not each.why]
    cases = [(each, "step", STEPS) for each in able]
    counted = [(each, "records", 3) for each in (one, captured) if not each.why]
    found = rounds(able, cases, count, before_the_end=counted)
    lines = []
    for each, name in names.items():
        steps = found[f"{each.name} step"]
        if each.why or None in steps:
            lines.append(f"| {size} | {name} | {each.why} | | | |")
            continue
        ratios = [
            "" if base.why or base is each else f"{ratio(steps, found[f'{base.name} step']):.2f}"
            for base in (theirs, compiled)
        ]
        written = sorted({number for answer in found[f"{each.name} records"] for number in answer})
        cells = [name, f"{middle(steps) / 1e3:.1f}", *ratios, ", ".join(map(str, written))]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Run the benchmark and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("operations", "kinds", "workers", "model"),
        default=("operations", "kinds", "workers", "model"),
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=(2, 4))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks")
    args = parser.parse_args()
    others = Others()
    lines = ["# One controller", "", f"{machine()}; torch {torch.__version__}; {args.rounds} rounds", ""]
    if "operations" in args.only:
        lines += operations(args.rounds)
    if "kinds" in args.only:
        lines += kinds(args.rounds)
    if "workers" in args.only:
        lines += workers(args.rounds)
    if "model" in args.only:
        lines += model(args.rounds, args.sizes)
    lines.append(others.note())
    args.out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines) + "\n"
    (args.out / "controller.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
