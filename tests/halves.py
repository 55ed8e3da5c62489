"""Runner of tests in two parallel runs of pytest: `python -m tests.halves -m "not slow" --durations=25`.

Many tests wait for a timeout, and the other half uses the processor meanwhile. The folders of the second half are
listed below, so that the order of tests is the same in every run. `-- PATHS -- PATHS` runs these in place of all tests.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SECOND = ("dtensor", "ecosystem", "job", "rdma", "telemetry", "testing")
"""Folders of the second half. They take as long as all others together."""
APART = ("clients",)
"""Folders that need an environment of their own: `make test-clients`."""
NO_TESTS = 5
"""Exit status of pytest if it ran no tests."""


def halves() -> tuple[list[str], list[str]]:
    """Return the paths of the two runs. Each folder and each file with tests is in one of them, or is in APART."""
    tops = sorted({HERE / path.relative_to(HERE).parts[0] for path in HERE.glob("*/**/test_*.py")})
    first = [str(path) for path in [*tops, *sorted(HERE.glob("test_*.py"))] if path.name not in (*SECOND, *APART)]
    return first, [str(HERE / name) for name in SECOND]


def split_at_dashes(words: Sequence[str]) -> list[list[str]]:
    """Split the words of a command line at each `--`.

    >>> split_at_dashes(["-q", "--", "a", "b", "--", "c"])
    [['-q'], ['a', 'b'], ['c']]
    """
    groups: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            groups.append([])
        else:
            groups[-1].append(word)
    return groups


def run(arguments: Sequence[str], first: Sequence[str], second: Sequence[str], log: Path) -> int:
    """Run pytest on both lists of paths and return its exit status.

    The output of the second run is written to the log, and printed after the first run has ended.
    """
    command = [sys.executable, "-m", "pytest", *arguments]
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as out:
        beside = subprocess.Popen([*command, *second], stdout=out, stderr=subprocess.STDOUT)
        runs = [subprocess.Popen([*command, *first]), beside]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runs get it, too, and print their results so far
    signal.signal(signal.SIGTERM, lambda *_: [each.terminate() for each in runs])
    runs[0].wait()
    print("\n======== the other half ========\n", flush=True)
    _follow(log, beside)
    return status([each.returncode for each in runs])


def status(codes: Sequence[int]) -> int:
    """Return the exit status of both halves.

    If ``-k`` or ``-m`` selects no test of one half, only the other half counts.
    """
    return max((abs(code) for code in codes if code != NO_TESTS), default=NO_TESTS)


def _follow(log: Path, writer: subprocess.Popen[bytes]) -> None:
    with log.open("rb") as said:
        ended = False
        while not ended:
            ended = writer.poll() is not None  # checked before the copy, so that the last output is copied
            shutil.copyfileobj(said, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            if not ended:
                time.sleep(0.2)


if __name__ == "__main__":
    options, *chosen = split_at_dashes(sys.argv[1:])
    if len(chosen) not in (0, 2):
        sys.exit("give no paths, or those of both runs: OPTIONS -- PATHS -- PATHS")
    sys.exit(run(options, *(chosen or halves()), HERE.parent / "build" / "second-half.log"))
