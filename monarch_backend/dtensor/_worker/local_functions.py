"""Functions that commands name in place of torch's operators."""

from __future__ import annotations

import torch

_aten = torch.ops.aten


def own(tensor: torch.Tensor, _inside: torch.Tensor) -> torch.Tensor:
    """Return the tensor on a rank that also has the other one; other ranks do not run this, and have no result."""
    return tensor.detach()


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, copy=True)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, if this process has a GPU."""
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor.clone()


# On a rank with an empty shard the CPU kernels of these two operators end the process, by a division by zero.


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    if v.numel() == 0:
        return torch.zeros_like(v), torch.zeros_like(g)
    return _aten._weight_norm_interface.default(v, g, dim)  # type: ignore[no-any-return]


def weight_norm_backward(
    gradient: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if v.numel() == 0:
        return torch.zeros_like(v), torch.zeros_like(g)
    return _aten._weight_norm_interface_backward.default(gradient, v, g, norms, dim)  # type: ignore[no-any-return]
