"""Jobs on a Slurm cluster of this machine: this project's SlurmJob and torchmonarch's.

    python tools/peer_env.py torchmonarch       # once: the peer's own environment
    python benchmarks/slurm_jobs.py [--rounds N] [--limit SECONDS] [--out FILE]

Needs root, and Slurm's packages (tests/support/slurm_cluster.py). Each system has two nodes of three. A program on the
login node submits the job, starts one process on each node, and calls an endpoint that does not return.

ready        seconds from the program's first line until both processes have imported torch and replied
error        seconds from a fault until the pending call raises in the program; "> LIMIT" if it does not raise
left behind  jobs of Slurm and processes on the nodes, when kill() returns, and a minute after the program was killed

torchmonarch reads the JSON of `squeue` of newer releases. Debian's Slurm is 22.05, where its `state()` raises. So it
runs with a `squeue` that converts the output (_slurm_squeue.py), and without it once to record the error.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from _job_faults import HERE, Comparison, Program, StartError, Testbed, arguments, last_line, show

from tests.support.slurm_cluster import SlurmCluster, refusal, slurm_cluster

FAULTS = ["worker killed", "scancel", "node crashed"]


class SlurmTestbed(Testbed):
    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        super().__init__(folder)
        self.cluster, self.converts = cluster, True
        self.systems = {"ours": ["slurm"], "torchmonarch": ["slurm"]}
        self.faults = {
            "worker killed": lambda pids: os.kill(pids[1], signal.SIGKILL),
            "scancel": lambda _: cluster.run("scancel", "--user=root"),
            "node crashed": lambda _: cluster.crash_node(1),
        }
        (folder / "bin").mkdir()
        shutil.copy(HERE / "_slurm_squeue.py", folder / "bin" / "squeue")
        (folder / "bin" / "squeue").chmod(0o755)

    def command(self, system: str, words: list[str]) -> tuple[list[str], dict[str, str]]:
        environment = dict(self.cluster.environment)
        if system != "ours":
            environment["PYTHONPATH"] = ""
            if self.converts:
                environment["PATH"] = f"{self.folder / 'bin'}:{environment['PATH']}"
        return self.cluster.where.command(0, *words), environment

    def left(self) -> str:
        """Return the number of jobs and of processes that are there, without those of Slurm."""
        mine = [words for words in self.cluster.processes().values() if "slurm" not in words.split()[0]]
        return f"{len(self.cluster.jobs())} jobs, {len(mine)} processes"

    def clean(self) -> None:
        self.cluster.run("scancel", "--user=root", check=False)
        if not self.cluster.where.processes(2):
            self.cluster.repair_node(1)
        self.cluster.wait_until_idle()
        for pid in self.cluster.processes():
            os.kill(pid, signal.SIGKILL)

    def without_conversion(self) -> str:
        self.converts = False
        program = Program(self, "torchmonarch")
        try:
            return f"ready after {program.start()[0]:.1f} s"
        except StartError as error:
            return last_line(error)
        finally:
            program.end()
            self.converts = True


def main() -> None:
    args = arguments((__doc__ or "").partition("\n")[0], FAULTS)
    if why := refusal():
        sys.exit(f"no Slurm cluster: {why}")
    with tempfile.TemporaryDirectory() as name, slurm_cluster(3) as cluster:
        testbed = SlurmTestbed(cluster, Path(name))
        comparison = Comparison(testbed, args.limit)
        if "torchmonarch" in comparison.systems:
            comparison.texts.append(f"torchmonarch on 22.05 without the conversion: {testbed.without_conversion()}")
        comparison.run(args.rounds, args.faults, args.ends)
        show(comparison.table(), args.out)


if __name__ == "__main__":
    main()
