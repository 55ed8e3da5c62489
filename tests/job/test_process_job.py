"""ProcessJob: start, search, end, and no processes left after a failure in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from monarch_backend import cli
from monarch_backend._job import state_file
from monarch_backend._job.base import Plan
from monarch_backend._job.host_launcher import ARGUMENTS
from monarch_backend._telemetry import sql
from monarch_backend.job import Job, JobError, ProcessJob
from tests.job.support import MARK, Where, gone, in_program, marked, new_mark, seen_by_ps
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessJob]:
    with new_mark() as mark:
        job = ProcessJob(
            {"trainers": 1, "dataloaders": 1}, path=tmp_path_factory.mktemp("job") / "job.json", env={MARK: mark}
        )
        job.apply()
        try:
            yield job
        finally:
            job.kill()


def pids(job: Job) -> list[int]:
    return [host["process"]["pid"] for host in json.loads(job.path.read_text())["hosts"]]


def names(path: Path) -> Any:
    state = Job.load(path).state()
    assert state.trainers is Job.load(path).state().trainers  # attached only once
    result = []
    for mesh in (state.trainers, state["dataloaders"]):
        procs = mesh.spawn_procs({"gpus": 2})
        result.append(list(procs.spawn("where", Where).host.call().get(30).values()))
        procs.stop().get(30)
    return result


@pytest.mark.slow
def test_programs_find_their_meshes(applied: ProcessJob) -> None:
    assert in_program(names, applied.path) == [["trainers0", "trainers0"], ["dataloaders0", "dataloaders0"]]


def keep(path: Path, folder: Path) -> str:
    """Write a history of a job while a program runs on its hosts. Return what the command prints."""
    state = Job.load(path).state()
    for mesh in (state.trainers, state["dataloaders"]):
        mesh.spawn_procs(name="kept").spawn("where", Where).host.call().get(30)
    command = [sys.executable, "-m", "monarch_backend.cli", "export", "history"]
    return subprocess.run(
        [*command, str(_with_hosts_elsewhere(path, folder)), "-o", str(folder / "kept"), "--once"],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip


def _with_hosts_elsewhere(path: Path, folder: Path) -> Path:
    """Return a copy of a job's file whose hosts count as other machines."""
    about = json.loads(path.read_text())
    for host in about["hosts"]:
        host["where"] = "127.0.0.1"
    copy = folder / "elsewhere.json"
    copy.touch(0o600)
    copy.write_text(json.dumps(about))
    return copy


@pytest.mark.slow
def test_history_has_the_processes_of_all_hosts(applied: ProcessJob, tmp_path: Path) -> None:
    assert in_program(keep, applied.path, tmp_path).startswith("added ")
    query = "select host, endpoint from messages join processes on pid = to_pid where endpoint = 'host' order by 1"
    rows = sql.answer_from(query, str(tmp_path / "kept")).rows
    assert rows == [("dataloaders[0] (127.0.0.1)", "host"), ("trainers[0] (127.0.0.1)", "host")]


def asked(path: Path) -> Any:
    job = Job.load(path)
    procs = job.state().trainers.spawn_procs({"gpus": 2})
    procs.spawn("where", Where).host.call().get(30)
    arrows = "select count(*) from messages where actor = 'where' and from_pid is not null"
    of_mesh = """
        select meshes.full_name, class, count(*) from actors join meshes on meshes.id = mesh_id where name = 'where'
        group by 1, 2
    """
    found = job.query(arrows)
    hosts = [(each.name.partition(" (")[0], each.has_answered) for each in found.hosts]
    result = found.rows, job.query(of_mesh).rows, hosts
    procs.stop().get(30)
    return result


def test_query_of_a_job_reads_the_program_and_the_hosts(applied: ProcessJob) -> None:
    handled, of_mesh, hosts = in_program(asked, applied.path)
    assert handled == [(2,)] and hosts[0] == ("this machine", True)
    assert sorted(hosts[1:]) == [("dataloaders[0]", True), ("trainers[0]", True)]
    [(name, of_class, actors)] = of_mesh
    assert name.endswith("/where") and (of_class, actors) == ("Python<Where>", 2)


def ends_of_connections(path: Path) -> list[tuple[str, str]]:
    """Return how the connections of the agents of former programs have ended."""
    job = Job.load(path)
    job.state().trainers.spawn_procs(name="asks").spawn("where", Where).host.call().get(30)
    query = "select distinct event, reason from connections where process like 'agent %' and event not like 'made%'"
    return wait_until(lambda: job.query(query).rows)


def test_end_of_a_program_ends_its_connections_in_order(applied: ProcessJob) -> None:
    in_program(asked, applied.path)
    assert in_program(ends_of_connections, applied.path) == [("ended", "it has ended the session")]


def test_second_apply_finds_running_hosts(applied: ProcessJob) -> None:
    before = pids(applied)
    applied.apply()
    ProcessJob({"dataloaders": 1, "trainers": 1}, path=applied.path, env=applied._env).apply()
    assert pids(applied) == before
    assert [(host.mesh, host.index, host.state) for host in applied.status()] == [
        ("trainers", 0, "up"),
        ("dataloaders", 0, "up"),
    ]


def test_the_secret_is_in_its_file_only(applied: ProcessJob) -> None:
    secret = applied.path.with_suffix(".secret").read_text().strip()
    assert len(secret) == 64
    assert seen_by_ps(secret) == []
    logs = [Path(host.log) for host in applied.status()]
    assert all(log.exists() and log.stat().st_mode & 0o077 == 0 for log in logs)
    assert not any(secret in log.read_text() for log in logs)


def killed_hosts(path: Path) -> Any:
    """Use the job's meshes while one of its hosts is killed and started again."""
    job = Job.load(path)
    before = job.state()
    [victim] = [host for host in json.loads(path.read_text())["hosts"] if host["mesh"] == "dataloaders"]
    os.kill(victim["process"]["pid"], signal.SIGKILL)
    said = ""
    end = time.monotonic() + 10
    while not said and time.monotonic() < end:  # the kernel may need a moment
        try:
            job.state(timeout=2)
        except JobError as error:
            said = str(error)
    states = [host.state for host in job.status()]
    job.apply()
    after = job.state()
    same = after.trainers is before.trainers, after.dataloaders is before.dataloaders
    procs = after.dataloaders.spawn_procs()
    where = procs.spawn("where", Where).host.call_one().get(30)
    procs.stop().get(30)
    return said, states, same, where


@pytest.mark.slow
def test_a_host_that_is_killed_is_missed_and_started_again(applied: ProcessJob) -> None:
    before = pids(applied)
    said, states, same, where = in_program(killed_hosts, applied.path)
    assert f"its process {before[1]} is gone, its log is" in said and "apply() starts again what is gone" in said
    assert "dataloaders[0]" in said and "trainers[0]" not in said
    assert states == ["up", "gone"]
    assert same == (True, False)
    assert where == "dataloaders0"
    assert pids(applied)[0] == before[0] and pids(applied)[1] != before[1]


def kill_while_in_use(path: Path) -> int:
    job = Job.load(path)
    procs = job.state().trainers.spawn_procs({"gpus": 2})
    actors = procs.spawn("where", Where)
    actors.host.call().get(30)
    job.kill()  # no failure: the actors are stopped first
    job.kill()
    return os.getpid()


@pytest.mark.slow
def test_second_program_ends_the_job(applied: ProcessJob) -> None:
    """Runs last of the tests that share the job."""
    mark = applied._env[MARK]
    assert marked(mark)
    assert in_program(kill_while_in_use, applied.path) != os.getpid()
    assert gone(mark), marked(mark)
    assert not applied.path.exists() and not applied.path.with_suffix(".secret").exists()
    applied.kill()


class OneBroken(ProcessJob):
    """A job whose second host ends at once."""

    def _plans(self) -> list[Plan]:
        first, second = super()._plans()
        code = "import sys; print('no such device', file=sys.stderr); sys.exit(3)"
        return [first, Plan(second.mesh, second.index, "", [sys.executable, "-S", "-c", code, *ARGUMENTS])]


@pytest.mark.slow
def test_partly_started_job_leaves_no_processes(tmp_path: Path) -> None:
    with new_mark() as mark:
        job = OneBroken({"trainers": 2}, path=tmp_path / "job.json", env={MARK: mark})
        with pytest.raises(JobError, match=r"trainers\[1\] has ended before it listened \(exit 3\): no such device"):
            job.apply()
        assert gone(mark, 5.0), marked(mark)
    assert not list(tmp_path.glob("job.[js]*[nt]"))


@pytest.mark.slow
def test_job_that_starts_too_late_leaves_no_processes(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(3)")
    late = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with new_mark() as mark:
        job = ProcessJob({"trainers": 1}, path=tmp_path / "job.json", env={MARK: mark, "PYTHONPATH": late})
        with pytest.raises(JobError, match=r"trainers\[0\] did not report in time that it listens"):
            job.apply(timeout=0.2)
        assert gone(mark, 5.0), marked(mark)
    assert not job.path.exists()


@pytest.mark.slow
def test_program_killed_while_starting_hosts_leaves_no_processes(tmp_path: Path) -> None:
    code = "import os; from monarch_backend.job import ProcessJob; ProcessJob({'h': 1}, path=os.environ['P']).apply()"
    with new_mark() as mark:
        env = {**os.environ, MARK: mark, "P": str(tmp_path / "job.json")}
        program = subprocess.Popen([sys.executable, "-c", code], env=env)
        end = time.monotonic() + 30
        while len(marked(mark)) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        program.kill()
        program.wait()
        assert gone(mark, 20), marked(mark)


@pytest.mark.slow
def test_two_programs_at_once_start_one_host(tmp_path: Path) -> None:
    with new_mark() as mark:
        jobs = [ProcessJob({"trainers": 1}, path=tmp_path / "job.json", env={MARK: mark}) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda job: job.apply(), jobs))
        try:
            assert len([line for line in marked(mark) if " up " in line]) == 1
            assert jobs[0].status() == jobs[1].status()
        finally:
            jobs[0].kill()
        assert [host.state for host in jobs[1].status()] == ["not started"]


class Silent(ProcessJob):
    """A job whose host runs until its standard input ends, and never listens."""

    def _plans(self) -> list[Plan]:
        return [Plan("trainers", 0, "", ["cat"], {**os.environ, **self._env})]


def test_kill_ends_an_apply_that_still_starts_hosts(tmp_path: Path) -> None:
    with new_mark() as mark, ThreadPoolExecutor(1) as pool:
        job = Silent({"trainers": 1}, path=tmp_path / "job.json", env={MARK: mark})
        applied = pool.submit(job.apply)
        wait_until(lambda: [line for line in marked(mark) if line.endswith("cat ")], 30)
        ProcessJob({"trainers": 1}, path=job.path).kill()
        with pytest.raises(JobError, match=r"was ended by kill\(\) while this program started"):
            applied.result(30)
    assert not job.path.exists()


@pytest.mark.slow
def test_a_host_that_can_not_listen(tmp_path: Path) -> None:
    """The error message of the host reaches the program."""
    job = ProcessJob({"trainers": 1}, path=tmp_path / "job.json", env={"MONARCH_TLS": "perhaps"})
    with pytest.raises(JobError, match=r"trainers\[0\] has ended .*: monarch-backend up: MONARCH_TLS='perhaps'"):
        job.apply()


def test_resize_starts_and_ends_hosts(tmp_path: Path) -> None:
    with new_mark() as mark:
        job = ProcessJob({"trainers": 1}, path=tmp_path / "job.json", env={MARK: mark})
        job.apply()
        try:
            [first] = pids(job)
            job.resize("trainers", 3)
            assert pids(job)[0] == first
            assert [host.state for host in Job.load(job.path).status()] == ["up"] * 3
            last = state_file.read(job.path).hosts[2].daemon  # type: ignore[union-attr]
            job.resize("trainers", 2)
            assert len(pids(job)) == 2
            assert not last.runs()
            assert len(in_program(sizes, job.path)) == 2
        finally:
            job.kill()


def sizes(path: Path) -> Any:
    procs = Job.load(path).state().trainers.spawn_procs({"gpus": 1})
    result = list(procs.spawn("where", Where).host.call().get(30).values())
    procs.stop().get(30)
    return result


def test_state_with_a_cached_path_starts_hosts_once(tmp_path: Path) -> None:
    with new_mark() as mark:
        job = ProcessJob({"trainers": 1}, env={MARK: mark})
        try:
            assert in_program(cached, tmp_path / "job.json", mark) == in_program(cached, tmp_path / "job.json", mark)
        finally:
            Job.load(tmp_path / "job.json").kill()
        assert not job.active


def cached(path: Path, mark: str) -> Any:
    job = ProcessJob({"trainers": 1}, env={MARK: mark})
    job.state(30, cached_path=path)
    return pids(job)


HELD = """
import os, sys
from monarch_backend.actor import Actor, endpoint
from monarch_backend.job import Job

class Trainer(Actor):
    @endpoint
    def step(self):
        print("the step begins", flush=True)
        breakpoint()

if __name__ == "__main__":
    job = Job.load(sys.argv[1])
    job.state().trainers.spawn_procs({"gpus": 1}, name="held").spawn("trainer", Trainer).step.call_one().get()
"""


@pytest.mark.slow
def test_commands_take_a_job_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("MONARCH_LOG_DIR", str(tmp_path / "logs"))
    script = tmp_path / "held.py"
    script.write_text(HELD)
    with new_mark() as mark:
        job = ProcessJob({"trainers": 1}, name="held-job", env={MARK: mark})
        job.apply()
        with subprocess.Popen([sys.executable, str(script), str(job.path)], stderr=subprocess.PIPE) as program:
            try:
                wait_until(lambda: cli.main(["debug", "held-job"]) == 0 and " in step" in capsys.readouterr().out)
                assert cli.main(["debug", "run", "p 6 * 7", "--program", "held-job"]) == 0
                assert "42" in capsys.readouterr().out
                assert cli.main(["kill", "held-job", "--json"]) == 0
                assert json.loads(capsys.readouterr().out) == {"job": "held-job", "ended_hosts": ["trainers[0]"]}
                assert not job.path.exists() and not job.active
                assert program.wait(30) == 1  # nothing handles the loss
            finally:
                program.kill()
                job.kill()
        assert cli.main(["logs", "held-job"]) == 0
        assert "hosts 0 gpus 0 of held: the step begins\n" in capsys.readouterr().out
