"""Collectives of XLA tensors through host memory, for processes whose XLA clients can't communicate.

An example is PJRT's CPU client, where each process has a device of its own. A collective copies its tensors to the CPU,
runs the group's CPU collective, and copies the results back. xla_backend.py decides which processes use it.

`functional_by_groups` replaces torch_xla's functional collectives, which reduce over all devices whatever the group is.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils import _pytree as pytree

from monarch_backend._core import debug_log
from monarch_backend.process_group import _c10d_internals, _c10d_patches
from monarch_backend.process_group._collective_specs import BY_METHOD, CollectiveSpec, Form
from monarch_backend.process_group._errors import where
from monarch_backend.process_group._hooks import DeferredWork
from monarch_backend.process_group._integer_mean import INTEGERS, divide_sum
from monarch_backend.process_group._xla import graph_hash_workaround

if TYPE_CHECKING:
    from monarch_backend.process_group._process_group import MonarchProcessGroup


class NothingToEnd:
    """Methods of a route that do nothing for XLA.

    XLA runs operations when a value is requested, so there is nothing to time, count or end.
    """

    def set_timeout(self, timeout: Any) -> None:
        """Do nothing: XLA has no timeouts. Staged collectives have the CPU route's timeout."""

    def _set_sequence_number_for_group(self) -> None:
        pass

    def shutdown(self) -> None:
        """Do nothing: the client belongs to the process."""

    def abort(self) -> None:
        """Do nothing: XLA can't end its operations. Staged collectives end with the CPU route."""


class StagedGroup(NothingToEnd):
    """Inner group of the XLA route that runs the group's own collectives on CPU copies."""

    def __init__(self, group: MonarchProcessGroup) -> None:
        self._group = group
        _say_once(group)
        functional_by_groups()

    def __getattr__(self, name: str) -> Any:
        spec = BY_METHOD.get(name)
        if spec is None:
            raise AttributeError(f"the XLA route has no {name}")
        if not spec.form.writes:
            return functools.partial(self._staged, name)
        return functools.partial(self._written, spec)

    def _staged(self, name: str, *args: Any) -> Any:
        return getattr(self._group, name)(*graph_hash_workaround.all_on_host(args))

    def _written(self, spec: CollectiveSpec, outputs: Any, *rest: Any) -> Any:
        group = self._group
        # The newest name that this release of torch has.
        own = next(getattr(group, name) for name in reversed(spec.methods) if hasattr(group, name))
        if spec.form.is_in_place:
            there, *rest = graph_hash_workaround.all_on_host((outputs, *rest))
        else:
            there, rest = pytree.tree_map(_room_for, outputs), graph_hash_workaround.all_on_host(rest)
        work = own(there, *rest)

        def finish() -> None:
            with torch.no_grad():
                for mine, staged in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(there), strict=True):
                    mine.copy_(staged)

        given = pytree.tree_leaves(outputs)
        late = DeferredWork(work, given, finish)
        if spec.form is Form.RECEIVE:  # the sender may be this very thread, later
            return late
        late.wait()
        return _c10d_internals.finished_work(given)


def _room_for(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if graph_hash_workaround.is_on_xla(value) else value


@functools.cache
def _say(_pid: int, text: str) -> None:
    debug_log.write(text)


def _say_once(group: MonarchProcessGroup) -> None:
    if debug_log.is_enabled():
        why = "the XLA clients of these processes can't talk to each other (PJRT's CPU client)"
        _say(os.getpid(), f"monarch_backend: {why}: collectives of XLA tensors go through the host [{where(group)}]")


# Functional collectives -----------------------------------------------------------------------------------------

_libraries: list[torch.library.Library] = []
_Kernel = Callable[..., torch.Tensor]
_KERNELS: dict[str, Callable[..., Any]] = {"wait_tensor": lambda tensor: tensor}


def functional_by_groups() -> None:
    """Register functional collectives of XLA tensors that use the given group; a second call does nothing.

    torch_xla's own ignore the group.
    """
    if _libraries:
        return
    library = torch.library.Library("_c10d_functional", "IMPL")
    with _c10d_patches.overriding():
        for name, kernel in _KERNELS.items():
            library.impl(name, kernel, "XLA", allow_override=True)  # torch_xla has one in Python, too
    _libraries.append(library)


def _kernel(name: str, *, coalesced: bool = False) -> Callable[[_Kernel], _Kernel]:
    """Return a decorator that registers a kernel of the functional collective ``name`` and, if asked, its list form."""

    def register(kernel: _Kernel) -> _Kernel:
        _KERNELS[name] = kernel
        if coalesced:
            _KERNELS[f"{name}_coalesced"] = lambda tensors, *args: [kernel(each, *args) for each in tensors]
        return kernel

    return register


def _op(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _group(name: str) -> Any:
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]


@_kernel("all_reduce", coalesced=True)
def _all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    out = x.clone()
    _reduce(out, op, group)
    return out


def _reduce(x: torch.Tensor, op: str, group: str) -> None:
    """Reduce in place; XLA has no mean."""
    ours = _group(group)
    if op.lower() != "avg":
        dist.all_reduce(x, _op(op), ours)
        return
    dist.all_reduce(x, dist.ReduceOp.SUM, ours)
    x.copy_(_mean(x, ours.size()))


def _mean(total: torch.Tensor, count: int) -> torch.Tensor:
    return divide_sum(total, count) if total.dtype in INTEGERS else total / count


@_kernel("all_reduce_")
def _all_reduce_here(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    _reduce(x, op, group)
    return x


@_kernel("all_gather_into_tensor", coalesced=True)
def _all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    shape = (size * x.shape[0], *x.shape[1:]) if x.ndim else (size,)
    out = x.new_empty(shape)
    dist.all_gather_into_tensor(out, x.contiguous(), _group(group))
    return out


@_kernel("reduce_scatter_tensor", coalesced=True)
def _reduce_scatter(x: torch.Tensor, op: str, size: int, group: str) -> torch.Tensor:
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    mean = op.lower() == "avg"
    dist.reduce_scatter_tensor(out, x.contiguous(), dist.ReduceOp.SUM if mean else _op(op), _group(group))
    return _mean(out, size) if mean else out


@_kernel("all_to_all_single")
def _all_to_all(x: torch.Tensor, outputs: Any, inputs: Any, group: str) -> torch.Tensor:
    outputs, inputs = list(map(int, outputs)), list(map(int, inputs))
    out = x.new_empty((sum(outputs), *x.shape[1:]) if outputs else x.shape)
    dist.all_to_all_single(out, x.contiguous(), outputs or None, inputs or None, _group(group))
    return out


@_kernel("broadcast")
def _broadcast(x: torch.Tensor, source: int, group: str) -> torch.Tensor:
    out = x.clone()
    dist.broadcast(out, group=_group(group), group_src=source)
    return out
