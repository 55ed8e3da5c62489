"""Decompositions of operators that torch_xla lacks or implements differently.

torch_xla makes operations that write into memory functional. torch can do that for its own operators only. FSDP's
operators write into views, or return some. Their results here equal torch's, see
fsdp/_fully_shard/_fsdp_collectives.py.

Two operators of torch_xla are right in a single process only, and one differs from torch. Operators that it lacks are
decomposed where torch knows how, else run on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._torch_internals import decompositions
from monarch_backend.process_group._xla import graph_hash_workaround


def all_gather_copy_in(
    inputs: list[torch.Tensor], output: torch.Tensor, split_sizes: Sequence[int], numel: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of the output, filled with the inputs, and the output."""
    mine = output.narrow(0, numel * rank, numel)
    for part, each in zip(torch.split(mine, list(split_sizes)), inputs, strict=True):
        part.copy_(each)
    return mine, output


def split_with_sizes_copy(
    gathered: torch.Tensor, split_sizes: Sequence[int], dim: int = 0, *, out: list[torch.Tensor]
) -> None:
    for mine, part in zip(out, torch.split(gathered, list(split_sizes), dim), strict=True):
        mine.copy_(part)


def chunk_cat(tensors: list[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor) -> None:
    """Write the chunks of all tensors, padded to one size, beside each other."""
    rows = [_padded(each, dim, num_chunks).reshape(num_chunks, -1) for each in tensors]
    out.copy_(torch.cat(rows, 1).view(out.shape))


def _padded(tensor: torch.Tensor, dim: int, num_chunks: int) -> torch.Tensor:
    size = tensor.size(dim)
    missing = -(-size // num_chunks) * num_chunks - size
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def nll_loss_forward(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the total weight of these targets, for which torch_xla returns 1."""
    if x.ndim == 1:
        out, total = nll_loss_forward(x[None], target.reshape(1), weight, reduction, ignore_index)
        return (out[0] if reduction == 0 else out), total
    classes, factors = _chosen(x, target, weight, ignore_index)
    each = -x.gather(1, classes.unsqueeze(1)).squeeze(1) * factors
    total = factors.sum()
    if reduction == 0:
        return each, torch.zeros_like(total)
    return (each.sum() / total if reduction == 1 else each.sum()), total


def _chosen(x: torch.Tensor, target: torch.Tensor, weight: Any, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a class for each target, and its weight, 0 for an ignored one."""
    kept = target != ignore_index
    classes = target.masked_fill(~kept, 0)
    return classes, (kept.to(x.dtype) if weight is None else weight[classes] * kept)


def nll_loss_backward(
    gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int,
    ignore_index: int, total_weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient by the given total weight; torch_xla takes that of this rank's part of the batch."""
    if x.ndim == 1:
        given = x[None], target.reshape(1), weight, reduction, ignore_index, total_weight
        return nll_loss_backward(gradient.reshape(-1) if reduction == 0 else gradient, *given)[0]
    classes, factors = _chosen(x, target, weight, ignore_index)
    each = -gradient * factors
    if reduction == 1:  # the mean
        each = each / total_weight
    return torch.zeros_like(x).scatter(1, classes.unsqueeze(1), each.unsqueeze(1))


def native_batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Normalise with torch's running variance. torch_xla's is the batch's, without Bessel's correction."""
    operator = torch.ops.aten.native_batch_norm
    if not training or running_var is None:
        return operator(x, weight, bias, running_mean, running_var, training, momentum, eps)  # type: ignore[no-any-return]
    channels = x.transpose(0, 1).flatten(1).to(running_var.dtype)
    running_mean.lerp_(channels.mean(1), momentum)
    running_var.lerp_(channels.var(1), momentum)
    return operator(x, weight, bias, None, None, training, momentum, eps)  # type: ignore[no-any-return]


def batch_norm_functional(
    x: torch.Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Normalise for a captured step: return new running values instead of changing them."""
    running_mean, running_var = running_mean.clone(), running_var.clone()
    found = native_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    return *found, running_mean, running_var


def native_batch_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: Any, running_mean: Any, running_var: Any, save_mean: Any,
    save_invstd: Any, train: bool, eps: float, output_mask: Any,
) -> Any:  # fmt: skip
    """Return gradients by the running values, if they were used. torch_xla takes saved values of a batch."""
    operator = torch.ops.aten.native_batch_norm_backward.default
    call = operator if train else decompositions.in_others(operator)
    given = gradient, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
    return call(*given)  # type: ignore[misc]


def resize(_tensor: torch.Tensor, _nbytes: int) -> None:
    """Do nothing: XLA's tensors have no memory that could be freed and allocated again."""


REPLACED: dict[str, Callable[..., Any]] = {
    "fsdp.all_gather_copy_in.default": all_gather_copy_in,
    "fsdp.split_with_sizes_copy.default": split_with_sizes_copy,
    "fsdp.chunk_cat.default": chunk_cat,
    "monarch_backend.dtensor._worker.storage:resize": resize,
    "aten.native_batch_norm.default": native_batch_norm,
    "aten._native_batch_norm_legit_functional.default": batch_norm_functional,
    "aten.native_batch_norm_backward.default": native_batch_norm_backward,
    "aten.nll_loss_forward.default": nll_loss_forward,
    "aten.nll_loss2d_forward.default": nll_loss_forward,
    "aten.nll_loss_backward.default": nll_loss_backward,
    "aten.nll_loss2d_backward.default": nll_loss_backward,
}
"""Functions of a worker with XLA devices, by the name in commands."""


# Operators that torch_xla lacks ---------------------------------------------------------------------------------


def adapted(operator: Any) -> Any:
    """Return a replacement of an operator that torch_xla would run on the CPU.

    torch_xla would execute all recorded operations at once, by a graph that it may take for another (see
    process_group/_xla/graph_hash_workaround.py).
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
        return operator
    schema = operator._schema
    if any(each.alias_info for each in (*schema.arguments, *schema.returns)):
        return operator  # it makes views or changes something: torch decomposes it first
    if decompositions.is_there(operator, "XLA"):
        return operator
    return decompositions.in_others(operator) or functools.partial(on_the_cpu, operator)


def on_the_cpu(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator with CPU copies, and move its results back."""
    tensors = filter(graph_hash_workaround.is_on_xla, pytree.tree_leaves((args, kwargs)))
    device = next((each.device for each in tensors), None)
    if device is None:
        return operator(*args, **kwargs)
    args, kwargs = graph_hash_workaround.all_on_host((args, kwargs))
    return pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), operator(*args, **kwargs))
