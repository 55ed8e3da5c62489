"""Functions that tests run on the workers, which import them from here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from monarch_backend.dtensor.worker._side import boards


def left_on_boards() -> int:
    """What was to be taken from the boards of this process and has not been."""
    return sum(len(board._parcels) + len(board._kept) + len(board._refused) for board in boards.values())


class Box:
    """No container that torch knows."""

    def __init__(self, content: Any) -> None:
        self.content = content


def fails_on(rank: int, _: Any) -> None:
    """The others wait for it in a collective."""
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    dist.all_reduce(torch.ones(1))


def sum_of_ranks() -> int:
    """By a collective of all."""
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)
