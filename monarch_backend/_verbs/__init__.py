"""One-sided memory over any NIC that libibverbs knows: RC queue pairs, READ, WRITE and atomics.

A pure engine: it knows no actors, and how bytes get to a peer is its user's business.

engine.py       one process's verbs: what it exposes, whom it accepts, what it asks; the thread that hears of ends
completion_poller.py  who looks at completion queues, and when they announce something
connection.py         what is asked of one peer: connecting, breaking, connecting again
queue_pair.py         one queue pair and what is posted on it
work_requests.py      a transfer, cut into pieces
open_device.py       an open device
registration_cache.py       registrations for own requests, kept while the allocation lives
gpudirect.py          registrations of GPUs' memory
wire_format.py     regions, offers and answers as bytes
path_selection.py        which port can talk to which
discovery.py      what /sys says; whether verbs can be used; lines for the doctor
config.py     what the environment says
provider.py      the one door to libibverbs; provider_pyverbs.py and provider_ibverbs.py are its two adapters
native_queues.py       posting and polling without the packages' Python
errors.py       what is raised
"""

from monarch_backend._core.public_names import name_exceptions
from monarch_backend._verbs.config import Settings, from_environment
from monarch_backend._verbs.discovery import Diagnostic, available, describe
from monarch_backend._verbs.engine import Engine, Region, hears, plan_atomic, plan_transfer
from monarch_backend._verbs.errors import NoConnectionError, UnreachableMemoryError, VerbsError
from monarch_backend._verbs.registration_cache import Allocation, allocation_of
from monarch_backend._verbs.work_requests import Plan

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

name_exceptions(__name__, globals())
