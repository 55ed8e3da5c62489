"""One-sided transfers by RDMA NICs, with any NIC that libibverbs supports: READ, WRITE and atomics on RC queue pairs.

The engine knows no actors. Its user carries the bytes of connection requests to a peer.

- engine.py: the engine of a process: its devices, connections and transfers
- engine_thread.py: the engine's thread: events of devices, and calls from other threads
- shared_engine.py: the one engine that the users in a process share
- work_requests.py: plans of transfers and atomics, cut into work requests
- open_device.py: an open device, memory that peers may access, and keys of memory that is not registered any more
- completion_poller.py: polling of completion queues
- wire_format.py: regions and connection requests as bytes
- discovery.py: devices in /sys, and whether they can be used
- eligibility.py: from which size NICs carry messages
- connections/: connections to peers, queue pairs in both directions, and the choice of ports
- registrations/: registrations of memory, kept while the allocation lives, also of GPU memory
- providers/: the packages that drive libibverbs, and posting and polling in C++

The exported names are imported at their first use. A rank on a machine without NICs imports eligibility.py only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_backend._verbs.config import Settings, from_environment
    from monarch_backend._verbs.discovery import Diagnostic, available, describe
    from monarch_backend._verbs.engine import Engine
    from monarch_backend._verbs.engine_thread import hears
    from monarch_backend._verbs.errors import NoConnectionError, UnreachableMemoryError, VerbsError
    from monarch_backend._verbs.registrations.cache import Allocation, allocation_of
    from monarch_backend._verbs.wire_format import Region
    from monarch_backend._verbs.work_requests import Plan, plan_atomic, plan_transfer

_NAMES = {
    "config": ("Settings", "from_environment"),
    "discovery": ("Diagnostic", "available", "describe"),
    "engine": ("Engine",),
    "engine_thread": ("hears",),
    "errors": ("NoConnectionError", "UnreachableMemoryError", "VerbsError"),
    "registrations.cache": ("Allocation", "allocation_of"),
    "wire_format": ("Region",),
    "work_requests": ("Plan", "plan_atomic", "plan_transfer"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Allocation",
    "Diagnostic",
    "Engine",
    "NoConnectionError",
    "Plan",
    "Region",
    "Settings",
    "UnreachableMemoryError",
    "VerbsError",
    "allocation_of",
    "available",
    "describe",
    "from_environment",
    "hears",
    "plan_atomic",
    "plan_transfer",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
