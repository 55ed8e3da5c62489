"""Work of Gloo that names a lost host in its error, and records the end of its collective."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from monarch_backend._telemetry.kinds import Status
from monarch_backend.process_group import _c10d_internals
from monarch_backend.process_group._errors import CollectiveTimeoutError
from monarch_backend.process_group._gloo_links import LARGE_BYTES
from monarch_backend.process_group._host_guard import HostGuard
from monarch_backend.process_group._route_recording import RecordedCall

_WORTH_A_LOOK = timedelta(seconds=1)
_TIMED_OUT = re.compile("[Tt]imed out")
_NO_TIMEOUT = timedelta(0)  # c10d's C++ default: this wait has no timeout of its own


@_c10d_internals.hide_from_dynamo
class GlooWork(dist.Work):
    """Work whose wait raises the guard's error, which names the lost host. Gloo's names an address at most.

    ``guard``: that of a group over several hosts. ``call``: the record of a collective. ``message_bytes``: the size of
    a message, None for a collective.
    """

    def __init__(
        self, work: Any, guard: HostGuard | None, call: RecordedCall | None = None, message_bytes: int | None = None
    ) -> None:
        super().__init__()
        self._work, self._guard, self._call, self._message_bytes = work, guard, call, message_bytes
        self._late_text: str | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the operation; raises its error."""
        try:
            self._wait(timeout)
        except BaseException as error:
            late = self._late(error, timeout)  # before the end is recorded: others look for it
            if timeout == _NO_TIMEOUT:  # else the wait was limited, and another one may follow
                self._end(Status.ERROR)
            if late is not None:
                raise late from error
            raise
        self._end(Status.OK)
        return True

    def _late(self, error: BaseException, timeout: timedelta) -> CollectiveTimeoutError | None:
        """Return the error of a timeout with the late ranks, where Gloo's names an address at most.

        The ranks are looked for once, and not for short timeouts: some programs poll with them.
        """
        if self._call is None or type(error) is not RuntimeError or not _TIMED_OUT.search(str(error)):
            return None
        if self._late_text is None and (timeout == _NO_TIMEOUT or timeout >= _WORTH_A_LOOK):
            self._late_text = self._call.late_text()
        text = self._call.operation if self._late_text is None else self._late_text
        return CollectiveTimeoutError(f"timed out: {text}. Gloo says: {error}")

    def _wait(self, timeout: timedelta) -> None:
        if self._guard is None:
            self._work.wait(timeout)
            return
        try:
            if self._message_bytes is None:
                self._guard.links.wait_for_collective(self._work, timeout)
            elif self._message_bytes >= LARGE_BYTES:
                self._guard.links.wait_for_message(self._work, timeout)
            else:
                self._work.wait(timeout)
        except RuntimeError as error:
            self._guard.cause()
            raise self._guard.error() or error from None

    def _end(self, status: Status) -> None:
        if self._call is not None:
            self._call.end(status)

    def __del__(self) -> None:
        """Record the end of a collective for whose work no thread waits."""
        if self._call is not None and self._call.status is None:
            has_failed = self._work.is_completed() and not self._work.is_success()
            self._call.end(Status.ERROR if has_failed else Status.OK, blocking=False)

    def is_completed(self) -> bool:
        """True once the operation has ended, with an error or without."""
        if not self._work.is_completed():
            return False
        self._end(Status.OK if self._work.is_success() else Status.ERROR)
        return True

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    def result(self) -> Any:
        return self._work.result()

    def get_future(self) -> Any:
        """Return the future of Gloo's work, with its error."""
        future = self._work.get_future()
        if self._call is not None and self._call.status is None:
            future.add_done_callback(self._end_with)
        return future

    def _end_with(self, future: Any) -> None:
        try:
            future.value()
        except Exception:
            self._end(Status.ERROR)
        else:
            self._end(Status.OK)
