"""Views in a trace: results that are views of inputs, and the order of shards of a view."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._patches.semantics.graph_breaks import _is_uneven
from monarch_backend.dtensor._per_rank import per_rank_int
from monarch_backend.dtensor._torch_internals import tracing_state


def _strided_again(own: Any) -> Any:
    """Restore a spec's explicit order, which torch drops when it takes a DTensor apart."""

    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        placements, meta, order, requires_grad = context
        spec = _in_order(order, inner["device_mesh"], placements, TensorMeta(size, stride, meta.dtype))
        if spec is None:
            return own(inner, context, size, stride)
        return DTensor(inner["_local_tensor"], spec, requires_grad=requires_grad)

    return __tensor_unflatten__


def _in_order(order: Any, mesh: Any, placements: Any, meta: Any) -> DTensorSpec | None:
    """Return the spec of a view of shards (``x.view(-1)`` of columns), whose placements have the order of the mesh.

    torch takes the order from the strides. None for other tensors.
    """
    if order is None or not any(isinstance(each, _StridedShard) for each in placements):
        return None
    return DTensorSpec(mesh, placements, tensor_meta=meta, shard_order=order, use_strided_shard_as_shard_order=False)


def _places_of_strided(own: Any) -> Any:
    """Return offsets that torch reads from a new tensor, which has no values in a trace."""

    def local_shard_size_and_offset(self: Any, size: Any, chunks: int, rank: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(size, torch.SymInt) and per_rank_int.values_of(size) is None:
            return own(self, size, chunks, rank, *rest, **options)
        with tracing_state.outside():
            return own(self, size, chunks, rank, *rest, **options)

    return local_shard_size_and_offset


def _view_of(own: Any) -> Any:
    """Make a result that is a view of an input outside of the graph; torch can't do it for DTensors."""

    def gen_alias_from_base(base: Any, target: Any, requires_grad: bool, *rest: Any, **options: Any) -> Any:
        if not (isinstance(base, DTensor) and isinstance(base._local_tensor, RemoteTensor)):
            return own(base, target, requires_grad, *rest, **options)
        inner = target._local_tensor
        whole = _gathered_alike(base, target).to_local()
        if _is_uneven(inner) or _is_uneven(whole):
            local = _Strided.apply(whole, inner)  # type: ignore[no-untyped-call]
        else:
            local = whole.as_strided(inner.size(), inner.stride(), inner.storage_offset())
        made = DTensor.from_local(
            local, target.device_mesh, target.placements, shape=target.shape, stride=target.stride()
        )
        spec = made._spec
        made._spec = _in_order(target._spec.shard_order, spec.mesh, spec.placements, spec.tensor_meta) or spec
        return made if requires_grad else made.detach()

    return gen_alias_from_base


class _Strided(torch.autograd.Function):
    """``as_strided`` with numbers that differ by rank: torch's own gradient of it compares strides."""

    @staticmethod
    def forward(ctx: Any, base: Any, like: Any) -> Any:
        ctx.of_base, ctx.of_view = base._meta, like._meta
        return base.as_strided(like._meta.shape, like._meta.stride, like._meta.offset)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        base, view = ctx.of_base, ctx.of_view
        count = base.offset + 1  # up to the end of its memory
        for size, stride in zip(base.shape, base.stride, strict=True):
            count = count + (size - 1) * stride
        places = gradient.new_ones((torch.sym_max(count, 0),), dtype=torch.int64).cumsum(0) - 1
        # Some elements occur several times: expand, unfold.
        seen = places.as_strided(view.shape, view.stride, view.offset).reshape(-1)
        flat = torch.zeros_like(places, dtype=gradient.dtype).index_add_(0, seen, gradient.reshape(-1))
        return flat.as_strided(base.shape, base.stride, base.offset), None


def _gathered_alike(base: DTensor, target: DTensor) -> DTensor:
    """Return the base gathered as its view (``x[1:]``) was, which is not a view of a shard.

    torch 2.14 and later may shard it by columns over ranks that all had it.
    """
    placements = []
    for old, new in zip(base.placements, target.placements, strict=True):
        if new.is_replicate():
            placements.append(new)
        else:
            placements.append(Shard(_origin(base, target, new.dim)) if old.is_replicate() else old)  # type: ignore[attr-defined]
    return base if placements == list(base.placements) else base.redistribute(placements=placements)


def _origin(base: DTensor, target: DTensor, dim: int) -> int:
    """Return the base's dimension that is sharded where this one of its view is: the outermost of its parts."""
    extent = target.stride(dim) * target.size(dim)
    for each in range(base.ndim):
        if base.size(each) > 1 and base.stride(each) * base.size(each) == extent:
            return each
    raise RemoteTensorError(
        f"a captured step returns a view of its input, {list(target.shape)} of {list(base.shape)}, whose dimension "
        f"{dim} is sharded like none of the input: return a copy, .clone()"
    )
