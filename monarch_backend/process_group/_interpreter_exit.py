"""A process that ends with groups alive ends quietly: no abort of a thread that frees a tensor too late, no hang.

Gloo's threads free the tensors of a finished operation a moment after the operation is done, and need the GIL for
it. If the interpreter ends in that moment, Python before 3.14 unwinds the thread, and C++ answers with SIGABRT:
torch's own "gloo" does so in a script that ends without destroy_process_group, or that has a model which still
holds its group. Here such a thread sleeps (csrc/interpreter_exit.h), and nobody waits for it, because what would
wait, the destructor of its group, is never called.
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
    """``inner`` lives as long as ``group`` does, and for ever if the interpreter ends before that."""
    _prepare()
    _inners.setdefault(group, []).append(inner)


def _keep_all() -> None:
    for inners in _inners.values():
        for inner in inners:
            _native.keep_for_ever(inner)
