"""Slurm's commands, replaced by scripts: other releases, outages of slurmctld, and errors."""

from __future__ import annotations

import datetime
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monarch_backend._core.state import make_private
from monarch_backend._job import state_file
from monarch_backend._job.slurm import commands
from monarch_backend._job.slurm import job as slurm_job
from monarch_backend._job.slurm.job import _sbatch_words
from monarch_backend._job.slurm.node import Report, read_reports, report_path
from monarch_backend._transport.network.auth import write_private
from monarch_backend.job import Job, JobError, SlurmJob
from tests.support.waiting import wait_until

RUNNING = "JobId=7 JobName=x JobState=RUNNING Reason=None NodeList=n1 EndTime=1795962260 Restarts=0 ExitCode=0:0"
AS_JSON = '{"jobs": [{"job_id": 7, "job_state": ["RUNNING"], "nodes": "n1"}]}'


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return ``script(name, text)``, which makes a command. No other command is found. It logs its arguments."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path))
    monkeypatch.setattr(commands.time, "sleep", lambda _: None)

    def make(name: str, text: str) -> Path:
        log = tmp_path / f"{name}.log"
        (tmp_path / name).write_text(f'#!/bin/sh\necho "$@" >> {log}\n{text}\n')
        (tmp_path / name).chmod(0o755)
        return log

    return make


@pytest.fixture
def queue(script: Callable[[str, str], Path], tmp_path: Path) -> Path:
    """Return the file with the numbers of queued jobs, which all have the name that is asked for."""
    jobs = tmp_path / "queue"
    jobs.touch()
    script("squeue", f"cat {jobs}")
    script("scancel", f'case $1 in --name=*) : > {jobs};; *) sed -i "/^$1$/d" {jobs};; esac')
    ended = RUNNING.replace("RUNNING", "CANCELLED")
    script("scontrol", f'grep -qx $4 {jobs} && echo "{RUNNING}" || echo "{ended}"')
    return jobs


NO_ANSWER = 'echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1'


def test_json_is_read_where_scontrol_prints_it(script: Callable[[str, str], Path]) -> None:
    log = script("scontrol", f"echo '{AS_JSON}'")
    assert [each.state for each in commands.show(7)] == ["RUNNING"]
    assert log.read_text() == "--json show job 7\n"


def test_text_is_read_from_then_on_where_scontrol_has_no_json(script: Callable[[str, str], Path]) -> None:
    log = script("scontrol", f'[ "$1" = --json ] && {{ echo "unrecognized option" >&2; exit 1; }}; echo "{RUNNING}"')
    assert commands.show(7) == commands.show(7)
    assert log.read_text().splitlines() == ["--json show job 7", "--oneliner show job 7", "--oneliner show job 7"]


def test_slurmctld_that_restarts_is_asked_again(script: Callable[[str, str], Path], tmp_path: Path) -> None:
    said = "scontrol: error: slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    log = script(
        "scontrol", f'[ -e {tmp_path}/up ] || {{ : > {tmp_path}/up; echo "{said}" >&2; exit 1; }}; echo "{RUNNING}"'
    )
    assert [each.nodes for each in commands.show(7)] == ["n1"]
    assert len(log.read_text().splitlines()) == 2


def test_job_that_slurm_has_forgotten_has_no_record(script: Callable[[str, str], Path]) -> None:
    script("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert commands.show(7) == []


def test_errors_have_the_output_and_the_remedy(script: Callable[[str, str], Path]) -> None:
    script("scontrol", 'echo "scontrol: error: Access denied" >&2; exit 3')
    with pytest.raises(JobError, match=r"scontrol has failed \(3\): Access denied"):
        commands.show(7)
    script("scontrol", "echo JobId=7 nonsense")
    with pytest.raises(JobError, match=r"the output of scontrol is not understood .*is SLURM_CONF right"):
        commands.show(7)
    with pytest.raises(JobError, match="not found: run this program where Slurm's commands are, or add them to PATH"):
        commands.run(["no-such-command-of-slurm"])


def test_job_that_was_submitted_by_a_killed_program_is_found_by_its_name(
    script: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """The job's file is written before sbatch is called, and has no number yet."""
    squeue = script("squeue", f"[ -e {tmp_path}/cancelled ] || echo 42")
    script("scontrol", f'[ -e {tmp_path}/cancelled ] && echo "{RUNNING.replace("RUNNING", "CANCELLED")}"')
    scancel = script("scancel", f": > {tmp_path}/cancelled")
    sbatch = script("sbatch", "echo 43")
    job = SlurmJob(name="killed", path=tmp_path / "job.json").add_mesh("trainers", 1)
    job.dump(job.path)
    make_private(tmp_path / "job.slurm")
    write_private(report_path(tmp_path / "job.slurm", "trainers", 0), msgspec.json.encode(Report("42.0", "n1")))
    job.apply(wait=False)
    assert not sbatch.exists()
    assert read_reports(tmp_path / "job.slurm")
    job.dump(tmp_path / "copies.json")
    assert Job.load(tmp_path / "copies.json")._folder == tmp_path / "job.slurm"  # type: ignore[attr-defined]
    Job.load(job.path).kill()
    assert re.fullmatch(r"42\n--name=monarch-killed-\w+\n", scancel.read_text())
    assert "--name=monarch-killed-" in squeue.read_text()


def test_job_that_is_accepted_after_sbatch_has_given_up_is_cancelled(
    script: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """slurmctld accepts it between the first and the second search."""
    said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    script("sbatch", f': > {tmp_path}/submitted; echo "{said}" >&2; exit 1')
    script(
        "squeue", f"[ -e {tmp_path}/submitted ] && {{ [ -e {tmp_path}/asked ] && echo 42; : > {tmp_path}/asked; }}; :"
    )
    scancel = script("scancel", "")
    job = SlurmJob(name="late", path=tmp_path / "job.json").add_mesh("trainers", 1)
    with pytest.raises(JobError, match="Batch job submission failed: Socket timed out"):
        job.apply()
    assert scancel.read_text().startswith("--name=monarch-late-")
    assert (tmp_path / "asked").exists()
    assert not job.path.exists()


def unanswered_job(script: Callable[[str, str], Path], folder: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmJob:
    """Return a job whose submission had no answer, and was not found afterwards."""
    monkeypatch.setattr(slurm_job, "WITHDRAW_TIMEOUT_S", 0.0)
    script("sbatch", NO_ANSWER)
    job = SlurmJob(path=folder / "job.json").add_mesh("trainers", 1)
    with pytest.raises(JobError, match=r"Slurm may still accept .*: apply\(\) finds it then, and kill\(\) ends it"):
        job.apply()
    return job


def test_job_that_may_be_accepted_later_stays_for_kill(
    script: Callable[[str, str], Path], queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = unanswered_job(script, tmp_path, monkeypatch)
    for _ in range(2):
        with pytest.raises(JobError, match=r"may still accept .*not found yet: call kill\(\) again in 1[12]\d s"):
            Job.load(job.path).kill()
        assert job.active
    queue.write_text("42\n")
    Job.load(job.path).kill()
    assert not queue.read_text()
    assert not job.path.exists()


def test_job_that_was_not_accepted_in_time_is_forgotten(
    script: Callable[[str, str], Path], queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = unanswered_job(script, tmp_path, monkeypatch)
    monkeypatch.setattr(slurm_job, "ACCEPT_TIMEOUT_S", 0.0)
    job.kill()
    assert not job.path.exists()


def test_kill_looks_for_a_job_that_is_accepted_meanwhile(
    script: Callable[[str, str], Path], queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = unanswered_job(script, tmp_path, monkeypatch)
    monkeypatch.setattr(slurm_job, "WITHDRAW_TIMEOUT_S", 30.0)
    script("squeue", f"cat {queue}; [ -e {tmp_path}/asked ] || echo 42 > {queue}; : > {tmp_path}/asked")
    job.kill()
    assert not queue.read_text()
    assert not job.path.exists()


def test_late_job_of_an_earlier_submission_is_cancelled_with_the_present_one(
    script: Callable[[str, str], Path], queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = unanswered_job(script, tmp_path, monkeypatch)
    sbatch = script("sbatch", f"echo 43 >> {queue}; echo 43")
    sbatch.unlink()
    with pytest.raises(JobError, match=r"may still accept .*Call apply\(\) again in 1[12]\d s, or kill\(\)"):
        job.apply(wait=False)
    assert not sbatch.exists()
    monkeypatch.setattr(slurm_job, "ACCEPT_TIMEOUT_S", 0.0)
    job.apply(wait=False)
    queue.write_text("43\n42\n")
    asked = tmp_path / "scontrol.log"
    Job.load(job.path).kill()
    assert not queue.read_text()
    assert {each.split()[-1] for each in asked.read_text().splitlines()} == {"42", "43"}  # it waits for both
    assert not job.path.exists()


def test_late_job_is_taken_by_the_next_apply(
    script: Callable[[str, str], Path], queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = unanswered_job(script, tmp_path, monkeypatch)
    queue.write_text("42\n")
    job.apply(wait=False)
    file = state_file.read(job.path)
    assert file is not None
    assert (file.submitted["job"], file.unanswered_at) == (42, 0.0)


def test_outage_of_a_second_apply_keeps_the_file_of_an_open_submission(
    script: Callable[[str, str], Path], queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = unanswered_job(script, tmp_path, monkeypatch)
    script("squeue", 'echo "squeue: error: no such partition" >&2; exit 1')
    with pytest.raises(JobError, match="no such partition"):
        job.apply()
    assert job.active


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_interrupted_submission_cancels_the_job(queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = SlurmJob(name="interrupted", path=tmp_path / "job.json").add_mesh("trainers", 1)

    def accepted(*_: Any) -> int:
        queue.write_text("42\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm_job, "_sbatch", accepted)
    with pytest.raises(KeyboardInterrupt):
        job.apply()
    assert not queue.read_text()
    assert not job.path.exists()


def test_interrupted_submission_that_is_not_found_stays_for_kill(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slurm_job, "WITHDRAW_TIMEOUT_S", 0.0)
    job = SlurmJob(name="interrupted", path=tmp_path / "job.json").add_mesh("trainers", 1)
    monkeypatch.setattr(slurm_job, "_sbatch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.apply()
    assert re.search(r"looking for the submission of monarch-interrupted-\w+ for 0 s, to cancel it", caplog.text)
    assert re.search(r"Slurm may still accept monarch-interrupted-\w+: apply\(\) finds it then", caplog.text)
    with pytest.raises(JobError, match=r"call kill\(\) again in"):
        job.kill()
    queue.write_text("42\n")
    job.kill()
    assert not queue.read_text()
    assert not job.path.exists()


def test_second_interruption_of_a_submission_leaves_the_job_to_kill(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = SlurmJob(name="twice", path=tmp_path / "job.json").add_mesh("trainers", 1)
    with monkeypatch.context() as patched:

        def sbatch(*_: Any) -> int:
            patched.setattr(commands, "find_by_name", interrupted)  # the search for the job that may be submitted
            raise KeyboardInterrupt

        patched.setattr(slurm_job, "_sbatch", sbatch)
        with pytest.raises(KeyboardInterrupt):
            job.apply()
    assert re.search(r"monarch-twice-\w+ may be submitted: end it with kill\(\)", caplog.text)
    queue.write_text("42\n")
    job.kill()
    assert not queue.read_text()
    assert not job.path.exists()


def test_submission_that_cannot_be_cancelled_stays_for_kill(
    script: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_job, "WITHDRAW_TIMEOUT_S", 0.0)
    script("squeue", "")
    script("sbatch", 'echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1')
    script("scancel", 'echo "scancel: error: Unable to contact slurm controller" >&2; exit 1')
    job = SlurmJob(path=tmp_path / "job.json").add_mesh("trainers", 1)
    with pytest.raises(JobError, match=r"Socket timed out .* may be submitted: end it with kill\(\)"):
        job.apply()
    scancel = script("scancel", "")
    script("squeue", f"[ -s {scancel} ] || echo 42")
    scancel.unlink()
    script("scontrol", f'echo "{RUNNING.replace("RUNNING", "CANCELLED")}"')
    Job.load(job.path).kill()
    assert re.fullmatch(r"--name=monarch-job-\w+\n", scancel.read_text())
    assert not job.path.exists()


@pytest.fixture
def allocation(script: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmJob:
    script("srun", "exec sleep 60")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    monkeypatch.delenv("SLURM_HET_SIZE", raising=False)
    return SlurmJob(path=tmp_path / "job.json", in_allocation=True).add_mesh("trainers", 1)


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"])
def test_number_of_an_allocation_that_is_none_is_named(
    allocation: SlurmJob, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "x")
    with pytest.raises(JobError, match=f"in_allocation: {variable}='x' is not a number"):
        allocation.apply()


def test_interrupted_start_of_a_step_ends_srun(allocation: SlurmJob, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def interrupted(*_: Any) -> None:
        if allocation._steps:
            started.extend(allocation._steps)
            raise KeyboardInterrupt

    monkeypatch.setattr(commands, "find_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        allocation.apply()
    assert [each.poll() for each in started] == [-signal.SIGTERM]
    assert not allocation.path.exists()


def test_kill_does_not_wait_for_an_srun_that_does_not_end(
    script: Callable[[str, str], Path], allocation: SlurmJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_job, "SRUN_END_TIMEOUT_S", 0.1)
    script("squeue", "")
    script("scancel", "")
    file = allocation._new_file(allocation.path)
    file.submitted = {"job": 7, "step": "7.3", "folder": str(tmp_path)}
    state_file.write(allocation.path, file)
    words = ["sh", "-c", "trap '' TERM; echo; exec sleep 60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as step:
        assert step.stdout is not None
        step.stdout.readline()
        allocation._steps.append(step)
        allocation.kill()
        assert step.poll() == -signal.SIGKILL
    assert not allocation._steps


def test_step_of_a_killed_program_is_found_by_its_name(
    script: Callable[[str, str], Path], allocation: SlurmJob, tmp_path: Path
) -> None:
    """The job's file is written before srun is called, and has no number of the step yet."""
    allocation.dump(allocation.path)
    name = f"monarch-job-{json.loads(allocation.path.read_bytes())['id']}"
    script("squeue", f'[ -e {tmp_path}/cancelled ] || echo "7.3|{name}"')
    scancel = script("scancel", f": > {tmp_path}/cancelled")
    Job.load(allocation.path).kill()
    assert scancel.read_text() == "7.3\n"


LATE = """
import os, sys
from monarch_backend._job.slurm import node
os.environ.update(SLURM_JOB_ID="7", SLURM_PROCID="0", SLURMD_NODENAME="n1")
node.address_of = lambda *_: ""
node._run_host = lambda *_: 0
words = ["--folder", sys.argv[1], "--secret-file", "s", "--meshes", "trainers=0:1", "--listen", "{node}:0"]
sys.exit(node.main(words))
"""


@pytest.mark.parametrize(("start", "ended"), [("7.0", "its daemon has ended with 0"), ("7.1", "")])
def test_end_of_an_earlier_start_keeps_the_report_of_the_present_one(tmp_path: Path, start: str, ended: str) -> None:
    write_private(report_path(tmp_path, "trainers", 0), msgspec.json.encode(Report(start, "n2", "tcp://n2:1")))
    subprocess.run([sys.executable, "-c", LATE, str(tmp_path)], check=True, timeout=60)
    report = read_reports(tmp_path)["trainers", 0]
    assert (report.start, report.ended) == (start, ended)


SIGNALLED = """
import signal, sys
from monarch_backend._job.slurm import node
child = node.os.fork()
if child == 0:
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGURG]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    print("up", flush=True)
    for line in sys.stdin:
        print(signal.sigwait(numbers).name, flush=True)
    node.os._exit(7)
print(node._wait(child, has_notice=sys.argv[1] == "notice"))
"""


@pytest.mark.parametrize(
    ("notice", "names"),
    [("notice", ["SIGUSR2", "SIGURG", "SIGINT", "SIGINT"]), ("none", ["SIGTERM", "SIGURG", "SIGTERM", "SIGTERM"])],
)
def test_signals_of_a_node_are_passed_on_to_its_daemon(notice: str, names: list[str]) -> None:
    """Slurm may send SIGTERM to the daemon as well. So one with a notice gets others for the first and for the next."""
    words = [sys.executable, "-c", SIGNALLED, notice]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "up\n"
        status = Path(f"/proc/{process.pid}/status")
        caught = 1 << (signal.SIGURG - 1)  # the last handler of the parent process
        wait_until(lambda: int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16) & caught)  # type: ignore[index]
        for number, name in zip((signal.SIGTERM, signal.SIGURG, signal.SIGTERM, signal.SIGTERM), names, strict=True):
            process.send_signal(number)
            process.stdin.write("next\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{name}\n"
        process.stdin.close()
        assert process.stdout.read() == "7\n"


def test_options_of_the_users_environment_do_not_hide_jobs(
    script: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    script("squeue", '[ -z "$SQUEUE_PARTITION" ] && echo 42')
    assert commands.find_by_name("x") == [42]


@pytest.mark.parametrize("name", ["squeue", "scontrol", "sinfo", "scancel", "sbatch"])
def test_options_of_the_users_environment_do_not_change_the_output(
    script: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    variables = ["SQUEUE_FORMAT", "SQUEUE_FORMAT2", "SQUEUE_STATES", "SCONTROL_ALL", "SINFO_FORMAT", "SCANCEL_NAME",
                 "SLURM_JSON", "SBATCH_ARRAY_INX"]  # fmt: skip
    for variable in (*variables, "SLURM_TIME_FORMAT", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(variable, "of the user")
    script(name, f'echo "{"".join(f"${each}" for each in variables)}|$SLURM_TIME_FORMAT|$SBATCH_ACCOUNT"')
    assert commands.run([name]) == "|%s|of the user\n"


def test_mesh_can_have_no_gpus() -> None:
    job = SlurmJob(gpus_per_node=8).add_mesh("trainers", 1).add_mesh("loaders", 1, gpus_per_node=0)
    words = [_sbatch_words(resources) for resources, _ in job._groups(dict.fromkeys(job._sizes(), range(1)))]
    assert words == [["--gres=gpu:8"], []]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"time": 5}, "time=5: give a timedelta"),
        ({"options": "--exclusive"}, "options is a list of words"),
        ({"env": {"a b": "c"}}, "'a b' is not a name of an environment variable"),
        ({"listen": "{node}"}, "give HOST:PORT"),
        ({"in_allocation": True, "partition": "gpu"}, "partition: the allocation that the program is in has"),
        ({"tether": 0}, "tether=0: give more than 0 seconds"),
        ({"notice": -1}, "notice=-1: give 0 seconds"),
        ({"reason_timeout": -1}, "reason_timeout=-1: give 0 seconds"),
        ({"notice": 70000}, "Slurm takes at most 65535 seconds"),
        ({"env": {"A": 1}}, "env: the value of A is 1: give a text"),
        ({"env": {1: "a"}}, "1 is not a name of an environment variable"),
        ({"env": ["A=1"]}, "give a mapping of names to texts"),
        ({"setup": None}, "setup=None: give a text"),
        ({"python": 3}, "python=3: give a text"),
        ({"listen": None}, "listen=None: give HOST:PORT"),
        ({"options": [5]}, r"options=\[5\]: options is a list of words"),
        ({"options": None}, "options=None: options is a list of words"),
        ({"gpus_per_node": -1}, "gpus_per_node=-1: give a number, or a text such as 'a100:8'"),
        ({"gpus_per_node": True}, "gpus_per_node=True: give a number"),
        ({"gpus_per_node": "a100: 8"}, "gpus_per_node='a100: 8': give a number"),
        ({"cpus_per_node": 0}, "cpus_per_node=0: give 1 or more"),
        ({"cpus_per_node": "8"}, "cpus_per_node='8': give 1 or more"),
        ({"memory_per_node": "64 GB"}, "memory_per_node='64 GB': give a text such as '64G'"),
        ({"memory_per_node": 64}, "memory_per_node=64: give a text such as '64G'"),
        ({"exclusive": "no"}, "exclusive='no': give True or False"),
        ({"requeue": 1}, "requeue=1: give True or False"),
        ({"in_allocation": "yes"}, "in_allocation='yes': give True or False"),
        ({"partition": ["a", "b"]}, r"partition=\['a', 'b'\]: give a text on one line, or None"),
        ({"account": ""}, "account='': give a text on one line, or None"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SlurmJob(**options)
    if options.keys() <= {"gpus_per_node", "cpus_per_node", "memory_per_node", "exclusive", "partition", "account"}:
        with pytest.raises(ValueError, match=f"mesh 'trainers': {words}"):
            SlurmJob().add_mesh("trainers", 1, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, []),
        ({"partition": "gpu,spare"}, ["--partition=gpu,spare"]),
        ({"account": "lab"}, ["--account=lab"]),
        ({"qos": "high"}, ["--qos=high"]),
        ({"constraint": "[a100|h100]"}, ["--constraint=[a100|h100]"]),
        ({"time": "1-12:00:00"}, ["--time=1-12:00:00"]),
        ({"time": datetime.timedelta(hours=30, seconds=0.5)}, ["--time=1-06:00:01"]),
        ({"gpus_per_node": 8}, ["--gres=gpu:8"]),
        ({"gpus_per_node": "a100:8"}, ["--gres=gpu:a100:8"]),
        ({"gpus_per_node": 0}, []),
        ({"cpus_per_node": 16}, ["--cpus-per-task=16"]),
        ({"memory_per_node": "64G"}, ["--mem=64G"]),
        ({"memory_per_node": "64000"}, ["--mem=64000"]),
        ({"exclusive": True}, ["--exclusive"]),
        ({"exclusive": False}, []),
        ({"options": ["--reservation=mine", "--begin=now+1hour"]}, ["--reservation=mine", "--begin=now+1hour"]),
        ({"options": ("--nice",), "qos": "low"}, ["--qos=low", "--nice"]),
    ],
)
@pytest.mark.parametrize("of", ["job", "mesh"])
def test_options_are_words_of_sbatch(
    script: Callable[[str, str], Path], tmp_path: Path, options: dict[str, Any], words: list[str], of: str
) -> None:
    script("squeue", "")
    log = script("sbatch", "cat > /dev/null; echo 43")
    job = SlurmJob(path=tmp_path / "job.json", **(options if of == "job" else {}))
    job.add_mesh("trainers", 3, **(options if of == "mesh" else {})).apply(wait=False)
    _, _, rendered = log.read_text().partition(" --nodes=3 --ntasks-per-node=1")
    assert rendered.split() == words


def test_script_that_cannot_be_made_is_not_submitted(
    script: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script("squeue", "")
    sbatch = script("sbatch", "echo 43")
    job = SlurmJob(path=tmp_path / "job.json").add_mesh("trainers", 1)

    def fails(*_: object) -> str:
        raise TypeError("no text")

    monkeypatch.setattr(job, "_script", fails)
    with pytest.raises(TypeError, match="no text"):
        job.apply(wait=False)
    assert not sbatch.exists()
    assert not job.active
    job.kill()


def test_notice_is_a_signal_of_sbatch_and_an_option_of_hosts(
    script: Callable[[str, str], Path], tmp_path: Path
) -> None:
    script("squeue", "")
    script("scancel", "")
    log = script("sbatch", f"cat > {tmp_path}/batch; echo 43")
    job = SlurmJob(path=tmp_path / "job.json", notice=59.5).add_mesh("trainers", 1)
    job.apply(wait=False)
    assert "--signal=URG@60" in log.read_text().split()
    assert "--notice 59.5" in (tmp_path / "batch").read_text()
    assert Job.load(job.path).can_run(job)


def test_invalid_meshes_are_refused_and_resize_too(tmp_path: Path) -> None:
    job = SlurmJob(path=tmp_path / "job.json").add_mesh("trainers", 1, time="1:00")
    for name, hosts, resources, words in (
        ("trainers", 1, {}, "has a mesh 'trainers' already"),
        ("others", 0, {}, "0 is not a number of hosts"),
        ("others", 1, {"gpus": 2}, "cannot have gpus; it can have partition"),
    ):
        with pytest.raises(ValueError, match=words):
            job.add_mesh(name, hosts, **resources)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no mesh 'others'; it has trainers"):
        job.resize("others", 2)
    job.resize("trainers", 2)
    assert len(job.status()) == 2
