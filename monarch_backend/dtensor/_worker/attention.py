"""Attention on a worker's GPU, by the kernel that torch chooses there.

Remote tensors are CPU tensors for the controller's C++, so its commands have the CPU's operators. `install` makes a GPU
run them. The worker chooses the kernel because that depends on its GPU: flash, cuDNN, memory-efficient, or plain
products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from monarch_backend.dtensor._torch_internals import fast_op_lookup

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_libraries: list[torch.library.Library] = []


def install(key: str = "CUDA") -> None:
    """Install the kernels in this process for tensors of this dispatch key; a second call does nothing."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl(_FORWARD, forward, key)
    library.impl(_FORWARD + "_backward", backward, key)
    _libraries.append(library)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    *, attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the result, and a tensor of the row sums' size that carries the graph for `backward` in their place."""
    out, leaves = _attended(query, key, value, dropout_p, is_causal, attn_mask, scale)
    batch, heads, rows, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    sums = query.new_zeros((batch, rows, heads), dtype=dtype).transpose(1, 2)
    sums._graph = out, leaves  # type: ignore[attr-defined]
    return _laid_out(out.detach(), torch.empty_like(query, device="meta").stride()), sums


def backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _out: torch.Tensor,
    sums: torch.Tensor, dropout_p: float, is_causal: bool,
    *, attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients. If the sums lost their graph (in a compiled graph), the attention is computed again."""
    found: Any = getattr(sums, "_graph", None)
    out, leaves = found or _attended(query, key, value, dropout_p, is_causal, attn_mask, scale)
    with fast_op_lookup.above_autograd():
        gradients = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    return tuple(_laid_out(each, _by_rows(each.shape)) for each in gradients)


def _attended(
    query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, mask: Any, scale: float | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    with torch.enable_grad(), fast_op_lookup.above_autograd():
        leaves = [each.detach().requires_grad_() for each in (query, key, value)]
        grouped = query.size(1) != key.size(1)
        q, k, v = leaves
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
    return out, leaves


def _by_rows(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides that the controller expects of the gradients: heads beside each other."""
    _, heads, rows, width = shape
    return heads * rows * width, width, heads * width, 1


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor with the controller's strides, because it accepted views by them."""
    if tensor.stride() == stride or tensor.device.type == "xla":  # its tensors have no strides
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
