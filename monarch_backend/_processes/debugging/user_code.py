"""pdb that starts in the user's frames and not in those of this package."""

from __future__ import annotations

import ctypes
import pdb
import sys
from types import FrameType
from typing import Any

from monarch_backend._core.package_folder import PACKAGE_FOLDER


def is_of_package(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE_FOLDER)


class UserCodePdb(pdb.Pdb):
    """Debugger that selects the innermost frame of the user's code where an error was raised."""

    def setup(self, f: FrameType | None, tb: Any) -> Any:
        """Select the innermost frame of the user's code."""
        done = super().setup(f, tb)
        users = [index for index, (frame, _) in enumerate(self.stack) if not is_of_package(frame)]
        if tb is not None and users and self.curindex != users[-1]:
            self.curindex = users[-1]
            self.curframe = self.stack[self.curindex][0]
            self.curframe_locals = self.curframe.f_locals
        return done

    def default(self, line: str) -> Any:
        """Execute a statement. What it assigns to local variables stays.

        Before Python 3.13 a frame has its variables twice. Each later look at ``f_locals``, as of `where`, would
        overwrite the assigned ones.
        """
        done = super().default(line)
        if sys.version_info < (3, 13) and self.curframe is not None:
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self.curframe), ctypes.c_int(1))
        return done

    def do_run(self, _arg: str) -> None:
        """run: not available here."""
        self.error("the program cannot be restarted from here")

    do_restart: Any = do_run
