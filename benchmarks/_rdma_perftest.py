"""ib_read_bw and ib_write_bw of perftest between two devices of this machine: what a NIC gives to who asks it in C."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

PATIENCE = 60.0
VOLUME = 8 << 20  # bytes of the short run, at least five messages
DEVICES = Path("/sys/class/infiniband")


def devices() -> list[str]:
    """The verbs devices of this machine."""
    return sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []


def missing() -> str | None:
    """Why it can't be measured."""
    return None if shutil.which("ib_read_bw") else "not found; apt install perftest"


def seconds(kind: str, size: int, depth: int, port: int) -> float:
    """Of one message, with so many in flight. Raises RuntimeError.

    perftest's own clock stands still in a guest of User-Mode Linux, so it is the difference of a long and a short run.
    """
    few = max(VOLUME // size, 5)
    return max(_wall(kind, size, depth, 5 * few, port) - _wall(kind, size, depth, few, port), 1e-9) / (4 * few)


def _wall(kind: str, size: int, depth: int, count: int, port: int) -> float:
    near, far = devices()[:2]
    options = [f"ib_{kind}_bw", "-F", *map(str, ("-s", size, "-n", count, "-t", min(depth, count), "-p", port))]
    server = subprocess.Popen([*options, "-d", far], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.5)  # it says nothing when it listens
        begun = time.perf_counter()
        done = subprocess.run([*options, "-d", near, "127.0.0.1"], capture_output=True, text=True, timeout=PATIENCE)
        took = time.perf_counter() - begun
        if done.returncode:
            raise RuntimeError(f"ib_{kind}_bw: {(done.stderr or done.stdout).strip()[-200:]}")
        return took
    finally:
        server.kill()
        server.wait()
