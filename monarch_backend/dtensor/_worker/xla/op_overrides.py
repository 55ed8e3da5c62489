"""Replacements of operators for which torch_xla (2.9) gives another result than torch, or ends the process.

It does so in a single process, too. op_decompositions.py has operators that it lacks, or that are wrong for several
ranks only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monarch_backend.dtensor._worker.xla import op_decompositions

_aten = torch.ops.aten


def _of_all(operator: Any) -> Callable[..., Any]:
    """Return the operator with no dimensions as all of them.

    torch_xla reduces none then, and returns another shape. For torch a number has a dimension 0.
    """
    arguments = operator._schema.arguments
    names = [each.name for each in arguments]
    default = arguments[names.index("dim")].default_value

    def reduced(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        options.update(zip(names[1:], args, strict=False))
        dims = options.get("dim", default)
        if dims is not None and not (len(dims) and x.ndim):
            options["dim"] = list(range(x.ndim))
        return operator(x, **options)

    return reduced


_mean_dim = _of_all(_aten.mean.dim)


def mean_dim(x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Also accept ints if a float result is requested: torch_xla raises."""
    return _mean_dim(x if dtype is None else x.to(dtype), dim, keepdim)


def mean(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _aten.mean.default(x if dtype is None else x.to(dtype))


def count_nonzero(x: torch.Tensor, dim: Any = None) -> torch.Tensor:
    """Return an int; torch_xla returns a float."""
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
    return (x != 0).sum(dims)


def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Add ints and bools in int64. torch_xla keeps the dtype: two True values add up to True."""
    if dtype is None and not (x.is_floating_point() or x.is_complex()):
        dtype = torch.int64
    return _aten.cumsum.default(x, dim, dtype=dtype) if x.numel() else x.to(dtype or x.dtype, copy=True)


def roll(x: torch.Tensor, shifts: Any, dims: Any = ()) -> Any:
    """Also accept empty tensors, as shards may be. torch_xla divides by the size, which ends the process."""
    return _aten.roll.default(x, shifts, dims) if x.numel() else x.clone()


def pack_padded_sequence(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """Pack step by step. torch_xla takes wrong rows if sequences end at different steps."""
    # A tensor without values gives the sizes, and torch's errors for invalid lengths.
    like = torch.zeros(*x.shape[:2], 1) if x.ndim > 1 else torch.zeros(x.shape)
    _, sizes = _aten._pack_padded_sequence.default(like, lengths.cpu(), batch_first)
    steps = x.transpose(0, 1) if batch_first else x
    return torch.cat([steps[at, :size] for at, size in enumerate(sizes.tolist())]), sizes


def _with_indices(operator: Any) -> Callable[..., Any]:
    """Return the operator with indices that have been summed.

    torch_xla can't look up rows by indices from an operation with several results. It asks for the shape of all
    results, and XLA ends the process ("buffer != nullptr"). A sum has only one.
    """

    def found(*args: Any, **options: Any) -> Any:
        result = operator(*args, **options)
        return result + 0 if isinstance(result, torch.Tensor) else (result[0], result[1] + 0)

    return found


def _by_scale(operator: Any) -> Callable[..., Any]:
    """Return the operator that resizes an image by the given factor.

    torch_xla computes the factor from the sizes, which have no fractions of a pixel. If the two differ, the worker's
    CPU runs the operator.
    """
    names = [each.name for each in operator._schema.arguments]

    def resized(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        options.update(zip(names[1:], args, strict=False))
        factors = options.get("scale_factors") or (options.get("scales_h"), options.get("scales_w"))
        sizes = options.get("input_size", x.shape)[2:]
        if all(each is None or float(size * each).is_integer() for size, each in zip(sizes, factors, strict=True)):
            return operator(x, **options)
        return op_decompositions.on_the_cpu(operator, x, **options)

    return resized


def _adapted(adapt: Callable[[Any], Callable[..., Any]], *operators: Any) -> dict[str, Callable[..., Any]]:
    return {str(each): adapt(each) for each in operators}


REPLACED: dict[str, Callable[..., Any]] = {
    **_adapted(
        _of_all, _aten.amax.default, _aten.amin.default, _aten.linalg_vector_norm.default, _aten.logsumexp.default,
        _aten.std.correction, _aten.std_mean.correction, _aten.sum.dim_IntList, _aten.var.correction,
        _aten.var_mean.correction,
    ),
    **_adapted(
        _with_indices, _aten.argsort.default, _aten.argsort.stable, _aten.cummax.default, _aten.kthvalue.default,
        _aten.max.dim, _aten.min.dim, _aten.sort.default, _aten.sort.stable, _aten.topk.default,
    ),
    **_adapted(
        _by_scale, _aten.upsample_bilinear2d.default, _aten.upsample_bilinear2d.vec,
        _aten.upsample_bilinear2d_backward.default, _aten.upsample_nearest2d.default, _aten.upsample_nearest2d.vec,
        _aten.upsample_nearest2d_backward.default,
    ),
    "aten.mean.dim": mean_dim, "aten.mean.default": mean, "aten.count_nonzero.default": count_nonzero,
    "aten.count_nonzero.dim_IntList": count_nonzero, "aten.cumsum.default": cumsum, "aten.roll.default": roll,
    "aten._pack_padded_sequence.default": pack_padded_sequence,
}  # fmt: skip
"""Functions of a worker with XLA devices, by the name in commands."""
