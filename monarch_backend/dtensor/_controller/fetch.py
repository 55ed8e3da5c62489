"""Reads of remote tensors' values. Only these wait for the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import _tensor_str
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor


def as_host(tensor: RemoteTensor) -> torch.Tensor:
    """Return the first worker's values as a tensor of this process. Raises RemoteOpError for a failure on a worker."""
    value: torch.Tensor = tensor._meta.workers.read(tensor)()
    return value.requires_grad_(tensor.requires_grad) if tensor.requires_grad and tensor.is_leaf else value


def item(tensor: RemoteTensor) -> Any:
    return tensor._meta.workers.read(tensor, "item")()


def text_of(tensor: Any) -> str:
    """Return the text of a tensor or DTensor as torch prints it. Of a large one only the shown values are read."""
    options, plain, prefix = _tensor_str.PRINT_OPTS, tensor.detach(), "tensor("
    if all(type(size) is int for size in tensor.shape) and tensor.numel() > options.threshold:
        shown = _long_again(as_host(_whole(_corners(plain, options.edgeitems))), options)
    else:
        shown = as_host(_whole(plain))
    body = _tensor_str._tensor_str(shown, len(prefix)) if shown.numel() else "[]"
    suffixes = [f"device='{tensor.device}'"] if tensor.device.type != "cpu" else []
    if not options.edgeitems if shown.numel() else shown.ndim != 1:
        suffixes.append(f"size={tuple(tensor.shape)}")
    if tensor.dtype not in _unsaid_dtypes(is_empty=not shown.numel()):
        suffixes.append(f"dtype={tensor.dtype}")
    if tensor.grad_fn is not None:
        suffixes.append(f"grad_fn=<{_name_of(tensor.grad_fn)}>")
    elif tensor.requires_grad:
        suffixes.append("requires_grad=True")
    return _tensor_str._add_suffixes(prefix + body, suffixes, len(prefix), force_newline=False)  # type: ignore[no-any-return]


def _unsaid_dtypes(*, is_empty: bool) -> tuple[torch.dtype, ...]:
    """Return the dtypes that torch does not print."""
    default = torch.get_default_dtype()
    if is_empty:
        return (default,)
    return default, torch.cdouble if default == torch.double else torch.cfloat, torch.int64, torch.bool


def _name_of(grad_fn: Any) -> str:
    name = type(grad_fn).__name__
    return name if name != "CppFunction" else grad_fn.name().rsplit("::", 1)[-1]


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _corners(tensor: torch.Tensor, edge: int) -> Any:
    """Return the shown values, and one more in the middle of each long dimension in place of the dots."""
    for dim in range(tensor.ndim):
        size = tensor.size(dim)
        if size > 2 * edge + 1:
            first, last = tensor.narrow(dim, 0, edge + 1), tensor.narrow(dim, size - edge, edge)
            tensor = torch.cat([first, last], dim)
    return tensor


def _long_again(corners: torch.Tensor, options: Any) -> torch.Tensor:
    """Return the shown values with a long middle that is never read, so that torch prints a large tensor."""
    edge = options.edgeitems
    dim = next(dim for dim, size in enumerate(corners.shape) if size == max(corners.shape))
    size = corners.shape[dim]
    more = int(options.threshold) // (corners.numel() // size) + 1 if size == 2 * edge + 1 else 0
    at = [*range(edge), *[edge] * more, *range(edge, size)]
    return corners.index_select(dim, torch.tensor(at))
