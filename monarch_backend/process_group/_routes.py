"""The routes of a group or of this machine, for users."""

from __future__ import annotations

import torch.distributed as dist

from monarch_backend.process_group._backend_selection import Route, survey
from monarch_backend.process_group._process_group import MonarchProcessGroup


def routes(group: dist.ProcessGroup | None = None) -> dict[str, Route]:
    """Return the available routes: of ``group``, by default of the default group, or of this machine without a group.

    The keys are device types. In a group the CPU's backend is "shm" (all ranks share a host), "shm+gloo" (some do)
    or "gloo". Without a group it is "shm+gloo", or "gloo" where this machine can't share memory; ``why`` says so.
    Raises TypeError if ``group`` is not a group of backend "monarch".

    >>> import monarch_backend
    >>> print(monarch_backend.routes()["cpu"])
    cpu -> shm+gloo (shared memory between ranks of one host, torch's Gloo between hosts)
    """
    if group is None and dist.is_initialized():
        default = dist.group.WORLD
        group = default if isinstance(default, MonarchProcessGroup) else None
    if group is not None and not isinstance(group, MonarchProcessGroup):
        raise TypeError(f"routes() takes a process group of backend 'monarch', not {type(group).__name__}")
    found = group._known_routes() if group is not None else survey()
    return {device: route for device, route in found.items() if route.available}
