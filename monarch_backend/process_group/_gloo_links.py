"""Close of a Gloo group's connections, and waits that end with it.

Gloo's ``abort`` does nothing. When its connections close it fails the messages that have not begun, but not one of
which a part has already been sent or received: a wait for that one lasts until the group's timeout.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

from monarch_backend import _native
from monarch_backend._core.limits import start_thread
from monarch_backend.process_group import _c10d_internals

LARGE_BYTES = 1 << 18  # from here on a cut in the middle of a message is likely enough to spend a thread on its wait
_SLICE_S = 0.25  # of a wait; each costs 0.3 ms of CPU
_EARLY_S = 0.01  # by which a wait may end before its time, through rounding


class GlooLinks:
    """The connections of one rank of the Gloo group ``gloo``."""

    def __init__(self, gloo: Any) -> None:
        self._gloo, self.closed = gloo, False
        self._change = threading.Condition()  # the links or a message have ended

    def close(self) -> None:
        """Close the connections. It fails the ranks that wait for this one, and this rank's own waits."""
        with self._change:
            self.closed = True
            self._change.notify_all()
        _c10d_internals.close_gloo_links(self._gloo)

    def wait_for_message(self, work: Any, timeout: timedelta) -> None:
        """Wait for a message of `LARGE_BYTES` or more. Raises RuntimeError.

        A wait for a message can't be cut into short ones, because Gloo closes the connections when one ends. So it
        takes place in a thread of its own.
        """
        errors: list[BaseException | None] = []

        def wait() -> None:
            error: BaseException | None = None
            try:
                work.wait(timeout)
            except BaseException as raised:
                error = raised
            with self._change:
                errors.append(error)
                self._change.notify_all()

        start_thread(threading.Thread(target=wait, name="monarch_message", daemon=True))
        with self._change:
            self._change.wait_for(lambda: errors or self.closed)
        if not errors:
            raise RuntimeError("the links were closed")
        if errors[0] is not None:
            raise errors[0]

    def wait_for_collective(self, work: Any, timeout: timedelta) -> None:
        """Wait for a collective operation in short waits; 0 s for its own timeout. Raises RuntimeError."""
        end = time.monotonic() + timeout.total_seconds() if timeout else float("inf")
        while True:
            begun = time.monotonic()
            seconds = max(0.001, min(_SLICE_S, end - begun))  # Gloo takes less than a millisecond for no limit
            try:
                work.wait(timedelta(seconds=seconds))
                return
            except RuntimeError:
                now = time.monotonic()
                if now >= end or now < begun + seconds - _EARLY_S:  # an error of the operation
                    raise
            if self.closed and not work.is_completed():
                _native.keep_for_ever(self._gloo)  # its destructor would wait for the operation
                raise RuntimeError("the links were closed")
