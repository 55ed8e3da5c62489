"""What goes wrong with jobs."""


class JobError(RuntimeError):
    """A job's hosts could not be started, found or ended; the text names each, says why, and what to do."""
