"""Fixes of torch's sharding strategies that give an operator another result than in one process.

_ops/decomposed_losses.py has operators that need other code, not another sharding. This module only keeps them in
place. _ops/sharding_rules.py has our own shardings.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import _api as api
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy, RuntimeSchemaInfo, TupleStrategy
from torch.distributed.tensor._ops import _math_ops as math_ops
from torch.distributed.tensor._ops import _view_ops as view_ops
from torch.distributed.tensor.parallel import loss
from torch.distributed.tensor.placement_types import _StridedShard

from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import deferred_checks, local_results
from monarch_backend.dtensor._ops import decomposed_losses, sharding_rules
from monarch_backend.dtensor._patches.fixes import embedding_mask, replicate_fallback
from monarch_backend.dtensor._patches.semantics import device_mesh_and_api
from monarch_backend.dtensor._patches.semantics.device_mesh_and_api import Replacement
from monarch_backend.dtensor._worker import value_checks as worker_checks

_aten = torch.ops.aten

_BY_ONE_NUMBER = (
    _aten._foreach_mul.Tensor, _aten._foreach_mul_.Tensor, _aten._foreach_div.Tensor, _aten._foreach_div_.Tensor,
)  # fmt: skip


def correct() -> None:
    """Correct torch's tables, before special_ops and sharding_rules add their entries."""
    propagator = api.DTensor._op_dispatcher.sharding_propagator
    known = propagator.op_strategy_funcs
    # It has no values, so it can't be a part of a sum.
    known[_aten.empty_like.default] = known[_aten.zeros_like.default]
    known[_aten.gather.default] = _aligned(known[_aten.gather.default])
    known[_aten.cat.default] = _beside_empty(known[_aten.cat.default])
    for operator in (_aten.select_backward.default, _aten.slice_backward.default):
        known[operator] = _counted_from_the_start(known[operator])
    known[_aten.linalg_vector_norm.default] = _of_values(known[_aten.linalg_vector_norm.default])
    # torch takes the sum of bools, which as a float is 2 where two ranks have one.
    math_ops.LINEAR_REDUCTION_OP_MAP.update(dict.fromkeys((_aten.any.default, _aten.any.dim, _aten.any.dims), "max"))
    known[_aten.any.dims] = _where_none_is_none(known[_aten.any.dims])
    known[_aten.logsumexp.default] = _also_of_a_number(known[_aten.logsumexp.default])
    handlers: dict[Any, Any] = api.DTensor._op_dispatcher._custom_op_handlers
    for operator in (_aten.argmin.default, _aten.argmax.default):
        handlers[operator] = _from_the_start(handlers[operator])
    handlers[_aten.as_strided.default] = replicate_fallback.strided(handlers[_aten.as_strided.default])
    handlers.update(dict.fromkeys(_BY_ONE_NUMBER, _by_a_whole_number))
    handlers.update(dict.fromkeys(embedding_mask.MASKED, embedding_mask.masked_at_once))
    for operator in decomposed_losses.OF_CLASSES:
        handlers[operator] = _unless_parallel(loss.customized_loss_ops.pop(operator), handlers[operator])
    single = propagator.op_single_dim_strategy_funcs
    for operator, corrected in (
        (_aten.index_put.default, _by_masks),
        (_aten.index_put_.default, _by_masks),
        (_aten._index_put_impl_.default, _by_masks),
        (_aten.embedding_dense_backward.default, _of_all_indices),
    ):
        single[operator] = dataclasses.replace(single[operator], func=corrected(single[operator].func))
    for operator in sharding_rules.CORRECTED:
        single.pop(operator, None)
    propagator.op_to_schema_info[_aten.view.dtype] = RuntimeSchemaInfo(1)  # else any dtype gets the first one's result


def _of_norms(own: Any) -> Replacement:
    def common_reduction_strategy(
        input_strategy: Any, reduce_dims: Any, keep_dim: bool = False, reduction_linear: bool = True,
        reduction_op: Any = "sum",
    ) -> Any:  # fmt: skip
        # A rank without elements has no largest value. The sum of partial norms is not the norm.
        specs = [way.output_spec for way in input_strategy.strategies]
        if reduction_op != "sum" and any(
            sharding_rules.has_nothing(spec, dim) for spec in specs for dim in reduce_dims
        ):
            reduction_linear = False
        norms = {
            each.norm_type for spec in specs for each in spec.placements if isinstance(each, math_ops._NormPartial)
        }
        is_same = isinstance(reduction_op, math_ops.NormReduction) and norms <= {reduction_op.norm_type}
        return own(input_strategy, reduce_dims, keep_dim, reduction_linear and (is_same or not norms), reduction_op)

    return common_reduction_strategy


def _of_nothing(own: Any) -> Replacement:
    def view_groups(from_size: Any, to_size: Any) -> Any:
        if not any(type(size) is int and size == 0 for size in from_size):
            return own(from_size, to_size)
        # torch's loop does not end, because its products stay 0. Leading dimensions that stay may be sharded.
        sizes = view_ops.infer_size(0, view_ops.normalize_sizes(to_size))
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(from_size, sizes, strict=False))
        kept = len(list(same))
        return tuple(view_ops.InputDim(dim) if dim < kept else view_ops.Singleton() for dim in range(len(sizes)))

    return view_groups


def _of_a_number(own: Any) -> Replacement:
    def dim_transpose(ndim: int, dim1: int, dim2: int) -> Any:
        return own(ndim, dim1, dim2) if ndim else ()

    return dim_transpose


def _aligned(own: Replacement) -> Replacement:
    """Shard only where the index has as many rows as the input: its rows belong to the same rows of the input."""

    def gather_strategy(op_schema: Any) -> Any:
        x, dim, index, *rest = op_schema.args_schema
        is_strided = any(map(_is_strided, (*_placements_of(x), *_placements_of(index))))
        if is_strided:  # torch has no path from such shards to a mask
            args = (_from_whole(x), dim, _from_whole(index), *rest)
            op_schema = dataclasses.replace(op_schema, args_schema=args)
        gathered = dim % max(x.ndim, 1)
        # Torch takes the literal -1 of a number for a dimension.
        args = (op_schema.args_schema[0], gathered, *op_schema.args_schema[2:])
        found = own(dataclasses.replace(op_schema, args_schema=args))

        def fits(each: Any) -> bool:
            if not each.is_shard() or x.ndim == 0:
                return not each.is_shard()
            return each.dim == gathered or bool(x.shape[each.dim] == index.shape[each.dim])

        def has_all_it_masks(way: Any) -> bool:
            """Whether each rank has the whole index and some rows, from which the mask is made."""
            given, rows = (each.placements for each in way.input_specs)
            masked = [embedding_mask.is_masked(each) for each in rows]
            if not any(masked):
                return True
            if is_strided:
                return False
            others = [
                each
                for pair, is_one in zip(zip(given, rows, strict=True), masked, strict=True)
                if not is_one
                for each in pair
            ]
            is_whole = all(each.is_replicate() for each in others) and masked.count(True) == 1
            return is_whole and not sharding_rules.has_nothing(way.input_specs[0], gathered)

        found.strategies = [
            way for way in found.strategies if all(map(fits, way.input_specs[1].placements)) and has_all_it_masks(way)
        ]
        return found

    return gather_strategy


def _beside_empty(own: Replacement) -> Replacement:
    """Handle an empty tensor of one dimension beside tensors of several; it has no dimension to shard alike.

    torch takes the number of dimensions from the first tensor and all shardings from the others.
    """

    def cat_strategy(op_schema: Any) -> Any:
        tensors, *rest = op_schema.args_schema
        empty = [at for at, each in enumerate(tensors.children) if tuple(each.shape) == (0,)]
        others = [each for at, each in enumerate(tensors.children) if at not in empty]
        if not empty or not others or others[0].ndim == 1:
            return own(op_schema)
        found = own(dataclasses.replace(op_schema, args_schema=(TupleStrategy(others), *rest)))
        for way in found.strategies:
            specs, costs = list(way.input_specs), list(way.redistribute_cost)
            for at in empty:
                spec = tensors.children[at].strategies[0].output_spec
                specs.insert(at, _without(spec, [True] * spec.mesh.ndim))
                costs.insert(at, [0.0] * len(tensors.children[at].strategies))
            way.input_specs, way.redistribute_cost = tuple(specs), costs
        return found

    return cat_strategy


def _is_strided(placement: Any) -> bool:
    return isinstance(placement, _StridedShard)


def _placements_of(strategy: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(each.output_spec.placements for each in strategy.strategies)


def _from_whole(strategy: Any) -> OpStrategy:
    """Return the strategy as if tensors with strided shards were gathered."""
    specs = [each.output_spec for each in strategy.strategies]
    return OpStrategy([OpSpec(_without(spec, list(map(_is_strided, spec.placements)))) for spec in specs])


def _of_all_indices(own: Replacement) -> Replacement:
    """Replicate indices for gradients that are divided by a row's number of lookups, which a rank can't count alone."""

    def embedding_dense_backward_strategy(op: Any, args: Any, kwargs: Any) -> Any:
        found = own(op, args, kwargs)
        by_frequency = args[4] if len(args) > 4 else kwargs.get("scale_grad_by_freq", False)
        return [way for way in found if way[2].is_replicate()] if by_frequency else found

    return embedding_dense_backward_strategy


def _counted_from_the_start(own: Replacement) -> Replacement:
    """Normalise the dimension in the gradient of ``x.select(-1, i)``; torch compares -1 with sharded dimensions."""

    def strategy(op_schema: Any) -> Any:
        gradient, sizes, dim, *rest = op_schema.args_schema
        args = (gradient, sizes, dim % len(sizes), *rest)
        return own(dataclasses.replace(op_schema, args_schema=args))

    return strategy


def _by_masks(own: Replacement) -> Replacement:
    """Drop shardings for masks of several dimensions, which torch takes for one dimension of the tensor."""

    def index_put_strategy(op: Any, args: Any, kwargs: Any) -> Any:
        found = own(op, args, kwargs)
        masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
        is_wide = any(len(each.shape) > 1 for each in masks)
        return [way for way in found if isinstance(way[0], Partial)] if is_wide else found

    return index_put_strategy


def _unless_parallel(parallel: Replacement, own: Replacement) -> Replacement:
    """Call the handler of `loss_parallel` while it is active, else ours; its own exit would remove ours."""
    handlers = api.DTensor._op_dispatcher._custom_op_handlers

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        is_parallel = _aten._log_softmax.default in handlers
        return (parallel if is_parallel else own)(func, args, kwargs)

    return handle


def _from_the_start(own: Replacement) -> Replacement:
    """Count a dimension from the start, because torch compares it with the sharded ones."""

    def argminmax_handler(func: Any, args: Any, kwargs: Any) -> Any:
        if len(args) > 1 and args[1] is not None and args[1] < 0:
            args = (args[0], args[1] + max(args[0].ndim, 1), *args[2:])
        x = args[0]
        dims = range(x.ndim) if len(args) < 2 or args[1] is None else [args[1]]
        empty = [dim for dim in dims if sharding_rules.has_nothing(x._spec, dim)]
        if empty:  # torch asks each rank for its largest
            whole = [Replicate() if each.is_shard() and each.dim in empty else each for each in x.placements]
            args = (x.redistribute(placements=whole), *args[1:])
        return own(func, args, kwargs)

    return argminmax_handler


def _by_a_whole_number(func: Any, args: Any, kwargs: Any) -> Any:
    """Replicate the number of a list operator: torch decides by the first tensor whether it may be a sum over ranks."""
    tensors, number, *rest = args
    return device_mesh_and_api._in_torchs_way(func, (tensors, local_results.everywhere(number), *rest), kwargs)


def _of_values(own: Replacement) -> Replacement:
    """Replicate a norm's partial values: the largest value of the ranks' parts may not have the largest magnitude."""

    def norm_strategy(op_schema: Any) -> Any:
        found = own(op_schema)
        for way in found.strategies:
            given = way.input_specs[0]
            whole = [each.is_partial() for each in given.placements]
            if any(whole):
                way.input_specs = (_without(given, whole), *way.input_specs[1:])
                way.output_specs = _without(way.output_specs, whole)
        return found

    return norm_strategy


def _without(spec: Any, whole: Sequence[bool]) -> Any:
    placements = [Replicate() if is_whole else each for is_whole, each in zip(whole, spec.placements, strict=True)]
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


class _Mode(threading.local):
    none_is_none = False


_mode = _Mode()


def _where_none_is_none(own: Replacement) -> Replacement:
    """Handle an empty list of dimensions for an operator that does not take it for all dimensions."""

    def strategy(op_schema: Any) -> Any:
        _mode.none_is_none = True
        try:
            return own(op_schema)
        finally:
            _mode.none_is_none = False

    return strategy


def _also_of_a_number(own: Replacement) -> Replacement:
    """Handle a tensor without dimensions for an operator whose dimensions torch then gets wrong."""

    def strategy(op_schema: Any) -> Any:
        of = op_schema.args_schema[0]
        return own(op_schema) if of.ndim else math_ops.common_reduction_strategy(of, [], reduction_linear=False)

    return strategy


def _reduced(own: Any) -> Replacement:
    """Treat no dimensions as all of them. torch itself asks so for the gradient of ``amax()``."""

    def _infer_reduction_dims(dims_arg: Any, ndim: int) -> Any:
        is_all = isinstance(dims_arg, (list, tuple)) and not dims_arg and not _mode.none_is_none
        return None if is_all else own(dims_arg, ndim)

    return _infer_reduction_dims


def _of_weighted_classes(own: Any) -> Replacement:
    # torch also looks up the weight of ignored labels, which are not classes.
    def _nll_loss_and_log_softmax_backward(
        grad_output: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int, *rest: Any
    ) -> Any:
        if weight is None:
            return own(grad_output, x, target, weight, reduction, ignore_index, *rest)
        counts = target != ignore_index
        classes = torch.where(counts, target, 0)
        found = own(grad_output, x, classes, weight, reduction, ignore_index, *rest)
        return torch.where(counts.unsqueeze(1 if x.dim() > 1 else 0), found, 0)

    return _nll_loss_and_log_softmax_backward


def _one_hot(own: Any) -> Replacement:
    # C++ checks the values of plain tensors only.
    def one_hot(tensor: Any, num_classes: int = -1) -> Any:
        if not torch.compiler.is_compiling() and isinstance(tensor, (DTensor, RemoteTensor)):
            deferred_checks.require(worker_checks.classes, tensor, num_classes)
        return own(tensor, num_classes)

    return one_hot
