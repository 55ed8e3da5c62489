"""One-sided transfers by RDMA NICs, with any NIC that libibverbs supports: READ, WRITE and atomics on RC queue pairs.

The engine knows no actors. Its user carries the bytes of connection requests to a peer.

==================================  ==================================================================
module                              contents
==================================  ==================================================================
`engine.py`                         The engine of a process: its devices, connections and transfers.
`engine_thread.py`                  The engine's thread: events of devices, and calls from other threads.
`shared_engine.py`                  The one engine that the users in a process share.
`region.py`                         Memory that peers may access.
`transfer_plan.py`                  Plans of transfers and atomics.
`work_requests.py`                  A transfer, cut into work requests.
`open_device.py`                    An open device.
`completion_poller.py`              Polling of completion queues.
`deferred_destroy.py`               Resources that are destroyed later.
`wire_format.py`                    Regions and connection requests as bytes.
`discovery.py`                      Devices in /sys, and whether they can be used.
`eligibility.py`                    From which size NICs carry messages.
`config.py`                         Settings.
`errors.py`                         Exceptions.
`connections/peer_connections.py`   The connections of an engine.
`connections/connection.py`         The connection to one peer: connecting, breaking, reconnecting.
`connections/queue_pair.py`         One queue pair and the work requests posted on it.
`connections/accepted_peers.py`     Queue pairs of peers that access this process's memory.
`connections/path_selection.py`     Which port can reach which port.
`registrations/cache.py`            Registrations of local memory, kept while the allocation lives.
`registrations/gpudirect.py`        Registrations of GPU memory.
`registrations/rkey_quarantine.py`  Keys of memory that is not registered any more.
`providers/provider.py`             The package that drives libibverbs.
`providers/pyverbs.py`              Adapter of pyverbs.
`providers/ibverbs.py`              Adapter of the ibverbs wheel.
`providers/native_queues.py`        Posting and polling in C++.
==================================  ==================================================================

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
    from monarch_backend._verbs.region import Region
    from monarch_backend._verbs.registrations.cache import Allocation, allocation_of
    from monarch_backend._verbs.transfer_plan import plan_atomic, plan_transfer
    from monarch_backend._verbs.work_requests import Plan

_MODULES = {
    "Settings": "config",
    "from_environment": "config",
    "Diagnostic": "discovery",
    "available": "discovery",
    "describe": "discovery",
    "Engine": "engine",
    "Region": "region",
    "hears": "engine_thread",
    "plan_atomic": "transfer_plan",
    "plan_transfer": "transfer_plan",
    "NoConnectionError": "errors",
    "UnreachableMemoryError": "errors",
    "VerbsError": "errors",
    "Allocation": "registrations.cache",
    "allocation_of": "registrations.cache",
    "Plan": "work_requests",
}

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
