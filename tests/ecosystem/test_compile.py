"""torch.compile over "monarch" as over "gloo", bit by bit: collectives in a graph, and compiled parallel models.

Mostly with backend "aot_eager", which traces, functionalises and splits graphs as inductor does; once each
with inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.ecosystem.support import WIDTH, batch, learns, mlp, on_both

Collective = Callable[[Tensor, Any], Tensor]


def _compiled(fn: Any, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(fn, backend=backend, fullgraph=True, **options)


def _empty(x: Tensor, rows: int) -> Tensor:
    return torch.empty(rows, *x.shape[1:], dtype=x.dtype)


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    x = x * 2
    dist.all_reduce(x, group=group)
    return x


def _all_reduce_max(x: Tensor, group: Any) -> Tensor:
    x = x * 2
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def _all_gather_into_tensor(x: Tensor, group: Any) -> Tensor:
    out = _empty(x, 2 * x.shape[0])
    dist.all_gather_into_tensor(out, x + 1, group=group)
    return out


def _all_gather(x: Tensor, group: Any) -> Tensor:
    out = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(out, x + 1, group=group)
    return torch.cat(out)


def _reduce_scatter_tensor(x: Tensor, group: Any) -> Tensor:
    out = _empty(x, x.shape[0] // 2)
    dist.reduce_scatter_tensor(out, x + 1, group=group)
    return out


def _all_to_all_single(x: Tensor, group: Any) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x + 1, group=group)
    return out


IN_PLACE: list[Collective] = [
    _all_reduce,
    _all_reduce_max,
    _all_gather_into_tensor,
    _all_gather,
    _reduce_scatter_tensor,
    _all_to_all_single,
]

FUNCTIONAL: dict[str, Collective] = {
    "all_reduce": lambda x, group: fc.all_reduce(x * 2, "sum", group),
    "all_reduce_avg": lambda x, group: fc.all_reduce(x * 2, "avg", group),
    "all_reduce_coalesced": lambda x, group: torch.cat(fc.all_reduce_coalesced([x, x * 2], "sum", group)),
    "all_gather": lambda x, group: fc.all_gather_tensor(x * 2, 1, group),
    "all_gather_coalesced": lambda x, group: torch.cat(
        fc.all_gather_into_tensor_coalesced([x, x * 2], group)
    ),
    "reduce_scatter": lambda x, group: fc.reduce_scatter_tensor(x * 2, "sum", 0, group),
    "reduce_scatter_coalesced": lambda x, group: torch.cat(
        fc.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group)
    ),
    "broadcast": lambda x, group: fc.broadcast(x * 2, 1, group),
    "all_to_all": lambda x, group: fc.all_to_all_single(x * 2, None, None, group),
    "permute": lambda x, group: fc.permute_tensor(x * 2, [1, 0], group),
}


def _in_graph(rank: int, which: str, name: str) -> Any:
    fn = FUNCTIONAL[name] if which == "functional" else next(f for f in IN_PLACE if f.__name__ == name)
    group = dist.group.WORLD
    x = torch.arange(8.0).reshape(4, 2).sin() + rank
    graph = _compiled(lambda x: (fn(x, group) + 1).relu())
    eager = (fn(x, group) + 1).relu()
    results = [graph(x), graph(x * 3), eager]
    assert torch.equal(results[0], eager), f"compiled {results[0]}, eager {eager}"
    return results


@pytest.mark.parametrize("name", [fn.__name__ for fn in IN_PLACE])
def test_collective_of_torch_distributed(name: str) -> None:
    on_both(_in_graph, 2, "in place", name)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_collective(name: str) -> None:
    on_both(_in_graph, 2, "functional", name)


def _in_subgroups(rank: int) -> Any:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    group, dim = groups[rank // 2], mesh.get_group("a")

    def step(x: Tensor) -> Tensor:
        x = fc.all_reduce(x, "sum", group) * 10
        dist.all_reduce(x, group=dim)
        size = dist.get_world_size(group) + dist.get_rank(dim)
        return fc.all_gather_tensor(x, 0, (mesh, 1)) + size

    x = torch.tensor([float(rank + 1)])
    return [_compiled(step)(x), step(x)]


def test_subgroups_in_a_graph() -> None:
    for compiled, eager in on_both(_in_subgroups, 4):
        assert compiled == eager


# Training -------------------------------------------------------------------------------------------------


def _train(model: Any, rank: int, steps: int = 3, params: Any = None) -> Any:
    optimizer = torch.optim.SGD(params or model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        x, y = batch(0, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": model.state_dict()}


def _averaging(rank: int, backend: str) -> Any:
    """One compiled function has the forward pass, gathers in it, and the average of the loss."""
    model = mlp()
    params = list(model.parameters())
    group = dist.group.WORLD

    def loss_of(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        whole = fc.all_gather_tensor_autograd(model(x), 0, group)
        loss = nn.functional.mse_loss(whole, fc.all_gather_tensor(y, 0, group))
        return loss, fc.all_reduce(loss.detach(), "avg", group)

    def reduced(grads: list[Tensor]) -> list[Tensor]:
        out = [grad.clone() for grad in grads]
        for grad in out:
            dist.all_reduce(grad)
        return out

    loss_of, reduced = _compiled(loss_of, backend), _compiled(reduced, backend)
    losses = []
    for _ in range(3):
        loss, shown = loss_of(*batch(0, rank))
        grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for param, grad in zip(params, reduced(list(grads)), strict=True):
                param.sub_(grad, alpha=0.1)
        losses.append(shown.item())
    return {"losses": losses, "state": model.state_dict()}


def _check(results: list[Any]) -> None:
    assert all(learns(result["losses"]) for result in results)
    assert all(result["state"] == results[0]["state"] for result in results)


def test_step_with_collectives_in_it() -> None:
    _check(on_both(_averaging, 2, "aot_eager"))


def _ddp(rank: int, backend: str) -> Any:
    torch._dynamo.config.optimize_ddp = True  # splits the graph where DDP's buckets end
    torch._dynamo.reset()
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.0005)
    return _train(torch.compile(model, backend=backend), rank)


def test_ddp_step() -> None:
    _check(on_both(_ddp, 2, "aot_eager"))


def _ddp_python_reducer(rank: int) -> Any:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    model = DistributedDataParallel(mlp())
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with torch._dynamo.config.patch(compiled_autograd=True), torch._dynamo.compiled_autograd._enable(compiler):
        for _ in range(3):
            x, y = batch(0, rank)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(step(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "state": model.state_dict()}


def test_ddp_with_collectives_in_the_compiled_backward() -> None:
    _check(on_both(_ddp_python_reducer, 2))


def _fsdp(rank: int) -> Any:
    model = mlp()
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            layer.compile(backend="aot_eager", fullgraph=True)
            fully_shard(layer)
    fully_shard(model)
    result = _train(model, rank)
    return {"losses": result["losses"], "state": {k: v.full_tensor() for k, v in result["state"].items()}}


def test_fsdp2_with_compiled_layers() -> None:
    _check(on_both(_fsdp, 2))


def _tensor_parallel(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # the same input on both ranks: they are one model
    return _train(_compiled(model), 0)


def test_tensor_parallel_step() -> None:
    results = on_both(_tensor_parallel, 2)
    assert learns(results[0]["losses"]) and results[0]["losses"] == results[1]["losses"]


def _dtensors(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))

    def step(x: Any, w: Any) -> Any:
        return (x @ w).redistribute(placements=[Shard(0)]).relu().full_tensor()

    x = distribute_tensor(torch.randn(4, WIDTH), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(WIDTH, 6), mesh, [Shard(1)])
    return [_compiled(step)(x, w), step(x, w)]


def test_dtensors_in_a_graph() -> None:
    for compiled, eager in on_both(_dtensors, 2):
        assert compiled == eager


def _inductor(rank: int, step: Callable[[int, str], Any], folder: str) -> Any:
    # inductor keeps its files; each rank of each run its own, so that nobody finds another's
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{dist.get_backend()}-{rank}"
    return step(rank, "inductor")


@pytest.mark.parametrize("step", [_averaging, _ddp], ids=["collectives", "ddp"])
def test_inductor(step: Callable[[int, str], Any], tmp_path: Path) -> None:
    # without a pool of compile processes, which would outlive the ranks
    _check(on_both(_inductor, 2, step, str(tmp_path), env={"TORCHINDUCTOR_COMPILE_THREADS": "1"}))
