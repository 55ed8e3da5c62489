"""breakpoint() with debugpy: the process listens on a free port of this machine, and waits for an editor."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

from monarch_backend._processes.debugging import channel


def set_trace(frame: FrameType) -> None:
    """Stop at the next line of ``frame`` in the attached editor, for which the first call waits.

    If the program has called ``debugpy.listen()``, it has no effect without an editor. Raises ImportError without
    debugpy. Any user of this machine can connect to the port and run code in the process.
    """
    if channel.is_ending():
        return
    import debugpy  # type: ignore[import-not-found, unused-ignore]

    if not debugpy.is_client_connected():
        try:
            host, port = debugpy.listen(("127.0.0.1", 0))
        except RuntimeError:  # the program listens
            return
        code = frame.f_code
        where = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        line = f"{channel.label} (pid {os.getpid()}) waits at {where} for a client of debugpy: {host}:{port}\n"
        os.write(2, line.encode(errors="replace"))
        while not debugpy.is_client_connected():
            channel.raise_at_end()
            channel.wait([])
        debugpy.wait_for_client()  # until it has sent its breakpoints
    pydevd: Any = sys.modules["pydevd"]  # debugpy.breakpoint() would stop in this function
    pydevd.settrace(suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame)
