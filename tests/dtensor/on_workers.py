"""Functions that tests run on the workers, which import them from here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from monarch_backend.dtensor import _wire
from monarch_backend.dtensor.worker import Executor, _functions
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


class ExecutorWithoutGpu(Executor):
    """Executes what is meant for a GPU, on the CPU: "cuda" is the CPU, and attention is done as a GPU's worker does."""

    def __init__(self, _device_type: str, timeout: float) -> None:
        super().__init__("cpu", timeout)
        _functions.constant = _with_gpus_on_the_cpu
        for name, ours in (("", "forward"), ("_backward", "backward")):
            operator = f"aten._scaled_dot_product_flash_attention_for_cpu{name}.default"
            _functions._REPLACED[operator] = f"monarch_backend.dtensor.worker._attention:{ours}"


def _with_gpus_on_the_cpu(tagged: list[Any], device: torch.device) -> Any:
    return device if tagged == [_wire.Tag.DEVICE, "cuda"] else _wire.constant(tagged, device)
