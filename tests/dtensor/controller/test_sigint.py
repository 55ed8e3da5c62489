"""Ctrl-C while a program issues operations: issued operations are executed, and the program can continue."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTS = 100

PROGRAM = """
import os, random, signal, threading, time
import torch
from torch.distributed.tensor import Replicate, distribute_tensor
from monarch_backend.actor import this_host

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    procs = this_host().spawn_procs({"x": 2})
    x = distribute_tensor(torch.zeros(3), procs.device_mesh("cpu"), [Replicate()])
    issuing, ended, issued = threading.Event(), False, 0

    def strike():
        while issuing.wait() and not ended:
            issuing.clear()  # one signal for each of the loops below: another would come where nobody expects it
            time.sleep(random.uniform(0, 0.005))
            os.kill(os.getpid(), signal.SIGINT)

    striker = threading.Thread(target=strike)
    striker.start()
    for _ in range(INTERRUPTS):
        try:
            issuing.set()
            while True:
                x.add_(1)
                issued += 1
        except KeyboardInterrupt:
            pass
    ended = True
    issuing.set()
    striker.join()
    print(issued, x.to_local().tolist()[0])
    procs.stop().get(30)
"""


@pytest.mark.slow
def test_interrupts_lose_no_operation(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.replace("INTERRUPTS", str(INTERRUPTS)))
    root = Path(__file__).parents[3]
    search = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    issued, total = map(float, run.stdout.split())
    assert issued >= INTERRUPTS
    assert issued <= total <= issued + INTERRUPTS  # an interrupt may come between the operation and its count
