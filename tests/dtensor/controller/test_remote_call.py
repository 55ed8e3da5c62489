"""Functions that run as SPMD code on the workers: they get local DTensors, and the controller gets the results."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import monarch_backend.actor as ma
from monarch_backend.actor import SupervisionError, ValueMesh, this_host
from monarch_backend.dtensor import MeshMismatchError, RemoteOpError, RemoteTensorError, run
from tests.dtensor import failing_lookup, worker_functions
from tests.dtensor.conftest import DEVICE, workers_of
from tests.dtensor.values import same, value


def values(of: Any) -> list[Any]:
    """Return the values in the order of ranks."""
    assert isinstance(of, ValueMesh)
    return list(of.values())


# Arguments ------------------------------------------------------------------------------------------------------


def test_function_gets_the_local_dtensor_of_its_rank(mesh: Any) -> None:
    x = distribute_tensor(torch.arange(24.0).view(8, 3), mesh, [Shard(0), Replicate()][: mesh.ndim])

    def look(x: Any, mesh: Any) -> Any:
        assert type(x) is DTensor
        assert type(x.to_local()) is torch.Tensor
        assert x.device_mesh == mesh
        return x.to_local().shape[0], tuple(mesh.get_coordinate()), x.full_tensor().tolist(), x.placements

    found = values(run(mesh, look, x, mesh=mesh).get())
    assert sum(rows for rows, *_ in found) * mesh.size(0) == 8 * mesh.size()
    assert len({at for _, at, *_ in found}) == mesh.size()
    assert all(whole == value(x).tolist() for _, _, whole, _ in found)
    assert all(placements == x.placements for *_, placements in found)


def test_plain_remote_tensor_arrives_as_a_plain_tensor(line: Any) -> None:
    x = distribute_tensor(torch.arange(12.0).view(6, 2), line, [Shard(0)])
    found = values(run(line, lambda plain: (type(plain), plain.sum().item()), x.to_local()).get())
    assert {kind for kind, _ in found} == {torch.Tensor}
    assert sum(total for _, total in found) == 66


def test_inplace_change_in_a_function_is_visible_to_all(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    whole = torch.randn(6, 4)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    view = x.view(3, 2, 4) if x.shape == (3, 2, 4) else x.t()

    def change(nested: dict[str, list[Any]]) -> None:
        nested["x"][0].mul_(2).to_local().add_(1)

    done = run(mesh, change, {"x": [x]})
    try:
        same(x, whole * 2 + 1)  # no wait for the function before
        same(view, (whole * 2 + 1).t())
    finally:
        done.get()


def test_tensor_passed_twice_arrives_as_one(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.ones(4), mesh_of("2"), [Shard(0)])
    same_object = run(mesh_of("2"), lambda a, b: (a[0] is b["x"], a[0] is b["y"]), [x], {"x": x, "y": x + 0}).get()
    assert values(same_object) == [(True, False)] * 2


def test_host_values_and_functions_are_pickled_as_for_actors(mesh_of: Callable[[str], Any]) -> None:
    offset = torch.arange(3000.0)

    def add(x: Any, *, rate: float) -> float:
        return float((x + offset).sum() * rate)

    assert values(run(mesh_of("2"), add, torch.ones(3000), rate=0.5).get()) == [float((offset + 1).sum() / 2)] * 2
    assert len(set(values(run(mesh_of("2"), os.getpid).get()))) == 2


def test_module_trains_on_workers_and_controller(mesh_of: Callable[[str], Any]) -> None:
    mesh, x = mesh_of("2"), torch.randn(5, 6)

    def net() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    def step(model: nn.Module, x: torch.Tensor) -> float:
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for each in model.parameters():
                each.sub_(each.grad * 0.1)
                each.grad = None
        return loss.full_tensor().item() if isinstance(loss, DTensor) else loss.item()

    model, reference = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), net()
    for _ in range(3):
        assert values(run(mesh, step, model, x).get()) == pytest.approx([step(reference, x)] * 2, rel=1e-5)
    for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
        same(ours, other)


def test_gradient_is_sent_with_its_parameter(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    model = distribute_module(nn.Linear(3, 3), mesh)
    model(torch.ones(2, 3)).sum().backward()
    grads = run(
        mesh, lambda m: [(type(p) is DTensor, isinstance(p, nn.Parameter), p.grad * 2) for p in m.parameters()], model
    ).get()
    for parameter, (is_dtensor, is_parameter, doubled) in zip(model.parameters(), grads, strict=True):
        assert values(is_dtensor) == values(is_parameter) == [True, True]
        same(doubled, value(parameter.grad) * 2)


# Meshes ---------------------------------------------------------------------------------------------------------


def test_function_gets_meshes_and_slices(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2x2")
    x = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0), Shard(1)])
    rows = distribute_tensor(torch.randn(4, 6), mesh["tp"], [Shard(1)])

    def look(x: Any, rows: Any, tp: Any) -> Any:
        assert rows.device_mesh == tp == x.device_mesh["tp"]
        assert dist.get_process_group_ranks(tp.get_group()) == tp.mesh.tolist()
        return tp.mesh.tolist(), (x.redistribute(placements=[Replicate(), Shard(1)]) * 2, rows + 1)

    ranks, (doubled, more) = run(mesh, look, x, rows, mesh["tp"]).get()
    assert values(ranks[0]) == [0, 0, 2, 2]
    assert ranks[0].item(dp=1, tp=0) == 2
    same(doubled, value(x) * 2)
    assert (doubled.device_mesh, doubled.placements) == (mesh, (Replicate(), Shard(1)))
    same(more, value(rows) + 1)
    assert more.device_mesh == mesh["tp"]


def test_slice_of_the_processes_runs_a_function(all_procs: Any) -> None:
    half = all_procs["2x2"].slice(dp=1).device_mesh(DEVICE)
    x = distribute_tensor(torch.arange(5.0), half, [Shard(0)])
    total, ranks = run(half, lambda x: (x.sum(), dist.get_rank()), x).get()
    assert (total.item(), values(ranks)) == (10, [2, 3])
    with pytest.raises(RemoteOpError, match="on purpose"):
        run(half, worker_functions.fails_on, 3, x).get()
    assert x.sum().item() == 10
    assert distribute_tensor(torch.ones(4), all_procs["2x2"].device_mesh(DEVICE), [Shard(0)] * 2).sum().item() == 4


def test_processes_run_a_function(all_procs: Any) -> None:
    assert values(all_procs["3"].run(dist.get_rank).get()) == [0, 1, 2]


# Results --------------------------------------------------------------------------------------------------------


def test_results_are_dtensors_or_values_by_rank(line: Any) -> None:
    whole = torch.randn(7, 5)
    x = distribute_tensor(whole, line, [Shard(0)])

    def results(x: Any) -> Any:
        partial = DTensor.from_local(x.to_local().sum(0), x.device_mesh, [Partial()])
        return {
            "two": [x * 2, x.device_mesh.get_local_rank()],
            "one": (x.redistribute(placements=[Shard(1)]), partial),
            "none": None,
        }

    found = run(line, results, x).get()
    same(found["two"][0], whole * 2)
    assert values(found["two"][1]) == list(range(line.size()))
    assert [each.placements for each in found["one"]] == [(Shard(1),), (Partial(),)]
    same(found["one"][0], whole)
    same(found["one"][1], whole.sum(0))
    same(found["two"][0] + found["one"][0], whole * 3)


def test_plain_result_tensors_return_as_values(mesh_of: Callable[[str], Any]) -> None:
    found = values(run(mesh_of("2"), lambda: torch.full((3,), float(dist.get_rank()))).get())
    assert [each.tolist() for each in found] == [[0.0] * 3, [1.0] * 3]


def test_result_can_be_awaited_or_ignored(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    with contextlib.suppress(RemoteOpError):
        workers_of(mesh).synchronize()  # raise failures that other tests have left unread
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])

    async def wait() -> Any:
        return await run(mesh, lambda x: x + 1, x)

    assert asyncio.run(wait()).sum().item() == 8
    workers = workers_of(mesh)
    gc.collect()
    held = workers.ask("inspect", worker_functions.count)
    for _ in range(5):
        run(mesh, lambda x: [x + 1, x + 2], x).get()
        run(mesh, lambda x: [x + 1, x + 2], x)
    workers.synchronize()
    gc.collect()
    x.add_(1)  # the workers drop them with this batch
    assert workers.ask("inspect", worker_functions.count) == held


def test_run_does_not_wait_for_its_result(mesh_of: Callable[[str], Any]) -> None:
    """Operations issued after run() execute after the function and see its changes."""
    mesh = mesh_of("2")
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])

    def doubled(x: Any) -> str:
        x.add_(x)
        return "done"

    runs = [run(mesh, doubled, x) for _ in range(5)]
    y = x + 1
    assert y.sum().item() == 4 * 33
    assert [values(each.get()) for each in runs] == [["done"] * 2] * 5


def test_inconsistent_results_raise(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(RemoteTensorError, match="trees of different forms"):
        run(mesh, lambda x: [x] * (1 + dist.get_rank()), x).get()
    with pytest.raises(RemoteTensorError, match="different things where one DTensor should be"):
        run(mesh, lambda x: [x, x if dist.get_rank() else 3], x).get()
    with pytest.raises(RemoteTensorError, match="no tuple, list or dict"):
        run(mesh, lambda x: worker_functions.Box(x), x).get()


# Failures -------------------------------------------------------------------------------------------------------


def test_exception_names_its_rank_and_ends_collectives_of_others(mesh: Any) -> None:
    ranks = [int(rank) - workers_of(mesh).first for rank in mesh.mesh.flatten()]  # numbered as on the workers
    last = ranks[-1]
    with pytest.raises(RemoteOpError, match="ValueError: on purpose") as caught:
        run(mesh, worker_functions.fails_on, last, None).get(60)
    assert caught.value.rank == last
    assert "in fails_on" in caught.value.remote_traceback
    assert "test_remote_call.py" in caught.value.issued_at
    x = distribute_tensor(torch.ones(12, 4), mesh, [Shard(0), Shard(1)][: mesh.ndim])
    assert x.sum().item() == 48
    assert x.redistribute(placements=[Replicate()] * mesh.ndim).sum().item() == 48
    if len(ranks) == workers_of(mesh).size:  # the default group has all workers
        assert values(run(mesh, worker_functions.sum_of_ranks).get()) == [sum(ranks)] * len(ranks)


def test_repeated_failures_leave_the_mesh_usable(mesh_of: Callable[[str], Any]) -> None:
    for rank in (0, 1, 0):
        failing = run(mesh_of("2"), worker_functions.fails_on, rank, None)
        after = run(mesh_of("2"), worker_functions.sum_of_ranks)
        assert isinstance(failing.exception(60), RemoteOpError)
        assert values(after.get(60)) == [1, 1]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_base_exception_ends_the_function_only(mesh_of: Callable[[str], Any], kind: type[BaseException]) -> None:
    def end(mesh: Any) -> None:
        if mesh.get_rank() == 1:
            raise kind("by itself")

    with pytest.raises(RemoteOpError, match=f"{kind.__name__}.*by itself"):
        run(mesh_of("2"), end, mesh_of("2")).get()
    assert len(values(run(mesh_of("2"), os.getpid).get())) == 2


def test_function_on_workers_cannot_be_a_controller(all_procs: Any) -> None:
    procs = all_procs["2"]

    def nested() -> Any:
        return run(procs, os.getpid).get()

    for _ in range(3):
        with pytest.raises(RemoteOpError, match=r"is a rank of a torch\.distributed group already"):
            run(procs, nested).get()
    assert len(values(run(procs, os.getpid).get())) == 2


def test_captured_steps_work_after_a_failed_function(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])

    @functools.partial(torch.compile, backend="monarch", options={"inductor": False})
    def total(x: Any) -> Any:
        return (x * 2).sum().full_tensor()

    assert total(x).item() == 12
    assert isinstance(run(mesh, worker_functions.fails_on, 1, None).exception(60), RemoteOpError)
    assert total(x).item() == 12
    assert (x * 3).sum().full_tensor().item() == 18


def test_failed_argument_raises_its_own_failure(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    x = distribute_tensor(torch.ones(2, 3), mesh, [Replicate()])
    index = distribute_tensor(torch.tensor([7]), mesh, [Replicate()])
    broken = DTensor.from_local(failing_lookup.look_up(index.to_local(), x.to_local()), mesh, [Replicate()])
    with pytest.raises(RemoteOpError, match=f"{failing_lookup.OPERATION}.* raised"):
        run(mesh, lambda x: x, broken).get(60)
    assert run(mesh, lambda x: x * 2, x).get().sum().item() == 12


def test_unread_failure_is_logged(mesh_of: Callable[[str], Any], caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.suppress(RemoteOpError):
        workers_of(mesh_of("2")).synchronize()  # raise failures that other tests have left unread
    run(mesh_of("2"), worker_functions.fails_on, 0, None)
    workers_of(mesh_of("2")).synchronize()
    gc.collect()
    assert "never read" in caplog.text


def test_dead_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ma, "unhandled_fault_hook", lambda _: None)  # this mesh has no supervisor
    with this_host().spawn_procs({"x": 2}) as procs:
        mesh = procs.device_mesh("cpu")

        def die() -> None:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()

        with pytest.raises((SupervisionError, RemoteOpError), match=r"SIGKILL|signal 9|x 1"):
            run(mesh, die).get(60)


def test_tensors_and_meshes_of_another_mesh_are_refused(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.ones(6), mesh_of("3"), [Shard(0)])
    with pytest.raises(MeshMismatchError, match=r"dtensor\.move"):
        run(mesh_of("2"), lambda x: x, x)
    with pytest.raises(MeshMismatchError, match="a mesh of"):
        run(mesh_of("2"), lambda mesh: None, mesh_of("3"))


def test_unpicklable_argument_is_named(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.ones(6), mesh_of("2"), [Shard(0)])
    with pytest.raises(TypeError, match=r"can't serialize .*\['lock'\]"):
        run(mesh_of("2"), lambda x, y: x, x, {"fine": x, "lock": threading.Lock()})


# Features of torch ----------------------------------------------------------------------------------------------


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.clamp(-0.5, 0.5)


def test_custom_autograd_function_works(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.arange(6.0) - 3, mesh_of("2"), [Shard(0)]).requires_grad_()

    def gradient(x: Any) -> Any:
        local = x.to_local().detach().requires_grad_()
        Clipped.apply(local).square().sum().backward()
        return DTensor.from_local(local.grad, x.device_mesh, x.placements)

    same(run(mesh_of("2"), gradient, x).get(), ((torch.arange(6.0) - 3) * 2).clamp(-0.5, 0.5))


def test_compiled_code_runs_in_a_function(mesh_of: Callable[[str], Any]) -> None:
    whole = torch.randn(6, 4)
    x = distribute_tensor(whole, mesh_of("2"), [Shard(0)])

    def compiled(x: Any) -> Any:
        return torch.compile(lambda x: x.sin() * 2 + 1, backend="aot_eager", fullgraph=True)(x)

    same(run(mesh_of("2"), compiled, x).get(), whole.sin() * 2 + 1)


def test_pipeline_schedule_runs_in_a_function(mesh_of: Callable[[str], Any]) -> None:
    mesh, x, target = mesh_of("2"), torch.randn(4, 6), torch.randn(4, 6)
    torch.manual_seed(5)
    stages = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def pipeline(stages: nn.ModuleList, x: torch.Tensor, target: torch.Tensor) -> Any:
        rank = dist.get_rank()
        stage = PipelineStage(stages[rank], rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.mse_loss)
        losses: list[torch.Tensor] = []
        schedule.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": target, "losses": losses}))
        return stages[rank].weight.grad, [each.item() for each in losses]

    (first, _), (second, losses) = values(run(mesh, pipeline, stages, x, target).get(60))
    parts = [
        F.mse_loss(stages[1](stages[0](each)), want) for each, want in zip(x.chunk(2), target.chunk(2), strict=True)
    ]
    (sum(parts) / 2).backward()  # type: ignore[union-attr]
    same(first, stages[0].weight.grad)
    same(second, stages[1].weight.grad)
    assert losses == pytest.approx([each.item() for each in parts], rel=1e-4)


def test_function_writes_its_own_checkpoint(mesh_of: Callable[[str], Any], tmp_path: Any) -> None:
    whole = torch.randn(5, 3)
    x = distribute_tensor(whole, mesh_of("2"), [Shard(0)])
    run(mesh_of("2"), lambda x: dcp.save({"x": x}, checkpoint_id=tmp_path) and None, x).get()
    x.zero_()
    dcp.load({"x": x}, checkpoint_id=tmp_path)
    assert value(x).equal(whole)


# Data loading ---------------------------------------------------------------------------------------------------


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, index * index])


def test_data_loader_on_the_controller(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    for i, batch in enumerate(DataLoader(Squares(), batch_size=4)):
        x = distribute_tensor(batch, mesh, [Shard(0)])
        assert x.sum(0).tolist() == batch.sum(0).tolist()
        assert batch[0, 0] == 4 * i


_loaders: dict[str, Any] = {}


def next_batch(name: str, mesh: Any) -> Any:
    """Return this worker's part of the next batch. Only the workers read the data."""
    if name not in _loaders:
        # The sampler uses torch.distributed's ranks, as in an SPMD program.
        sampler: Any = DistributedSampler(Squares(), shuffle=False)
        _loaders[name] = iter(DataLoader(Squares(), batch_size=2, sampler=sampler))
    local = next(_loaders[name], None)
    return None if local is None else DTensor.from_local(local, mesh, [Shard(0)])


def test_data_loader_on_the_workers(mesh_of: Callable[[str], Any]) -> None:
    mesh, seen = mesh_of("2"), []
    while isinstance(batch := run(mesh, next_batch, "squares", mesh).get(), DTensor):
        assert batch.shape == (4, 2)
        seen += batch.tolist()
    assert sorted(seen) == [[i, i * i] for i in range(16)]


def epoch(mesh: Any, data: Any) -> Any:
    """Read all batches on each worker. Workers with the same "dp" coordinate read the same rows."""
    sampler: Any = DistributedSampler(data, mesh["dp"].size(), mesh.get_local_rank("dp"), shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    return [DTensor.from_local(batch, mesh, [Shard(0), Replicate()]) for batch in loader]


def test_a_sharded_sampler_on_a_mesh_of_two_dimensions(all_procs: Any) -> None:
    procs = all_procs["2x2"]
    mesh = procs.device_mesh("cpu")
    weight = distribute_tensor(torch.eye(2), mesh, [Replicate(), Shard(1)])
    batches = procs.run(epoch, mesh, Squares()).get()
    assert len(batches) == 4
    assert all(batch.placements == (Shard(0), Replicate()) for batch in batches)
    seen = [row for batch in batches for row in (batch.float() @ weight).tolist()]
    assert sorted(seen) == [[i, i * i] for i in range(16)]
    assert [row[0] for row in batches[0].tolist()] == [0, 2, 1, 3]  # torch's sampler assigns rows to ranks in turn
