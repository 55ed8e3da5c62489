"""Fixes of torch's sharding rules for one dimension of a mesh, which torch 2.14 and later have for most operators.

sharding_fixes.py has the fixes of whole strategies, which older releases have for the same operators. Where torch has
corrected itself there is none here: `cat` beside an empty tensor, dimensions of `select_backward` and `slice_backward`
counted from the end, `any` and `all` of shards, `logsumexp` of a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor._ops import _math_ops
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from monarch_backend.dtensor._ops import sharding_rules
from monarch_backend.dtensor._patches.fixes import embedding_mask

_aten = torch.ops.aten
math_ops: Any = _math_ops  # some of its names are in newer releases of torch only

Rule = Callable[[Any, Any, Any], Any]
"""A function of an operator, its arguments and keywords, which returns rows of placements: results, then operands."""
Filter = Callable[[Any, Any, Any, Any], bool]
"""A function of a mesh, an operation, and the specs of operands and results, which tells whether these may be used."""


def correct(rules: dict[Any, Any]) -> None:
    reductions = [each for each, info in rules.items() if info.func is math_ops.linear_reduction_single_dim_strategy]
    spread = [each for each, info in rules.items() if info.func is math_ops.std_var_single_dim_strategy]
    _change(rules, (*reductions, *spread, _aten.logsumexp.default), _all_for_none(1))
    means = [each for each, info in rules.items() if info.func is math_ops.mean_single_dim_strategy]
    for operator in means:
        own = rules[operator].full_mesh_strategy_filter
        rules[operator] = dataclasses.replace(rules[operator], full_mesh_strategy_filter=_all_for_none_in(own, 1))
    _change(rules, means, _all_for_none(1))
    _change(rules, (each for each in reductions if _reduction_of(each) != "sum"), None, _has_values(1))
    norms = _aten.linalg_vector_norm.default, _aten.norm.Scalar
    _change(rules, norms, lambda own: _without_partial(_all_for_none(2)(own)), _has_values(2))
    _change(rules, (_aten._foreach_norm.Scalar,), _without_partial, _has_values(None))
    _change(rules, (_aten.linalg__powsum.default,), _all_for_none(2))
    # It has no values, so it can't be a part of a sum.
    rules[_aten.empty_like.default] = rules[_aten.zeros_like.default]
    _change(rules, (_aten.gather.default,), _of_the_same_rows, _has_all_it_masks)


def _change(
    rules: dict[Any, Any],
    operators: Iterable[Any],
    corrected: Callable[[Rule], Rule] | None,
    fits: Filter | None = None,
) -> None:
    """Replace rules by corrected ones. ``fits`` is asked beside torch's own filter."""
    for operator in operators:
        info = rules[operator]
        func = info.func if corrected is None else corrected(info.func)
        also = info.full_mesh_strategy_filter if fits is None else _both(info.full_mesh_strategy_filter, fits)
        rules[operator] = dataclasses.replace(info, func=func, full_mesh_strategy_filter=also)


def _both(own: Filter | None, fits: Filter) -> Filter:
    def filtered(mesh: Any, op_schema: Any, operands: Any, results: Any) -> bool:
        return (own is None or own(mesh, op_schema, operands, results)) and fits(mesh, op_schema, operands, results)

    return filtered


def _reduction_of(operator: Any) -> Any:
    return {**math_ops.LINEAR_REDUCTION_OP_MAP, **math_ops.FOREACH_LINEAR_REDUCTION_OP_MAP}.get(operator)


def _all_for_none(at: int) -> Callable[[Rule], Rule]:
    """Treat no dimensions as all of them. torch itself asks so for the gradient of ``amax()``."""

    def corrected(own: Rule) -> Rule:
        return lambda op, args, kwargs: own(op, none_for_empty(args, at), kwargs)

    return corrected


def _all_for_none_in(own: Filter, at: int) -> Filter:
    """As `_all_for_none`, for torch's filter."""

    def filtered(mesh: Any, op_schema: Any, operands: Any, results: Any) -> bool:
        args = none_for_empty(op_schema.args_schema, at)
        return own(mesh, dataclasses.replace(op_schema, args_schema=args), operands, results)

    return filtered


def none_for_empty(args: Any, at: int) -> Any:
    is_empty = len(args) > at and isinstance(args[at], (list, tuple)) and not args[at]
    return (*args[:at], None, *args[at + 1 :]) if is_empty else args


def _without_partial(own: Rule) -> Rule:
    """Replicate partial values: the largest value of the ranks' parts may not have the largest magnitude."""

    def rule(op: Any, args: Any, kwargs: Any) -> Any:
        return [row for row in own(op, args, kwargs) if not isinstance(row[1], Partial)]

    return rule


def _has_values(at: int | None) -> Filter:
    """Refuse shards for a reduction if a rank has none: without elements there is no largest value.

    ``at``: place of the dimensions among the arguments; None if all are reduced.
    """

    def fits(_mesh: Any, op_schema: Any, operands: Any, _results: Any) -> bool:
        spec, args = operands[0], op_schema.args_schema
        dims = args[at] if at is not None and len(args) > at else None
        listed = [dims] if isinstance(dims, int) else dims
        wanted = [dim % max(spec.ndim, 1) for dim in listed] if listed else range(spec.ndim)
        return not any(sharding_rules.has_nothing(spec, dim) for dim in wanted)

    return fits


def _of_the_same_rows(own: Rule) -> Rule:
    """Shard only where the index has as many rows as the input: its rows belong to the same rows of the input."""

    def rule(op: Any, args: Any, kwargs: Any) -> Any:
        x, dim, index = args[:3]
        if not x.shape:
            return []
        gathered = dim % len(x.shape)

        def fits(row: Any) -> bool:
            on = getattr(row[2], "dim", None)
            return on is None or on == gathered or bool(x.shape[on] == index.shape[on])

        return [row for row in own(op, args, kwargs) if fits(row)]

    return rule


def _has_all_it_masks(_mesh: Any, op_schema: Any, operands: Any, _results: Any) -> bool:
    x, index = operands[:2]
    given = [way.output_spec for each in (0, 2) for way in op_schema.args_schema[each].strategies]
    is_strided = any(isinstance(each, _StridedShard) for spec in (*given, x, index) for each in spec.placements)
    dim = op_schema.args_schema[1] % max(x.ndim, 1)
    return embedding_mask.has_all_it_masks(x, index.placements, dim, is_strided=is_strided)
