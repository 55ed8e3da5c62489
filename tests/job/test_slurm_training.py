"""examples/slurm_train.py on a real cluster: training through faults of processes, nodes, the network and Slurm."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch_backend.actor
from monarch_backend._job import state_file
from tests.job.conftest import ROOT
from tests.job.support import in_program
from tests.support.slurm_cluster import SlurmCluster
from tests.support.undisturbed_training import train_undisturbed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slurm

STEPS, FAULT_STEP = 12, 7
"""A snapshot is taken after five steps, so the steps since then are repeated."""


class Fault:
    """One fault of a run, after a step."""

    def __init__(self, cluster: SlurmCluster, kind: str) -> None:
        self.cluster, self.kind, self.is_done = cluster, kind, False

    def __call__(self, run: Any, step: int) -> None:
        if step == FAULT_STEP and not self.is_done:
            self.is_done = True
            getattr(self, self.kind)(run)

    @staticmethod
    def _number(run: Any) -> str:
        file = state_file.read(run.job.path)
        assert file is not None
        return str(file.submitted["job"])

    def _kill_worker(self, index: int) -> None:
        pids = [pid for pid, words in self.cluster.where.processes(index + 1).items() if "slurm" not in words]
        started = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) for pid in pids}
        os.kill(max(started, key=started.__getitem__), signal.SIGKILL)

    def killed_worker(self, _: Any) -> None:
        self._kill_worker(1)

    def scancel(self, run: Any) -> None:
        self.cluster.run("scancel", self._number(run))

    def drained_node(self, run: Any) -> None:
        self.cluster.run("scontrol", "update", f"NodeName={self.cluster.nodes[1]}", "State=DRAIN", "Reason=new disk")
        self.cluster.run("scontrol", "requeue", self._number(run))

    def crashed_node(self, _: Any) -> None:
        self.cluster.crash_node(1)

    def slurmctld(self, _: Any) -> None:
        self.cluster.kill_controller()
        self._kill_worker(1)

    def cut(self, run: Any) -> None:
        self.cluster.where.cables.cut_off(2, [0])

        def heal() -> None:
            wait_until(lambda: run.failures, 60)
            self.cluster.where.cables.heal(2, [0])

        threading.Thread(target=heal, daemon=True).start()


def train(cluster: SlurmCluster, folder: Path, kind: str) -> dict[str, Any]:
    cluster.where.enter(0)
    sys.path.insert(0, str(ROOT / "examples"))
    import slurm_train

    monarch_backend.actor.unhandled_fault_hook = lambda _: None
    job = slurm_train.slurm_job(2, name="lm", path=folder / "job.json", tether=60)
    try:
        job.apply(timeout=60)
        run = slurm_train.SlurmRun(job, STEPS)
        run.train(Fault(cluster, kind))
        return {
            "losses": run.losses,
            "failures": run.failures,
            "recoveries": run.recoveries,
            "submissions": run.submissions,
        }
    finally:
        job.kill()


@pytest.fixture(scope="module")
def expected_losses() -> dict[int, float]:
    losses: dict[int, float] = in_program(train_undisturbed, STEPS, timeout=120)
    return losses


@contextlib.contextmanager
def requeued_jobs_start_at_once(cluster: SlurmCluster) -> Iterator[None]:
    """Let requeued jobs start within seconds. By default Slurm waits for two minutes."""
    is_over, done = threading.Event(), set[str]()

    def run() -> None:
        while not is_over.wait(0.5):
            for job in cluster.jobs("%i %r %S", check=False):
                number, reason, start = job.split()
                if reason == "BeginTime" and start not in done:
                    cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now+2seconds", check=False)
                    done.update(job.split()[2] for job in cluster.jobs("%i %r %S", check=False))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture
def repaired(cluster: SlurmCluster) -> Iterator[None]:
    """Repair the cluster after the test."""
    yield
    cluster.where.cables.heal_all()
    cluster.run("scontrol", "update", f"NodeName={cluster.nodes[1]}", "State=RESUME", check=False)
    if not cluster.where.processes(2):
        cluster.repair_node(1)


@pytest.mark.usefixtures("repaired")
@pytest.mark.parametrize("kind", ["killed_worker", "scancel", "drained_node", "crashed_node", "slurmctld", "cut"])
def test_training_goes_on_with_the_same_losses(
    cluster: SlurmCluster, tmp_path: Path, expected_losses: dict[int, float], kind: str
) -> None:
    begun = time.monotonic()
    with requeued_jobs_start_at_once(cluster):
        found = in_program(train, cluster, tmp_path, kind, timeout=200)
    print(f"{kind}: {time.monotonic() - begun:.1f} s, recovery {found['recoveries']}", *found["failures"], sep="\n")
    assert found["losses"] == pytest.approx(expected_losses, rel=1e-3)
    assert found["submissions"] == (2 if kind == "scancel" else 1)
    assert len(found["recoveries"]) == 1
