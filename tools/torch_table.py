#!/usr/bin/env python3
"""Writes the table of docs/reference/torch-releases.md from the results in docs/reference/torch-results/.

    python tools/torch_tests.py 2.15.0     # runs the tests and writes the results of a release
    python tools/torch_table.py            # writes the table; --check only compares

A result has the counts of an area's tests on one release. It is made from the record of a run, in build/torch/.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "reference" / "torch-results"
PAGE = ROOT / "docs" / "reference" / "torch-releases.md"
BEGIN, END = "<!-- begin: tools/torch_table.py -->\n", "<!-- end: tools/torch_table.py -->\n"


@dataclass(frozen=True)
class Area:
    """Tests that are counted together."""

    paths: tuple[str, ...]
    oldest: str = "2.9"
    """The first release that has the feature at all."""
    without: tuple[str, ...] = ()


AREAS = {
    "backend": Area(("tests/process_group", "tests/test_torch_patches.py")),
    "commands": Area(("tests/cli", "tests/tpu")),
    "actors": Area(("tests/actor",)),
    "hosts": Area(("tests/hosts",)),
    "memory": Area(("tests/rdma",)),
    "patches": Area(("tests/dtensor/patches",), "2.11"),
    "operations": Area(("tests/dtensor/ops", "tests/dtensor/dispatch"), "2.11"),
    "controller": Area(
        ("tests/dtensor/controller", "tests/dtensor/devices", "tests/dtensor/worker"),
        "2.11",
    ),
    "training": Area(("tests/dtensor/training",), "2.11", without=("tests/dtensor/training/test_fsdp.py",)),
    "fsdp": Area(("tests/dtensor/training/test_fsdp.py",), "2.11"),
    "captured": Area(("tests/dtensor/compile",), "2.11"),
}
"""By the name that `make test-torch AREAS=...` takes."""


def lines_of(record: Path) -> list[dict[str, Any]]:
    """Return the lines of a record. A process that was killed may have left half a line at the end."""
    lines = record.read_text().splitlines() if record.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def outcomes(record: Path) -> dict[str, list[str]]:
    """Return by test its outcomes, the oldest first."""
    found: dict[str, list[str]] = {}
    for line in lines_of(record):
        if "test" in line:
            before = found.setdefault(line["test"], [])
            if before[-1:] == ["unfinished"]:
                before.pop()
            before.append(line["outcome"])
    return found


def summarize(release: str, area: str, record: Path) -> None:
    """Write the counts of a record into the release's result, in place of the area's last ones."""
    runs = [line for line in lines_of(record) if "commit" in line]
    found = outcomes(record)
    last = [each[-1] for each in found.values()]
    counts = {
        "sample": runs[0]["sample"],
        "passed": last.count("passed"),
        "passed in a second run": sum(each[-1] == "passed" and "failed" in each for each in found.values()),
        "failed": last.count("failed"),
        "skipped": last.count("skipped"),
        "unfinished": last.count("unfinished"),
        "failed tests": sorted(test for test, each in found.items() if each[-1] == "failed"),
        "torch": runs[0]["torch"],
        "python": runs[0]["python"],
        "date": runs[-1]["date"],
        "commits": list(dict.fromkeys(run["commit"] for run in runs)),
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{release}.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    result[area] = counts
    file.write_text(json.dumps({name: result[name] for name in AREAS if name in result}, indent=1) + "\n")


def results() -> dict[str, dict[str, Any]]:
    """Return the results by release, the oldest first."""
    files = sorted(RESULTS.glob("*.json"), key=lambda each: [int(part) for part in each.stem.split(".")])
    return {file.stem: json.loads(file.read_text()) for file in files}


def cell(release: str, area: str, counts: dict[str, Any] | None) -> str:
    """Return the text of a cell."""
    if counts is not None:
        text = f"{counts['passed']} / {counts['failed']} / {counts['skipped']}"
        text += f", {counts['unfinished']} not reached" if counts.get("unfinished") else ""
        return text if counts["sample"] else f"{text}, all"
    oldest = AREAS[area].oldest
    return "not run" if parts(release) >= parts(oldest) else f"needs {oldest}"


def parts(release: str) -> list[int]:
    """Return major and minor of a release, which can be compared."""
    return [int(part) for part in release.split(".")[:2]]


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the table, then what failed, then the runs."""
    lines = [f"| area | {' | '.join(found)} |", "| --- |" + " --- |" * len(found)]
    for area in AREAS:
        cells = [cell(release, area, result.get(area)) for release, result in found.items()]
        lines.append(f"| {area} | {' | '.join(cells)} |")
    failed = [(release, test) for release in found for each in found[release].values() for test in each["failed tests"]]
    lines += ["", "Failed tests: none." if not failed else "Failed tests:", ""]
    lines += [f"- {release}: `{test}`" for release, test in failed]
    lines += [""] if failed else []
    lines += ["| torch | Python | date | commits | passed in a second run only |", "| --- | --- | --- | --- | --- |"]
    for release, result in found.items():
        row = [", ".join(dict.fromkeys(each[key] for each in result.values())) for key in ("python", "date")]
        commits = ", ".join(dict.fromkeys(commit for each in result.values() for commit in each["commits"]))
        second = sum(each["passed in a second run"] for each in result.values())
        lines.append(f"| {release} | {' | '.join(row)} | {commits} | {second} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with a new table."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(results())}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="say whether the page has the table of the results")
    if parser.parse_args().check:
        return 0 if PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
