"""A Slurm cluster on this machine: slurmctld, slurmd and munged of the system's packages, in network namespaces.

Host 0 is the login node with slurmctld. Hosts 1 to n are the compute nodes. All have the same files, which stands for
a shared file system. Needs Linux, root, and Debian's packages slurmctld, slurmd, slurm-client and munge.

Where this machine has control groups of version 1, Slurm uses them: the kernel limits the memory of a job.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support import hosts as network
from tests.support.ranks import KEPT_PIDS
from tests.support.waiting import wait_until

NODE_TIMEOUT_S = 5
"""Seconds after which slurmctld declares a node down that does not answer."""

ROOT = Path(__file__).parents[2]
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "setpriv")

_CONFIGURATION = """
ClusterName=monarch
SlurmctldHost={controller}({controller_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
JobAcctGatherType=jobacct_gather/none
{process_plugins}
FirstJobId={first_job}
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode={default_memory_mib}
SchedulerParameters=bf_interval=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdTimeout={node_timeout}
SlurmctldTimeout=10
KillWait=2
MessageTimeout=5
CompleteWait=0
OverTimeLimit=0
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1
PartitionName=urgent Nodes=ALL Default=NO MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=9
PartitionName=spare Nodes=ALL Default=NO MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1 PreemptMode=CANCEL
PartitionName=graceful Nodes=ALL Default=NO MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1 \
PreemptMode=CANCEL GraceTime={grace}
"""

GRACE_S = 60
"""Seconds from the preemption of a job in the partition "graceful" to its end."""

DEFAULT_MEMORY_MIB = 1900
"""Memory of a job on each node that asks for none. Two of them have place on a node."""

_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "freezer")
_WITH_CGROUPS = "ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup"
_WITHOUT_CGROUPS = "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none"

CONTROLLER_PAUSE_S = 3
_CONTROLLER = f"""
start="setpriv --pdeathsig KILL slurmctld -D"
$start -c
while sleep {CONTROLLER_PAUSE_S}; do $start; done
"""


class SlurmCluster:
    """A running cluster. ``SLURM_CONF`` names it to Slurm's commands. Use `slurm_cluster` to start one."""

    def __init__(self, where: network.Hosts, folder: Path, nodes: int) -> None:
        self.where, self.folder, self.nodes = where, folder, [where.name(index + 1) for index in range(nodes)]
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        self._configure()
        at = [f"--{name}={self.folder}/munge.{name.split('-')[0]}" for name in ("key-file", "pid-file", "log-file")]
        at += [f"--socket={self.folder}/munge.sock", f"--seed-file={self.folder}/munge.seed"]
        self._start("munged", ["munged", "--force", "--foreground", *at])
        wait_until(lambda: (self.folder / "munge.sock").exists(), 20)
        self._start("slurmctld", self.where.command(0, "sh", "-c", _CONTROLLER))
        for index in range(len(self.nodes)):
            self.start_node(index)
        self.wait_until_idle()

    def _configure(self) -> None:
        lines = [
            f"NodeName={name} NodeAddr={self.where.address(index + 1)} NodeHostname={name} CPUs=4 RealMemory=4000 "
            f"Gres=gpu:4 Feature={'fast' if index == 0 else 'slow'}"
            for index, name in enumerate(self.nodes)
        ]
        text = _CONFIGURATION.format(
            controller=self.where.name(0), controller_address=self.where.address(0), folder=self.folder,
            node_timeout=NODE_TIMEOUT_S, nodes="\n".join(lines), grace=GRACE_S, default_memory_mib=DEFAULT_MEMORY_MIB,
            process_plugins=_WITH_CGROUPS if has_cgroups() else _WITHOUT_CGROUPS,
            first_job=1 + os.getpid() % 10000 * 1000,  # groups of jobs of another cluster have other names
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)
        for number in range(4):
            (self.folder / f"gpu{number}").touch()  # ordinary files stand for the devices
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={self.folder}/gpu[0-3]\n")
        (self.folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainDevices=no\n"
            f"ConstrainRAMSpace={'yes' if has_cgroups() else 'no'}\n"
        )

    def _start(self, name: str, command: list[str]) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        KEPT_PIDS.add(self._daemons[name].pid)  # a test may start it again

    def start_node(self, index: int) -> None:
        """Start the daemon of a compute node."""
        name = self.nodes[index]
        self._start(name, self.where.command(index + 1, "slurmd", "-D", "-N", name))

    def crash_node(self, index: int) -> None:
        """Cut a node off, and kill all of its processes, as a power failure does. A forked process can call it."""
        self.where.cables.cut_off(index + 1)
        for pid in self.where.processes(index + 1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_controller(self) -> None:
        """Kill slurmctld, which starts again after CONTROLLER_PAUSE_S seconds. A forked process can call it."""
        for pid, words in self.where.processes(0).items():
            if words.split()[:1] == ["slurmctld"]:
                os.kill(pid, signal.SIGKILL)

    def repair_node(self, index: int) -> None:
        """Start a crashed node again."""
        self.where.cables.heal(index + 1)
        crashed = self._daemons[self.nodes[index]]
        crashed.wait()
        KEPT_PIDS.discard(crashed.pid)
        self.start_node(index)
        self.wait_until_idle()

    def run(self, *words: str, check: bool = True) -> str:
        """Run a command on the login node, and return its output."""
        done = subprocess.run(
            self.where.command(0, *words), env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert not check or done.returncode == 0, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def jobs(self, columns: str = "%i %T", *, check: bool = True) -> list[str]:
        """Return number and state of the jobs that have not ended, or other columns of squeue."""
        states = "--states=PENDING,RUNNING,SUSPENDED"
        return self.run("squeue", "--noheader", states, f"--format={columns}", check=check).splitlines()

    def wait_until_idle(self) -> None:
        """Wait until all nodes can take a job."""

        def states() -> set[str]:
            return set(self.run("sinfo", "-hNo", "%T", "-p", "main", check=False).split())

        try:
            wait_until(lambda: states() == {"idle"}, 40)
        except AssertionError:
            logs = "\n".join((self.folder / f"{name}.out").read_text()[-600:] for name in self._daemons)
            raise AssertionError(f"not all nodes are idle: {self.run('sinfo', '-NR', check=False)}\n{logs}") from None

    def processes(self) -> dict[int, str]:
        """Return the processes on the compute nodes except those of Slurm, by pid."""
        found: dict[int, str] = {}
        for index in range(len(self.nodes)):
            found |= self.where.processes(index + 1)
        return {pid: words for pid, words in found.items() if words and "slurmd" not in words.split()[0]}

    def stop(self) -> None:
        """Kill everything: the state of the cluster is not used again."""
        for index in range(len(self.nodes) + 1):
            for pid in self.where.processes(index):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._daemons.values():
            process.kill()
            process.wait()
            KEPT_PIDS.discard(process.pid)
        for name, controller in itertools.product(self.nodes, _CONTROLLERS):
            for group, _, _ in os.walk(_CGROUPS / controller / f"slurm_{name}", topdown=False):
                with contextlib.suppress(OSError):  # it has processes of another cluster
                    os.rmdir(group)


def has_cgroups() -> bool:
    """Return whether Slurm can limit memory by control groups of version 1 here."""
    return all(os.access(_CGROUPS / each / "cgroup.procs", os.W_OK) for each in _CONTROLLERS)


@functools.cache
def refusal() -> str:
    """Return the reason why no cluster can be started on this machine, or ''."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
        return f"{', '.join(missing)} not found: as root, apt-get install slurmctld slurmd slurm-client munge"
    return network.refusal()


@contextlib.contextmanager
def slurm_cluster(nodes: int) -> Iterator[SlurmCluster]:
    """Start a cluster of ``nodes`` compute nodes, which ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="monarch-slurm-"))  # short: a socket's path has at most 107 characters
    folder.chmod(0o755)
    try:
        with network.hosts(nodes + 1) as where:
            cluster = SlurmCluster(where, folder, nodes)
            try:
                cluster.start()
                yield cluster
            finally:
                cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
