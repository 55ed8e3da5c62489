"""Recording of transfers: their route, size and other process. Small ones are left out, which a record would slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from monarch_backend import _native
from monarch_backend._actor.errors import CancelledError
from monarch_backend._rdma.registrations import Handle
from monarch_backend._rdma.routes.protocol import AtomicOp, ReadWriteOp
from monarch_backend._telemetry import kinds, texts, transfer_ends

MIN_BYTES = 64 << 10
"""Bytes from which a transfer is recorded."""


class Record(NamedTuple):
    """What is recorded at the end of a transfer."""

    start_ns: int
    route: str
    detail: str
    nbytes: int

    def end(self, error: BaseException | None) -> None:
        """Record the event."""
        status = kinds.Status.OK if error is None else kinds.Status.ERROR
        if isinstance(error, CancelledError):
            status = kinds.Status.CANCELLED
        texts.event(
            kinds.Kind.TRANSFER, self.route, self.detail, status=int(status), start_ns=self.start_ns, value=self.nbytes
        )


def begin(routed: Sequence[tuple[ReadWriteOp | AtomicOp, Any]]) -> Record | None:
    """Return the record of a transfer of these parts, each with its route, which starts now. None: it has none."""
    if not _native.is_recording():
        return None
    nbytes = 0
    for part, _ in routed:
        if not isinstance(part, AtomicOp):
            for segment in part.segments:
                nbytes += segment[2]
    if nbytes < MIN_BYTES:
        return None
    first, route = routed[0]
    others = len({part.handle.token for part, _ in routed}) - 1
    return begin_copy(route.name, first.handle, isinstance(first, ReadWriteOp) and first.write, nbytes, others)


def begin_copy(route: str, handle: Handle, write: bool, nbytes: int, others: int = 0) -> Record | None:
    """Return the record of a transfer that starts now with this process and ``others`` more. None: it has none.

    ``nbytes`` is at least `MIN_BYTES`.
    """
    if not _native.is_recording():
        return None
    detail = transfer_ends.detail_of(write, handle.pid, handle.host, others)
    return Record(_native.monotonic_ns(), route, detail, nbytes)
