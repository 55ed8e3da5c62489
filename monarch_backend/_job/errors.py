"""Errors of jobs."""

from monarch_backend._core.errors import MonarchError, public


@public("monarch_backend.job")
class JobError(MonarchError, RuntimeError):
    """Hosts of a job could not be started, found or ended. The text names each, the reason and the remedy.

    Methods of jobs and `host_mesh_from_env` raise it.

    >>> from monarch_backend.job import Job, JobError
    >>> try:
    ...     Job.load("/nowhere/job.json")
    ... except JobError as error:
    ...     print(error)
    there is no job: no file /nowhere/job.json
    """
