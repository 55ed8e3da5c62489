"""The "monarch" backend of torch.distributed. Needs no actors; imports only _core and _verbs.

=============================  =====================================================================================
module                         contents
=============================  =====================================================================================
_process_group.py              the ProcessGroup that torch sees: making, destroying, aborting
_collective_specs.py           the table of collectives, from which the other modules take names, forms and routes
_collectives.py                one method per collective: validation, choice of the backend, call
_backend_selection.py          which backend a device takes and why; how the inner groups are made
_rendezvous.py                 from the default group's address to a store that all ranks have reached
_handshake.py                  how the ranks of a new group agree on one attempt, within the timeout
_store_host.py                 how long rank 0 keeps the store that it hosts
_argument_forms.py             the call forms of c10d's methods
_cpu_validation.py             what CPU collectives accept: dtypes, reduce ops, shapes, ranks
_overlap.py                    tensors of one call that share memory
_tensor_lists.py               several tensors per rank in one call
_hooks.py                      completion hooks, and works that complete late
_interpreter_exit.py           groups that are alive when the interpreter ends
_c10d_internals.py             private parts of torch's c10d
_c10d_patches.py               functions of torch's c10d that are replaced
_shm/                          collectives over the shared memory of one host
_hierarchical/                 collectives over several hosts: shared memory inside, messages between
_rdma/                         large point-to-point messages between hosts, read by NICs
_xla/                          collectives of XLA tensors
=============================  =====================================================================================
"""

from monarch_backend._core.errors import MonarchError
from monarch_backend.process_group._backend_selection import Route, routes
from monarch_backend.process_group._errors import (
    CollectiveArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    NoRouteError,
    ProcessGroupError,
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
    "ProcessGroupError",
    "RankFailedError",
    "Route",
    "SharedMemoryError",
    "abort_all",
    "create",
    "empty_shared",
    "routes",
]
