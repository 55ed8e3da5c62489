"""Requests to a running process of this user, such as a profile, and their answers: request_answers.py gives them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import time
from typing import Any

from monarch_backend._telemetry import discovery, stacks
from monarch_backend._telemetry.request_answers import ASKED, BODY_AT, DONE, RequestError, name_for
from monarch_backend._telemetry.stack_signal import FILE_NAME, stack_signal

ANSWER_TIMEOUT_S = 3.0
"""Seconds in which a process must have taken a request."""

_MAX_BYTES = 2 << 30


class Request:
    """A request to one process. Close it, or use it in a ``with`` block: that also ends the work for it."""

    def __init__(self, pid: int, **about: Any) -> None:
        """Send the request. Raises RequestError, and OSError without a descriptor or memory."""
        self._pid = pid
        self._sent_at = time.monotonic()
        self._descriptor = os.memfd_create(name_for(pid), os.MFD_CLOEXEC)
        try:
            os.pwrite(self._descriptor, ASKED, 0)
            os.pwrite(self._descriptor, json.dumps(about).encode(), BODY_AT)
            self._send()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _send(self) -> None:
        if discovery.descriptor_named(self._pid, FILE_NAME) is None:
            raise RequestError("it can't be asked: it has ended, records nothing, or is another user's")
        if (why := stacks.refusal(self._pid)) is not None:
            raise RequestError(why)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.sigqueue(self._pid, stack_signal(), ctypes.c_void_p(self._descriptor)) != 0:
            raise RequestError(f"it can't be asked: {os.strerror(ctypes.get_errno())}")

    def state(self) -> bytes:
        """Return `ASKED`, `TAKEN`, `ENDED` or `DONE`. After ENDED only the answer is still to be written."""
        return os.pread(self._descriptor, len(DONE), 0)

    def answer(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the answer, or None if the process still works on it. Raises RequestError."""
        state = self.state()
        if state != DONE:
            if not stacks.is_alive(self._pid):
                raise RequestError("it has ended meanwhile")
            if state == ASKED and time.monotonic() - self._sent_at > ANSWER_TIMEOUT_S:
                state_of_it = stacks.state_of(self._pid)
                raise RequestError(
                    f"it does not answer within {ANSWER_TIMEOUT_S:g} s: {state_of_it}, or C code keeps the GIL"
                )
            return None
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(BODY_AT)
            about, _, body = file.read(_MAX_BYTES).partition(b"\n")
        found = json.loads(about)
        if "error" in found:
            raise RequestError(str(found["error"]))
        return found, body

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
