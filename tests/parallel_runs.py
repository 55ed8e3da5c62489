"""Runner of tests in parallel runs of pytest: `python -m tests.parallel_runs -m "not slow" --durations=25`.

Many tests wait for a timeout, and other runs use the processor meanwhile. The folders of each run are listed below, so
that the order of tests is the same every time. `-- PATHS -- PATHS` runs these in place of all tests.
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
FOLDERS = (("dtensor", "processes", "rdma", "testing"), ("ecosystem", "job", "process_group", "telemetry"))
"""Folders of each run but the first, which has all others. All runs take equally long."""
APART = ("clients",)
"""Folders that need environments of their own: `make test-clients`."""
NO_TESTS = 5
"""Exit status of pytest if it ran no tests."""


def all_runs() -> list[list[str]]:
    """Return the paths of each run. Each folder and each file with tests is in one of them, or is in APART."""
    tops = sorted({HERE / path.relative_to(HERE).parts[0] for path in HERE.glob("*/**/test_*.py")})
    taken = {*APART, *(name for names in FOLDERS for name in names)}
    first = [str(path) for path in [*tops, *sorted(HERE.glob("test_*.py"))] if path.name not in taken]
    return [first, *([str(HERE / name) for name in names] for names in FOLDERS)]


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


def run(arguments: Sequence[str], paths: Sequence[Sequence[str]], logs: Path) -> int:
    """Run pytest on each list of paths and return the exit status.

    The first run prints at once. The output of each other run is written to a log in the folder ``logs``, and printed
    after the runs before it have ended.
    """
    command = [sys.executable, "-m", "pytest", *arguments]
    logs.mkdir(exist_ok=True)
    runs: list[subprocess.Popen[bytes]] = []
    files = [logs / f"tests-{number}.log" for number in range(1, len(paths))]
    for file, chosen in zip(files, paths[1:], strict=True):
        with file.open("wb") as out:
            runs.append(subprocess.Popen([*command, *chosen], stdout=out, stderr=subprocess.STDOUT))
    runs.insert(0, subprocess.Popen([*command, *paths[0]]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runs get it, too, and print their results so far
    signal.signal(signal.SIGTERM, lambda *_: [each.terminate() for each in runs])
    runs[0].wait()
    for number, (file, beside) in enumerate(zip(files, runs[1:], strict=True), start=2):
        print(f"\n======== run {number} of {len(runs)} ========\n", flush=True)
        _follow(file, beside)
    return status([each.returncode for each in runs])


def status(codes: Sequence[int]) -> int:
    """Return the exit status of all runs: the worst one.

    If ``-k`` or ``-m`` selects no test of a run, only the others count.
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
    sys.exit(run(options, chosen or all_runs(), HERE.parent / "build"))
