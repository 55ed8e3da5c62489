"""All of tests/ as two parallel runs of pytest: `python -m tests.halves -m "not slow" --durations=25`.

Many tests wait for a timeout, and the other half uses the processor meanwhile. The folders of each half are written
down below, so that the order of tests is the same in every run. A run of any part needs pytest only.
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
"""These take as long as all the others together."""
NO_TESTS = 5
"""What pytest ends with where it has run none."""


def halves() -> tuple[list[str], list[str]]:
    """The arguments of the two runs: each folder and each file with tests is in one of them."""
    tops = sorted({HERE / path.relative_to(HERE).parts[0] for path in HERE.glob("*/**/test_*.py")})
    first = [str(path) for path in [*tops, *sorted(HERE.glob("test_*.py"))] if path.name not in SECOND]
    return first, [str(HERE / name) for name in SECOND]


def run(arguments: Sequence[str], log: Path) -> int:
    """Both of them. What the second says goes to the log, and is said when the first one is over; pytest's status."""
    first, second = halves()
    command = [sys.executable, "-m", "pytest", *arguments]
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as out:
        beside = subprocess.Popen([*command, *second], stdout=out, stderr=subprocess.STDOUT)
        runs = [subprocess.Popen([*command, *first]), beside]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # they have it as well, and say how far they have come
    signal.signal(signal.SIGTERM, lambda *_: [each.terminate() for each in runs])
    runs[0].wait()
    print(f"\n======== the other half, {', '.join(SECOND)} ========\n", flush=True)
    _follow(log, beside)
    return status([each.returncode for each in runs])


def status(codes: Sequence[int]) -> int:
    """pytest's, of both: a half in which ``-k`` or ``-m`` has chosen nothing is no failure beside one with tests."""
    return max((abs(code) for code in codes if code != NO_TESTS), default=NO_TESTS)


def _follow(log: Path, writer: subprocess.Popen[bytes]) -> None:
    with log.open("rb") as said:
        ended = False
        while not ended:
            ended = writer.poll() is not None  # before reading: what it says last is read as well
            shutil.copyfileobj(said, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            if not ended:
                time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], HERE.parent / "build" / "second-half.log"))
