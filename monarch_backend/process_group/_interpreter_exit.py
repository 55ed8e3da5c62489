"""Quiet end of a process whose groups are alive: no abort in a thread that frees a tensor too late, no hang.

Gloo's threads free the tensors of a finished operation a moment after the operation is done, and need the GIL for it.
If the interpreter ends in that moment, Python before 3.14 unwinds the thread, and C++ raises SIGABRT. torch's own
"gloo" does so in a script without destroy_process_group, or with a model that still holds its group.

Here such a thread sleeps (csrc/interpreter_exit.h). No code waits for it, because only its group's destructor would,
and that is never called.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from typing import Any

import torch.distributed as dist

from monarch_backend import _native

_inners: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Any]] = weakref.WeakKeyDictionary()


@functools.cache
def _prepare() -> None:
    _native.park_threads_at_exit()
    atexit.register(_keep_all)


def outlives(group: dist.ProcessGroup, inner: Any) -> None:
    """Keep ``inner`` alive as long as ``group``, and for the rest of the process if the interpreter ends first."""
    _prepare()
    _inners.setdefault(group, []).append(inner)


def _keep_all() -> None:
    for inners in _inners.values():
        for inner in inners:
            _native.keep_for_ever(inner)
