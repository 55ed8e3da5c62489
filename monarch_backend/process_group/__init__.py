"""The "monarch" torch.distributed backend. Works with no actor anywhere; imports no other room of the house,
but for rdma's engine, where there are NICs (_rdma/peer_reads.py).

_process_group.py        the ProcessGroup that torch sees: its routes, its life
_collectives.py  its operations: one method per collective, each finds its route and goes
_interpreter_exit.py         what happens to groups that are alive when the interpreter ends
_hooks.py        completion hooks, and works that end late
_backend_selection.py       which route a device takes and why; how the groups behind the routes are made
_rendezvous.py   from the default group's address to a store that all ranks have reached
_handshake.py    how the ranks of a new group agree on one attempt, within its deadline
_store_host.py   how long rank 0 keeps the store that it hosts
_shm/segment.py  this process's shared memory, its limits, and tensors in it
_shm/bootstrap.py     how ranks find out which of them share memory
_shm/shm_backend.py          the shared-memory route: c10d's calls as calls on the compiled core
_hierarchical/hierarchical_backend.py    ranks on several hosts: shared memory inside, messages between (_hierarchical/inter_host.py, _hierarchical/reduction.py, _hierarchical/work_queue.py)
_rdma/p2p.py          large messages between hosts, which NICs read (_rdma/peer_reads.py) after a word over Gloo (_rdma/p2p_protocol.py)
_argument_forms.py   the call forms of c10d's methods
_cpu_validation.py          what the CPU route accepts: dtypes, reduce ops, shapes, ranks
_errors.py       what is raised, and how a message names its rank
_options.py      what `pg_options=` may be
_c10d_internals.py        everything that leans on a private part of torch
"""

from monarch_backend._core.public_names import name_exceptions
from monarch_backend.process_group._backend_selection import Route, routes
from monarch_backend.process_group._errors import (
    CollectiveArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    MonarchError,
    NoRouteError,
    RankFailedError,
)
from monarch_backend.process_group._options import Options
from monarch_backend.process_group._process_group import MonarchProcessGroup, abort_all, create
from monarch_backend.process_group._shm.segment import SharedMemoryError, empty_shared

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
