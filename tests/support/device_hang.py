"""A program whose rank waits for a device that computes for minutes, for tests of what others see of it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend import cli
from tests.support.running_script import running_script
from tests.support.waiting import wait_until

COMPUTATIONS = {
    "cuda": "torch.cuda._sleep(1 << 42)",  # cycles: at least half an hour
    "xla": "for _ in range(1000): x = x @ x",
}
SCRIPT = """
import sys
import torch
from monarch_backend.actor import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    def step(self):
        if "{device}" == "xla":
            import torch_xla
        x = torch.ones(4096, 4096).to("{device}")
        {computation}
        print("began", flush=True)
        return x[0, 0].item()


if __name__ == "__main__":
    procs = this_host().spawn_procs({{"devices": 1}}, name="trainers")
    procs.spawn("trainer", Trainer).step.broadcast()
    sys.stdin.readline()
"""


@contextlib.contextmanager
def waiting_program(folder: Path, device: str) -> Iterator[subprocess.Popen[str]]:
    """Run the program until its rank has started the computation. It is killed with the block."""
    source = SCRIPT.format(device=device, computation=COMPUTATIONS[device])
    with running_script(folder / "device_hang.py", source) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        while line and not line.endswith("began\n"):  # torch_xla may print a warning first
            line = process.stdout.readline()
        assert line, "the program has ended"
        yield process


def check_commands(pid: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that `stack` shows the line that waits for the device, and `ps` the endpoint."""

    def is_shown() -> bool:
        assert cli.main(["stack", str(pid)]) == 0
        return "in step\n        return x[0, 0].item()\n" in capsys.readouterr().out

    wait_until(is_shown)
    assert cli.main(["ps", str(pid)]) == 0
    assert "trainer rank 0: running step for" in capsys.readouterr().out
