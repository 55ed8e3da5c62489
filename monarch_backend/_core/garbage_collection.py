"""Pause of the garbage collector, for work that makes many objects and frees few."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Keep the garbage collector off, as for imports and for reading recordings: they have many objects and few cycles.

    A fifth of torch's import time is that of the collector.

    >>> with without_collector():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
