"""The "monarch" torch.distributed backend. Works with no actor anywhere; imports no other room of the house,
but for rdma's engine, where there are NICs (_nics.py).

_group.py        the ProcessGroup that torch sees: its routes, its life
_collectives.py  its operations: one method per collective, each finds its route and goes
_exit.py         what happens to groups that are alive when the interpreter ends
_hooks.py        completion hooks, and works that end late
_routes.py       which route a device takes and why; how the groups behind the routes are made
_rendezvous.py   from the default group's address to a store that all ranks have reached
_handshake.py    how the ranks of a new group agree on one attempt, within its deadline
_store_host.py   how long rank 0 keeps the store that it hosts
_shm_process.py  this process's shared memory, its limits, and tensors in it
_shm_meet.py     how ranks find out which of them share memory
_shm.py          the shared-memory route: c10d's calls as calls on the compiled core
_hierarchy.py    ranks on several hosts: shared memory inside, messages between (_between.py, _combine.py, _in_turn.py)
_far.py          large messages between hosts, which NICs read (_nics.py) after a word over Gloo (_letters.py)
_call_forms.py   the call forms of c10d's methods
_cpu.py          what the CPU route accepts: dtypes, reduce ops, shapes, ranks
_errors.py       what is raised, and how a message names its rank
_options.py      what `pg_options=` may be
_torch.py        everything that leans on a private part of torch
"""

from monarch_backend._public import name_exceptions
from monarch_backend.process_group._errors import (
    CollectiveArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    MonarchError,
    NoRouteError,
    RankFailedError,
)
from monarch_backend.process_group._group import MonarchProcessGroup, abort_all, create
from monarch_backend.process_group._options import Options
from monarch_backend.process_group._routes import Route, routes
from monarch_backend.process_group._shm_process import SharedMemoryError, empty_shared

__all__ = [
    "CollectiveArgumentError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "GroupClosedError",
    "MonarchError",
    "MonarchProcessGroup",
    "NoRouteError",
    "Options",
    "RankFailedError",
    "Route",
    "SharedMemoryError",
    "abort_all",
    "create",
    "empty_shared",
    "routes",
]

name_exceptions("monarch_backend", globals())
