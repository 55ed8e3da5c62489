"""`monarch-backend run` on several hosts: one is cut off, or a rank of one is stopped. All launchers end their ranks.

A host is a network namespace (tests/support/hosts.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, address, hosts, refusal

pytestmark = [pytest.mark.skipif(bool(refusal()), reason=refusal() or "-"), pytest.mark.slow]

LIMIT = 5.0  # the default of MONARCH_HOST_TIMEOUT
PORT = 26603
SCRIPT = """
import datetime, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("monarch", timeout=datetime.timedelta(seconds=float(sys.argv[2])))
x = torch.ones(4)
dist.all_reduce(x)
rank = dist.get_rank()
open(f"up-{rank}.tmp", "w").write(str(os.getpid()))
os.rename(f"up-{rank}.tmp", f"up-{rank}")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    os.write(1, f"restarted {dist.get_world_size()}\\n".encode())  # two ranks share the pipe
elif sys.argv[1] == "collective":
    while True:
        dist.all_reduce(x)
elif sys.argv[1] == "compute":
    while True:
        sum(range(1000))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    with hosts(3) as made:
        yield made


@pytest.fixture
def where(three: Hosts) -> Iterator[Hosts]:
    """Yield three hosts, and heal their network afterwards."""
    yield three
    three.cables.heal_all()


@contextlib.contextmanager
def _job(
    where: Hosts, folder: Path, count: int, mode: str, *words: str, nnodes: str = "", timeout: float = 60.0
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a launcher on each of ``count`` hosts with two ranks each, and wait until all ranks are in a group."""
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    with contextlib.ExitStack() as stack:
        launchers = []
        for host in range(count):
            arguments = [f"--nnodes={nnodes or count}", "--nproc-per-node=2", f"--local-addr={address(host)}"]
            arguments += ["--rdzv-backend=c10d", f"--rdzv-endpoint={address(0)}:{PORT}", "--rdzv-id=cut", *words]
            command = where.command(
                host, sys.executable, "-m", "monarch_backend", "run", *arguments, "script.py", mode, str(timeout)
            )
            command = [each.replace(f"--chdir={os.getcwd()}", f"--chdir={folder}") for each in command]
            launcher = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
            stack.callback(_end, where, host, launcher)
            launchers.append(launcher)
        _until(lambda: len(list(folder.glob("up-?"))) == 2 * count)
        time.sleep(1.0)  # the launchers meet after their ranks have started
        yield launchers


def _end(where: Hosts, host: int, launcher: subprocess.Popen[str]) -> None:
    for pid in where.processes(host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.communicate(timeout=10)


def _until(happened: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 40
    while not happened():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.02)


def _finish(launchers: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """Wait for all launchers to fail within the time, and return what they wrote to stderr."""
    end = time.monotonic() + seconds
    texts = []
    for launcher in launchers:
        _, text = launcher.communicate(timeout=max(0.1, end - time.monotonic()))
        assert launcher.returncode == 1, text
        texts.append(text)
    return texts


@pytest.mark.parametrize("mode", ["collective", "compute"])
@pytest.mark.parametrize(("count", "host"), [(2, 1), (3, 0)], ids=["second of 2", "store's host of 3"])
def test_cut_host_ends_the_job_everywhere(where: Hosts, tmp_path: Path, count: int, host: int, mode: str) -> None:
    with _job(where, tmp_path, count, mode) as launchers:
        where.cables.cut_off(host)
        texts = _finish(launchers, LIMIT + 3.0)  # leaving the rendezvous and the interpreter's end take up to 3 s
        for here, text in enumerate(texts):
            away = [other for other in range(count) if (other == host) != (here == host)]
            for other in away:
                name, at = f"host-{'abc'[other]}", re.escape(address(other))
                assert re.search(rf"no sign of life from .*(\(host {name}, {at}|{name} \({at})", text), text
        assert not any(where.processes(each) for each in range(count))


def test_cut_host_restarts_the_others(where: Hosts, tmp_path: Path) -> None:
    """The host without the store of the rendezvous ends. The other one goes on alone."""
    with _job(
        where, tmp_path, 2, "collective", "--max-restarts=1", "--rdzv-conf=last_call_timeout=1", nnodes="1:2"
    ) as jobs:
        where.cables.cut_off(1)
        assert "No restart: the rendezvous cannot be reached" in _finish(jobs[1:], LIMIT + 3.0)[0]
        out, text = jobs[0].communicate(timeout=40)
        assert jobs[0].returncode == 0 and out.count("restarted 2\n") == 2, out + text


def test_cut_that_heals_in_time_does_not_end_the_job(where: Hosts, tmp_path: Path) -> None:
    with _job(where, tmp_path, 2, "compute") as launchers:
        where.cables.cut_off(1)
        time.sleep(2.0)
        where.cables.heal(1)
        time.sleep(LIMIT)
        assert all(launcher.poll() is None for launcher in launchers)


@pytest.mark.parametrize("ranks", [(1,), (2, 3)], ids=["one of a host", "all of a host"])
def test_stopped_ranks_end_the_job_everywhere(where: Hosts, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """The launcher of the stopped ranks is told by the other one; its ranks report nothing."""
    with _job(where, tmp_path, 2, "collective", timeout=3.0) as launchers:
        for rank in ranks:
            os.kill(int((tmp_path / f"up-{rank}").read_text()), signal.SIGSTOP)
        texts = _finish(launchers, 3.0 + LIMIT + 1.0)
        assert any(re.search(r"timed out: rank \d+ \(host host-", text) for text in texts), texts
        assert not any(where.processes(each) for each in range(2))
