"""Cells of a notebook or IPython: interrupting one cancels the calls that it has made."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.calls.pending_calls import cancel_calls

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime


def cancel_interrupted_cells(runtime: Runtime) -> None:
    """Do so from now on, if this program is a notebook or IPython. The present cell counts from its first call."""
    module: Any = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    if shell is None:
        return
    first = 0

    def begin(*_: object) -> None:
        nonlocal first
        first = next(runtime.ids)

    def end(result: Any) -> None:
        if isinstance(result.error_in_exec, KeyboardInterrupt):
            cancelled = cancel_calls(runtime, "its cell was interrupted", after=first)
            if cancelled:
                print(f"{cancelled} call{'s' * (cancelled > 1)} of this cell cancelled", file=sys.stderr)

    shell.events.register("pre_run_cell", begin)
    shell.events.register("post_run_cell", end)
