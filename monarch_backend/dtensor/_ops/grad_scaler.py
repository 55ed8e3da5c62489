"""GradScaler's operator on lists of gradients: each is checked and scaled on its ranks.

All ranks learn of an overflow on one rank. torch's own rule applies the first gradient's placements to all gradients.
Beside DTensors there may be plain tensors: gradients of parameters that no plan names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import dispatch, local_results

_check = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def _check_and_unscale(_func: Any, args: Any, kwargs: Any) -> None:
    """Scale gradients in place and set the flag to 1 after an overflow. ``args``: gradients, flag, 1 / scale."""
    gradients, found, inverse = args
    by_mesh: dict[Any, list[Any]] = {}
    others: list[Any] = []
    distributed = sorted((each for each in gradients if isinstance(each, DTensor)), key=lambda x: x.device_mesh.size())
    of_workers = {local_results.workers_of(each): each.device_mesh for each in distributed}  # the largest
    for gradient in gradients:
        # Each rank has its own plain gradient; its flag is reduced with the others.
        mesh = (
            gradient.device_mesh
            if isinstance(gradient, DTensor)
            else of_workers.get(local_results.workers_of(gradient))
        )
        (others if mesh is None else by_mesh.setdefault(mesh, [])).append(gradient)
    for mesh, of_mesh in by_mesh.items():
        flag, factor = (local_results.distributed(each, mesh).to_local() for each in (found, inverse))
        of_rank = flag.clone()
        _check([_to_look_at(each, factor) for each in of_mesh], of_rank, factor, **(kwargs or {}))
        parts = local_results.of_parts(of_rank, local_results.meta_of(of_rank), mesh, [Partial("max")] * mesh.ndim)
        _tell(found, parts.full_tensor())
    if others:  # of this process, or of processes without a DTensor among these
        _check(others, found, inverse, **(kwargs or {}))


def check_and_unscale_plain(func: Any, args: Any, kwargs: Any) -> None:
    """Run the operator on gradients that are not DTensors. Flags of slices are sent to all ranks by their members."""
    gradients, found, inverse = args
    by_members: dict[frozenset[int], list[Any]] = {}
    for each in gradients:
        by_members.setdefault(_outside(each), []).append(each)
    for outside, of_members in by_members.items():
        if not isinstance(found, RemoteTensor) or outside <= _outside(found):
            dispatch.run_plain(func, (of_members, found, inverse), kwargs or {})
            continue
        flag = found._meta.workers.without(found.clone(), outside)  # type: ignore[arg-type]  # of this class as well
        dispatch.run_plain(func, (of_members, flag, inverse), kwargs or {})
        _tell(found, flag)


def _outside(tensor: Any) -> frozenset[int]:
    return tensor._meta.outside if isinstance(tensor, RemoteTensor) else frozenset()


def _tell(found: Any, flag: Any) -> None:
    """Send a slice's flag to all ranks that have the total flag."""
    if isinstance(found, RemoteTensor) and not _outside(flag) <= _outside(found):
        found.fill_(flag.item())
    else:
        found.copy_(flag)


def _to_look_at(gradient: Any, factor: Any) -> Any:
    """Return this rank's part, which is scaled during the check.

    For partial values the sum may overflow although no part does, or be finite although a part is not. Their parts are
    scaled here, and a reduced copy is checked.
    """
    if not isinstance(gradient, DTensor):
        return gradient
    whole = [Replicate() if each.is_partial() else each for each in gradient.placements]
    if whole == list(gradient.placements):
        return gradient._local_tensor
    reduced = gradient.redistribute(placements=whole)._local_tensor
    gradient._local_tensor.mul_(factor)
    return reduced


HANDLERS: dict[Any, Callable[..., Any]] = {_check: _check_and_unscale}
