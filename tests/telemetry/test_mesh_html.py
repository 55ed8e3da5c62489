"""A mesh in a notebook: a table of its ranks and states."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from monarch_backend._core import platform
from monarch_backend._telemetry import mesh_html

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="programs are found in /proc")

SCRIPT = """
import json, os, time
from monarch_backend._telemetry import mesh_html
from monarch_backend.actor import Actor, endpoint, this_host


class Sleeper(Actor):
    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def sleep(self):
        time.sleep(1e6)


def main():
    procs = this_host().spawn_procs({"gpus": 3}, name="<i>&")
    sleepers = procs.spawn("sleepers", Sleeper)
    pids = [str(pid) for pid in sleepers.pid.call().get().values()]
    sleepers.slice(gpus=1).sleep.broadcast()
    end = time.monotonic() + 60
    # An endpoint ends after its reply.
    while ("sleepers.sleep" not in (html := procs._repr_html_()) or "sleepers.pid" in html) and time.monotonic() < end:
        time.sleep(0.01)
    shown = {"procs": procs._repr_html_(), "slice": sleepers.slice(gpus=slice(1, 3))._repr_html_()}
    mesh_html.MAX_ROWS = 1
    print(json.dumps({**shown, "cut": procs._repr_html_(), "pids": pids}))
    os._exit(0)


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("program") / "sleepers.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _rows(text: str) -> list[list[str]]:
    return [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr><td>.*?</tr>", text)]


def test_table_has_ranks_states_and_pids(shown: dict[str, str]) -> None:
    rows = [(row[0], row[1], row[2], row[6]) for row in _rows(shown["procs"])]
    name = "&lt;i&gt;&amp;"
    assert rows == [
        (f"gpus 0 of {name}", "idle", "", shown["pids"][0]),
        (f"gpus 1 of {name}", "running", "sleepers.sleep", shown["pids"][1]),
        (f"gpus 2 of {name}", "idle", "", shown["pids"][2]),
    ]
    assert "<i>" not in shown["procs"]


def test_slice_of_actors_has_its_ranks_only(shown: dict[str, str]) -> None:
    assert shown["slice"].startswith("<p>ActorMesh(&#x27;sleepers&#x27;, Sleeper, gpus=2)</p><table>")
    assert [row[:3] for row in _rows(shown["slice"])] == [row[:3] for row in _rows(shown["procs"])[1:]]


def test_large_mesh_is_cut(shown: dict[str, str]) -> None:
    assert len(_rows(shown["cut"])) == 1 and shown["cut"].endswith("<p>2 more ranks</p>")


def test_process_without_a_recording_has_no_state() -> None:
    assert "not recorded on this machine" in mesh_html.as_html("mesh", ["gpus 0 of elsewhere"])
