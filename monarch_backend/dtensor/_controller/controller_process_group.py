"""`ControllerGroup`: torch.distributed's process groups on the controller, which is not a rank of them.

torch gets sizes, names and ranks. Collectives of remote tensors are commands (see _ops/special_ops.py). Those of
this process's own tensors are computed here (see host_collectives.py).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._controller import host_collectives
from monarch_backend.dtensor._controller.operations import operations
from monarch_backend.dtensor._controller.per_rank_host_tensor import PerRankTensor
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._errors import MeshClosedError, MeshMismatchError, RemoteTensorError
from monarch_backend.dtensor._per_rank import per_rank_int
from monarch_backend.dtensor._torch_internals import c10d_registry

if TYPE_CHECKING:
    from monarch_backend.dtensor._controller.worker_set import WorkerSet

_names = itertools.count()
_DEFAULT = "0"
"""Name of torch's default group, here and on workers."""


class ControllerGroup(dist.ProcessGroup):
    """Process group whose ``rows`` are lists of ranks: on each rank it is the group of that rank's row."""

    def __init__(
        self, name: str, rows: Sequence[Sequence[int]], desc: str = "", workers: WorkerSet | None = None
    ) -> None:
        super().__init__(0, max(1, len(rows[0]) if rows else 1))  # type: ignore[call-arg]
        self._name, self._desc = name, desc
        self.rows = [list(row) for row in rows]
        self._place: Any = 0
        if workers is not None:
            places: list[int | None] = [None] * workers.size
            for row in self.rows:
                for place, rank in enumerate(row):
                    places[rank - workers.first] = place
            self._place = per_rank_int.by_rank(places)

    def rank(self) -> Any:
        """Each rank's own rank. In the default group, with all ranks of all meshes, it is the controller's: 0."""
        return self._place

    def size(self) -> int:
        return len(self.rows[0]) if self.rows else 0

    def getBackendName(self) -> str:
        return "monarch"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def new_group(
        self, ranks: Sequence[int], *, group_name: str | None = None, group_desc: str | None = None, **_: Any
    ) -> ControllerGroup:
        """Make a group for torch.distributed.new_group, which passes all ranks."""
        return make([list(ranks)], group_desc or "", group_name, register=False)

    def shutdown(self) -> None:
        """Do nothing: there is no connection here."""

    abort = shutdown

    def barrier(self, *_: Any, **__: Any) -> Any:
        """Wait until the group's workers have executed all commands so far. Raises RemoteOpError for failures."""
        ranks = {rank for row in self.rows for rank in row}
        for workers in _owners:
            if not ranks.isdisjoint(range(workers.first, workers.first + workers.size)):
                workers.synchronize()
        return c10d_registry.done()

    def all_to_all_single(  # type: ignore[override]
        self, output: Any, input: Any, output_split_sizes: Any = (), input_split_sizes: Any = (), *_: Any, **__: Any
    ) -> Any:
        """Exchange slices by a command: torch's operator takes no sizes that differ by rank, as uneven splits have."""
        if not _are_of_workers("all_to_all_single", (output, input)):
            host_collectives.run("all_to_all_single", self.size(), (output, input))
            return c10d_registry.done()
        splits = {"output_split_sizes": list(output_split_sizes), "input_split_sizes": list(input_split_sizes)}
        operations.issue("alltoall_base_", {"output": output, "input": input, "process_group": self, **splits})
        return c10d_registry.done()

    def _get_backend(self, _device: Any) -> Any:
        """Return this group: torch asks a group's backend what it can do."""
        return self

    def _start_coalescing(self, *_: Any) -> None:
        """Do nothing: torch collects coalesced calls itself, and passes all of them."""

    def _end_coalescing(self, *_: Any) -> Any:
        return c10d_registry.done()


_COLLECTIVES = frozenset(
    {
        "allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "_allgather_base", "all_gather_single",
        "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter",
        "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base",
        "send", "recv", "recv_anysource",
    }
)  # fmt: skip
"""Collectives that take tensors. torch's other names for some of them call these, and would recurse here."""


def _collective(name: str) -> Any:
    own = getattr(dist.ProcessGroup, name)

    def collective(self: ControllerGroup, *args: Any, **options: Any) -> Any:
        if _are_of_workers(name, (args, options)):
            return own(self, *args, **options)  # an operator, which becomes a command
        host_collectives.run(name, self.size(), (*args, *options.values()))
        return c10d_registry.done()

    # pybind11 calls the base class's function only from a function of the same name, else this one again.
    collective.__code__ = collective.__code__.replace(co_name=name)
    return collective


def _are_of_workers(name: str, given: Any) -> bool:
    """Return whether all tensors are on workers; False if all are the controller's own.

    Raises RemoteTensorError for both kinds in one call: torch selects the implementation by the inputs only, and would
    leave the controller's outputs as they are.
    """
    tensors = [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor)]
    own = [each for each in tensors if not isinstance(each, RemoteTensor)]
    if not own:
        return True
    for each in own:
        if isinstance(each, DTensor):
            raise RemoteTensorError(
                f"{name}() of a DTensor: call it with each rank's part, x.to_local(), or call "
                "x.redistribute(...) instead"
            )
        if isinstance(each, PerRankTensor) or len(own) < len(tensors):
            raise RemoteTensorError(
                f"{name}() of a tensor of the controller beside tensors of workers: give tensors of one kind. "
                "Distribute the tensor first (distribute_tensor), make the output from a tensor of the workers "
                "(torch.empty_like), or run the function on the workers (monarch_backend.dtensor.run)"
            )
    return False


for _name in _COLLECTIVES:  # the base class would fail with another error, or silently do nothing
    if hasattr(dist.ProcessGroup, _name):  # some releases of torch lack some names
        setattr(ControllerGroup, _name, _collective(_name))
if not hasattr(dist.ProcessGroup, "all_to_all_single"):  # torch before 2.13 calls it by its other name
    ControllerGroup.alltoall_base = ControllerGroup.all_to_all_single  # type: ignore[method-assign, assignment]


_universe: ControllerGroup | None = None
_owners: list[WorkerSet] = []
_made: weakref.WeakSet[ControllerGroup] = weakref.WeakSet()
"""Groups of existing WorkerSets, or that a tensor or mesh still refers to."""


def universe() -> ControllerGroup:
    """Return torch's default group of this process, made if needed. Raises RemoteTensorError if there is another."""
    global _universe
    if is_controller():
        return _universe  # type: ignore[return-value]
    refuse_a_rank()
    _universe = ControllerGroup(_DEFAULT, [])
    c10d_registry.register(_universe, _DEFAULT, [])
    c10d_registry.set_default(_universe)
    return _universe


def grow(size: int) -> int:
    """Add ranks to torch's default group, those of all WorkerSets, and return the first of them."""
    group = universe()
    first = group.size()
    group.rows = [list(range(first + size))]
    c10d_registry.set_ranks(group, group.rows[0])
    return first


def refuse_a_rank() -> None:
    """Raise RemoteTensorError if torch's default group is not a controller's."""
    if dist.is_initialized() and not is_controller():
        raise RemoteTensorError(
            "this process is a rank of a torch.distributed group already; a controller of device meshes can't be one: "
            "call torch.distributed.destroy_process_group() first, or make the mesh in a program of its own. A "
            "function of run() makes its own calls, on every rank"
        )


def is_controller() -> bool:
    """Return whether torch's default group is this controller's, which has no rank here."""
    return _universe is not None and dist.is_initialized() and c10d_registry.default() is _universe


def add_owner(workers: WorkerSet) -> None:
    _owners.append(workers)


def remove_owner(workers: WorkerSet) -> None:
    """Remove workers that have ended. Without WorkerSets of real processes torch has no default group any more.

    torch still finds the others by their names. An operation on their tensors raises that they have ended.
    """
    global _universe
    if workers in _owners:
        _owners.remove(workers)
    if all(each.is_simulated for each in _owners) and _universe is not None:
        _owners.clear()
        if is_controller():
            dist.destroy_process_group()
            for group in list(_made):
                if not group.group_name.isdecimal():  # torch's own names are counted anew from now on
                    c10d_registry.register_name(group, group.group_name)
        _universe = None


def owners() -> list[WorkerSet]:
    real = [each for each in _owners if not each.is_simulated]
    return real or list(_owners)


def owner_of(ranks: Sequence[int]) -> WorkerSet | None:
    """Return the WorkerSet of all these global ranks; None in a process that is not a controller.

    Raises ValueError if they belong to several or to none, MeshClosedError if their processes have ended.
    """
    found = {workers for workers in _owners for rank in ranks if workers.first <= rank < workers.first + workers.size}
    if len(found) > 1:
        names = " and ".join(each.name for each in _owners if each in found)
        raise ValueError(
            f"ranks {list(ranks)} belong to {names}: a mesh or group has processes of one spawn_procs() only. Where "
            "there are several, make a mesh by procs.device_mesh(), its groups by mesh.get_group()"
        )
    owner = next(iter(found), None)
    nobodys = [rank for rank in ranks if owner is None or not owner.first <= rank < owner.first + owner.size]
    if nobodys and is_controller():
        size = universe().size()
        if max(nobodys) >= size:
            raise ValueError(
                f"there is no rank {max(nobodys)}: the meshes of this program have {size} ranks, from 0 on"
            )
        raise MeshClosedError(
            f"the processes that were ranks {nobodys} have ended, and no others get their numbers: make a mesh of "
            "those that run by procs.device_mesh()"
        )
    return owner


def check_group(workers: WorkerSet, group: Any, name: str) -> None:
    """Raise MeshMismatchError if this group, or the group of this name, has other workers."""
    if name == _DEFAULT:
        if is_controller() and universe().size() != workers.size:
            raise MeshMismatchError(
                f"torch's default group is the {universe().size()} ranks of all meshes of this program, and this "
                f"tensor is on the {workers.size} of {workers.name} only: give a group of its mesh, mesh.get_group()"
            )
        return
    if workers.has_group(name):
        return
    others = next((each.name for each in _owners if each.has_group(name)), None)
    if others is not None or isinstance(group, ControllerGroup):
        raise MeshMismatchError(
            f"a collective of a tensor of {workers.name} got a group of {others or 'processes that have ended'}: give "
            "a group of the tensor's own mesh, or move the tensor first (monarch_backend.dtensor.move)"
        )


def make(rows: list[list[int]], desc: str, name: str | None = None, *, register: bool = True) -> ControllerGroup:
    workers = owner_of([rank for row in rows for rank in row])
    name = name or f"monarch_{next(_names)}"
    group = ControllerGroup(name, rows, desc, workers)
    if workers is not None:
        workers.add_group(name, rows)
        workers.kept.setdefault("groups", []).append(group)  # torch finds a group by its name while it is referenced
        _made.add(group)
    if register:
        c10d_registry.register(group, name, rows[0])
    return group
