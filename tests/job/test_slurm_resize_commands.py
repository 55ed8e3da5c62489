"""SlurmJob.resize with Slurm's commands replaced by scripts: outages, refusals, interruptions, killed programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from monarch_backend._job import state_file
from monarch_backend._job.slurm import job as slurm_job
from monarch_backend._job.slurm.node import Report, report_path
from monarch_backend._transport.network.auth import write_private
from monarch_backend.job import Job, JobError, SlurmJob
from tests.job.test_slurm_commands import NO_ANSWER, RUNNING
from tests.job.test_slurm_commands import script as script

RUNS = RUNNING.replace("1795962260", "Unknown")


class Slurm:
    """The files of a Slurm made of scripts: queue has the numbers of its jobs, which all have the name asked for."""

    def __init__(self, folder: Path, script: Callable[[str, str], Path]) -> None:
        self.folder, self.script = folder, script
        self.jobs = folder / "queue"
        self.jobs.touch()
        script("squeue", f"cat {self.jobs}")
        script("sinfo", "")
        self.scancel = script(
            "scancel", f'case $1 in --name=*) : > {self.jobs};; *) sed -i "/^$1$/d" {self.jobs};; esac'
        )
        ended = RUNNING.replace("RUNNING", "CANCELLED")
        show = f'grep -qx $4 {self.jobs} && echo "{RUNS}" | sed "s/JobId=7/JobId=$4/" || echo "{ended}"'
        self.scontrol = script("scontrol", f"[ $1 = --json ] && exit 1; [ $1 = update ] && exit 0; {show}")

    def accept(self, number: int, *, answers: bool = True) -> Path:
        """Make an sbatch that accepts a job under this number, and return its log."""
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
    log = slurm.accept(42)
    job._wait_for_change = lambda *_: slurm.report("42.0", 2, 3, folder="job.slurm/1")  # type: ignore[method-assign]
    job.resize("trainers", 4)
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


def test_growth_that_is_accepted_late_is_cancelled_by_the_next_resize_or_kill(
    job: SlurmJob, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_job, "WITHDRAW_TIMEOUT_S", 0.0)
    slurm.script("sbatch", NO_ANSWER)
    with pytest.raises(
        JobError, match=r"Socket timed out.*; Slurm may still accept the job for new hosts: another res"
    ):
        job.resize("trainers", 4)
    slurm.jobs.write_text("41\n42\n")
    job.resize("trainers", 2)
    assert slurm.jobs.read_text() == "41\n"
    slurm.jobs.write_text("41\n43\n")
    job.kill()
    assert slurm.jobs.read_text() == ""


def test_job_in_the_programs_allocation_is_not_resized(job: SlurmJob, slurm: Slurm, tmp_path: Path) -> None:
    inside = SlurmJob(name="inside", path=tmp_path / "inside.json", in_allocation=True).add_mesh("trainers", 1)
    file = inside._new_file(inside.path)
    file.submitted = {"job": 41, "step": "41.3", "folder": str(tmp_path)}
    state_file.write(inside.path, file)
    with pytest.raises(JobError, match=r"runs in an allocation of the program.*: end the job by kill\(\)"):
        inside.resize("trainers", 2)
    assert len(inside.status()) == 1
