"""Command line of a clean interpreter: the same executable, flags and sys.path as here, without __main__."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

# Imports, of torch above all, take seconds in which the parent may die. So the first call requests to die with it.
# With -c, unlike -m, no directory of the user's is searched before sys.path is set.
_PROGRAM = """import sys
sys.path[:] = sys.argv[4:]
if sys.platform == "linux":
    import ctypes, os
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]): os._exit(1)
import importlib
importlib.import_module(sys.argv[2]).main(sys.argv[3])
"""


def command(module: str, argument: str, path: Sequence[str]) -> list[str]:
    """Return the command line of an interpreter that calls ``module.main(argument)`` with ``path`` as its sys.path.

    It dies with the thread of this process that starts it, unless it calls linux.outlive_parent. Raises RuntimeError in
    a program that does not know its interpreter.
    """
    if not sys.executable:
        raise RuntimeError("sys.executable is empty: set it to the Python interpreter that processes are to run")
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as multiprocessing does
    fixed = [sys.executable, *flags, "-X", "faulthandler", "-c", _PROGRAM, str(os.getpid()), module, argument]
    return [*fixed, *path]
