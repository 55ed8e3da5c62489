"""Fixes of torch's sharding strategies that give an operator another result than in one process.

_ops/decomposed_losses.py has operators that need other code, not another sharding. This module only keeps them in
place. _ops/sharding_rules.py has our own shardings.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import _api as api
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy, OutputSharding, RuntimeSchemaInfo, TupleStrategy
from torch.distributed.tensor._ops import _math_ops as math_ops
from torch.distributed.tensor._ops import _view_ops as view_ops
from torch.distributed.tensor.parallel import loss
from torch.distributed.tensor.placement_types import _StridedShard

from monarch_backend._core.torch_version import torch_version
from monarch_backend.dtensor._controller.controller_mesh import Replacement
from monarch_backend.dtensor._dispatch import local_results
from monarch_backend.dtensor._ops import decomposed_losses, sharding_rules
from monarch_backend.dtensor._patches.fixes import embedding_mask, replicate_fallback, sharding_rule_fixes
from monarch_backend.dtensor._torch_internals import own_handlers

_aten = torch.ops.aten

BY_ONE_NUMBER = (
    _aten._foreach_mul.Tensor, _aten._foreach_mul_.Tensor, _aten._foreach_div.Tensor, _aten._foreach_div_.Tensor,
)  # fmt: skip
"""Operators on a list of tensors and one number."""
BY_INDICES = _aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default
"""Operators with a list of indices, some of them None."""


def correct() -> None:
    """Correct torch's tables, before special_ops and sharding_rules add their entries."""
    propagator = api.DTensor._op_dispatcher.sharding_propagator
    known, single = propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs
    _register_views()
    if _aten.sum.default in known:
        _correct_strategies(known)
    else:
        sharding_rule_fixes.correct(single)
    if _aten.detach_.default not in known and _aten.detach_.default not in single:  # before torch 2.13
        known[_aten.detach_.default] = known[_aten.detach.default]
    handlers: dict[Any, Any] = api.DTensor._op_dispatcher._custom_op_handlers
    for operator in (_aten.argmin.default, _aten.argmax.default):
        handlers[operator] = _from_the_start(handlers[operator])
    handlers[_aten.as_strided.default] = replicate_fallback.strided(handlers[_aten.as_strided.default])
    if torch_version() < (2, 12):
        handlers.update(dict.fromkeys(BY_INDICES, _of_a_host_tensor))
    handlers.update(dict.fromkeys(BY_ONE_NUMBER, _by_a_whole_number))
    handlers.update(dict.fromkeys(embedding_mask.MASKED, embedding_mask.masked_at_once))
    for operator in (_aten.nll_loss_backward.default, _aten.nll_loss2d_backward.default):
        loss.customized_loss_ops[operator] = _of_weighted_classes(loss.customized_loss_ops[operator])
    for operator in decomposed_losses.OF_CLASSES:
        handlers[operator] = _unless_parallel(loss.customized_loss_ops.pop(operator), handlers[operator])
    if _aten.embedding_dense_backward.default in known:  # before torch 2.13
        strategy = _with_all_indices(known[_aten.embedding_dense_backward.default])
        known[_aten.embedding_dense_backward.default] = strategy
    for operator, corrected in (
        (_aten.index_put.default, _by_masks),
        (_aten.index_put_.default, _by_masks),
        (_aten._index_put_impl_.default, _by_masks),
        (_aten.embedding_dense_backward.default, _of_all_indices),
    ):
        if operator in single:
            single[operator] = dataclasses.replace(single[operator], func=corrected(single[operator].func))
    for operator in sharding_rules.OPERATORS:
        single.pop(operator, None)  # torch prefers a rule there to a strategy of ours
    propagator.op_to_schema_info[_aten.view.dtype] = RuntimeSchemaInfo(1)  # else any dtype gets the first one's result


def _correct_strategies(known: dict[Any, Any]) -> None:
    """Correct the strategies of torch before 2.14; sharding_rule_fixes.py has those of later releases."""
    none_is_none = known.get(_aten.any.dims)
    _correct_reductions(known)
    if none_is_none is not None:  # since torch 2.12
        known[_aten.any.dims] = _from_known_values(none_is_none, 1, _operation)
    # It has no values, so it can't be a part of a sum.
    known[_aten.empty_like.default] = known[_aten.zeros_like.default]
    _change(known, _aten.gather.default, _aligned)
    _change(known, _aten.cat.default, _beside_empty)
    for operator in (_aten.select_backward.default, _aten.slice_backward.default):
        _change(known, operator, _counted_from_the_start)
    _change(known, _aten.linalg_vector_norm.default, _of_values)
    # torch takes the sum of bools, which as a float is 2 where two ranks have one.
    math_ops.LINEAR_REDUCTION_OP_MAP.update(dict.fromkeys((_aten.any.default, _aten.any.dim, _aten.any.dims), "max"))
    _change(known, _aten.logsumexp.default, _also_of_a_number)
    if torch_version() < (2, 12):
        for operator in (_aten.div.Tensor, _aten.div_.Tensor, _aten.div.Tensor_mode, _aten.div_.Tensor_mode):
            _change(known, operator, _by_whole_divisors)
        _change(known, _aten._to_copy.default, _of_whole_numbers)
        for operator in (_aten.index_put.default, _aten._index_put_impl_.default):
            _change(known, operator, _after_indices)
        rules: dict[Any, Any] = api.DTensor._op_dispatcher.sharding_propagator.op_to_rules
        for operator in (_aten.index.Tensor, _aten.index_select.default):
            _change(rules, operator, _of_reduced_values)


def _change(known: dict[Any, Any], operator: Any, corrected: Callable[[Replacement], Replacement]) -> None:
    """Correct a strategy. An older torch has none for some operators, which run replicated."""
    if operator in known:
        known[operator] = corrected(known[operator])


def _register_views() -> None:
    maps: dict[Any, Any] = view_ops.dim_maps
    maps[torch.Tensor.view] = _of_nothing(maps[torch.Tensor.view])
    maps[torch.reshape] = _of_nothing(maps[torch.reshape])
    maps[torch.transpose] = _of_a_number(maps[torch.transpose])
    for operator, name, is_strict in (
        (_aten.view.default, torch.Tensor.view, True),
        (_aten.view_copy.default, torch.Tensor.view, False),
        (_aten._unsafe_view.default, torch.Tensor.view, True),
        (_aten.reshape.default, torch.reshape, False),
        (_aten.transpose.int, torch.transpose, False),
    ):
        info = RuntimeSchemaInfo(1)
        view_ops.register_op_strategy_map(operator, name, schema_info=info, strict_view=is_strict)


def _of_nothing(own: Replacement) -> Replacement:
    """Handle a tensor of size 0: torch's loop does not end, because its products stay 0."""

    def view(x: Any, *shape: Any) -> Any:
        if not any(type(size) is int and size == 0 for size in x.shape):
            return own(x, *shape)
        # Leading dimensions that stay may be sharded.
        sizes = view_ops.infer_size(0, view_ops.normalize_sizes(shape))
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(x.shape, sizes, strict=False))
        kept = len(list(same))
        return tuple(view_ops.InputDim(dim) if dim < kept else view_ops.Singleton() for dim in range(len(sizes)))

    return view


def _of_a_number(own: Replacement) -> Replacement:
    """Handle a tensor without dimensions, for which torch's map of a transpose raises."""

    def transpose(x: Any, dim0: int, dim1: int) -> Any:
        return own(x, dim0, dim1) if x.ndim else ()

    return transpose


def _correct_reductions(known: dict[Any, Any]) -> None:
    """Correct strategies of reductions: an empty list of dimensions means all, and some partial values cannot be kept.

    A rank without elements has no largest value. The sum of partial norms is not the norm.
    """
    linear, spread = known[_aten.sum.dim_IntList], known[_aten.var.correction]
    for operator, own in list(known.items()):
        if own is linear:
            known[operator] = _reduced(_from_known_values(own, 1, _operation), 1)
        elif own is spread:
            known[operator] = _reduced(own, 1)
    _change(known, _aten.logsumexp.default, lambda own: _reduced(own, 1))
    for operator in (_aten.linalg_vector_norm.default, _aten.norm.Scalar):
        _change(known, operator, lambda own: _reduced(_from_known_values(own, 2, _norm), 2))
    _change(known, _aten.linalg__powsum.default, lambda own: _reduced(_from_known_values(own, 2, _sum), 2))
    for operator, reduction in (
        (_aten._foreach_norm.Scalar, _norm), (_aten._foreach_max.default, lambda _: "max"),
        (_aten._foreach_powsum.Scalar, _sum),
    ):  # fmt: skip
        _change(known, operator, functools.partial(_from_known_values, at=None, reduction=reduction))


def _operation(op_schema: Any) -> Any:
    return math_ops.LINEAR_REDUCTION_OP_MAP[op_schema.op]


def _norm(op_schema: Any) -> Any:
    return math_ops._get_norm_reduction_op(op_schema.args_schema[1] if len(op_schema.args_schema) > 1 else 2)


def _sum(_op_schema: Any) -> str:
    return "sum"


def _from_known_values(own: Replacement, at: int | None, reduction: Callable[[Any], Any]) -> Replacement:
    """Gather what ``reduction`` cannot make of the ranks' results. ``at``: place of the dimensions among arguments."""

    def strategy(op_schema: Any) -> Any:
        given, *rest = op_schema.args_schema
        operation, dims = reduction(op_schema), rest[at - 1] if at is not None and len(rest) >= at else None
        if isinstance(given, TupleStrategy):
            given = TupleStrategy([_gathered(each, dims, operation) for each in given.children])
        else:
            given = _gathered(given, dims, operation)
        if given is op_schema.args_schema[0]:
            return own(op_schema)
        return own(dataclasses.replace(op_schema, args_schema=(given, *rest)))

    return strategy


def _gathered(given: Any, dims: Any, reduction: Any) -> Any:
    named = None if dims is None else [dims] if isinstance(dims, int) else list(dims)
    wanted = range(given.ndim) if named is None else math_ops.normalize_dims(named, given.ndim)
    found = []
    for way in given.strategies:
        spec = way.output_spec
        norms = {each.norm_type for each in spec.placements if isinstance(each, math_ops._NormPartial)}
        is_same = isinstance(reduction, math_ops.NormReduction) and norms <= {reduction.norm_type}
        is_empty = reduction != "sum" and any(sharding_rules.has_nothing(spec, dim) for dim in wanted)
        if is_empty or (norms and not is_same):
            placements = math_ops.replicate_reduction_dims(spec.placements, list(wanted))
            spec = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
            way = OpSpec(spec)
        found.append(way)
    is_changed = any(one is not other for one, other in zip(found, given.strategies, strict=True))
    return OpStrategy(found) if is_changed else given


def _by_whole_divisors(own: Replacement) -> Replacement:
    """Reduce a divisor that is a part of a sum: the quotients of the parts are not the parts of the quotient."""

    def strategy(op_schema: Any) -> Any:
        x, divisor, *rest = op_schema.args_schema
        if not isinstance(divisor, OpStrategy) or not any(each.is_partial() for each in _placements_of(divisor)):
            return own(op_schema)
        return own(dataclasses.replace(op_schema, args_schema=(x, _from_whole(divisor, _is_partial), *rest)))

    return strategy


def _of_whole_numbers(own: Replacement) -> Replacement:
    """Reduce parts of a sum before they are cast to integers or bools: those of the parts have another sum."""

    def strategy(op_schema: Any) -> Any:
        x, *rest = op_schema.args_schema
        before, after = x.strategies[0].output_spec.tensor_meta.dtype, op_schema.kwargs_schema.get("dtype")
        is_rounded = after is not None and before.is_floating_point and not _has_fractions(after)
        if before == after or not (is_rounded or after == torch.bool):
            return own(op_schema)
        return own(dataclasses.replace(op_schema, args_schema=(_from_whole(x, _is_partial), *rest)))

    return strategy


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _after_indices(own: Replacement) -> Replacement:
    """Shard only the dimensions after those with an index, and where the values have as many rows.

    torch 2.11 shards indexed dimensions as well if the tensor has no more dimensions than the values. It refuses None
    among the indices.
    """

    def index_put_strategy(op_schema: Any) -> Any:
        x, indices, values, *rest = op_schema.args_schema
        if not all(isinstance(each, OpStrategy) for each in getattr(indices, "children", [None])):
            raise NotImplementedError("No sharding strategy where an index is None")
        indexed = sum(_dims_of_index(each) for each in indices.children)
        before = x.ndim - values.ndim
        found = {dim for dim in range(max(indexed, before), x.ndim) if x.shape[dim] == values.shape[dim - before]}
        x, values = _sharded_by(x, found), _sharded_by(values, {dim - before for dim in found})
        return own(dataclasses.replace(op_schema, args_schema=(x, indices, values, *rest)))

    return index_put_strategy


def _sharded_by(strategy: Any, dims: set[int]) -> OpStrategy:
    """Return the strategy as if all were replicated but shards of these dimensions."""
    return _from_whole(strategy, lambda each: not (each.is_shard() and each.dim in dims))


def _of_reduced_values(own: Replacement) -> Replacement:
    """Reduce parts of a sum before they are indexed: torch 2.11 loses the sum where the result is sharded."""

    def rule(op_schema: Any) -> Any:
        values, *rest = op_schema.args_schema
        parts = list(map(_is_partial, values.placements))
        if not any(parts):
            return own(op_schema)
        reduced = dataclasses.replace(op_schema, args_schema=(_without(values, parts), *rest))
        found = own(reduced)
        return found if found.output_spec is None else OutputSharding(None, redistribute_schema=reduced)

    return rule


def _dims_of_index(index: Any) -> int:
    """Return the number of a tensor's dimensions that an index stands for: a mask has one for each of its own."""
    is_mask = index.strategies[0].output_spec.tensor_meta.dtype in (torch.bool, torch.uint8)
    return index.ndim if is_mask else 1


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

        def fits_all(way: Any) -> bool:
            table, rows = way.input_specs[0], way.input_specs[1].placements
            is_right = embedding_mask.has_all_it_masks(table, rows, gathered, is_strided=is_strided)
            return is_right and all(map(fits, rows))

        found.strategies = list(filter(fits_all, found.strategies))
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


def _is_partial(placement: Any) -> bool:
    return bool(placement.is_partial())


def _from_whole(strategy: Any, is_gathered: Callable[[Any], bool] = _is_strided) -> OpStrategy:
    """Return the strategy as if tensors with such placements were replicated."""
    specs = [each.output_spec for each in strategy.strategies]
    return OpStrategy([OpSpec(_without(spec, list(map(is_gathered, spec.placements)))) for spec in specs])


def _of_all_indices(own: Replacement) -> Replacement:
    """Replicate indices for gradients that are divided by a row's number of lookups, which a rank can't count alone."""

    def embedding_dense_backward_strategy(op: Any, args: Any, kwargs: Any) -> Any:
        found = own(op, args, kwargs)
        by_frequency = args[4] if len(args) > 4 else kwargs.get("scale_grad_by_freq", False)
        return [way for way in found if way[2].is_replicate()] if by_frequency else found

    return embedding_dense_backward_strategy


def _with_all_indices(own: Replacement) -> Replacement:
    """As `_of_all_indices`, for the strategy of an older torch."""

    def strategy(op_schema: Any) -> Any:
        found, args = own(op_schema), op_schema.args_schema
        if len(args) > 4 and args[4]:
            ways = [
                way for way in found.strategies if all(each.is_replicate() for each in way.input_specs[1].placements)
            ]
            found.strategies = ways
        return found

    return strategy


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
        is_of_all = len(args) < 2 or args[1] is None
        dims = range(x.ndim) if is_of_all else [args[1]]
        is_wrong = is_of_all and torch_version() < (2, 12)  # torch compares indices of the shards there
        empty = [dim for dim in dims if is_wrong or sharding_rules.has_nothing(x._spec, dim)]
        if empty:  # torch asks each rank for its largest
            whole = [Replicate() if each.is_shard() and each.dim in empty else each for each in x.placements]
            args = (x.redistribute(placements=whole), *args[1:])
        return own(func, args, kwargs)

    return argminmax_handler


def _by_a_whole_number(func: Any, args: Any, kwargs: Any) -> Any:
    """Replicate the number of a list operator: torch decides by the first tensor whether it may be a sum over ranks."""
    tensors, number, *rest = args
    return own_handlers.run(func, (tensors, local_results.everywhere(number), *rest), kwargs)


def _of_a_host_tensor(func: Any, args: Any, kwargs: Any) -> Any:
    """Distribute a host tensor whose indices are DTensors: torch 2.11 looks for a mesh in lists of tensors only."""
    tensor, indices, *rest = args
    mesh = next((each.device_mesh for each in indices if isinstance(each, DTensor)), None)
    if isinstance(tensor, DTensor) or mesh is None:
        return own_handlers.run(func, args, kwargs)
    whole = local_results.distributed(tensor, mesh)
    result = own_handlers.run(func, (whole, indices, *rest), kwargs)
    return tensor.copy_(whole) if func._schema.name.endswith("_") else result


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


def _also_of_a_number(own: Replacement) -> Replacement:
    """Handle a tensor without dimensions for an operator whose dimensions torch then gets wrong."""

    def strategy(op_schema: Any) -> Any:
        of = op_schema.args_schema[0]
        return own(op_schema) if of.ndim else math_ops.common_reduction_strategy(of, [], reduction_linear=False)

    return strategy


def _reduced(own: Replacement, at: int) -> Replacement:
    """Treat no dimensions as all of them. torch itself asks so for the gradient of ``amax()``."""

    def strategy(op_schema: Any) -> Any:
        args = sharding_rule_fixes.none_for_empty(op_schema.args_schema, at)
        is_same = args is op_schema.args_schema
        return own(op_schema if is_same else dataclasses.replace(op_schema, args_schema=args))

    return strategy


def _of_weighted_classes(own: Replacement) -> Replacement:
    """Leave out the weight of ignored labels, which torch looks up, and which are no classes."""

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        grad_output, x, target, weight, reduction, ignore_index, *rest = args
        if weight is None:
            return own(func, args, kwargs)
        counts = target != ignore_index
        found = own(
            func, (grad_output, x, torch.where(counts, target, 0), weight, reduction, ignore_index, *rest), kwargs
        )
        counts = counts._local_tensor if isinstance(counts, DTensor) else counts
        found._local_tensor = torch.where(counts.unsqueeze(1 if x.dim() > 1 else 0), found._local_tensor, 0)
        return found

    return handle
