"""Posting, polling and arming without a package's Python between: the compiled calls for queues that it has made.

Both packages keep libibverbs's pointers in C fields of their objects, where the core finds them
(csrc/verbs/queue_pairs.h) and looks whether they are what they must be. Where it does not, the package's own
functions are taken, some ten times slower.
"""

from __future__ import annotations

import logging
from typing import Any

from monarch_backend import _native

log = logging.getLogger("monarch_backend")


def completion_queue(queue: Any, fd: int, entries: int) -> _native.VerbsCompletionQueue | None:
    """Of this object of a package, whose channel has this descriptor; None where it can't be told."""
    found = _native.VerbsCompletionQueue.find(queue, fd, entries)
    if found is None:
        log.info(
            "verbs: %s's queues are not where they are expected: they are asked by its own Python", _package(queue)
        )
    return found


def queue_pair(pair: Any, number: int, queue: _native.VerbsCompletionQueue | None) -> _native.VerbsQueuePair | None:
    """Of this object of a package, which completes in that queue; None where either can't be told."""
    return None if queue is None else _native.VerbsQueuePair.find(pair, number, queue)


def _package(made: Any) -> str:
    return type(made).__module__.partition(".")[0]
