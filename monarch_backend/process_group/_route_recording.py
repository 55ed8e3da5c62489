"""Recording of collectives that other backends carry: torch's Gloo alone, NCCL, RCCL, torch_xla's and plugins'.

The core records those in shared memory by itself, and `Hierarchy` those over several hosts.

On the CPU a collective is under way until a thread has waited for its work. On other devices the call only enqueues it,
and its end is not known here: the event is that of the call. So a rank's count says what it has enqueued.
"""

from __future__ import annotations

import collections
import secrets
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import Store

from monarch_backend._telemetry import payloads, recorder
from monarch_backend._telemetry.kinds import Kind, State, Status

_RUNNING = int(State.RUNNING)
_NUMBER = 3  # of a collective, in the arguments of `begin_activity`
MAX_OPEN = 1024
"""Collectives of a route that are recorded as under way. The oldest one counts as ended when there are more."""

_IDENTITY_KEY = "recording identity"


class RecordedCall:
    """One collective, as the context of the call that starts it. An exception in the call ends it with an error.

    ``status``: how it has ended, None while it is under way.
    """

    __slots__ = ("_fields", "_recording", "operation", "status")

    def __init__(self, recording: RouteRecording, operation: str, fields: tuple[int, ...]) -> None:
        self._recording, self.operation, self._fields = recording, operation, fields
        self.status: Status | None = None

    def __enter__(self) -> RecordedCall:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.end(Status.ERROR)

    def end(self, status: Status, *, blocking: bool = True) -> None:
        """Record the end. No effect after the first one.

        Without ``blocking``, the record may follow with the next collective: garbage collection must not wait.
        """
        if self.status is None:
            self.status = status
            self._recording.advance(blocking=blocking)

    def late_text(self) -> str:
        """Return "all_reduce #5 of group 0", and the ranks of this machine that have not entered it, with lines."""
        from monarch_backend._telemetry import late_ranks  # only after a failure

        recording, number = self._recording, self._fields[_NUMBER]
        text = f"{self.operation} #{number} of {recording.name}"
        for rank, place in late_ranks.behind(recording.identity, number):
            text += f"; rank {rank} has not entered it, it is {place}"
        return text

    def show(self) -> None:
        """Show the collective in the cell."""
        recorder.begin_activity(*self._fields)


class Unrecorded:
    """Context in place of a `RecordedCall`, for a route that records by itself or not at all."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


UNRECORDED = Unrecorded()


class EnqueuedCall:
    """Context of a call that only enqueues a collective. Its event is that of the call."""

    __slots__ = ("_cell",)

    def __init__(self, cell: int) -> None:
        self._cell = cell

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        recorder.end_activity(self._cell, Status.OK if kind is None else Status.ERROR)


class RouteRecording:
    """The collectives of one route of a group, in a cell that shows the oldest one under way.

    Ends are recorded in the order of the calls. ``identity`` is that of `agree_on_identity`.
    """

    def __init__(self, name: str, rank: int, identity: int, route: str) -> None:
        self.name, self.identity = name, identity
        self._route = payloads.route_named(route)
        self._is_only_enqueued = payloads.decode(payloads.encode("", self._route)).is_only_enqueued
        self._cell = recorder.take_cell(Kind.COLLECTIVE, name, rank, identity)
        release = weakref.finalize(self, recorder.release_cell, self._cell)
        release.atexit = False
        self._lock = threading.RLock()  # a signal handler may call a collective, too
        self._is_advancing = False
        self._count = 0
        self._open: collections.deque[RecordedCall] = collections.deque()
        self._shown: RecordedCall | None = None
        self._payloads: dict[torch.dtype | None, int] = {}
        self._enqueued = EnqueuedCall(self._cell)

    def enter(self, operation: str, tensors: Sequence[Tensor]) -> RecordedCall | EnqueuedCall:
        """Record that a collective on ``tensors`` is under way. It has the dtype and the bytes of the first one."""
        dtype, size = (tensors[0].dtype, tensors[0].nbytes) if tensors else (None, 0)
        payload = self._payloads.get(dtype)
        if payload is None:
            name = "" if dtype is None else str(dtype).removeprefix("torch.")
            payload = self._payloads[dtype] = payloads.encode(name, self._route)
        detail = recorder.name_number(operation)
        with self._lock:
            self._count += 1
            fields = (
                self._cell, _RUNNING, detail, self._count, payload, size, self.identity, recorder.monotonic_ns()
            )  # fmt: skip
            if self._is_only_enqueued:
                recorder.begin_activity(*fields)
                return self._enqueued
            call = RecordedCall(self, operation, fields)
            self._open.append(call)
            if len(self._open) > MAX_OPEN:
                self._open[0].status = Status.OK
            self.advance()
        return call

    def advance(self, *, blocking: bool = True) -> None:
        """Record the ends of the oldest collectives that have ended, and show the next one.

        No effect within another call of it: that one goes on with what has changed.
        """
        if not self._lock.acquire(blocking):
            return
        try:
            if not self._is_advancing:
                self._is_advancing = True
                try:
                    self._advance()
                finally:
                    self._is_advancing = False
        finally:
            self._lock.release()

    def _advance(self) -> None:
        while self._open:
            first = self._open[0]
            if self._shown is not first:
                first.show()
                self._shown = first
            if first.status is None:
                return
            recorder.end_activity(self._cell, first.status)
            self._open.popleft()

    def close(self) -> None:
        """End what is under way as aborted, and free the cell."""
        with self._lock:
            for call in self._open:
                call.status = call.status or Status.ABORTED
            self.advance()
            recorder.release_cell(self._cell)
            self._cell = 0


def agree_on_identity(store: Store) -> int:
    """Return a number for the group of this store, the same on all of its ranks. Waits for none of them.

    Raises what the store does, for one that lacks ``compare_set``.
    """
    drawn = str(secrets.randbits(63))
    return int(store.compare_set(_IDENTITY_KEY, "", drawn))
