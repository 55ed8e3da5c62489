#!/usr/bin/env python3
"""Runs the tests on one release of torch by area, and writes the counts to docs/reference/torch-results/.

    python tools/torch_tests.py 2.15.0                             # one parametrization of each test function
    python tools/torch_tests.py 2.15.0 --all --area patches        # all parametrizations of one area
    python tools/torch_tests.py 2.15.0 --again                     # what has failed or was not reached, once more

Each area is one run of pytest. The tests that failed run once more, alone, since some have tight time limits; the
counts say how many passed only then. `tools/torch_table.py` writes the table of docs/reference/torch-releases.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from torch_env import ROOT, BuildError, Environment, say
from torch_table import AREAS, Area, outcomes, parts, summarize

MARKS = "not slow and not gpu and not xla and not verbs and not slurm"
MOST_AGAIN = 60
"""More failures than this have a common cause, and do not run once more. Tests that a run did not reach always do."""


class Runs:
    """The runs on one release, one area after the other."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self.environment, self.folder = environment, folder

    def pytest(self, record: Path, *arguments: str) -> int:
        """Run pytest in the environment, with a record."""
        command = [str(self.environment.python), "-m", "pytest", "-q", "--continue-on-collection-errors"]
        command += ["-p", "tests.support.torch_record"]
        command += ["--record", str(record), "-m", MARKS, *arguments]
        return subprocess.run(command, cwd=ROOT, env=self.environment.variables(), check=False).returncode

    def run(self, name: str, area: Area, sample: bool) -> bool:
        """Run an area from its beginning, then what failed. Return whether all has passed."""
        record = self.folder / f"{name}.jsonl"
        record.unlink(missing_ok=True)
        left_out = [f"--ignore={path}" for path in area.without]
        status = self.pytest(record, *(["--sample"] if sample else []), *left_out, *area.paths)
        if not outcomes(record):
            say(f"{name}: pytest ended with status {status} and ran no test")
            return False
        return self.again(name) and status in (0, 1)

    def again(self, name: str) -> bool:
        """Run what has failed in an area once more. Return whether all has passed."""
        record = self.folder / f"{name}.jsonl"
        bad = failed(record)
        if bad and sum(outcomes(record)[test][-1] == "failed" for test in bad) <= MOST_AGAIN:
            say(f"{name}: {len(bad)} tests once more")
            self.pytest(record, *bad)
        summarize(self.environment.version, name, record)
        return not failed(record)


def failed(record: Path) -> list[str]:
    """Return the tests of a record that did not pass and were not skipped."""
    return [test for test, found in outcomes(record).items() if found[-1] in ("failed", "unfinished")]


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("version", help="a release of torch, as 2.14.1")
    parser.add_argument("--all", action="store_true", help="all parametrizations instead of one of each test function")
    parser.add_argument("--area", nargs="+", choices=AREAS, help="only these areas")
    parser.add_argument("--again", action="store_true", help="only what failed or was not reached in the last runs")
    args = parser.parse_args()
    environment = Environment(ROOT / ".envs" / f"torch-{args.version}", args.version)
    try:
        environment.build()
    except BuildError as error:
        say(str(error))
        return 1
    runs = Runs(environment, ROOT / "build" / "torch" / args.version)
    passed = True
    for name in args.area or AREAS:
        if parts(args.version) < parts(AREAS[name].oldest):
            say(f"{name}: needs torch {AREAS[name].oldest}")
        elif args.again:
            passed = (not (runs.folder / f"{name}.jsonl").exists() or runs.again(name)) and passed
        else:
            passed = runs.run(name, AREAS[name], sample=not args.all) and passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
