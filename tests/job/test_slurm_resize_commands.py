"""SlurmJob.resize with Slurm's commands replaced by scripts: outages, refusals, interruptions, killed programs."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monarch_backend._job import state_file
from monarch_backend._job.slurm import job as slurm_job
from monarch_backend._job.slurm.node import Report, read_reports, report_path
from monarch_backend._transport.network.auth import write_private
from monarch_backend.job import Job, JobError, SlurmJob
from tests.job.test_slurm_commands import LATE, NO_ANSWER, RUNNING
from tests.job.test_slurm_commands import script as script

RUNS = RUNNING.replace("1795962260", "Unknown")
ENDED = RUNS.replace("RUNNING", "CANCELLED")


class Slurm:
    """The files of a Slurm made of scripts: queue has the numbers of its jobs, which all have the name asked for."""

    def __init__(self, folder: Path, script: Callable[[str, str], Path]) -> None:
        self.folder, self.script = folder, script
        self.jobs, self.states = folder / "queue", folder / "states"
        self.jobs.touch()
        self.states.mkdir()
        script("squeue", f"cat {self.jobs}")
        script("sinfo", "")
        remove = f'case $1 in --name=*) : > {self.jobs};; *) sed -i "/^$1$/d" {self.jobs};; esac'
        self.scancel = script("scancel", remove)
        self.refusal = folder / "refusal"
        self.scontrol = script("scontrol", f"""
case $1 in
--json) exit 1;;
update)
    echo "$SLURM_JOB_ID$SLURM_JOBID" > {folder}/variables
    [ ! -e {self.refusal} ] || {{ cat {self.refusal} >&2; exit 1; }};;
show) for i in 1 2 3 4; do echo n$i; done;;
*) if grep -qx $4 {self.jobs}; then cat {self.states}/$4; else echo "{ENDED}"; fi;;
esac""")  # fmt: skip

    def show(self, number: int, **fields: str) -> None:
        """Let a queued job have other fields than those of one that runs."""
        text = RUNS.replace("JobId=7", f"JobId={number}")
        for name, value in fields.items():
            text = re.sub(rf"\b{name}=\S+", f"{name}={value}", text)
        (self.states / str(number)).write_text(text)

    def accept(self, number: int, *, answers: bool = True) -> Path:
        """Make an sbatch that accepts a job under this number, and return its log."""
        self.show(number)
        return self.script("sbatch", f"cat > {self.folder}/batch; echo {number} >> {self.jobs}; "
                           + (f"echo {number}" if answers else NO_ANSWER))  # fmt: skip

    def report(self, start: str, *indices: int, folder: str = "job.slurm") -> None:
        """Write the reports of hosts that listen."""
        for index in indices:
            report = Report(start, f"n{index + 1}", f"tcp://n{index + 1}:1", "")
            path = report_path(self.folder / folder, "trainers", index)
            path.parent.mkdir(exist_ok=True)
            write_private(path, msgspec.json.encode(report))


@pytest.fixture
def slurm(script: Callable[[str, str], Path], tmp_path: Path) -> Slurm:
    return Slurm(tmp_path, script)


@pytest.fixture
def job(slurm: Slurm, tmp_path: Path) -> SlurmJob:
    """Return a job whose two hosts listen."""
    slurm.accept(41)
    job = SlurmJob(path=tmp_path / "job.json", time="1:00", options=["--nice"]).add_mesh("trainers", 2)
    job.apply(wait=False)
    slurm.report("41.0", 0, 1)
    job.apply()
    return job


def submitted(job: Job) -> dict[str, Any]:
    file = state_file.read(job.path)
    assert file is not None
    return file.submitted


def test_growth_is_a_further_job_with_the_same_options(job: SlurmJob, slurm: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "sbatch.log"
    grow(job, slurm, 4, 1, 42)
    first, further = (line.replace(f"{tmp_path}/job.slurm", "F") for line in log.read_text().splitlines())
    assert further == first.replace("F/batch.log", "F/1/batch.log")
    assert "--meshes trainers=2:4" in (tmp_path / "batch").read_text()
    assert submitted(job) == {
        "job": 41, "folder": f"{tmp_path}/job.slurm", "hosts": {"trainers": [0, 2]},
        "further": [{"job": 42, "folder": f"{tmp_path}/job.slurm/1", "hosts": {"trainers": [2, 4]}}],
    }  # fmt: skip
    loaded = Job.load(job.path)
    assert [(each.state, each.address) for each in loaded.status()] == [("up", f"tcp://n{n}:1") for n in range(1, 5)]
    loaded.kill()
    assert slurm.jobs.read_text() == ""
    assert slurm.scancel.read_text().splitlines()[:2] == ["41", "42"]


def grow(job: SlurmJob, slurm: Slurm, count: int, folder: int, number: int) -> None:
    """Add hosts to the job's mesh by a Slurm job with this number."""
    there = len(job.status())
    slurm.accept(number)
    listen = functools.partial(slurm.report, f"{number}.0", *range(there, count), folder=f"job.slurm/{folder}")
    job._wait_for_change = lambda *_: listen()  # type: ignore[method-assign]
    job.resize("trainers", count)


def test_time_limit_of_a_further_job_is_that_of_its_hosts(job: SlurmJob, slurm: Slurm) -> None:
    grow(job, slurm, 3, 1, 42)
    slurm.show(42, EndTime=str(int(time.time()) + 60))
    assert [each.state for each in job.status()] == ["up", "up", "ending"]


def test_shrinking_cancels_further_jobs_and_takes_nodes_of_others(
    job: SlurmJob, slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a job of Slurm, scontrol would write a script into the working directory."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOBID", "7")
    grow(job, slurm, 4, 1, 42)
    grow(job, slurm, 5, 2, 43)
    slurm.scontrol.unlink()
    job.resize("trainers", 3)
    assert slurm.scancel.read_text().split() == ["43"]
    assert [line for line in slurm.scontrol.read_text().splitlines() if "update" in line] == [
        "update JobId=42 NodeList=n3"
    ]
    assert (tmp_path / "variables").read_text() == "\n"
    assert [each["hosts"] for each in submitted(job)["further"]] == [{"trainers": [2, 3]}]
    grow(job, slurm, 5, 3, 44)
    assert [each.index for each in Job.load(job.path).status() if each.state == "up"] == [0, 1, 2, 3, 4]
    job.resize("trainers", 1)
    assert slurm.jobs.read_text() == "41\n"
    assert "update JobId=41 NodeList=n1" in slurm.scontrol.read_text()
    assert submitted(job)["hosts"] == {"trainers": [0, 1]}
    assert submitted(job)["further"] == []


def test_hosts_end_where_slurm_does_not_take_their_nodes(
    job: SlurmJob, slurm: Slurm, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.refusal.write_text("slurm_update error: Requested operation is presently disabled")
    waits = []

    def sleep(_: float) -> None:
        waits.append((tmp_path / "job.slurm" / "ended-41.json").read_text())
        report = Report("41.0", "n2", "tcp://n2:1", "", ended="its daemon has ended with 0")
        write_private(report_path(tmp_path / "job.slurm", "trainers", 1), msgspec.json.encode(report))

    monkeypatch.setattr(slurm_job.time, "sleep", sleep)
    job.resize("trainers", 1)
    assert set(waits) == {'{"trainers":1}'}
    assert re.search("stay allocated until Slurm job 41 ends, because .*: .*is presently disabled", caplog.text)
    assert [str(each) for each in job.status()] == ["trainers[0]: up"]


def test_shrinking_a_job_that_waits_keeps_its_nodes(job: SlurmJob, slurm: Slurm, tmp_path: Path) -> None:
    slurm.show(41, JobState="PENDING", Restarts="1")
    with pytest.raises(JobError, match=r"not all hosts run in time: trainers\[0\]: pending \(Slurm job 41: PENDING"):
        job.resize("trainers", 1, timeout=0)
    assert "update" not in slurm.scontrol.read_text()
    assert (tmp_path / "job.slurm" / "ended-41.json").read_text() == '{"trainers":1}'
    assert len(Job.load(job.path).status()) == len(job.status()) == 1


@pytest.mark.parametrize(("index", "is_started"), [(0, True), (1, False)])
def test_node_does_not_start_an_ended_host(tmp_path: Path, index: int, is_started: bool) -> None:
    (tmp_path / "ended-7.json").write_text('{"trainers": 1}')
    program = LATE.replace('PROCID="0"', f'PROCID="{index}"').replace("0:1", "0:2")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0
    assert ("was ended by a resize" in done.stdout) is not is_started
    assert bool(read_reports(tmp_path)) is is_started


@pytest.mark.parametrize("error", [JobError, KeyboardInterrupt])
def test_growth_that_is_given_up_leaves_the_job_as_it_was(
    job: SlurmJob, slurm: Slurm, tmp_path: Path, error: type[BaseException]
) -> None:
    before = job.path.read_bytes()
    slurm.accept(42)
    if error is KeyboardInterrupt:

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        job._wait_for_change = interrupt  # type: ignore[method-assign]
    with pytest.raises(error) as caught:
        job.resize("trainers", 3, timeout=0 if error is JobError else 60)
    if error is JobError:
        assert re.search(r"trainers\[2\]: pending \(Slurm job 42: RUNNING on n1; its host", str(caught.value))
    assert slurm.jobs.read_text() == "41\n"
    assert len(job.status()) == len(Job.load(job.path).status()) == 2
    assert {**submitted(job), "further": []} == submitted(job)
    assert state_file.read(job.path).hosts == msgspec.json.decode(before, type=state_file.JobFile).hosts  # type: ignore[union-attr]
    job.apply()


def test_refused_growth_has_slurms_reason_and_leaves_the_job_as_it_was(job: SlurmJob, slurm: Slurm) -> None:
    before = job.path.read_bytes()
    slurm.script("sbatch", 'echo "sbatch: error: Node count specification invalid" >&2; exit 1')
    with pytest.raises(JobError, match="Node count specification invalid"):
        job.resize("trainers", 4)
    assert job.path.read_bytes() == before
    assert len(job.status()) == 2


def test_growth_without_an_answer_is_found_and_cancelled(job: SlurmJob, slurm: Slurm) -> None:
    slurm.accept(42, answers=False)
    with pytest.raises(JobError, match=r"Socket timed out on send/recv operation$"):
        job.resize("trainers", 4)
    assert slurm.jobs.read_text() == "41\n"


@pytest.fixture
def unanswered(job: SlurmJob, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> SlurmJob:
    """Return a job with a growth that had no answer, and was not found."""
    monkeypatch.setattr(slurm_job, "WITHDRAW_TIMEOUT_S", 0.0)
    slurm.script("sbatch", NO_ANSWER)
    with pytest.raises(
        JobError, match=r"Socket timed out.*; Slurm may still accept .*: resize\(\) and kill\(\) cancel"
    ):
        job.resize("trainers", 4)
    return job


def test_growth_that_is_accepted_late_is_cancelled_by_the_next_resize(unanswered: SlurmJob, slurm: Slurm) -> None:
    sbatch = slurm.accept(43)
    sbatch.unlink()
    with pytest.raises(JobError, match=r"may still accept .*Call resize\(\) again in 1[12]\d s, or kill\(\)"):
        Job.load(unanswered.path).resize("trainers", 4)
    assert not sbatch.exists()
    slurm.jobs.write_text("41\n42\n")
    grow(unanswered, slurm, 4, 2, 43)
    assert slurm.jobs.read_text() == "41\n43\n"
    slurm.jobs.write_text("41\n43\n")
    unanswered.kill()
    assert slurm.jobs.read_text() == ""


def test_growth_that_is_accepted_late_is_cancelled_by_kill(unanswered: SlurmJob, slurm: Slurm) -> None:
    with pytest.raises(JobError, match=r"may still accept .*not found yet: call kill\(\) again in 1[12]\d s"):
        unanswered.kill()
    slurm.jobs.write_text("42\n")
    Job.load(unanswered.path).kill()
    assert slurm.jobs.read_text() == ""
    assert not unanswered.path.exists()


def test_interrupted_submission_of_a_growth_is_cancelled(
    job: SlurmJob, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> int:
        slurm.jobs.write_text("41\n42\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm_job, "_sbatch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        job.resize("trainers", 4)
    assert slurm.jobs.read_text() == "41\n"
    assert len(job.status()) == 2
    job.resize("trainers", 2)


def test_growth_waits_no_more_when_another_program_ends_the_job(job: SlurmJob, slurm: Slurm) -> None:
    slurm.accept(42)
    job._wait_for_change = lambda *_: Job.load(job.path).kill()  # type: ignore[method-assign]
    with pytest.raises(JobError, match="was ended while this program waited for its hosts"):
        job.resize("trainers", 4)
    assert slurm.jobs.read_text() == ""
    assert not job.path.exists()


def test_growth_of_a_killed_program_is_in_the_jobs_file(job: SlurmJob, slurm: Slurm) -> None:
    """Another program sees what its hosts wait for, and can give the growth up."""
    slurm.accept(42)
    slurm.show(42, JobState="PENDING", Reason="Resources")
    seen = []

    def use_it(*_: Any) -> None:
        other = Job.load(job.path)
        seen.extend(str(each) for each in other.status())
        other.resize("trainers", 2)
        raise KeyboardInterrupt

    job._wait_for_change = use_it  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        job.resize("trainers", 3)
    assert seen == ["trainers[0]: up", "trainers[1]: up", "trainers[2]: pending (Slurm job 42: PENDING (Resources))"]
    assert slurm.jobs.read_text() == "41\n"
    assert job.can_run(Job.load(job.path))


def test_growth_before_that_of_another_program_is_kept(
    job: SlurmJob, slurm: Slurm, caplog: pytest.LogCaptureFixture
) -> None:
    slurm.accept(42)

    def grow_more(*_: Any) -> None:
        slurm.accept(43)
        other = Job.load(job.path)
        assert isinstance(other, SlurmJob)
        slurm.report("42.0", 2, folder="job.slurm/1")
        grow(other, slurm, 4, 2, 43)
        raise KeyboardInterrupt

    job._wait_for_change = grow_more  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        job.resize("trainers", 3)
    assert slurm.jobs.read_text() == "41\n42\n43\n"
    assert "another program has added hosts after them" in caplog.text
    assert [each.state for each in job.status()] == ["up"] * 4


def test_job_in_the_programs_allocation_is_not_resized(job: SlurmJob, slurm: Slurm, tmp_path: Path) -> None:
    inside = SlurmJob(name="inside", path=tmp_path / "inside.json", in_allocation=True).add_mesh("trainers", 1)
    file = inside._new_file(inside.path)
    file.submitted = {"job": 41, "step": "41.3", "folder": str(tmp_path)}
    state_file.write(inside.path, file)
    with pytest.raises(JobError, match=r"runs in an allocation of the program.*: end the job by kill\(\)"):
        inside.resize("trainers", 2)
    assert len(inside.status()) == 1
