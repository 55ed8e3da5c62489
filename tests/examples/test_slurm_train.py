"""examples/slurm_train.py with a job that Slurm refuses or ends each time: the program ends with an error."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from monarch_backend.job import HostStatus, JobError


class EndedJob:
    """Job that ends at once after each submission. ``refused``: why it is not accepted again."""

    name = "lm"

    def __init__(self, refused: str = "") -> None:
        self.refused, self.submissions, self.state_name = refused, 1, "gone"

    def status(self) -> list[HostStatus]:
        return [HostStatus("trainers", 0, self.state_name, reason="CANCELLED")]

    def kill(self) -> None:
        self.state_name = "not started"

    def apply(self, *, wait: bool) -> None:
        assert not wait
        if self.refused:
            raise JobError(self.refused)
        self.submissions, self.state_name = self.submissions + 1, "gone"

    def state(self, timeout: float) -> Any:
        raise JobError("job 'lm' cannot run: CANCELLED")


@pytest.fixture
def slurm_train(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module("slurm_train")


def test_refused_submission_ends_the_training(slurm_train: Any) -> None:
    job = EndedJob("sbatch has failed (1): Invalid qos")
    run = slurm_train.SlurmRun(job, 10)
    with pytest.raises(RuntimeError, match=r"'lm' could not be submitted again: sbatch has failed .* Invalid qos"):
        run.train()
    with pytest.raises(RuntimeError, match="'lm' was ended by another program"):
        run.train()


def test_job_that_ends_after_each_submission_ends_the_training(slurm_train: Any) -> None:
    job = EndedJob()
    run = slurm_train.SlurmRun(job, 10)
    with pytest.raises(RuntimeError, match=r"was submitted 5 times, and ended: .*CANCELLED"):
        run.train()
    assert job.submissions == slurm_train.MAX_SUBMISSIONS == 5
    assert len(run.failures) == 4
