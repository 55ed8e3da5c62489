"""Values of the controller that differ by rank, before they are sent. Each worker gets only its own.

`distribute_tensor` of a local tensor makes them: views of it, one for each class of ranks. They are sent after the last
placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._controller import host_tensor_cache
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor, no_pointer
from monarch_backend.dtensor._per_rank import per_rank_int

if TYPE_CHECKING:
    from monarch_backend.dtensor._controller.host_tensor_cache import Source
    from monarch_backend.dtensor._controller.worker_set import WorkerSet


class PerRankTensor(torch.Tensor):
    """A tensor of this process for each rank; None for a rank that takes no part."""

    by_rank: tuple[torch.Tensor | None, ...]
    workers: WorkerSet | None
    source: Source | None = None  # of the values that differ by rank

    @staticmethod
    def __new__(cls, values: Sequence[torch.Tensor | None], workers: WorkerSet | None = None) -> PerRankTensor:
        first = _first(values)
        sizes, strides = _numbers(values, "size"), _numbers(values, "stride")
        differ = any(type(number) is not int for number in (*sizes, *strides))
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, sizes, strides=strides, dtype=first.dtype, device=first.device,
            dispatch_sizes_strides_policy="sizes" if differ else None,
        )  # fmt: skip
        no_pointer(made)
        made.by_rank, made.workers = tuple(values), workers
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Target device: a controller without a GPU can't move the tensor there before it is sent."""
        return _first(self.by_rank).device if self.workers is None else self.workers.device

    @property
    def outside(self) -> frozenset[int]:
        return frozenset(rank for rank, each in enumerate(self.by_rank) if each is None)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return PerRankTensor(args[0].by_rank, args[0].workers)
        if func is torch.ops.aten.sym_size.default:
            return _numbers(args[0].by_rank, "size")
        if func is torch.ops.aten.sym_stride.default:
            return _numbers(args[0].by_rank, "stride")
        if func is torch.ops.aten.dim.default:
            return _first(args[0].by_rank).ndim
        if func is torch.ops.aten.new_zeros.default and args[0].workers is not None:  # needs none of the values
            return args[0].workers.without(args[0].workers.zeros(args[1], args[0].dtype), args[0].outside)
        flat = pytree.tree_leaves((args, kwargs))
        if func._schema.is_mutable:
            for each in flat:
                if isinstance(each, cls):
                    each.source = None
        workers = next((each.workers for each in flat if isinstance(each, cls) and each.workers), None)
        if workers is None:  # torch has made it from values of this process; it goes to the others' workers
            workers = next((each._meta.workers for each in flat if hasattr(each, "_meta")), None)
        if workers is None:
            return run(func, args, kwargs or {})
        args, kwargs = pytree.tree_map(
            lambda each: each.sent(workers, func._schema) if isinstance(each, cls) else each, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def sent(self, workers: WorkerSet | None = None, schema: Any = None) -> Any:
        """Send the tensor. ``schema``: of the operator that gets it; no other operator uses the copy."""
        owner = self.workers or workers
        if owner is None:
            raise TypeError("the workers of this tensor are not known")
        if self.is_meta:
            return owner.without(owner.put_shape(self), self.outside)
        first = self.by_rank[0]
        if all(each is first for each in self.by_rank) and first is not None:
            return host_tensor_cache.put(owner, schema, host_tensor_cache.source(first), lambda: owner.put(first))
        return host_tensor_cache.put(owner, schema, self.source, lambda: owner.put_by_rank(self.by_rank))

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        """Return the tensor as it is. torch calls this before it replicates a tensor, which is done by sending it."""
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Send the tensor and set the flag. torch calls this last before the tensor is a DTensor's."""
        return self.sent().requires_grad_(requires_grad)


def _first(values: Sequence[torch.Tensor | None]) -> torch.Tensor:
    return next(each for each in values if each is not None)


def _numbers(values: Sequence[torch.Tensor | None], what: str) -> tuple[Any, ...]:
    return tuple(
        per_rank_int.by_rank([None if v is None else getattr(v, what)(d) for v in values], sizes=True)
        for d in range(_first(values).ndim)
    )


def belonging(tensor: Any, workers: WorkerSet, outside: frozenset[int]) -> Any:
    """Set the workers of a tensor that is to be sent; a sent one stays. ``outside``: ranks without a part."""
    if isinstance(tensor, RemoteTensor):
        return workers.without(tensor, outside)
    if isinstance(tensor, PerRankTensor):
        tensor.workers = workers
        return tensor
    detached = tensor.detach()
    made = PerRankTensor([None if rank in outside else detached for rank in range(workers.size)], workers)
    return torch.Tensor.requires_grad_(made, tensor.requires_grad)  # its own method would send it


def run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the function once for each class of ranks; return its results by rank. Ints and tensors may differ."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    columns = [each.by_rank if isinstance(each, PerRankTensor) else per_rank_int.values_of(each) for each in flat]
    size = len(next(each for each in columns if each is not None))
    known: dict[Any, Any] = {}
    results: list[Any] = []
    for rank in range(size):
        mine = [value if column is None else column[rank] for value, column in zip(flat, columns, strict=True)]
        if any(column is not None and column[rank] is None for column in columns):
            results.append(None)
            continue
        key = tuple(
            id(m) if isinstance(m, torch.Tensor) else m for m, c in zip(mine, columns, strict=True) if c is not None
        )
        if key not in known:
            a, k = pytree.tree_unflatten(mine, spec)
            known[key] = pytree.tree_flatten(function(*a, **k))
        results.append(known[key])
    source = _source(function, flat)
    form = next(each[1] for each in results if each is not None)
    leaves = zip(*[each[0] if each is not None else [None] * form.num_leaves for each in results], strict=True)
    merged = [_merged(list(each)) for each in leaves]
    workers = next((each.workers for each in flat if isinstance(each, PerRankTensor) and each.workers), None)
    for number, each in enumerate(merged):
        if isinstance(each, PerRankTensor):
            each.workers = workers
            if source is not None:
                each.source = source._replace(what=(number, source.what))
    return pytree.tree_unflatten(merged, form)


def _source(function: Callable[..., Any], flat: Sequence[Any]) -> Source | None:
    """Return the source of a function's result. None unless one argument is a tensor, and all others are hashable."""
    what: list[Any] = [function]
    found = None
    for each in flat:
        if isinstance(each, torch.Tensor):
            if found is not None:
                return None
            found = _source_of(each)
            if found is None:
                return None
            what.append(found.what)
        else:
            values = per_rank_int.values_of(each)
            what.append((type(each), each) if values is None else tuple(values))
    if found is None:
        return None
    try:
        hash(tuple(what))
    except TypeError:
        return None
    return found._replace(what=tuple(what))


def _source_of(tensor: torch.Tensor) -> Source | None:
    if not isinstance(tensor, PerRankTensor):
        return host_tensor_cache.source(tensor)
    wholes = {id(each): each for each in tensor.by_rank if each is not None}
    if tensor.source is not None or len(wholes) != 1:
        return tensor.source
    source = host_tensor_cache.source(*wholes.values())  # one that goes to its workers, and is not split yet
    return None if source is None else source._replace(what=(source.what, tensor.outside))


def _merged(column: list[Any]) -> Any:
    first = next((each for each in column if each is not None), None)
    if isinstance(first, torch.Tensor):
        return PerRankTensor(column)
    if type(first) is bool:
        return all(each for each in column if each is not None)
    if type(first) is int:
        return per_rank_int.by_rank(column, sizes=True)
    return first
