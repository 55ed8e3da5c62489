"""Features of the operating system that some tests need: `pytest.mark.needs("proc")` skips a test without them.

Most are the abilities of `_core/platform.py`, which macOS lacks, and which MONARCH_PORTABLE=1 hides on Linux. A test
that itself looks at a process through /proc needs "/proc", which that variable does not hide.
"""

from __future__ import annotations

import os

from monarch_backend import _native
from monarch_backend._core import platform

FEATURES: dict[str, bool] = {
    "fork": platform.HAS_SAFE_FORK,
    "prctl": platform.HAS_PRCTL,
    "pidfd": platform.HAS_PIDFD,
    "proc": platform.HAS_PROC,
    "memfd": platform.HAS_MEMFD,
    "abstract sockets": platform.HAS_ABSTRACT_SOCKETS,
    "affinity": platform.HAS_AFFINITY,
    "process_vm_readv": not _native.is_portable,
    "verbs": hasattr(_native, "VerbsCompletionQueue"),
    "GPU drivers": not platform.IS_PORTABLE,
    "/proc": os.path.isdir("/proc/self"),
}


def missing(*names: str) -> list[str]:
    """Those of the features that this system has not. Raises KeyError for a name that is not in the table."""
    return [name for name in names if not FEATURES[name]]
