"""Operators whose CPU kernels end the process, by a division by zero, on a rank with an empty shard."""

from __future__ import annotations

import torch

_aten = torch.ops.aten


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `_weight_norm_interface`: return the weight and the norms."""
    if v.numel() == 0:
        return torch.zeros_like(v), torch.zeros_like(g)
    return _aten._weight_norm_interface.default(v, g, dim)  # type: ignore[no-any-return]


def weight_norm_backward(
    gradient: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `_weight_norm_interface_backward`: return the gradients of v and g."""
    if v.numel() == 0:
        return torch.zeros_like(v), torch.zeros_like(g)
    return _aten._weight_norm_interface_backward.default(gradient, v, g, norms, dim)  # type: ignore[no-any-return]
