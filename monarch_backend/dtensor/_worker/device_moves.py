"""Copies of a tensor between a worker's GPU and its memory, and operators that only CPUs have, run for a GPU."""

from __future__ import annotations

import torch


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on this device, with the same strides."""
    return tensor.to(device, copy=True)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, if this process has a GPU."""
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor.clone()
