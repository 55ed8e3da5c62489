"""Reason why dynamo traces a function again. Imports dynamo, so import it in a trace only."""

from __future__ import annotations

from torch._dynamo import utils


def reason() -> str | None:
    """Return the guard that has failed, as torch words it, or None for the first trace of a function."""
    of_trace = utils.get_metrics_context()
    found = getattr(of_trace, "_metrics", {}).get("recompile_reason") if of_trace.in_progress() else None
    return None if found is None else str(found)
