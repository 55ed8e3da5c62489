"""Where a program's hosts come from: this machine, processes, ssh, or the launcher that has started the program.

>>> from monarch_backend.job import LocalJob
>>> LocalJob(["trainers"]).state().trainers
HostMesh(this host)

Rooms: what is the same for all jobs (_job/base.py), their file (_job/state_file.py), starting one host
(_job/host_launcher.py), and each kind of job. What a host is, hosts/ knows.
"""

from monarch_backend import _wiring as _wiring
from monarch_backend._job.base import HostStatus, Job, JobState
from monarch_backend._job.errors import JobError
from monarch_backend._job.local import LocalJob
from monarch_backend._job.process import ProcessJob
from monarch_backend._job.spmd import SPMDJob, host_mesh_from_env
from monarch_backend._job.ssh import SSHJob

__all__ = [
    "HostStatus",
    "Job",
    "JobError",
    "JobState",
    "LocalJob",
    "ProcessJob",
    "SPMDJob",
    "SSHJob",
    "host_mesh_from_env",
]
