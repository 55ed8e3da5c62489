"""Runner of tests in two parallel runs of pytest: `python -m tests.halves -m "not slow" --durations=25`.

Many tests wait for a timeout, and the other half uses the processor meanwhile. The folders of the second half are
listed below, so that the order of tests is the same in every run. Paths after `--` run in place of all tests.
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
SECOND = ("dtensor", "ecosystem", "job", "rdma", "testing")
"""Folders of the second half. They take as long as all others together."""
NO_TESTS = 5
"""Exit status of pytest if it ran no tests."""


def all_tests() -> list[Path]:
    """Return each folder and each file of this folder that has tests."""
    tops = {HERE / path.relative_to(HERE).parts[0] for path in HERE.glob("*/**/test_*.py")}
    return [*sorted(tops), *sorted(HERE.glob("test_*.py"))]


def halves(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the paths of the first run and of the second."""
    in_second = [path.absolute().relative_to(HERE).parts[0] in SECOND for path in paths]
    return (
        [path for path, second in zip(paths, in_second, strict=True) if not second],
        [path for path, second in zip(paths, in_second, strict=True) if second],
    )


def run(arguments: Sequence[str], paths: Sequence[Path], log: Path) -> int:
    """Run both halves of the paths and return pytest's exit status. Without paths, run all tests.

    The output of the second half is written to the log, and printed after the first half has ended.
    """
    first, second = halves(paths or all_tests())
    command = [sys.executable, "-m", "pytest", *arguments]
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as out:
        beside = subprocess.Popen([*command, *second], stdout=out, stderr=subprocess.STDOUT)
        runs = [subprocess.Popen([*command, *first]), beside]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runs get it, too, and print their results so far
    signal.signal(signal.SIGTERM, lambda *_: [each.terminate() for each in runs])
    runs[0].wait()
    print(f"\n======== the other half, {', '.join(SECOND)} ========\n", flush=True)
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
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    chosen = [Path(name) for name in sys.argv[split + 1 :]]
    sys.exit(run(sys.argv[1:split], chosen, HERE.parent / "build" / "second-half.log"))
