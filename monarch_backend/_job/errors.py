"""Errors of jobs."""

from monarch_backend._core.errors import MonarchError, public


@public("monarch_backend.job")
class JobError(MonarchError, RuntimeError):
    """A job's hosts could not be started, found or ended; the text names each, says why, and what to do."""
