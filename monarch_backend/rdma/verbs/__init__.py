"""One-sided memory over any NIC that libibverbs knows: RC queue pairs, READ, WRITE and atomics.

A pure engine: it knows no actors, and how bytes get to a peer is its user's business.

_engine.py       one process's verbs: what it exposes, whom it accepts, what it asks; the thread that hears of ends
_completions.py  who looks at completion queues, and when they announce something
_link.py         what is asked of one peer: connecting, breaking, connecting again
_lane.py         one queue pair and what is posted on it
_request.py      a transfer, cut into pieces
_device.py       an open device
_memory.py       registrations for own requests, kept while the allocation lives
_gpu.py          registrations of GPUs' memory
_messages.py     regions, offers and answers as bytes
_reach.py        which port can talk to which
_devices.py      what /sys says; whether verbs can be used; lines for the doctor
_settings.py     what the environment says
_binding.py      the one door to libibverbs; _pyverbs.py and _ibverbs.py are its two adapters
_queues.py       posting and polling without the packages' Python
_errors.py       what is raised
"""

from monarch_backend._public import name_exceptions
from monarch_backend.rdma.verbs._devices import Fact, available, describe
from monarch_backend.rdma.verbs._engine import Engine, Region, hears, plan_atomic, plan_transfer
from monarch_backend.rdma.verbs._errors import NoConnectionError, UnreachableMemoryError, VerbsError
from monarch_backend.rdma.verbs._memory import Allocation, allocation_of
from monarch_backend.rdma.verbs._request import Plan
from monarch_backend.rdma.verbs._settings import Settings, from_environment

__all__ = [
    "Allocation",
    "Engine",
    "Fact",
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

name_exceptions(__name__, globals())
