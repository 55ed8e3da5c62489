"""Jobs: the hosts of a program, and how they are started. On this machine, as processes, by ssh, or by a launcher.

>>> from monarch_backend.job import LocalJob
>>> LocalJob(["trainers"]).state().trainers
HostMesh(this host)

The implementation is in _job/: the base class (base.py), the file of a job (state_file.py), the start of one host
(host_launcher.py), and each kind of job. _hosts/ has the hosts themselves.
"""

from monarch_backend import _wiring as _wiring
from monarch_backend._job.base import HostStatus, Job, JobState
from monarch_backend._job.errors import JobError
from monarch_backend._job.kubernetes.job import KubernetesJob
from monarch_backend._job.local import LocalJob
from monarch_backend._job.process import ProcessJob
from monarch_backend._job.ray_cluster import RayJob
from monarch_backend._job.rendering import skypilot_task, torchx_app
from monarch_backend._job.skypilot import SkyPilotJob
from monarch_backend._job.slurm.job import SlurmJob
from monarch_backend._job.spmd import SPMDJob, host_mesh_from_env
from monarch_backend._job.ssh import SSHJob

__all__ = [
    "HostStatus",
    "Job",
    "JobError",
    "JobState",
    "KubernetesJob",
    "LocalJob",
    "ProcessJob",
    "RayJob",
    "SPMDJob",
    "SSHJob",
    "SkyPilotJob",
    "SlurmJob",
    "host_mesh_from_env",
    "skypilot_task",
    "torchx_app",
]
