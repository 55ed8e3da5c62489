"""Ctrl-C while a program issues operations: what it has issued is done, and it can go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, threading, time
import torch
from torch.distributed.tensor import Replicate, distribute_tensor
from monarch_backend.actor import this_host

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    procs = this_host().spawn_procs({"x": 2})
    x = distribute_tensor(torch.zeros(3), procs.device_mesh("cpu"), [Replicate()])
    ended, issued, interrupts = threading.Event(), 0, 0

    def strike():
        while not ended.wait(0.003):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=strike).start()
    while interrupts < 20:
        try:
            while True:
                x.add_(1)
                issued += 1
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts == 20:
                ended.set()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:  # what has come and was not raised yet
        try:
            total = x.to_local().tolist()[0]
        except KeyboardInterrupt:
            interrupts += 1
    print(issued, total, interrupts)
    procs.stop().get(30)
"""


@pytest.mark.slow
def test_no_operation_is_lost(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    root = Path(__file__).parents[2]
    search = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    issued, total, interrupts = map(float, run.stdout.split())
    assert issued >= 100
    assert issued <= total <= issued + interrupts  # an interrupt may come between the operation and its count
