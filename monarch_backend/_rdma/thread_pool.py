"""Threads that may wait, for jobs that come in a queue: at most so many, made when they are needed.

Nothing here knows what the jobs are.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

from monarch_backend._rdma.errors import RDMAError

Job = Callable[[], None]


class Workers:
    """``most`` threads. They stay, and sleep while there is nothing to do."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._idle = 0

    def submit(self, job: Job) -> None:
        """By the next thread that has time: others may hold up all of them for long. Raises RDMAError where none runs
        any more, since Python ends.
        """
        _refuse_at_the_end()
        with self._lock:
            more = self._begin(job)
        if more:
            self._more()

    def submit_at_once(self, job: Job) -> None:
        """By a thread that begins now, one for this job alone if need be: somebody waits for it who has no part in
        what holds up the others. Raises as `submit`.
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
        """Under the lock. True if it takes one more thread."""
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
    # Threads stop where they are then, perhaps with our lock, and whoever waits for a new one to begin waits for ever.
    if sys.is_finalizing():
        raise RDMAError(
            "Python is ending, and runs no threads any more: nothing can be transferred now. Do it before, in an "
            "atexit function for example, and not in a __del__ that runs last"
        )
