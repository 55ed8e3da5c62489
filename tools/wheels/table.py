"""Table of wheels in the documentation: which were built, installed and tested. `python -m tools.wheels.table`.

Builds and smoke tests add their results to `results.json`; this writes them between two markers in a page.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from pathlib import Path

from tools.wheels.targets import DEBIAN_PYTHONS, PLATFORMS, PYTHONS, Target, all_targets

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "wheels.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- wheels: written by tools/wheels/table.py -->", "<!-- end of wheels -->"


class Results:
    """Results by wheel tag, in a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}

    def begin(self, target: Target, **values: str) -> None:
        """Add the first values of a new wheel. Those of an older wheel with the same tag are dropped."""
        self.all.pop(target.tag, None)
        self.add(target, **values)

    def add(self, target: Target, **values: str) -> None:
        """Add values to the results of one wheel, and write the file."""
        self.all.setdefault(target.tag, {}).update(values)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.all, indent=1, sort_keys=True) + "\n")


def long_table(results: Results) -> str:
    """One line per wheel."""
    lines = [
        "| Python | platform | wheel | installed in | smoke test | ran on |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for target in all_targets():
        found = results.all.get(target.tag, {})
        cells = [_cell(target, found, name) for name in ("built", "installed", "smoke")] + [found.get("on", "")]
        lines.append(f"| {target.python} | {target.platform.wheel} | {' | '.join(cells)} |")
    return "\n".join(lines)


def short_table(results: Results) -> str:
    """One line per platform, one column per Python."""
    lines = [f"| wheel | {' | '.join(PYTHONS)} |", f"| --- |{' --- |' * len(PYTHONS)}"]
    for each in PLATFORMS.values():
        found = [results.all.get(Target(python, each).tag, {}) for python in PYTHONS]
        lines.append(f"| {each.name} | {' | '.join(map(_state, found))} |")
    return "\n".join(lines)


def _cell(target: Target, found: dict[str, str], name: str) -> str:
    """A result, or why there is none."""
    if name in found:
        return found[name]
    if name == "built":
        return f"failed: {found['failed']}" if "failed" in found else "not built"
    if "built" not in found:
        return "no wheel"
    if not target.platform.is_linux:
        return "not run: needs a Mac"
    if target.platform.machine != platform.machine() and target.python not in DEBIAN_PYTHONS:
        return f"not run: no interpreter, Debian has none for {target.platform.machine}"
    return "not run"


def _state(found: dict[str, str]) -> str:
    smoke = found.get("smoke", "")
    if smoke.startswith("ok, torch"):
        return "tested"
    if smoke.startswith("ok"):
        return "core tested"
    if smoke:
        return "test failed"
    return next((state for state in ("built", "failed") if state in found), "no")


def insert(page: Path, table: str) -> None:
    """Replace what is between the markers of a page."""
    text = page.read_text()
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    changed, count = re.subn(pattern, lambda _: f"{BEGIN}\n\n{table}\n\n{END}", text, flags=re.S)
    if count != 1:
        raise RuntimeError(f"{page} has no place for the table, or several")
    page.write_text(changed)


def main() -> int:
    """The command line; returns the exit status."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "wheels" / "results.json"
    results = Results(path)
    insert(PAGE, long_table(results))
    insert(README, short_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
