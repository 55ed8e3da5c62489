"""A mesh as a table in a notebook: its ranks, and what each process does at that moment."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence

from monarch_backend._telemetry.programs import ENDED, Process, select
from monarch_backend._telemetry.rank_states import state_of, title_of

MAX_ROWS = 256

_COLUMNS = ("rank", "state", "doing", "for, s", "queue", "memory, MiB", "pid")


def as_html(title: str, labels: Sequence[str]) -> str:
    """Return a table of the processes with these labels, which this program has started. It has no script or style.

    A process that is not recorded on this machine has no state.
    """
    found = _processes()
    rows = [_row(label, found.get(label)) for label in labels[:MAX_ROWS]]
    more = f"<p>{len(labels) - MAX_ROWS} more ranks</p>" if len(labels) > MAX_ROWS else ""
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    return f"<p>{html.escape(title)}</p><table><tr>{head}</tr>{''.join(rows)}</table>{more}"


def _processes() -> dict[str, Process]:
    """Return the processes of this program by label: of those with one label the one that runs."""
    try:
        [program] = select(str(os.getpid()))
    except (LookupError, NotImplementedError, OSError, ValueError):  # nothing is recorded
        return {}
    return {each.label: each for each in sorted(program.processes, key=lambda each: each.state != ENDED)}


def _row(label: str, process: Process | None) -> str:
    if process is None:
        return _cells([label, "not recorded on this machine", "", "", "", "", ""])
    state, activity = state_of(process)
    memory = "" if process.memory is None else f"{process.memory / 2**20:.0f}"
    doing, seconds = (title_of(activity), f"{activity['seconds']:.1f}") if activity else ("", "")
    queue = sum(int(each["queue"]) for each in process.activities)
    return _cells([label, state, doing, seconds, str(queue), memory, str(process.pid)])


def _cells(texts: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in texts)}</tr>"
