"""Special operations: collectives, operations that change metadata, and those whose result is not a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._controller import fetch
from monarch_backend.dtensor._controller.remote_tensor import Ref, RemoteTensor
from monarch_backend.dtensor._dispatch import collectives, dispatch
from monarch_backend.dtensor._dispatch.fake_tensors import Operand, out_sizes, propagate, stands_in
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._ops import grad_scaler
from monarch_backend.dtensor._per_rank import shard_origins
from monarch_backend.dtensor._protocol import RemoteRef
from monarch_backend.dtensor._torch_internals import decompositions, invalid_access

if TYPE_CHECKING:
    from monarch_backend.dtensor._controller.tensor_meta import Meta
    from monarch_backend.dtensor._controller.worker_set import WorkerSet
    from monarch_backend.dtensor._per_rank.shard_origins import Origin

_aten = torch.ops.aten
_functional = torch.ops._c10d_functional
MAX_RESULTS = 4
"""Limit of results of an operator whose results' sizes depend on values: ``unique_consecutive`` has three."""


def _item(_func: Any, args: Any, _kwargs: Any) -> Any:
    return fetch.item(args[0])


def _equal(_func: Any, args: Any, _kwargs: Any) -> bool:
    first, second = pytree.tree_map(dispatch._plain(args, {}), list(args))
    return False not in first._meta.workers.ask("equal", first._ref.id, second._ref.id)


def _allclose(_func: Any, args: Any, kwargs: Any) -> bool:
    return bool(fetch.item(_aten.isclose.default(*args, **kwargs).all()))


def _same_handle(_func: Any, args: Any, _kwargs: Any) -> Any:
    """Do nothing: workers wait for a collective when its result is used, and have no autograd."""
    return RemoteTensor(args[0]._meta, args[0]._ref)


def _as_it_is_padded(_func: Any, _args: Any, _kwargs: Any) -> bool:
    """Whether `nn.TransformerEncoder` may use a nested tensor for a masked batch: no, workers have none."""
    return False


def _itself(_func: Any, args: Any, _kwargs: Any) -> Any:
    return args[0]


def _sizes(_func: Any, args: Any, _kwargs: Any) -> Any:
    return tuple(args[0]._meta.shape)


def _strides(_func: Any, args: Any, _kwargs: Any) -> Any:
    return tuple(args[0]._meta.stride)


def _offset(_func: Any, args: Any, _kwargs: Any) -> Any:
    """Return one rank's offset if they differ.

    A DTensor of it has plain sizes, and C++ asks for the offset only here.
    """
    meta = args[0]._meta
    return meta.offset if meta.classes is None else meta.classes[0].offset


def _size_by_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator whose result's size depends on values: the workers are asked for it."""
    first = next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, RemoteTensor))
    args, kwargs = pytree.tree_map(dispatch._plain(args, kwargs), (list(args), dict(kwargs)))
    return _run_and_measure(first._meta.workers, str(func), args, kwargs)


def _run_and_measure(workers: WorkerSet, name: str, args: Any, kwargs: Any) -> Any:
    """Run an operator whose results' sizes depend on values, and wait for the sizes only."""

    def by_id(value: Any) -> Any:
        return RemoteRef(value._ref.id) if isinstance(value, RemoteTensor) else value

    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, RemoteTensor)]
    streams = [each._meta.origin.streams for each in tensors if each._meta.origin is not None]
    origin = shard_origins.Origin(shard_origins.together(streams)) if streams else None
    first = next(workers.ids)
    numbers = [first, *(next(workers.ids) for _ in range(MAX_RESULTS - 1))]
    sent_args, sent_kwargs = pytree.tree_map(by_id, (list(args), dict(kwargs)))
    replies = workers.ask("measure", name, sent_args, sent_kwargs, numbers)
    results = []
    count = len(next(each for each in replies if each is not None))
    for i, number in enumerate(numbers[:count]):
        columns = [None if each is None else each[i] for each in replies]
        metas = [None if each is None else _meta_of(workers, origin, *each) for each in columns]
        results.append(RemoteTensor(workers.metas.by_rank(metas), Ref(workers, number)))
    return results[0] if len(results) == 1 else tuple(results)


def _meta_of(workers: WorkerSet, origin: Origin | None, sizes: Any, strides: Any, dtype: str) -> Meta:
    return workers.metas.same(tuple(sizes), tuple(strides), 0, getattr(torch, dtype), workers.device, origin)


def _pack(func: Any, args: Any, kwargs: Any) -> Any:
    """Pack a sequence; the sizes of the batches stay on the controller, which runs the loop over them."""
    x, lengths, batch_first = args
    lengths = fetch.as_host(lengths) if isinstance(lengths, RemoteTensor) else lengths
    sizes = func(torch.empty(*x.shape[:2], 1), lengths, batch_first)[1]
    return _size_by_values(func, (x, lengths, batch_first), kwargs)[0], sizes


def _set_metadata(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``t_``, ``squeeze_`` and others, which change the sizes of the same tensor here and on workers."""
    tensor = args[0]
    if not isinstance(tensor, RemoteTensor):
        raise TypeError(f"{func}: a tensor of the controller can't take the memory of one that lives on workers")
    changed = _changed(func, args, kwargs)  # before anything is changed, because it may raise
    # A detached tensor has the same id and keeps its sizes, so this tensor gets a new id.
    own = dispatch.dispatch(_aten.alias.default, (tensor,), {})
    dispatch.run_plain(func, (own, *args[1:]), kwargs)
    invalid_access.set_metadata(func, args, kwargs)
    tensor._ref, tensor._meta = own._ref, changed
    return tensor


def _into(func: Any, args: Any, kwargs: Any) -> Any:
    """Set an empty ``out=`` to the result's sizes, as torch does. op_signatures.py checks other sizes."""
    if any(map(_is_empty, pytree.tree_leaves(list(kwargs.values())))):
        _resize_empty(func, args, kwargs)
    return dispatch.run_plain(func, args, kwargs)


def _resize_empty(func: Any, args: Any, kwargs: Any) -> None:
    given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, RemoteTensor)]
    if any(each._meta.classes is not None for each in given):
        raise RemoteTensorError(
            f"{func}: an empty `out` beside tensors that differ in size by rank: give it one of the result's sizes "
            "(torch.empty_like), or take what the operation returns"
        )
    try:
        sizes = out_sizes(func, args, kwargs)
    except Exception:
        return  # the operation itself reports the error, or finds its sizes in another way
    for out, size in sizes:
        if _is_empty(out) and tuple(out.shape) != size:
            out.resize_(size)


def _is_empty(value: Any) -> bool:
    # If ranks have different sizes, an empty part on some of them is intended.
    return type(value) is RemoteTensor and value._meta.classes is None and 0 in value.shape


def _changed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the first argument's metadata after the operation."""
    meta = args[0]._meta
    metas = meta.workers.metas

    origin = None if meta.origin is None else meta.origin._replace(whole=None)

    def of(each: Any) -> Any:
        return metas.like(propagate(func, (Operand(each), *args[1:]), kwargs), each.device, origin)

    if meta.classes is None:
        return of(meta)
    each = [of(one) for one in meta.classes]
    return metas.by_rank([None if which < 0 else each[which] for which in meta.of_rank])


def _by_kind(func: Any) -> Any:
    if func.namespace == "c10d":
        return collectives.eager
    if torch.Tag.inplace_view in func.tags:
        return _set_metadata
    if torch.Tag.dynamic_output_shape in func.tags:
        return _size_by_values
    if decompositions.is_out_variant(func):
        return _into
    return None


dispatch.special.update(
    {
        _aten._local_scalar_dense.default: _item,
        _aten.equal.default: _equal,
        _aten._amp_foreach_non_finite_check_and_unscale_.default: grad_scaler.check_and_unscale_plain,
        _aten._pack_padded_sequence.default: _pack,
        _aten.allclose.default: _allclose,
        _aten.detach.default: _same_handle,
        _aten._nested_tensor_from_mask_left_aligned.default: _as_it_is_padded,
        _aten.detach_.default: _itself,
        _aten.sym_size.default: _sizes,
        _aten.sym_storage_offset.default: _offset,
        _aten.sym_stride.default: _strides,
        _functional.wait_tensor.default: _itself,
        _functional._wrap_tensor_autograd.default: _itself,
    }
)
dispatch.specials.append(_by_kind)


def _shard_dim_alltoall(tensor: Any, gather_dim: int, shard_dim: int, group: Any) -> Any:
    resolve: Any = c10d._resolve_process_group
    size = (resolve(group) if isinstance(group, str) else group).size()
    shape = list(tensor.shape)
    shape[gather_dim], shape[shard_dim] = shape[gather_dim] * size, shape[shard_dim] // size
    return tensor.new_empty(shape)


stands_in[torch.ops._dtensor.shard_dim_alltoall.default] = _shard_dim_alltoall
