"""ib_read_bw and ib_write_bw of perftest between two devices of this machine: what a NIC gives to who asks it in C."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

PATIENCE = 60.0
VOLUME = 32 << 20  # bytes of a batch, at least five messages
DEVICES = Path("/sys/class/infiniband")


def devices() -> list[str]:
    """The verbs devices of this machine."""
    return sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []


def missing() -> str | None:
    """Why it can't be measured."""
    return None if shutil.which("ib_read_bw") else "not found; apt install perftest"


def seconds(kind: str, size: int, depth: int, port: int) -> float:
    """Of one message, with so many in flight. Raises RuntimeError."""
    near, far = devices()[:2]
    options = [
        f"ib_{kind}_bw",
        "-F",
        "-s",
        str(size),
        "-n",
        str(max(VOLUME // size, 5)),
        "-t",
        str(depth),
        "-p",
        str(port),
    ]
    server = subprocess.Popen([*options, "-d", far], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.5)  # it says nothing when it listens
        done = subprocess.run(
            [*options, "-d", near, "127.0.0.1"], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == [str(size)]]
        if not rows:
            raise RuntimeError(f"ib_{kind}_bw: {(done.stderr or done.stdout).strip()[-200:]}")
        return size / (float(rows[0][3]) * (1 << 20))
    finally:
        server.kill()
        server.wait()
