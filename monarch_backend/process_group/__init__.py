"""The "monarch" backend of torch.distributed. Needs no actors; imports only _core and _verbs.

=============================  =====================================================================================
module                         contents
=============================  =====================================================================================
`_process_group.py`            The ProcessGroup that torch sees: options, creation, routes, destruction, abort.
`_collective_specs.py`         The table of collectives; other modules take names, forms and routes from it.
`_collectives.py`              One method per collective: validation, choice of the backend, call.
`_backend_selection.py`        Which backend a device takes and why.
`_rendezvous.py`               From the default group's address to a store that all ranks have reached.
`_handshake.py`                Agreement of a new group's ranks on one attempt, within the timeout.
`_bootstrap.py`                Which ranks share memory, and its proof.
`_store_host.py`               How long rank 0 keeps the store that it hosts.
`_argument_forms.py`           The call forms of c10d's methods.
`_cpu_arguments.py`            Checked arguments of CPU collectives, by their form.
`_cpu_validation.py`           What CPU collectives accept: dtypes, reduce ops, shapes, ranks.
`_overlap.py`                  Tensors of one call that share memory.
`_tensor_lists.py`             Several tensors per rank in one call.
`_hooks.py`                    Completion hooks, and works that complete late.
`_work_queue.py`               Operations of a group, one after the other.
`_interpreter_exit.py`         Groups that are alive when the interpreter ends.
`_c10d_internals.py`           Private parts of torch's c10d.
`_c10d_patches.py`             Functions of torch's c10d that are replaced.
`_shm/`                        Collectives over the shared memory of one host.
`_hierarchical/`               Collectives over several hosts: shared memory inside, messages between.
`_rdma/`                       Large point-to-point messages between hosts, read by NICs.
`_xla/`                        Collectives of XLA tensors.
=============================  =====================================================================================
"""

from monarch_backend._core.errors import MonarchError
from monarch_backend.process_group._backend_selection import Route
from monarch_backend.process_group._errors import (
    CollectiveArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    NoRouteError,
    ProcessGroupError,
    RankFailedError,
)
from monarch_backend.process_group._process_group import MonarchProcessGroup, Options, abort_all, create, routes
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
