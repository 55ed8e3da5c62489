"""examples/kubernetes_train.py with a job that another program ends, or that fails again and again: it ends."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_backend.job import HostStatus, JobError


class FailingJob:
    """Job whose hosts have a state, and cannot be attached."""

    name = "lm"

    def __init__(self, state: str) -> None:
        self.host_state, self.attempts = state, 0

    def status(self) -> list[HostStatus]:
        return [HostStatus("trainers", 0, self.host_state)]

    def state(self, timeout: float) -> Any:
        self.attempts += 1
        raise JobError("mesh 'trainers' of job 'lm': no host answers")


@pytest.fixture
def kubernetes_train(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module("kubernetes_train")


def test_job_that_another_program_has_ended_ends_the_training(kubernetes_train: Any) -> None:
    job = FailingJob("not started")
    with pytest.raises(RuntimeError, match="job 'lm' was ended by another program: start the training again"):
        kubernetes_train.Run(job, 10).train()
    assert job.attempts == 0


def test_failures_without_a_new_step_end_the_training(kubernetes_train: Any) -> None:
    job = FailingJob("up")
    with pytest.raises(
        RuntimeError, match=r"no step after step 0 within 10 attempts, the last one: .* no host answers"
    ):
        kubernetes_train.Run(job, 10).train()
    assert job.attempts == kubernetes_train.MAX_FAILURES == 10


def test_failures_with_new_steps_between_them_do_not_end_the_training(
    kubernetes_train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def call(step: int) -> Any:
        calls.append(step)
        if calls.count(step) == 1:  # each step fails once
            raise JobError(f"step {step} fails")
        return SimpleNamespace(get=lambda timeout: {0: float(step)})

    def start(run: Any) -> None:
        run.procs, run.trainers = object(), SimpleNamespace(train=SimpleNamespace(call=call))

    monkeypatch.setattr(kubernetes_train.Run, "start", start)
    monkeypatch.setattr(kubernetes_train.Run, "stop", lambda run: setattr(run, "procs", None))
    monkeypatch.setattr(kubernetes_train.Run, "keep", lambda run, step: setattr(run, "kept", (step, b"")))
    run = kubernetes_train.Run(FailingJob("up"), 25)
    run.train()
    assert run.losses == {step: float(step) for step in range(25)}
    assert len(run.failures) == 25
