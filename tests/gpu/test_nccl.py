"""The CUDA (NCCL) and ROCm (RCCL) route on a machine with a GPU: `make test-gpu`. One GPU is enough.

Tests that need two GPUs skip with a reason. tests/process_group/test_accelerator_selection.py needs no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import monarch_backend
from monarch_backend import NoRouteError
from monarch_backend.process_group import _c10d_internals
from tests.support.gpus import gpu_count, needs_gpu
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
]
two_gpus = pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs")


def _device(rank: int) -> torch.device:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def _no_layer_between(rank: int) -> None:
    device = _device(rank)
    group = dist.group.WORLD
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    inner = group._get_backend(device)
    assert _c10d_internals.is_c10d_backend(inner)
    assert "NCCL" in type(_c10d_internals.peel(inner)).__name__
    # The C++ base has the same object, so callers in C++ use it directly.
    assert super(type(group), group)._get_backend(device) is inner
    assert monarch_backend.routes()["cuda"].backend == "nccl"
    assert x.tolist() == [float(dist.get_world_size())] * 4


def test_cuda_tensors_take_torch_s_own_group() -> None:
    run_ranks(_no_layer_between, 1)


def _every_collective(rank: int) -> None:
    device, n = _device(rank), dist.get_world_size()
    x = torch.full((4,), float(rank + 1), device=device)
    total = float(sum(range(1, n + 1)))
    dist.broadcast(x.clone(), 0)
    summed = x.clone()
    dist.all_reduce(summed)
    assert summed.tolist() == [total] * 4
    averaged = x.clone()
    dist.all_reduce(averaged, dist.ReduceOp.AVG)
    assert averaged.tolist() == [total / n] * 4
    listed = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(listed, x)
    assert [t[0].item() for t in listed] == [float(r + 1) for r in range(n)]
    dist.reduce(x.clone(), 0)
    dist.gather(x, listed if rank == 0 else None, 0)
    dist.scatter(torch.empty_like(x), listed if rank == 0 else None, 0)
    dist.reduce_scatter(torch.empty_like(x), [x] * n)
    dist.all_to_all([torch.empty_like(x) for _ in range(n)], [x] * n)
    dist.all_to_all_single(torch.empty(n, device=device), torch.arange(float(n), device=device))
    work = dist.all_reduce(x.clone(), async_op=True)
    work.wait()
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, rank)
    assert objects == list(range(n))
    dist.barrier()
    dist.barrier(device_ids=[rank])
    functional = fc.all_gather_tensor(x, 0, dist.group.WORLD)
    assert functional.shape == (4 * n,)
    torch.cuda.synchronize()


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=two_gpus)])
def test_every_collective(world_size: int) -> None:
    run_ranks(_every_collective, world_size)


def _both_devices(rank: int) -> None:
    x, y = torch.ones(2, device=_device(rank)), torch.ones(2)
    dist.all_reduce(x)
    dist.all_reduce(y)
    assert x.tolist() == y.tolist() == [float(dist.get_world_size())] * 2
    assert {d.type for d in dist.group.WORLD._device_types} == {"cpu", "cuda"}
    with pytest.raises(NoRouteError, match="cuda -> nccl"):
        dist.group.WORLD._get_backend(torch.device("hpu"))


def test_cpu_and_cuda_in_one_group() -> None:
    run_ranks(_both_devices, 1)


def _bound(rank: int, address: str) -> None:
    device = _device(rank)
    dist.init_process_group("monarch", init_method=address, rank=rank, world_size=1, device_id=device)
    group = dist.group.WORLD
    assert group.bound_device_id == device
    child = dist.new_group([0])
    x = torch.ones(1, device=device)
    dist.all_reduce(x, group=child)
    split = dist.split_group(group, [[0]])
    dist.all_reduce(x, group=split)
    assert type(split) is type(group)
    dist.destroy_process_group()
    dist.init_process_group("cpu:monarch,cuda:nccl", init_method=address + "2", rank=rank, world_size=1)
    dist.all_reduce(x)
    dist.distributed_c10d._abort_process_group()


def test_device_id_split_and_abort() -> None:
    run_ranks(_bound, 1, backend=None)


def _batched(rank: int) -> None:
    device, peer = _device(rank), 1 - rank
    # Large enough that a send waits for its receive. Without coalescing this test hangs.
    mine, theirs = torch.full((1 << 24,), float(rank), device=device), torch.empty(1 << 24, device=device)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]):
        work.wait()
    assert theirs[0].item() == float(peer)


@two_gpus
def test_batched_sends_do_not_wait_for_each_other() -> None:
    run_ranks(_batched, 2)


def _train(rank: int, how: str) -> list[float]:
    device = _device(rank)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device)
    wrapped: Any = DistributedDataParallel(model, device_ids=[rank]) if how == "ddp" else fully_shard(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    batch = torch.linspace(-1, 1, 64, device=device).view(8, 8)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = wrapped(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_training_equals_nccl(how: str) -> None:
    assert run_ranks(_train, 1, how) == run_ranks(_train, 1, how, backend="nccl")
