"""ib_read_bw, ib_write_bw and ib_read_lat between two devices of this machine: the floor of a NIC in C."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

PATIENCE = 60.0
LASTS, MARGIN = 4, 1  # seconds of a run, and seconds at each end that are not counted
DEVICES = Path("/sys/class/infiniband")


def devices() -> list[str]:
    """Return the names of this machine's verbs devices."""
    return sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []


def missing() -> str | None:
    """Return the reason if perftest cannot run, or None."""
    return None if shutil.which("ib_read_bw") else "not found; apt install perftest"


def seconds(tool: str, size: int, depth: int | None, port: int) -> float:
    """Return the seconds per message with ``depth`` messages in flight. With None the tool chooses the depth.

    Raises RuntimeError. The result is the measured interval divided by the number of messages. The rates that the tool
    prints use a clock that stands still in User-Mode Linux.
    """
    near, far = devices()[:2]
    options = [tool, "-F", *map(str, ("-s", size, "-p", port, "-D", LASTS, "-f", MARGIN))]
    options += [] if depth is None else ["-t", str(depth)]
    server = subprocess.Popen([*options, "-d", far], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.5)  # the server prints nothing when it listens
        done = subprocess.run([*options, "-d", near, "127.0.0.1"], capture_output=True, text=True, timeout=PATIENCE)
        rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == [str(size)]]
        if done.returncode or not rows or int(rows[0][1]) < 1:
            raise RuntimeError(f"{tool}, {size} bytes: {(done.stderr or done.stdout).strip()[-200:]}")
        return (LASTS - 2 * MARGIN) / int(rows[0][1])
    finally:
        server.kill()
        server.wait()
