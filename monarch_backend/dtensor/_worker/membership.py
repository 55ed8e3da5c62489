"""Membership: which ranks have a tensor."""

from __future__ import annotations

import torch


def own(tensor: torch.Tensor, _inside: torch.Tensor) -> torch.Tensor:
    """Return the tensor on a rank that also has the other one; other ranks do not run this, and have no result."""
    return tensor.detach()
