"""Application of the manifest's rows for traces with dynamo's first trace."""

from __future__ import annotations

from typing import Any

from monarch_backend.dtensor._controller import controller_process_group
from monarch_backend.dtensor._controller.controller_mesh import Replacement
from monarch_backend.dtensor._patches import features


def install_at_first_trace(own: Any) -> Replacement:
    """Install the rows for traces at dynamo's first trace for any backend; their imports take a second."""

    def __call__(self: Any, *args: Any, skip: int = 0, **options: Any) -> Any:
        if controller_process_group.is_controller():
            features.require_traces()
            from monarch_backend.dtensor._patches import trace_installation  # it imports dynamo

            trace_installation.install()
        return own(self, *args, skip=skip + 1, **options)

    return __call__
