"""The programs and commands of docs/guides/slurm.md run on a real cluster."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.job.conftest import ROOT
from tests.support.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slurm

PAGE = ROOT / "docs" / "guides" / "slurm.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_programs_and_commands_of_the_page_run(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program is a block with its name. The first commands install the package, which is installed here."""
    for text in blocks("py"):
        match = re.match(r"# (\w+\.py)\n", text)
        assert match
        (tmp_path / match[1]).write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setitem(cluster.environment, "XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setitem(cluster.environment, "PATH", f"{Path(sys.executable).parent}:{cluster.environment['PATH']}")
    _, *commands = blocks("sh")
    doctor, ranks, train, inside, controller, survive, resize, submit, logs, end = [
        cluster.run("bash", "-ec", f"cd {tmp_path}; {command}") for command in commands
    ]
    assert sorted(re.findall(r"^([01]): ok  torch ", doctor, re.MULTILINE)) == ["0", "1"], doctor
    expected, *_ = blocks("text")
    assert sorted(ranks.splitlines()) == expected.splitlines()
    assert re.findall(r"hosts (\d) gpus (\d) (\S+)", train) == [(host, gpu, "3.0") for host in "01" for gpu in "01"]
    assert inside.startswith("Submitted batch job")
    assert (tmp_path / "inside.log").read_text() == f"nodes: {' '.join(cluster.nodes[:2])}\n"
    assert controller == "processes: 4\n"
    assert re.findall(r"^step (\d+): loss \d\.\d{4}$", survive, re.MULTILINE) == [str(step + 1) for step in range(10)]
    assert resize == "processes: 4\nprocesses: 3\n"
    up = "trainers[0]: up\ntrainers[1]: up\n"
    assert submit.startswith(up)
    assert re.search(r"^ *\d+ +main +monarch-", submit, re.MULTILINE), submit
    assert re.match(r"monarch_backend: start \d+\.0\n", logs), logs  # the log of the host is empty
    assert end == up
