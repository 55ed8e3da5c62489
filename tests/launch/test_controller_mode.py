"""`monarch-backend run --controller`: the script runs once and controls all nodes."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.launch.launcher import finish, launch, launching

SCRIPT = """
import json, os, sys
from monarch_backend.actor import Actor, endpoint
from monarch_backend.job import host_mesh_from_env

class Doubler(Actor):
    @endpoint
    def double(self, x):
        return x * 2

hosts = host_mesh_from_env()
procs = hosts.spawn_procs({"gpus": int(os.environ["MONARCH_NPROC_PER_NODE"])})
doubled = list(procs.spawn("doubler", Doubler).double.call(21).get().values())
with open("report-0.json", "x") as file:
    json.dump([len(hosts), sys.argv[1:], doubled], file)
if sys.argv[-1] == "fail":
    sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_one_node(module: bool, script: str, tmp_path: Path) -> None:
    what = ["-m", "script"] if module else [script]
    words = ["--standalone", "--controller", "--nproc-per-node=2", *what, "a", "--b"]
    done = launch("monarch", *words, directory=tmp_path / "run", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.reports() == [[1, ["a", "--b"], [42, 42]]]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["well", "fail"])
def test_two_nodes(end: str, script: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", "--controller", script, end]
    first, second = tmp_path / "first", tmp_path / "second"
    with (
        launching("monarch", "--node-rank=0", *words, directory=first) as one,
        launching("monarch", "--node-rank=1", *words, directory=second) as other,
    ):
        ended = [finish(one, first), finish(other, second)]
    assert [len(each.reports()) for each in ended] == [1, 0], "the script runs once"
    assert ended[0].reports() == [[2, [end], [42, 42]]]
    assert [each.returncode for each in ended] == ([0, 0] if end == "well" else [1, 0]), ended[0].stderr
    if end == "fail":
        assert "exitcode  : 3" in ended[0].stderr


def test_there_must_be_a_script(tmp_path: Path) -> None:
    done = launch("monarch", "--controller", "--no-python", "ls", directory=tmp_path / "run")
    assert done.returncode == 1
    assert "--controller runs a script or" in done.stderr
    assert json.dumps(done.reports()) == "[]"
