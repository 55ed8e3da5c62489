"""Fake ranks, one after the other in this process, for tests of what each registers and reads.

torch's "fake" process group gives a rank its place in a DeviceMesh and moves no data, which is enough to cut a
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
    """The mesh of this shape, as one of its ranks sees it."""
    size = 1
    for ways in shape:
        size *= ways
    dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=size)
    try:
        yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


def on_each(shape: tuple[int, ...], call: Callable[[DeviceMesh], T]) -> list[T]:
    """What it returns on each rank of a mesh of this shape."""
    size, results = 1, []
    for ways in shape:
        size *= ways
    for number in range(size):
        with rank(number, shape) as mesh:
            results.append(call(mesh))
    return results


def cut(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part, by torch; memory of its own."""
    made: Any = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return DTensor.from_local(
        made.to_local().clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
