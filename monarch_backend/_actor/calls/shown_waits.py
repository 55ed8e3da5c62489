"""Waits that last, in cells of the recording: other processes see what this one waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch_backend._actor.calls.wait_notice import FullQueue, name_of
from monarch_backend._telemetry import kinds, recorder

if TYPE_CHECKING:
    from monarch_backend._actor.execution.runner import ActorRunner
    from monarch_backend._actor.runtime import Runtime


def begin_shown_wait(runtime: Runtime, what: Any, runner: ActorRunner | None) -> int:
    """Return a cell for a wait, 0 if there is none.

    It has the mesh and endpoint, the number of the call, and the cell of the actor that waits.
    """
    what = FullQueue.of(runtime, what) or what
    ref = 0 if isinstance(what, FullQueue) else getattr(what, "ref", 0)
    peer = getattr(what, "peer", None)
    cell = recorder.take_cell(kinds.Kind.WAIT, name_of(what), 0 if runner is None else runner.rank)
    recorder.begin_activity(
        cell, int(kinds.State.WAITING), recorder.name_number(getattr(what, "endpoint", "")), ref, 0,
        0 if runner is None else recorder.cell_number(runner.recording_cell), 0 if peer is None else peer.identity,
    )  # fmt: skip
    return cell


def end_shown_wait(cell: int, *, is_done: bool) -> None:
    """Free the cell of a wait."""
    recorder.end_activity(cell, int(kinds.Status.OK if is_done else kinds.Status.CANCELLED))
    recorder.release_cell(cell)
