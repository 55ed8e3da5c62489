"""NIC route to GPU memory: direct if the NICs of both sides reach it, staged otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from monarch_backend import _native
from monarch_backend._rdma.handle import Handle
from monarch_backend._rdma.routes.gpu_staged import Staged
from monarch_backend._rdma.routes.inflight import VerbsInFlight
from monarch_backend._rdma.routes.protocol import (
    UNREACHABLE,
    AtomicOp,
    ReadWriteOp,
    Result,
    Route,
    Segment,
    of_nics,
)
from monarch_backend._rdma.routes.verbs import Verbs


class GpuNics(Route):
    """Route to GPU memory of processes that a NIC of this process reaches."""

    name = "verbs"

    def __init__(self, verbs: Verbs, staged: Staged) -> None:
        self._verbs, self._staged = verbs, staged

    def begin(
        self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any, done: Callable[[Result], None]
    ) -> VerbsInFlight | None:
        """See AsyncRoute. Staged transfers need a thread."""
        return self._verbs.begin(part, scope, keep, done) if part.handle.verbs else None

    def is_ready(self, handle: Handle) -> bool:
        return self._verbs.is_ready(handle) and (bool(handle.verbs) or self._staged.has_lease(handle.token))

    def prepare(self, handle: Handle) -> None:
        self._verbs.prepare(handle)
        if not handle.verbs:
            self._staged.prepare(handle)

    def planned(self, part: ReadWriteOp | AtomicOp, keep: Any) -> Any:
        return self._verbs.planned(part, keep) if part.handle.verbs else None

    def begin_planned(
        self, part: ReadWriteOp | AtomicOp, plan: Any, done: Callable[[Result], None]
    ) -> VerbsInFlight | None:
        return self._verbs.begin_planned(part, plan, done)

    def recover(self, part: ReadWriteOp | AtomicOp, result: Result, scope: Any, keep: Any) -> Result:
        return self._verbs.recover(part, result, scope, keep)

    def run(self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any) -> Result:
        if part.handle.verbs:
            result = self._verbs.run(part, scope, keep)
            if isinstance(part, AtomicOp) or result.outcome != UNREACHABLE or self._verbs.has_no_way(part.handle.token):
                return result
            self._staged.why_here = result.text  # this process's own memory is the unreachable one
        result = self._staged.run(part, scope, keep)
        if result.outcome == UNREACHABLE and isinstance(part, ReadWriteOp):
            self._staged.give_back(part.handle, scope)
        return result


def gathered(routed: Sequence[tuple[ReadWriteOp | AtomicOp, Route]]) -> list[tuple[ReadWriteOp | AtomicOp, Route]]:
    """Join the staged parts of the same registration and local GPU into one part each.

    Each part costs a request to its owner, and many small ones fit into a slot.
    """
    made: list[tuple[ReadWriteOp | AtomicOp, Route]] = []
    segments: dict[tuple[Any, ...], list[Segment]] = {}
    for part, route in routed:
        if not isinstance(part, ReadWriteOp) or not part.handle.staged or of_nics(route) is None:
            made.append((part, route))
            continue
        handle, gpu = part.handle, _native.gpu_device_of(part.segments[0][1])
        known = segments.setdefault((handle.token, handle.ticket, part.write, gpu), [])
        if not known:
            made.append((part._replace(segments=known), route))
        known.extend(part.segments)
    return made
