"""torch.compile over "monarch" equals "gloo" bit by bit: collectives in a graph, and compiled parallel models.

Most tests use "aot_eager", which traces, functionalises and splits graphs as inductor does. The slow tests at the end
use inductor.
"""

from __future__ import annotations

import importlib
import os
import warnings
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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from monarch_backend.dtensor._patches import trace_installation
from tests.ecosystem.support import WIDTH, batch, learns, mlp, on_both, train_step

# torch 2.13 renamed its *_tensor collectives to *_single. Only the old names exist in every supported release.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated. Please use:FutureWarning")

# TorchDynamo reads .grad of every tensor that enters a graph, including tensors of FSDP and of the backward pass.
asks_for_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

Collective = Callable[[Tensor, Any], Tensor]


@pytest.fixture(scope="module", autouse=True)
def _compiler_is_imported() -> None:
    """Import the compiler once, before the ranks fork. The import takes seconds in each rank otherwise."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # no pool of compile processes, because it would outlive the tests
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        # inductor imports parts of torch.jit, which torch itself has deprecated
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        for module in (
            "torch._functorch.aot_autograd",
            "torch._inductor.compile_fx",
            "torch._dynamo.backends.debugging",
        ):
            importlib.import_module(module)
    torch._dynamo.utils.counters.clear()  # clear the counts from other tests in the same process


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


IN_PLACE: dict[str, Collective] = {
    "all_reduce": _all_reduce,
    "all_reduce_max": _all_reduce_max,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
}

FUNCTIONAL: dict[str, Collective] = {
    "all_reduce": lambda x, group: fc.all_reduce(x * 2, "sum", group),
    "all_reduce_avg": lambda x, group: fc.all_reduce(x * 2, "avg", group),
    "all_reduce_coalesced": lambda x, group: torch.cat(fc.all_reduce_coalesced([x, x * 2], "sum", group)),
    "all_gather": lambda x, group: fc.all_gather_tensor(x * 2, 1, group),
    "all_gather_coalesced": lambda x, group: torch.cat(fc.all_gather_into_tensor_coalesced([x, x * 2], group)),
    "reduce_scatter": lambda x, group: fc.reduce_scatter_tensor(x * 2, "sum", 0, group),
    "reduce_scatter_coalesced": lambda x, group: torch.cat(
        fc.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group)
    ),
    "broadcast": lambda x, group: fc.broadcast(x * 2, 1, group),
    "all_to_all": lambda x, group: fc.all_to_all_single(x * 2, None, None, group),
    "permute": lambda x, group: fc.permute_tensor(x.flatten() * 2, [1, 0], group),
}


def _in_graph(rank: int, collectives: dict[str, Collective]) -> Any:
    group = dist.group.WORLD
    x = torch.arange(8.0).reshape(4, 2).sin() + rank
    results = {}
    for name, fn in collectives.items():

        def step(x: Tensor, fn: Collective = fn) -> Tensor:
            return (fn(x, group) + 1).relu()

        graph = _compiled(step)
        results[name] = [graph(x), step(x), graph(x * 3)]
        torch._dynamo.reset()  # the functions share one code object, and TorchDynamo limits its recompilations
    return results


@pytest.mark.parametrize(
    "collectives", [IN_PLACE, pytest.param(FUNCTIONAL, marks=pytest.mark.slow)], ids=["in-place", "functional"]
)
def test_collectives(collectives: dict[str, Collective]) -> None:
    results = on_both(_in_graph, 2, collectives)
    for result in results:
        for name, (compiled, eager, other) in result.items():
            assert compiled == eager != other, name


def _as_a_former_controller(rank: int, fn: Callable[[int], Any]) -> Any:
    trace_installation.install()
    return fn(rank)


def _all_of_them(rank: int) -> Any:
    return [*_in_graph(rank, IN_PLACE | FUNCTIONAL).values(), _in_a_pair(rank)]


def _in_a_pair(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))

    def step(x: Tensor) -> Tensor:
        return x * (dist.get_rank() + 2) + dist.get_rank(mesh.get_group()) + mesh.get_local_rank()

    def sharded(x: Tensor) -> Tensor:
        placed = DTensor.from_local(x, mesh, [Shard(0)])
        return (placed @ placed.T).redistribute(placements=[Replicate()]).to_local().relu()

    x = torch.full((2, 3), rank + 1.0)
    return [_compiled(step)(x), step(x), _compiled(sharded)(x), sharded(x)]


@pytest.mark.slow
def test_a_process_that_was_a_controller_compiles_its_own_programs_as_before() -> None:
    """The patches that a controller installs in torch cause no graph breaks after the process was a controller."""
    for *collectives, (step, eager_step, sharded, eager_sharded) in on_both(_as_a_former_controller, 2, _all_of_them):
        assert all(compiled == eager != other for compiled, eager, other in collectives)
        assert step == eager_step
        assert sharded == eager_sharded


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


@pytest.mark.slow
def test_subgroups_in_a_graph() -> None:
    for compiled, eager in on_both(_in_subgroups, 4):
        assert compiled == eager


def _between_graphs(rank: int) -> Any:
    def step(x: Tensor) -> Tensor:
        x, got = x * 2, torch.zeros_like(x)
        pair = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        dist.monitored_barrier()
        return got + 1

    # Without fullgraph: the compiler must end a graph at a call that graphs cannot hold, and start another one.
    compiled = torch.compile(step, backend="eager")
    return [compiled(torch.full((4,), float(rank))), step(torch.full((4,), float(rank)))]


@pytest.mark.slow
def test_code_that_graphs_cannot_hold_runs_between_graphs() -> None:
    for compiled, eager in on_both(_between_graphs, 2):
        assert compiled == eager


# Training -------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A module defined outside torch.nn, because TorchDynamo does not start to compile in a module of torch.nn."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.inner = mlp(layers=layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _graphs() -> int:
    """Return the number of compiled graphs. Without fullgraph=True only this number shows that a graph was compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _train(model: Any, rank: int, steps: int = 3, params: Any = None) -> Any:
    optimizer = torch.optim.SGD(params or model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        losses.append(train_step(model, optimizer, *batch(0, rank)))
    return {"losses": losses, "state": model.state_dict()}


def _averaging(rank: int, backend: str) -> Any:
    """Compile the forward pass, its gathers and the average of the loss as one function."""
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


@pytest.mark.slow
def test_step_with_collectives_in_it() -> None:
    _check(on_both(_averaging, 2, "aot_eager"))


def _ddp(rank: int, backend: str) -> Any:
    torch._dynamo.config.optimize_ddp = True  # splits the graph at the ends of DDP's buckets
    # The default is 1 MiB, and the first bucket must not be larger than the others.
    dist._DEFAULT_FIRST_BUCKET_BYTES = 256
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.0005)
    result = _train(torch.compile(model, backend=backend), rank)
    return {**result, "graphs": _graphs()}


def test_ddp_step() -> None:
    results = on_both(_ddp, 2, "aot_eager")
    _check(results)
    assert results[0]["graphs"] == 1


def _ddp_python_reducer(rank: int) -> Any:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    model = DistributedDataParallel(Net())
    graph = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        x, y = batch(0, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(graph(x), y)
        with torch._dynamo.compiled_autograd._enable(_compiled):
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "state": model.state_dict(), "graphs": _graphs()}


@pytest.mark.slow
@asks_for_grad
def test_ddp_with_collectives_in_the_compiled_backward() -> None:
    results = on_both(_ddp_python_reducer, 2)
    _check(results)
    assert results[0]["graphs"] == 2, "not one graph forward and one backward"


def _fsdp(rank: int) -> Any:
    model = nn.Sequential(Net(2), nn.Tanh(), Net(2))
    for block in (model[0], model[2]):
        block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block)
    fully_shard(model)
    result = _train(model, rank)
    return {"losses": result["losses"], "state": {k: v.full_tensor() for k, v in result["state"].items()}}


@pytest.mark.slow
@asks_for_grad
def test_fsdp2_with_compiled_layers() -> None:
    _check(on_both(_fsdp, 2))


def _tensor_parallel(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # Tensor parallel ranks hold one model, so both get the same input.
    return _train(_compiled(model), 0)


@pytest.mark.slow
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
    # inductor keeps its files. Each rank of each run has a separate folder, so that no run uses files of another.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{dist.get_backend()}-{rank}"
    return step(rank, "inductor")


@pytest.mark.slow  # a C++ compiler runs in each rank
@pytest.mark.parametrize("step", [_averaging, _ddp], ids=["collectives", "ddp"])
def test_inductor(step: Callable[[int, str], Any], tmp_path: Path) -> None:
    _check(on_both(_inductor, 2, step, str(tmp_path)))
