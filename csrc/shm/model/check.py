#!/usr/bin/env python3
"""Check the models in this folder with spin: `check.py [--slow] [NAME ...]`; see README.md.

Every case has an expected result: "holds", or the error that spin must find. Mutants must be rejected, among them the
defects that the code once had. This shows that the checker can find errors.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent

HOLDS = "holds"
WRONG = "assertion violated"
STUCK = "invalid end state"


@dataclass(frozen=True)
class Case:
    """One model with its parameters and its expected result."""

    name: str
    expected: str
    ranks: int = 2
    kinds: tuple[int, ...] = ()
    flags: tuple[str, ...] = ()
    model: str = "group.pml"
    slow: bool = False  # takes more than ten seconds

    def defines(self) -> list[str]:
        """Return the parameters as options of spin's preprocessor."""
        kinds = [f"-DK{i}={kind}" for i, kind in enumerate(self.kinds, 1)]
        return [f"-DN={self.ranks}", *kinds, *(f"-D{flag}" for flag in self.flags)]


@dataclass
class Outcome:
    """Result of a case."""

    found: str
    states: int = 0
    seconds: float = 0.0
    text: str = field(default="", repr=False)


# Kinds: 0: in slots; 1-3: large, with this number of chunks; 5-7: the same in two shots; + 16: chunks twice as wide;
# 8: direct reads.
MIXED = (0, 1, 0, 5)
LARGE = (7, 0, 3, 0)
WIDTHS = (1, 18, 5, 22)
DIRECT = (8, 0, 8, 3)
QUICK = [
    Case("slots", HOLDS, kinds=(0,) * 6),
    Case("mixed", HOLDS, kinds=MIXED),
    Case("large", HOLDS, kinds=LARGE),
    Case("large, both kinds", HOLDS, kinds=(3, 6, 0, 2, 5)),
    Case("large, widths mixed", HOLDS, kinds=WIDTHS, flags=("STAGE=4",)),
    Case("large, widths mixed, a death", HOLDS, kinds=(1, 18, 5, 17), flags=("STAGE=4", "DEATHS=1")),
    Case("direct", HOLDS, kinds=DIRECT),
    Case("large, a death", HOLDS, kinds=LARGE, flags=("DEATHS=1",)),
    Case("mixed, a death, time-outs", HOLDS, kinds=MIXED, flags=("DEATHS=1", "TIMEOUTS=2")),
    Case("large, time-outs", HOLDS, kinds=LARGE, flags=("TIMEOUTS=2",)),
    Case("direct, a death, time-outs", HOLDS, kinds=DIRECT, flags=("DEATHS=1", "TIMEOUTS=2")),
    Case("exits, a death", HOLDS, kinds=MIXED, flags=("EXITS", "DEATHS=1")),
    Case("direct, exits, a death, time-outs", HOLDS, kinds=DIRECT,
         flags=("EXITS", "DEATHS=1", "TIMEOUTS=1")),
    Case("3 ranks, exits, a death", HOLDS, ranks=3, kinds=(0, 0), flags=("EXITS", "DEATHS=1")),
    Case("threads", HOLDS, model="threads.pml"),
    Case("idea: `taken` without ring()", HOLDS, kinds=LARGE, flags=("QUIET_TAKEN",)),
    Case("mutant: one slot", WRONG, kinds=LARGE, flags=("M_ONE_SLOT",)),
    Case("mutant: one chunk buffer", WRONG, kinds=LARGE, flags=("M_ONE_BUFFER",)),
    Case("mutant: fills without looking at `taken`", WRONG, kinds=LARGE, flags=("M_NO_TAKEN",)),
    Case("mutant: collects without looking at `reduced`", WRONG, kinds=LARGE, flags=("M_NO_REDUCED",)),
    Case("mutant: no fence in ring()", STUCK, kinds=LARGE, flags=("M_NO_FENCE",)),
    Case("mutant: `entered` without ring()", STUCK, kinds=LARGE, flags=("M_NO_RING",)),
    Case("mutant: no look after announcing the sleep", STUCK, kinds=LARGE, flags=("M_NO_LOOK",)),
    Case("mutant: `ring_count` loaded after the look", STUCK, kinds=LARGE, flags=("M_HEARD_LATE",)),
    Case("mutant: the culprit words are not read", WRONG, ranks=3, kinds=(0, 0),
         flags=("EXITS", "DEATHS=1", "M_BLAME_LAST")),
    Case("mutant: direct, returns before all have taken", WRONG, kinds=DIRECT, flags=("M_NO_WAIT",)),
    Case("mutant: direct, trusts what it read of a rank that gave up", WRONG, kinds=DIRECT,
         flags=("M_NO_TRUST", "TIMEOUTS=1")),
    Case("mutant: direct, blames a rank for memory that was freed when it gave up", WRONG, kinds=DIRECT,
         flags=("M_NO_CAUSE", "TIMEOUTS=1")),
    Case("mutant: blames a rank that had done its part", WRONG, kinds=MIXED, flags=("M_NO_RETRY", "EXITS")),
    Case("mutant: blames a rank that had named the cause", WRONG, ranks=3, kinds=(0, 0),
         flags=("M_NO_REREAD", "EXITS", "DEATHS=1")),
    Case("mutant: a thread sleeps on", STUCK, model="threads.pml", flags=("M_TRY_LOOK",)),
]  # fmt: skip
SLOW = [
    Case("3 ranks, large", HOLDS, ranks=3, kinds=(6, 2), slow=True),
    Case("3 ranks, mixed", HOLDS, ranks=3, kinds=MIXED, slow=True),
    Case("3 ranks, slots, a death, a time-out", HOLDS, ranks=3, kinds=(0, 0, 0), flags=("DEATHS=1", "TIMEOUTS=1"),
         slow=True),
    Case("3 ranks, slots, two deaths", HOLDS, ranks=3, kinds=(0, 0, 0), flags=("DEATHS=2",), slow=True),
    Case("3 ranks, mixed, a death", HOLDS, ranks=3, kinds=MIXED, flags=("DEATHS=1",), slow=True),
    Case("3 ranks, direct, a death", HOLDS, ranks=3, kinds=(8, 0, 8), flags=("DEATHS=1",), slow=True),
    Case("3 ranks, large, exits, a death", HOLDS, ranks=3, kinds=(0, 1),
         flags=("EXITS", "DEATHS=1"), slow=True),
]  # fmt: skip
CASES = [*QUICK, *SLOW]


def missing() -> str:
    """Return the names of missing tools, or ''."""
    return ", ".join(tool for tool in ("spin", "gcc") if shutil.which(tool) is None)


def run(case: Case) -> Outcome:
    """Explore all states of a case."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:

        def call(*command: str) -> str:
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if result.returncode != 0:
                raise RuntimeError(f"{case.name}: {command[0]} failed:\n{result.stdout}{result.stderr}")
            return result.stdout

        shutil.copy(HERE / case.model, folder)
        call("spin", "-a", *case.defines(), case.model)
        call("gcc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=12000", "-o", "pan", "pan.c")
        text = call("./pan", "-m100000", "-w26" if case.slow else "-w20")
    error = re.search(r"^pan:\d+: (assertion violated|invalid end state)", text, re.MULTILINE)
    clean = "errors: 0\n" in text and not re.search("not completed|max search depth|out of memory", text)
    states = re.search(r"(\d+) states, stored", text)
    found = error.group(1) if error else HOLDS if clean else "not completed"
    return Outcome(found, int(states.group(1)) if states else 0, time.monotonic() - began, text)


def main() -> int:
    """Run the selected cases. Return the exit status: 1 if a result is not the expected one, 2 if a tool is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", action="store_true", help="three ranks as well: some minutes")
    parser.add_argument("names", nargs="*", help="only cases with one of these in their name")
    options = parser.parse_args()
    if missing():
        print(f"not on this machine: {missing()}", file=sys.stderr)
        return 2
    wrong = 0
    for case in CASES:
        if case.slow and not options.slow:
            continue
        if options.names and not any(name in case.name for name in options.names):
            continue
        outcome = run(case)
        good = outcome.found == case.expected
        wrong += not good
        print(f"{'ok   ' if good else 'WRONG'} {outcome.states:>10,} states {outcome.seconds:6.1f} s  "
              f"{case.name}: {outcome.found}", flush=True)  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
