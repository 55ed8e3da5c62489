"""Command line of a clean interpreter: the same executable, flags and sys.path as here, without __main__."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from monarch_backend._core import platform
from monarch_backend._processes import parent_watch

# Imports, of torch above all, take seconds in which the parent may die. So the first call requests to die with it.
# With -c, unlike -m, no directory of the user's is searched before sys.path is set.
_DIE_WITH_PARENT = """import ctypes, os
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]): os._exit(1)
"""
_WATCH_PARENT = """from monarch_backend._processes import parent_watch
parent_watch.start(int(sys.argv[1]))
"""
_PROGRAM = f"""import sys
sys.path[:] = sys.argv[4:]
{_DIE_WITH_PARENT if platform.HAS_PRCTL else _WATCH_PARENT}import importlib
importlib.import_module(sys.argv[2]).main(sys.argv[3])
"""


def command(module: str, argument: str, path: Sequence[str]) -> list[str]:
    """Return the command line of an interpreter that calls ``module.main(argument)`` with ``path`` as its sys.path.

    It dies with the thread of this process that starts it (without prctl: with this process), unless it calls
    system_calls.outlive_parent. It has to inherit the descriptors of `inherited`. Raises RuntimeError in a program
    that does not know its interpreter.
    """
    if not sys.executable:
        raise RuntimeError("sys.executable is empty: set it to the Python interpreter that processes are to run")
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as multiprocessing does
    parent = os.getpid() if platform.HAS_PRCTL else parent_watch.descriptor()
    fixed = [sys.executable, *flags, "-X", "faulthandler", "-c", _PROGRAM, str(parent), module, argument]
    return [*fixed, *path]


def inherited() -> list[int]:
    """Return the descriptors that the interpreter of `command` has to inherit."""
    return [] if platform.HAS_PRCTL else [parent_watch.descriptor()]
