"""`monarch-backend profile`: torch.profiler on ranks of running programs, in one timeline with all that is recorded."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from monarch_backend._telemetry.labels import is_among
from monarch_backend.cli.arguments import add_program, fail

if TYPE_CHECKING:
    from monarch_backend._telemetry.programs import Process, Program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_program(parser)
    parser.add_argument(
        "--ranks",
        metavar="WHICH",
        help='only these processes: labels ("gpus 3"), pids, or indices of dimensions ("hosts=0 gpus=0,2-3")',
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--seconds", type=float, metavar="N", help="how long the profile lasts")
    length.add_argument("--steps", type=int, metavar="N", help="how many calls of telemetry.step() it covers")
    written = parser.add_mutually_exclusive_group()
    written.add_argument("-o", "--output", metavar="FILE", default="trace.json", help="timeline; default trace.json")
    written.add_argument("--flame", metavar="FILE.svg", help="write a flame graph of Python code instead; needs py-spy")


def run(args: argparse.Namespace) -> int:
    """Take the profiles. Return 0, or 1 with the reason if there is no such process, or none could be profiled."""
    from monarch_backend._telemetry import profile_result, profiles
    from monarch_backend._telemetry.programs import select

    try:
        profiles.check(args.seconds, args.steps, profiles.STEP_LIMIT_S)
        ranks = _ranks(select(args.program), args.ranks)
        if args.flame:
            return _write_flames(args.flame, args.seconds, ranks)
        with open(args.output, "a"):  # an error of the file comes before the profile
            pass
        result = profile_result.take([(each.pid, each.label) for each in ranks], seconds=args.seconds, steps=args.steps)
        counts = result.save(args.output)
    except (LookupError, NotImplementedError, OSError, ValueError) as error:
        return fail("profile", error)
    except KeyboardInterrupt:
        return fail("profile", "interrupted; nothing was written")
    print(
        f"{args.output}: {counts.get('X', 0)} slices, profiles of {len(result.labels)} of {len(ranks)} processes, "
        f"times within {result.clock_error_bound_ns / 1000:.1f} us. Open it in https://ui.perfetto.dev"
    )
    for label, problem in result.problems.items():
        print(f"no profile of {label}: {problem}")
    for line in result.shortfalls(args.steps):
        print(line)
    return 0 if result.labels else 1


def _ranks(programs: list[Program], which: str | None) -> list[Process]:
    """Return the chosen processes; without a choice all, but not a program's own process beside those it started."""
    running = [(program, each) for program in programs for each in program.processes if each.state == "running"]
    if which is not None:
        chosen = [each for _, each in running if is_among(each.label, each.pid, which)]
    else:
        started = {id(program) for program, each in running if each.parent}
        chosen = [each for program, each in running if each.parent or id(program) not in started]
    if not chosen:
        labels = ", ".join(f"{each.label} (pid {each.pid})" for _, each in running) or "none"
        raise LookupError(f"no process is {which!r}; there are: {labels}" if which else "no program of this user runs")
    return chosen


def _write_flames(path: str, seconds: float | None, ranks: list[Process]) -> int:
    """Write a flame graph of each process: to ``path``, or with the pid in the name for several."""
    from monarch_backend._telemetry import py_spy

    if seconds is None:
        raise ValueError("--flame needs --seconds, because py-spy knows no steps")
    if py_spy.find() is None:
        raise LookupError('--flame needs py-spy: pip install "monarch_backend[stacks]"')
    file = Path(path)
    files = [file if len(ranks) == 1 else file.with_suffix(f".{each.pid}{file.suffix or '.svg'}") for each in ranks]

    def write(process: Process, target: Path) -> str:
        try:
            py_spy.record(process.pid, seconds, str(target))
        except py_spy.PySpyError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        problems = list(pool.map(write, ranks, files))
    for process, target, problem in zip(ranks, files, problems, strict=True):
        print(f"no flame graph of {process.label}: {problem}" if problem else f"{target}: {process.label}")
    return 1 if all(problems) else 0
