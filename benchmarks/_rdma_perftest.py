"""ib_read_bw, ib_write_bw and ib_read_lat between two devices of this machine: the floor of a NIC in C."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

PATIENCE = 60.0
LASTS, MARGIN = 4, 1  # seconds of a run, and those at both ends that do not count
DEVICES = Path("/sys/class/infiniband")


def devices() -> list[str]:
    """The verbs devices of this machine."""
    return sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []


def missing() -> str | None:
    """Why it can't be measured."""
    return None if shutil.which("ib_read_bw") else "not found; apt install perftest"


def seconds(tool: str, size: int, depth: int | None, port: int) -> float:
    """Of one message, with so many in flight; None: the tool decides. Raises RuntimeError.

    From how many it counts between two alarms: the clock that its rates are of stands still in User-Mode Linux.
    """
    near, far = devices()[:2]
    options = [tool, "-F", *map(str, ("-s", size, "-p", port, "-D", LASTS, "-f", MARGIN))]
    options += [] if depth is None else ["-t", str(depth)]
    server = subprocess.Popen([*options, "-d", far], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.5)  # it says nothing when it listens
        done = subprocess.run([*options, "-d", near, "127.0.0.1"], capture_output=True, text=True, timeout=PATIENCE)
        rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == [str(size)]]
        if done.returncode or not rows or int(rows[0][1]) < 1:
            raise RuntimeError(f"{tool}, {size} bytes: {(done.stderr or done.stdout).strip()[-200:]}")
        return (LASTS - 2 * MARGIN) / int(rows[0][1])
    finally:
        server.kill()
        server.wait()
