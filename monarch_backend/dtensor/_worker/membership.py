"""Membership: which ranks have a tensor."""

from __future__ import annotations

import torch


def own(tensor: torch.Tensor, _inside: torch.Tensor) -> torch.Tensor:
    """The tensor, of a rank that has the other one, too: the others do not come here, and have nothing of it."""
    return tensor.detach()
