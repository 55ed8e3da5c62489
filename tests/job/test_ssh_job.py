"""SSHJob with a real sshd on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend.job import Job, JobError, SSHJob
from tests.job.support import MARK, Where, gone, in_program, marked, new_mark, seen_by_ps
from tests.support import sshd
from tests.support.sshd import Server

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(bool(sshd.refusal()), reason=sshd.refusal())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with sshd.server(tmp_path_factory.mktemp("sshd")) as made:
        yield made


@pytest.fixture
def mark() -> Iterator[str]:
    with new_mark() as made:
        yield made


def new_job(server: Server, folder: Path, mark: str = "", **changes: Any) -> SSHJob:
    env = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "there"), MARK: mark}
    wanted = {"port": server.port, "identity": server.identity, "options": server.options, "env": env} | changes
    return SSHJob(path=folder / "job.json", **wanted)


def use(path: Path) -> Any:
    procs = Job.load(path).state().trainers.spawn_procs({"gpus": 2})
    reached = procs.spawn("where", Where).variable.call("SSH_CONNECTION").get(30)
    procs.stop().get(30)
    Job.load(path).kill()
    return list(reached.values())


def test_from_apply_to_kill(server: Server, tmp_path: Path, mark: str) -> None:
    """This is one test, because each start takes seconds. Another program finds, uses and ends the job."""
    job = new_job(server, tmp_path, mark).add_mesh("trainers", ["127.0.0.1"])
    job.apply()
    [host] = json.loads(job.path.read_text())["hosts"]
    assert host["address"].startswith("tcp://127.0.0.1:") and host["where"] == "127.0.0.1"
    job.apply()
    assert json.loads(job.path.read_text())["hosts"] == [host]
    assert [each.state for each in job.status()] == ["up"]

    secret = job.path.with_suffix(".secret").read_text().strip()
    assert seen_by_ps(secret) == []
    assert secret not in server.log.read_text()
    assert all(secret not in log.read_text() for log in (tmp_path / "there").rglob("*.log"))

    assert all(text.endswith(f" {server.port}") for text in in_program(use, job.path))
    assert gone(mark), marked(mark)
    assert not job.path.exists()
    job.kill()


@pytest.mark.slow
def test_a_host_that_is_killed(server: Server, tmp_path: Path, mark: str) -> None:
    """This includes a machine that does not answer: hosts that may still run stay in the state file."""
    job = new_job(server, tmp_path, mark).add_mesh("trainers", ["127.0.0.1"], listen="0.0.0.0:0")
    job.apply()
    [host] = json.loads(job.path.read_text())["hosts"]
    assert host["address"].startswith("tcp://127.0.0.1:")  # the address to which ssh has connected

    text = job.path.read_text()
    job.path.write_text(text.replace(f'"port": {server.port}', f'"port": {closed_port()}'))
    away = Job.load(job.path)
    assert away.status()[0].state.startswith("unknown: ssh: connect to host 127.0.0.1")
    with pytest.raises(JobError, match=r"it is unknown whether these hosts still run: trainers\[0\] \(127.0.0.1\)"):
        away.apply()
    with pytest.raises(JobError, match=r"not ended: trainers\[0\] \(127.0.0.1\): unknown: ssh: connect"):
        away.kill()
    assert json.loads(job.path.read_text())["hosts"] == [host]
    job.path.write_text(text)

    os.kill(host["process"]["pid"], signal.SIGKILL)
    assert gone(mark), marked(mark)
    assert [each.state for each in job.status()] == ["gone"]
    with pytest.raises(JobError, match=r"its process \d+ is gone, its log is .*apply\(\) starts again what is gone"):
        in_program_state(job.path)
    job.kill()
    assert not job.path.exists()


def in_program_state(path: Path) -> None:
    def state() -> str:
        try:
            Job.load(path).state(timeout=5)
        except JobError as error:
            return str(error)
        return ""

    if said := in_program(state):
        raise JobError(said)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "changes", "message"),
    [
        ("nosuchhost.invalid", {}, r"trainers\[0\] \(nosuchhost.invalid\) .*\(exit 255\): .*nosuchhost.invalid"),
        ("127.0.0.1", {"port": 1}, r"trainers\[0\] .* \(exit 255\): .*Connection refused"),
        ("127.0.0.1", {"identity": "/nonexistent"}, r"\(exit 255\): .*Permission denied"),
        ("127.0.0.1", {"python": "/nonexistent/python"}, r"\(exit 127\): .*/nonexistent/python: not found"),
        ("127.0.0.1", {"python": "/bin/false"}, r"has ended before it listened \(exit 1\)"),
        ("127.0.0.1", {"env": {"PYTHONPATH": "/nonexistent"}, "python": "python3 -I"}, r"\(exit 127\)"),
    ],
    ids=["unknown host", "refused", "no key", "no python", "no host", "no such command"],
)
def test_a_host_that_can_not_be_started(
    server: Server, tmp_path: Path, host: str, changes: dict[str, Any], message: str
) -> None:
    job = new_job(server, tmp_path, **changes).add_mesh("trainers", [host])
    with pytest.raises(JobError, match=rf"(?s){message}"):
        job.apply()
    assert not job.path.exists() and not job.path.with_suffix(".secret").exists()


def test_unknown_host_key_is_refused(server: Server, tmp_path: Path) -> None:
    """The program sends nothing to an unverified machine, because it leaves ssh's own check in place."""
    options = ["-F", "none", "-o", "UserKnownHostsFile=/dev/null", "-o", "GlobalKnownHostsFile=/dev/null"]
    job = new_job(server, tmp_path, options=options).add_mesh("trainers", ["127.0.0.1"])
    with pytest.raises(JobError, match="Host key verification failed"):
        job.apply()


@pytest.mark.slow
def test_failure_of_one_machine_leaves_no_processes(server: Server, tmp_path: Path, mark: str) -> None:
    job = new_job(server, tmp_path, mark).add_mesh("trainers", ["127.0.0.1", "nosuchhost.invalid"])
    with pytest.raises(JobError, match="nosuchhost"):
        job.apply()
    assert gone(mark, 5), marked(mark)
    assert not job.path.exists()


@pytest.mark.slow
def test_hosts_hello_runs_with_an_ssh_job(
    server: Server, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make the change that the text of the example describes, then run it."""
    source = (ROOT / "examples" / "hosts_hello.py").read_text()
    env = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "there"), MARK: mark}
    options = f"port={server.port}, identity={str(server.identity)!r}, options={server.options!r}, env={env!r}"
    changed = source.replace(
        'ProcessJob({"workers": args.hosts}, name="hello")',
        f'SSHJob(name="hello", {options}).add_mesh("workers", ["127.0.0.1"])',
    ).replace("import ProcessJob", "import SSHJob")
    assert changed.count("SSHJob(name") == 2  # also in the example's text
    (tmp_path / "hello.py").write_text(changed)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    done = subprocess.run([sys.executable, "hello.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"of {socket.gethostname()}" in done.stdout
    assert gone(mark), marked(mark)
