"""Posting, polling and arming in C++ on queues that a Python package has made.

Both packages keep libibverbs's pointers in C fields of their objects. The core finds them there
(csrc/verbs/queue_pairs.h) and checks them. If the check fails, the package's own functions are used, which are about
ten times slower.
"""

from __future__ import annotations

import logging
from typing import Any

from monarch_backend import _native

log = logging.getLogger("monarch_backend")


def completion_queue(queue: Any, fd: int, entries: int) -> _native.VerbsCompletionQueue | None:
    """Return the compiled completion queue of a package's object with this channel descriptor; None if not found."""
    found = _native.VerbsCompletionQueue.find(queue, fd, entries)
    if found is None:
        log.info(
            "verbs: %s's queues are not in the expected places; its own Python functions are used, which are slower",
            _package(queue),
        )
    return found


def queue_pair(pair: Any, number: int, queue: _native.VerbsCompletionQueue | None) -> _native.VerbsQueuePair | None:
    """Return the compiled queue pair of a package's object that completes in ``queue``; None if not found."""
    return None if queue is None else _native.VerbsQueuePair.find(pair, number, queue)


def _package(made: Any) -> str:
    return type(made).__module__.partition(".")[0]
