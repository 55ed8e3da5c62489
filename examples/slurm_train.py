"""Train a byte-level transformer on nodes of a Slurm cluster, through failures of processes, nodes and the job.

    python examples/slurm_train.py --partition gpu --nodes 4 --time 8:00:00
    python examples/slurm_train.py --partition gpu --nodes 2 --resize 20=4 40=3

It runs on a login node, where sbatch is and where it reaches the nodes by TCP. The folder of this file, and that of the
job's file, are on a file system that all nodes have. docs/guides/slurm.md explains the job.

Replicas, snapshots and recovery are those of kubernetes_train.py. If Slurm requeues the job, the program waits for its
next start. If the job has ended, for example by scancel, the program submits it again.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

from kubernetes_train import Run

import monarch_backend.actor
from monarch_backend.job import JobError, SlurmJob

FOLDER = Path(__file__).resolve().parent
MAX_SUBMISSIONS = 5


def slurm_job(nodes: int, **options: Any) -> SlurmJob:
    """Return a job whose nodes find the modules of this folder."""
    variables = {"PYTHONPATH": os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])}
    return SlurmJob(requeue=True, env=variables, **options).add_mesh("trainers", nodes)


class SlurmRun(Run):
    """A training run that submits its job again when hosts of it are gone for good.

    `train` catches each JobError and starts again. So a job that cannot be submitted any more raises RuntimeError.
    """

    submissions = 1

    def start(self) -> None:
        if "gone" in self.states():
            if self.submissions == MAX_SUBMISSIONS:
                gone = "; ".join(str(each) for each in self.job.status() if each.state == "gone")
                raise RuntimeError(f"job {self.job.name!r} was submitted {self.submissions} times, and ended: {gone}")
            self.submissions += 1
            self.job.kill()
            try:
                self.job.apply(wait=False)
            except JobError as error:
                raise RuntimeError(f"job {self.job.name!r} could not be submitted again: {error}") from error
        super().start()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--partition")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--time", help="limit of a submission, days-hours:minutes:seconds")
    parser.add_argument("--gpus-per-node", type=int)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--resize", nargs="*", default=[], metavar="STEP=NODES")
    args = parser.parse_args()

    logging.basicConfig(level=logging.INFO)  # what the job waits for
    monarch_backend.actor.unhandled_fault_hook = lambda failure: print(f"failure: {failure}", flush=True)
    job = slurm_job(
        args.nodes, name="lm", partition=args.partition, time=args.time, gpus_per_node=args.gpus_per_node, tether=120
    )
    job.apply()
    try:
        sizes = {int(step): int(nodes) for step, nodes in (text.split("=") for text in args.resize)}
        run = SlurmRun(job, args.steps, sizes=sizes)
        run.train(lambda run, step: print(f"step {step}: loss {run.losses[step - 1]:.4f}", flush=True))
    finally:
        job.kill()


if __name__ == "__main__":
    main()
