#!/usr/bin/env python3
"""Prints the table of torch releases and passed tests, from junit files that are named after the release.

    python -m pytest tests/dtensor --junitxml=build/torch/2.15.0-dtensor.xml     # in the environment of the release
    python tools/torch_table.py build/torch

A test that is in several files of a release counts once, by its newest run. A cell has the passed tests, of how many.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

# A column and the beginning of its tests' names. The first that fits has the test.
COLUMNS = {
    "backend": ("tests.process_group.",),
    "actors": ("tests.actor.",),
    "hosts": ("tests.hosts.",),
    "registered memory": ("tests.rdma.",),
    "controller: FSDP2": ("tests.dtensor.training.test_fsdp",),
    "controller: captured": ("tests.dtensor.compile.",),
    "controller: eager": ("tests.dtensor.",),
}


def column_of(name: str) -> str | None:
    """Return the column that has a test."""
    return next((column for column, starts in COLUMNS.items() if name.startswith(starts)), None)


def results(folder: Path) -> dict[str, dict[str, bool]]:
    """Return by release whether each test that was not skipped has passed."""
    found: dict[str, dict[str, bool]] = collections.defaultdict(dict)
    for file in sorted(folder.glob("*.xml"), key=lambda each: each.stat().st_mtime):
        release = re.match(r"\d+\.\d+\.\d+", file.name)
        if release is None:
            raise SystemExit(f"{file}: the name does not begin with a release of torch")
        for case in ET.parse(file).iter("testcase"):
            kinds = {each.tag for each in case}
            if "skipped" not in kinds:
                name = f"{case.get('classname')}::{case.get('name')}"
                found[release[0]][name] = not kinds & {"failure", "error"}
    return found


def table(found: dict[str, dict[str, bool]]) -> str:
    """Return the table."""
    lines = [f"| torch | {' | '.join(COLUMNS)} |", "| --- |" + " --- |" * len(COLUMNS)]
    for release in sorted(found, key=lambda each: [int(part) for part in each.split(".")]):
        cells = []
        for column in COLUMNS:
            passed = [ok for name, ok in found[release].items() if column_of(name) == column]
            cells.append(f"{sum(passed)} of {len(passed)}" if passed else "not run")
        lines.append(f"| {release} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="folder with files as 2.15.0-dtensor.xml")
    print(table(results(parser.parse_args().folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
