"""Protocol of the runners of jobs on stdin and stdout, as _job_faults.py describes it.

It may import only the standard library, because runners run in the peers' own environments.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Started = tuple[list[int], Callable[[], Callable[[], object]], Callable[[], object]]
"""Pids of the processes, a function that calls them and returns the wait for the reply, and one that ends the job."""


def serve(start: Callable[[], Started]) -> None:
    """Start a job, wait for the error of a call if that is asked for, and end the job."""
    _say("begun")
    begun = time.time()
    pids, call, kill = start()
    _say([time.time() - begun, pids])
    wait = call()
    if sys.stdin.readline() != "end\n":
        try:
            wait()
        except Exception as error:
            _say([time.time(), str(error)])
        sys.stdin.readline()
    begun = time.time()
    kill()
    _say(time.time() - begun)


def _say(content: Any) -> None:
    print(json.dumps(content), flush=True)
