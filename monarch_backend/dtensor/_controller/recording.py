"""Recording of what a controller does: batches, reads, captured steps and compilations, not single operations."""

from __future__ import annotations

from monarch_backend._telemetry import kinds, recorder
from monarch_backend._telemetry.kinds import BATCH, COMPILER
from monarch_backend._telemetry.recorder import monotonic_ns

__all__ = ["BATCH", "COMPILER", "MAX_REASON", "monotonic_ns", "record"]

MAX_REASON = 300
"""Characters of a reason that are recorded: a process has room for a limited number of names."""


def record(
    name: str, detail: str, start_ns: int, *, reference: int = 0, value: int = 0, has_failed: bool = False
) -> None:  # fmt: skip
    """Record a controller's event, which ends now. ``name`` is that of the workers, ``value`` a number of bytes."""
    status = kinds.Status.ERROR if has_failed else kinds.Status.OK
    recorder.event(
        kinds.Kind.CONTROLLER, name, detail[:MAX_REASON], status=int(status), start_ns=start_ns, reference=reference,
        value=value,
    )  # fmt: skip
