"""Fake ranks, one after the other in this process, for tests of the data that each rank registers and reads.

torch's "fake" process group gives a rank its position in a DeviceMesh and moves no data. That is enough to shard a
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

T = TypeVar("T")


@contextmanager
def rank(number: int, shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Yield a mesh of this shape from the view of rank ``number``."""
    size = 1
    for ways in shape:
        size *= ways
    dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=size)
    try:
        yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


def on_each(shape: tuple[int, ...], call: Callable[[DeviceMesh], T]) -> list[T]:
    """Return the results of ``call`` on all ranks of a mesh of this shape."""
    size, results = 1, []
    for ways in shape:
        size *= ways
    for number in range(size):
        with rank(number, shape) as mesh:
            results.append(call(mesh))
    return results


def cut(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return this rank's shard, made by torch, in memory of its own."""
    made: Any = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return DTensor.from_local(
        made.to_local().clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
