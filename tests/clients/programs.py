"""Runs the programs of docs/guides/frameworks.md by the commands of that page, and records the groups they make."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "frameworks.md"
SETTING = "MONARCH_AS=gloo"

RECORDER = """
import functools
import os


def start():
    from torch.distributed import distributed_c10d as c10d

    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def recorded(*args, **kwargs):
        made = make(*args, **kwargs)
        with open(os.environ["RECORDED_GROUPS"], "a") as file:
            file.write(type(made[0]).__name__ + "\\n")
        return made

    c10d._new_process_group_helper = recorded
"""
"""Module of an entry point that `import torch` calls. It records the class of each process group in a file."""


class Run(NamedTuple):
    """A program that has ended: what it printed, and the classes of its process groups with their number."""

    status: int
    out: str
    err: str
    groups: Counter[str]

    def losses(self) -> list[str]:
        """Return the sorted lines that begin with "rank". The program must have succeeded.

        Two ranks write to one pipe, so a line may follow the other's without its end.
        """
        assert self.status == 0, f"status {self.status}:\n{self.out[-3000:]}\n{self.err[-6000:]}"
        lines = sorted(re.findall(r"rank \d .*?(?=rank \d |$)", self.out, re.MULTILINE))
        assert {line.split()[1] for line in lines} == {"0", "1"}, self.out[-3000:]
        return lines


def needs(module: str) -> pytest.MarkDecorator:
    """Skip the tests of a module where the framework is not installed."""
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f"{module} is not in this environment: run make test-clients",
    )


def command(section: str) -> str:
    """Return the command of a section of the page: its line that begins with the setting, without the setting."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (line,) = re.findall(rf"^{SETTING} (.+)$", text, re.MULTILINE)
    return str(line)


def run(command: str, folder: Path, **env: str) -> Run:
    """Run a command in the repository root, with these variables in addition."""
    groups = folder / "groups.txt"
    groups.write_text("")
    settings = {name: value for name, value in os.environ.items() if name != "MONARCH_AS"}
    settings |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{settings['PATH']}",
        "PYTHONPATH": str(_recorder(folder)),
        "RECORDED_GROUPS": str(groups),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **env,
    }
    process = subprocess.Popen(
        ["env", *shlex.split(command)], cwd=ROOT, env=settings, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{command} did not end within 400 s:\n{out[-3000:]}\n{err[-6000:]}")
    return Run(process.returncode, out, err, Counter(groups.read_text().split()))


def run_with_gloo(command: str, folder: Path, **env: str) -> Run:
    """Run a command with Gloo, for comparison. Repeat a run that Gloo's threads have aborted at its exit.

    They may end the process with "terminate called without an active exception" if the program leaves its group to the
    end of the interpreter. This is a fault of torch.
    """
    for _ in range(3):
        done = run(command, folder, **env)
        if done.status == 0 or "terminate called without an active exception" not in done.err:
            break
    return done


def compare(section: str, folder: Path, *, arguments: str = "", by_name: bool = False, **env: str) -> None:
    """Run the program of a section with Gloo, as if with Gloo, and by name, and compare the losses bit by bit.

    Each loss is printed with the digits that identify it. The sum of two ranks has no order that could differ.
    """
    words = f"{command(section)} {arguments}"
    gloo = run_with_gloo(words, folder, **env)
    as_gloo = run(words, folder, MONARCH_AS="gloo", **env)
    assert gloo.losses() == as_gloo.losses()
    assert set(gloo.groups) == {"ProcessGroup"}
    assert as_gloo.groups == {"MonarchProcessGroup": gloo.groups["ProcessGroup"]}
    if by_name:
        named = run(f"{words} monarch", folder, **env)
        assert gloo.losses() == named.losses()
        assert named.groups == as_gloo.groups


def _recorder(folder: Path) -> Path:
    """Write the recorder as a distribution with an entry point, and return its folder, for PYTHONPATH."""
    place = folder / "recorder"
    metadata = place / "group_recorder-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (place / "group_recorder.py").write_text(RECORDER)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: group-recorder\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ngroup_recorder = group_recorder:start\n")
    return place


def expect_refusal(section: str, folder: Path, message: str) -> None:
    """Run the program of a section with the name "monarch", which must end it with this error."""
    done = run(f"{command(section)} monarch", folder)
    assert done.status != 0
    assert message in done.err
