"""Layout of torch's DTensors as the package computes it: by placements, after redistribute(), under FSDP2 and TP.

Each element of a tensor is its own index, so a local tensor shows the origin of its elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from monarch_backend._rdma import local_shards
from monarch_backend._rdma.shard_geometry import Overlap
from tests.support.ranks import RankPool

Pool = Callable[[int], RankPool]

KINDS: list[Placement] = [Replicate(), Shard(0), Shard(1)]


def numbered(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def assert_described(name: str, tensor: Tensor, whole: Tensor) -> tuple[Overlap, ...]:
    """The pieces that the package computes must make up the local tensor."""
    held = local_shards.local(name, tensor)
    mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    assert held.shape == tuple(whole.shape)
    made = torch.full(mine.shape, -1, dtype=whole.dtype)
    for box, at in held.pieces:
        source = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.sizes, strict=True))]
        made[tuple(slice(o, o + n) for o, n in zip(at, box.sizes, strict=True))] = source
    assert torch.equal(made, mine.detach().to(whole.dtype)), f"{name}: {held.pieces} make\n{made}\nand not\n{mine}"
    return held.pieces


def _distributed(rank: int, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    for size in [(5, 7), (8, 6), (1, 3), (0, 4)]:
        whole = numbered(*size)
        for placements in itertools.product(KINDS, repeat=len(shape)):
            x = distribute_tensor(whole, mesh, placements)
            assert_described(f"{size} as {placements}", x, whole)
            if 0 not in size:
                assert_described("redistributed", x.redistribute(mesh, [*placements[1:], Shard(1)]), whole)
    x = distribute_tensor(numbered(6, 4), mesh, [Shard(-1)] * len(shape))
    assert_described("negative", x, numbered(6, 4))
    assert_described("scalar", distribute_tensor(torch.tensor(3), mesh, [Replicate()] * len(shape)), torch.tensor(3))


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
def test_distributed_tensors(shape: tuple[int, ...], pool: Pool) -> None:
    pool(math.prod(shape)).run(_distributed, shape)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 5)
        self.norm, self.table = nn.LayerNorm(5), nn.Embedding(10, 6)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(numbered(*parameter.shape))


def _sharded_model(rank: int, shape: tuple[int, ...], names: tuple[str, ...]) -> dict[str, str]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    net = Net()
    if "tp" in names:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "table": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan)
    data = mesh[tuple(name for name in names if name != "tp")]
    for layer in (net.up, net.down):
        fully_shard(layer, mesh=data)
    fully_shard(net, mesh=data)
    told = {}
    for name, value in net.state_dict().items():
        assert isinstance(value, DTensor)
        held = assert_described(name, value, numbered(*value.shape).float())
        assert len(held) <= 1, "one box, also of a strided shard"
        told[name] = str(value.placements)
    return told


@pytest.mark.parametrize(
    ("shape", "names"), [((3,), ("dp",)), ((2, 2), ("dp", "tp")), ((2, 2), ("rep", "dp"))], ids=["fsdp", "2d", "hsdp"]
)
def test_fsdp2_and_tensor_parallelism(shape: tuple[int, ...], names: tuple[str, ...], pool: Pool) -> None:
    told = pool(math.prod(shape)).run(_sharded_model, shape, names)[0]
    if "tp" in names:  # otherwise this test would not cover strided shards
        assert told["up.weight"] == str((_StridedShard(0, split_factor=2), Shard(0)))
        assert told["down.weight"] == str((Shard(0), Shard(1)))


def _refused(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    wrong = {
        "sum": DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False),
        "own": DTensor.from_local(torch.ones(3 - 2 * rank, 2), mesh, [Shard(0)], shape=(4, 2), stride=(2, 1)),
    }
    told = []
    for name, tensor in wrong.items():
        with pytest.raises(ValueError) as error:
            local_shards.local(name, tensor)
        told.append(str(error.value))
    return told


def test_partial_placements_and_wrong_shards_are_refused(pool: Pool) -> None:
    partial, own = pool(2).run(_refused)[0]
    assert partial.startswith("sum: ") and "redistribute() it first" in partial
    assert own.startswith("own: the local tensor has shape (3, 2)") and "make (2, 2) on this rank" in own


def _outside(rank: int) -> int:
    mesh = DeviceMesh("cpu", [0, 2])
    x = distribute_tensor(numbered(6, 2), mesh, [Shard(0)])
    return len(local_shards.local("x", x).pieces)


def test_rank_outside_the_mesh_has_no_part(pool: Pool) -> None:
    assert pool(3).run(_outside) == [1, 0, 1]


def _in_another_order(rank: int) -> bool:
    """Shard by the second dimension of the mesh first."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    mesh, whole = init_device_mesh("cpu", (2, 2)), numbered(8, 2)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    mine = whole.chunk(2)[coordinate[1]].chunk(2)[coordinate[0]].contiguous()
    spec = DTensorSpec(
        mesh,
        (Shard(0), Shard(0)),
        TensorMeta(whole.shape, whole.stride(), whole.dtype),
        shard_order=(ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),),
    )
    x: Any = DTensor(mine, spec, requires_grad=False)
    assert_described("x", x, whole)
    return dist.is_initialized()


def test_the_order_of_cuts(pool: Pool) -> None:
    from torch.distributed.tensor import _dtensor_spec

    if not hasattr(_dtensor_spec, "ShardOrderEntry"):
        pytest.skip("before torch 2.13 there was one order")
    assert all(pool(4).run(_in_another_order))
