"""Normalisations of DTensors: of batches by channels, of groups by batch, or whole.

torch's batch norm writes its running values into temporary shards, which are lost. Its group norm has a gradient for a
whole batch only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from monarch_backend.dtensor._dispatch import local_results
from monarch_backend.dtensor._per_rank import output_strides, per_rank_int
from monarch_backend.dtensor._torch_internals import tracing_state

_aten = torch.ops.aten
_RUNNING = slice(3, 5)


def _batch_norm(func: Any, args: Any, _kwargs: Any) -> Any:
    """``args``: input, weight, bias, running mean and variance, whether to train, momentum, epsilon."""
    mesh, whole = local_results.on_one_mesh(args[:5])
    x, by_channel = whole[0], _by_channel(whole[0])
    placed = [_placed(each, Shard(0 if i else 1), by_channel) for i, each in enumerate(whole)]
    keeps = bool(args[5]) and None not in args[_RUNNING]
    if keeps and tracing_state.is_traced(local_results.local_of(x)):
        func = _aten._native_batch_norm_legit.default  # it declares its changes, which a graph needs
    found = func(*map(local_results.local_of, placed), *args[5:])
    if keeps:
        for running, there in zip(args[_RUNNING], placed[_RUNNING], strict=True):
            _keep(running, there)
    y = local_results.wholes(func, (*whole, *args[5:]))[0]
    shared = [local_results.of_parts(found[0], output_strides.as_part(y, found[0]), mesh, _where(Shard(1), by_channel))]
    return (*shared, *(_of_channels(each, x, by_channel) for each in found[1:]))


def _batch_norm_backward(func: Any, args: Any, _kwargs: Any) -> Any:
    """``args``: gradient, input, weight, running mean and variance, those of this batch, and what is no tensor."""
    mesh, whole = local_results.on_one_mesh(args[:7])
    x, by_channel = whole[1], _by_channel(whole[1])
    placed = [_placed(each, Shard(0 if i > 1 else 1), by_channel) for i, each in enumerate(whole)]
    found = func(*map(local_results.local_of, placed), *args[7:])
    of_x = found[0]
    if of_x is not None:
        of_x = local_results.of_parts(
            of_x, output_strides.as_part(local_results.meta_of(x), of_x), mesh, placed[1].placements
        )
    return of_x, *(_of_channels(each, x, by_channel) for each in found[1:])


def _by_channel(x: Any) -> list[bool]:
    """Return, by dimension of the mesh, whether channels are sharded; not if a rank has none, for torch's kernels."""
    size = x._local_tensor.size(1)
    everywhere = 0 not in (per_rank_int.values_of(size) or (size,))
    return [everywhere and each.is_shard(1) for each in x.placements]


def _where(shard: Any, is_sharded: Sequence[bool]) -> list[Any]:
    return [shard if each else Replicate() for each in is_sharded]


def _placed(tensor: Any, shard: Any, is_sharded: Sequence[bool]) -> Any:
    if tensor is None:
        return None
    if tensor.numel() == 0:  # such as the batch's mean in `eval()`
        is_sharded = [False] * len(is_sharded)
    return tensor.redistribute(tensor.device_mesh, _where(shard, is_sharded))


def _keep(running: Any, there: Any) -> None:
    """Copy the changed running value to the program's tensor."""
    if isinstance(running, DTensor) and running.placements == there.placements:
        return
    if isinstance(running, DTensor):
        running._local_tensor.copy_(there.redistribute(placements=running.placements)._local_tensor)
    else:
        running.copy_(there.full_tensor())


def _of_channels(local: Any, x: Any, by_channel: Sequence[bool]) -> Any:
    if local is None:
        return None
    mesh, size = x.device_mesh, local.size(0)
    if size == 0 and not per_rank_int.values_of(size):
        return local_results.of_parts(local, local_results.meta_of(local), mesh, _where(Shard(0), [False] * mesh.ndim))
    whole = local_results.meta_of(torch.empty(x.size(1), dtype=local.dtype, device="meta"))
    return local_results.of_parts(local, whole, mesh, _where(Shard(0), by_channel))


def _group_norm_backward(func: Any, args: Any, _kwargs: Any) -> Any:
    """``args``: gradient, input, mean, 1 / deviation, weight, the input's sizes, the groups, which are wanted."""
    mesh, whole = local_results.on_one_mesh(args[:5])
    by_batch = [each.is_shard(0) for each in whole[1].placements]
    is_weight = [False] * 4 + [True]
    placed = [
        _placed(each, Shard(0), [False] * mesh.ndim if of_all else by_batch)
        for each, of_all in zip(whole, is_weight, strict=True)
    ]
    found = func(*map(local_results.local_of, placed), placed[1]._local_tensor.size(0), *args[6:])
    added = [Partial() if each else Replicate() for each in by_batch]
    wheres = (_where(Shard(0), by_batch), added, added)
    wholes = local_results.wholes(func, (*whole, *args[5:]))
    return tuple(
        None if each is None else local_results.of_parts(each, of_all, mesh, where)
        for each, of_all, where in zip(found, wholes, wheres, strict=True)
    )


HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.native_batch_norm.default: _batch_norm,
    _aten._native_batch_norm_legit.default: _batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.native_group_norm_backward.default: _group_norm_backward,
}
"""Handlers of operators that torch's DTensor lacks."""
