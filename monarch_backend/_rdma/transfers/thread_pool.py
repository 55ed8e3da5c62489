"""Thread pool for jobs that may block. Threads start on demand, up to a limit."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

from monarch_backend._rdma.errors import RDMAError

Job = Callable[[], None]


class Workers:
    """Pool of up to ``most`` threads. Threads never end; idle ones sleep."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._idle = 0

    def submit(self, job: Job) -> None:
        """Queue a job for the next free thread. Long jobs may delay it.

        Raises RDMAError during interpreter shutdown, when threads do not run any more.
        """
        _refuse_at_the_end()
        with self._lock:
            more = self._begin(job)
        if more:
            self._more()

    def submit_at_once(self, job: Job) -> None:
        """Run a job without a delay by other jobs, if necessary on an extra thread. Raises as `submit`.

        Connections use this, because a waiting caller does not depend on the jobs that occupy the pool.
        """
        _refuse_at_the_end()
        with self._lock:
            free = self._idle > self._jobs.qsize() or self._threads < self._most
            more = free and self._begin(job)
        if more:
            self._more()
        elif not free:
            threading.Thread(target=job, name="monarch-memory-extra", daemon=True).start()

    def _begin(self, job: Job) -> bool:
        """Queue a job under the lock. Return whether it needs one more thread."""
        more = self._idle <= self._jobs.qsize() and self._threads < self._most
        self._threads += more
        self._jobs.put(job)
        return more

    def _more(self) -> None:
        threading.Thread(target=self._work, name="monarch-memory", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
            job()
            del job


def _refuse_at_the_end() -> None:
    # During shutdown threads stop anywhere, perhaps with our lock, and starting a thread would block without end.
    if sys.is_finalizing():
        raise RDMAError(
            "Python is ending, and runs no threads any more: nothing can be transferred now. Do it before, in an "
            "atexit function for example, and not in a __del__ that runs last"
        )
