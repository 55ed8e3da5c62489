"""State file of a job: its permissions, its content, and how it is used to end the processes that it names."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._hosts.process_identity import Identity
from monarch_backend._job import state_file
from monarch_backend._job.scheduled import ScheduledJob
from monarch_backend._job.state_file import HostEntry
from monarch_backend._transport.network.auth import new_secret, user_secret
from monarch_backend.job import Job, JobError, KubernetesJob, LocalJob, ProcessJob, SlurmJob, SPMDJob, SSHJob
from tests.support.waiting import wait_until


def noted(path: Path, process: Identity, **changes: Any) -> ProcessJob:
    """Return a job whose file has this process as its only host."""
    job = ProcessJob({"trainers": 1}, path=path)
    file = job._new_file(job.path)
    file.hosts = [HostEntry("trainers", 0, "", "tcp://127.0.0.1:1", process, "/tmp/log")]
    state_file.write(path, file)
    if changes:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return job


@pytest.fixture
def sleeper() -> Any:
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


def test_state_file_is_private_and_has_no_secret(tmp_path: Path, sleeper: Any) -> None:
    path = tmp_path / "job.json"
    noted(path, Identity.of(sleeper.pid))
    secret = tmp_path / "job.secret"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, secret)] == [0o600, 0o600]
    assert secret.read_text().strip() not in path.read_text()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["job.json", "job.secret"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 2, "hosts": "as they are called then"}', "is of version 2, and this monarch_backend reads 1"),
        ("{", "is not the file of a job"),
        ("", "is not the file of a job"),
        ('{"version": 1}', "is not the file of a job"),
        ("[1, 2]", "is not the file of a job"),
        ("\0\xff", "is not the file of a job"),
    ],
)
def test_invalid_state_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(text)
    path.chmod(0o600)
    job = ProcessJob({"trainers": 1}, path=path)
    for use in (lambda: Job.load(path), job.apply, job.state, job.status, job.kill):
        with pytest.raises(JobError, match=message):
            use()
    assert path.read_text() == text


def test_unknown_job_kind_is_refused(tmp_path: Path, sleeper: Any) -> None:
    path = tmp_path / "job.json"
    job = noted(path, Identity.of(sleeper.pid), kind="balloon")
    with pytest.raises(JobError, match="kind 'balloon', which this release of monarch_backend does not have"):
        Job.load(path)
    with pytest.raises(JobError, match="kind 'balloon': give this one another name"):
        job.apply()
    noted(path, Identity.of(sleeper.pid), description={"meshes": {"trainers": 0}})
    with pytest.raises(JobError, match="is not the file of a ProcessJob"):
        Job.load(path)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_state_file_accessible_to_other_users_is_refused(tmp_path: Path, sleeper: Any, mode: int) -> None:
    path = tmp_path / "job.json"
    job = noted(path, Identity.of(sleeper.pid))
    path.chmod(mode)
    with pytest.raises(JobError, match="must be yours alone: chown it, and chmod 600"):
        job.kill()
    assert sleeper.poll() is None


def test_a_process_that_got_the_pid_later_is_left_alone(tmp_path: Path, sleeper: Any) -> None:
    path, now = tmp_path / "job.json", Identity.of(sleeper.pid)
    for other in (Identity(now.pid, now.start - 1, now.boot), Identity(now.pid, now.start, "before")):
        job = noted(path, other)
        assert [host.state for host in job.status()] == ["gone"]
        job.kill()
        assert not path.exists()
    assert sleeper.poll() is None


def test_kill_ends_hosts_and_deletes_the_state_file(tmp_path: Path, sleeper: Any) -> None:
    path = tmp_path / "job.json"
    noted(path, Identity.of(sleeper.pid))
    Job.load(path).kill()
    assert sleeper.wait(5) == -signal.SIGINT
    assert not path.exists() and not (tmp_path / "job.secret").exists()
    with pytest.raises(JobError, match="there is no job: no file"):
        Job.load(path)
    ProcessJob({"trainers": 1}, path=path).kill()  # there is no job, so this has no effect


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_kill_on_a_full_disk_ends_the_hosts(
    tmp_path: Path, sleeper: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    job = noted(tmp_path / "job.json", Identity.of(sleeper.pid))

    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    for name in ("ftruncate", "pwrite", "fsync"):
        monkeypatch.setattr(os, name, fail)
    with monkeypatch.context() as patched:
        patched.setattr(ProcessJob, "_end", lambda *_: ["unknown: no answer"])
        with pytest.raises(JobError, match=r"not ended: trainers.*: unknown: no answer"):
            job.kill()
    job.kill()
    assert sleeper.wait(5) == -signal.SIGINT
    assert not job.path.exists()


def test_process_that_ignores_sigterm_gets_sigkill(tmp_path: Path) -> None:
    process = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; exec sleep 100"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as said:
        said.readline()
    Identity.of(process.pid).end(0.1)
    assert process.wait(5) == -signal.SIGKILL


def test_identity_of_a_zombie_raises_lookup_error() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessLookupError):
        Identity.of(process.pid)
    process.wait()


def test_state_file_of_another_machine_is_refused(tmp_path: Path, sleeper: Any) -> None:
    path = tmp_path / "job.json"
    noted(path, Identity.of(sleeper.pid), machine="elsewhere")
    for use in (Job.load(path).kill, Job.load(path).apply, Job.load(path).state):
        with pytest.raises(JobError, match="is of processes on elsewhere, and this is "):
            use()
    assert sleeper.poll() is None


def test_two_jobs_of_one_name(tmp_path: Path, sleeper: Any) -> None:
    path = tmp_path / "job.json"
    noted(path, Identity.of(sleeper.pid))
    with pytest.raises(JobError, match=r"was described differently: end that one first \(Job.load\('.*'\).kill\(\)\)"):
        ProcessJob({"trainers": 2}, path=path).apply()
    with pytest.raises(JobError, match="is of a job of kind 'process': give this one another name"):
        LocalJob(path=path).apply()


def test_state_before_apply(tmp_path: Path) -> None:
    job = ProcessJob({"trainers": 1}, path=tmp_path / "job.json")
    with pytest.raises(JobError, match=r"does not run \(no file .*\): apply\(\) starts it"):
        job.state()
    assert [host.state for host in job.status()] == ["not started"]


def test_a_secret_that_others_can_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(new_secret().hex())
    job = ProcessJob({"trainers": 1}, path=tmp_path / "job.json", secret_file=secret)
    with pytest.raises(PermissionError, match="must be yours alone"):
        job.apply()
    assert not job.path.exists()


@pytest.mark.parametrize("make", [ProcessJob, SlurmJob], ids=["ProcessJob", "SlurmJob"])
@pytest.mark.parametrize("given", ["argument", "variable"])
def test_a_missing_secret_file_is_an_error_with_a_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: type[ProcessJob | SlurmJob], given: str
) -> None:
    secret = tmp_path / "secret"
    if given == "variable":
        monkeypatch.setenv("MONARCH_SECRET_FILE", str(secret))
    options: Any = {"path": tmp_path / "job.json", "secret_file": secret if given == "argument" else None}
    job = ProcessJob({"trainers": 1}, **options) if make is ProcessJob else SlurmJob(**options).add_mesh("trainers", 1)
    with pytest.raises(JobError, match=rf"there is no secret file {secret}: create it by .* give neither secret_file="):
        job.apply()
    assert not job.path.exists()


def test_own_secret_file_that_was_removed_is_an_error_with_a_cure(tmp_path: Path) -> None:
    job = ProcessJob({"trainers": 1}, path=tmp_path / "job.json")
    job.dump(job.path)
    (tmp_path / "job.secret").unlink()
    with pytest.raises(JobError, match=r"no secret file .*: it was removed, so end the job by kill\(\)"):
        job.apply()
    job.kill()
    assert not job.path.exists()


def test_default_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    job = LocalJob(["trainers", "evaluators"], name="some-job")
    assert job.path == tmp_path / "monarch_backend" / "jobs" / "some-job.json"
    job.apply()
    other = Job.load("some-job")
    assert isinstance(other, LocalJob) and other.name == "some-job"
    assert list(other.state()) == ["trainers", "evaluators"]
    assert other.state().trainers.hosts is None  # this host
    assert repr(other.state()) == "JobState('some-job': trainers=HostMesh(this host), evaluators=HostMesh(this host))"
    with pytest.raises(AttributeError, match="no mesh 'learners'; it has trainers, evaluators"):
        other.state().learners  # noqa: B018
    other.kill()
    assert not job.path.exists()
    assert user_secret()  # the folder is private, so it can also hold the secret of the user


@pytest.mark.parametrize(
    "make",
    [
        lambda: ProcessJob({"trainers": 0}),
        lambda: ProcessJob({"trainers": True}),
        lambda: ProcessJob({"two words": 1}),
        lambda: ProcessJob({"class": 1}),
        lambda: ProcessJob({"_private": 1}),
        lambda: ProcessJob({"items": 1}),  # the name of a method of the state
        lambda: ProcessJob({"trainers": 1}, name="../elsewhere"),
        lambda: LocalJob(["a b"]),
        lambda: SPMDJob("a b"),
        lambda: SSHJob(options="-v"),
        lambda: SSHJob(env={"A B": "c"}),
        lambda: SSHJob().add_mesh("trainers", []),
        lambda: SSHJob().add_mesh("trainers", "node1"),
        lambda: SSHJob().add_mesh("trainers", ["-oProxyCommand=evil"]),
        lambda: SSHJob().add_mesh("trainers", ["a b"]),
        lambda: SSHJob().add_mesh("trainers", ["a"]).add_mesh("trainers", ["b"]),
        lambda: SSHJob().add_mesh("trainers", ["a", "b"], reach=["c"]),
        lambda: SSHJob(path="/nonexistent/job.json").apply(),
    ],
)
def test_bad_arguments(make: Any) -> None:
    with pytest.raises(ValueError):
        make()


def test_loading_makes_the_same_job(tmp_path: Path) -> None:
    job = SSHJob(path=tmp_path / "j.json", user="me", port=22, options=["-v"], env={"A": "b"}, python="python3")
    job.add_mesh("trainers", ["a", "b"], listen="0.0.0.0:7", reach=["10.0.0.1", "::1"]).add_mesh("others", ["a"])
    state_file.write(job.path, job._new_file(job.path))
    other = Job.load(job.path)
    assert isinstance(other, SSHJob)
    assert other._plans() == job._plans() and other.path == job.path
    assert [plan.reach for plan in other._plans()] == ["10.0.0.1", "::1", ""]
    job._forget(job._new_file(job.path))


@pytest.mark.parametrize(
    ("job", "added"),
    [
        (ProcessJob({"trainers": 1}), ["notice"]),
        (SlurmJob().add_mesh("trainers", 1), ["notice", "tether"]),
        (KubernetesJob().add_mesh("trainers", 1, image="i"), ["controller", "tether"]),
        (SSHJob().add_mesh("trainers", ["a"]), ["notice"]),
    ],
)
def test_file_of_a_release_with_fewer_arguments_is_of_the_same_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Job, added: list[str]
) -> None:
    monkeypatch.setattr(Job, "_start_missing", lambda *_: None)
    monkeypatch.setattr(ScheduledJob, "_submit_new", lambda *_: None)
    monkeypatch.setattr(ScheduledJob, "_wait_until_up", lambda *_: None)
    path = tmp_path / "job.json"
    job.dump(path)
    content = json.loads(path.read_text())
    for name in added:
        del content["description"][name]
    path.write_text(json.dumps(content))
    loaded = Job.load(path)
    assert loaded.can_run(job)
    loaded.apply()
    if not isinstance(job, SSHJob):
        loaded.resize("trainers", 2)
        assert len(Job.load(path)._plans()) == 2


def test_command_that_waits_for_another_names_it_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_file, "LOCK_NOTICE_S", 0.0)
    path, holder = tmp_path / "job.json", f"resize\\(\\) of pid {os.getpid()} on "
    with state_file.locked(path, "a command with a longer name"):
        pass
    with state_file.locked(path, "resize"):
        with pytest.raises(JobError, match=f"job.json is in use by {holder}.* wait for its end, or end that process"):
            ProcessJob({"trainers": 1}, path=path).apply(timeout=0.2)
        assert not state_file.is_kill_requested(path)
    assert re.search(f"waiting for {holder}.* which is starting or ending hosts of the job", caplog.text)


def test_request_of_a_kill_ends_with_its_wait(tmp_path: Path) -> None:
    job, errors = ProcessJob({"trainers": 1}, path=tmp_path / "job.json"), list[str]()

    def kill() -> None:
        try:
            job.kill()
        except JobError as error:
            errors.append(str(error))

    with state_file.locked(job.path, "apply"):
        waiting = threading.Thread(target=kill)
        waiting.start()
        wait_until(lambda: state_file.is_kill_requested(job.path))
        with pytest.raises(JobError, match="was ended by kill"):
            job._stop_if_killed()
    waiting.join(30)
    assert not errors
    assert not state_file.is_kill_requested(job.path)
