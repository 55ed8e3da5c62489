"""XLA tensors in a group of backend "monarch", with the real torch_xla on PJRT's CPU client, one rank."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor.debug import CommDebugMode

import monarch_backend
from monarch_backend import CollectiveArgumentError, GroupClosedError, NoRouteError
from monarch_backend.process_group._xla import xla_backend
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("torch_xla_imported")]


def _x(device: str) -> torch.Tensor:
    return torch.arange(4.0, device=device) + 1


def _out(device: str, call: Callable[[torch.Tensor], Any], size: int = 4) -> torch.Tensor:
    out = torch.zeros(size, device=device)
    call(out)
    return out


def _outs(device: str, call: Callable[[list[torch.Tensor]], Any]) -> torch.Tensor:
    outs = [torch.zeros(4, device=device)]
    call(outs)
    return outs[0]


def _in_place(device: str, call: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    x = _x(device)
    call(x)
    return x


def _async(device: str) -> torch.Tensor:
    x = _x(device)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    return x


def _coalesced(device: str) -> torch.Tensor:
    outs = [[torch.zeros(4, device=device)]]
    with pytest.warns(FutureWarning):
        dist.all_gather_coalesced(outs, [_x(device)])
    return outs[0][0]


OPS = dist.ReduceOp
CASES: dict[str, Callable[[str], torch.Tensor]] = {
    **{
        f"all_reduce {op}": lambda d, op=op: _in_place(d, lambda x: dist.all_reduce(x, op=getattr(OPS, op)))
        for op in ("SUM", "PRODUCT", "MIN", "MAX")
    },
    "all_reduce async": _async,
    "reduce": lambda d: _in_place(d, lambda x: dist.reduce(x, 0)),
    "broadcast": lambda d: _in_place(d, lambda x: dist.broadcast(x, 0)),
    "all_gather": lambda d: _outs(d, lambda o: dist.all_gather(o, _x(d))),
    "all_gather_into_tensor": lambda d: _out(d, lambda o: dist.all_gather_into_tensor(o, _x(d))),
    "all_gather_coalesced": _coalesced,
    "reduce_scatter": lambda d: _out(d, lambda o: dist.reduce_scatter(o, [_x(d)])),
    "reduce_scatter_tensor": lambda d: _out(d, lambda o: dist.reduce_scatter_tensor(o, _x(d))),
    "gather": lambda d: _outs(d, lambda o: dist.gather(_x(d), o, 0)),
    "scatter": lambda d: _out(d, lambda o: dist.scatter(o, [_x(d)], 0)),
    "all_to_all": lambda d: _outs(d, lambda o: dist.all_to_all(o, [_x(d)])),
    "all_to_all_single": lambda d: _out(d, lambda o: dist.all_to_all_single(o, _x(d))),
    "functional all_reduce": lambda d: funcol.all_reduce(_x(d), "sum", dist.group.WORLD) + 0,
    "functional all_gather": lambda d: funcol.all_gather_tensor(_x(d), 0, dist.group.WORLD) + 0,
    "functional reduce_scatter": lambda d: funcol.reduce_scatter_tensor(_x(d), "sum", 0, dist.group.WORLD) + 0,
    "functional all_to_all": lambda d: funcol.all_to_all_single(_x(d), None, None, dist.group.WORLD) + 0,
    "functional broadcast": lambda d: funcol.broadcast(_x(d), 0, dist.group.WORLD) + 0,
}


def _run_case(rank: int, name: str, watched: bool) -> None:
    with CommDebugMode() if watched else contextlib.nullcontext():
        got = CASES[name]("xla")
    assert got.device.type == "xla"
    assert got.cpu().tolist() == [1.0, 2.0, 3.0, 4.0]  # with one rank the result of every collective is its input


@pytest.mark.parametrize("name", CASES)
def test_collective(pool: Any, name: str) -> None:
    pool(1).run(_run_case, name, False)


@pytest.mark.parametrize("name", [n for n in CASES if "functional" not in n])
def test_collective_while_a_dispatch_mode_watches(pool: Any, name: str) -> None:
    # torch has no XLA kernels for its c10d operators, so XLA tensors must bypass the dispatcher in this case, too.
    pool(1).run(_run_case, name, True)


def _send_and_receive(rank: int) -> list[float]:
    x, y = _x("xla"), torch.zeros(4, device="xla")
    dist.isend(x, 0).wait()  # one rank can only send to itself; torch_xla uses a permutation, which does not block
    dist.irecv(y, 0).wait()
    return y.cpu().tolist()


def test_send_and_receive_reach_torch_xla(pool: Any) -> None:
    assert pool(1).run(_send_and_receive) == [[0.0] * 4]


def _mixed(rank: int) -> list[Any]:
    group = dist.group.WORLD
    x, y = _x("xla"), _x("cpu")
    dist.all_reduce(x)
    dist.all_reduce(y)
    dist.barrier()
    objects = [None]
    dist.all_gather_object(objects, {"rank": rank})
    routes = monarch_backend.routes(group)
    with pytest.raises(CollectiveArgumentError, match="tensors on xla and on cpu in one call"):
        dist.all_gather([torch.zeros(4)], x)
    return [x.cpu().tolist() == y.tolist(), objects, str(routes["xla"]), routes["cpu"].backend, sorted(routes)]


def test_cpu_tensors_take_shared_memory_in_the_same_group() -> None:
    [(same, objects, xla, cpu, names)] = run_ranks(_mixed, 1)
    assert same
    assert objects == [{"rank": 0}]
    assert xla == "xla -> xla (XLA tensors take torch_xla's own group)"
    assert cpu == "shm"
    assert names == ["cpu", "xla"]  # not "x", "l" and "a", which torch_xla registers on torch 2.9


def test_debug_output_names_the_route(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(_mixed, 1, env={"MONARCH_DEBUG": "1"})
    lines = [line for line in capfd.readouterr().err.splitlines() if "xla -> xla" in line]
    assert len(lines) == 1
    assert lines[0].startswith("[monarch rank 0/1 pid ")


def _init_by(rank: int, _address: str, url: str) -> list[float]:
    import torch_xla.distributed.xla_backend  # noqa: F401 # brings the address xla://

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("monarch", init_method=url)
    x, y = _x("xla"), _x("cpu")
    dist.all_reduce(x)
    dist.all_reduce(y)
    assert dist.get_backend() == "monarch"
    dist.destroy_process_group()
    return x.cpu().tolist() + y.tolist()


@pytest.mark.parametrize("url", ["env://", "xla://"])
def test_init_method(url: str) -> None:
    assert run_ranks(_init_by, 1, url, backend=None) == [[1.0, 2.0, 3.0, 4.0] * 2]


def test_a_script_needs_no_import_of_ours() -> None:
    script = (
        "import torch, torch_xla, torch.distributed as dist\n"
        "dist.init_process_group('monarch', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\n"
        "x = torch.ones(2, device='xla'); dist.all_reduce(x); print(x.cpu().tolist()); dist.destroy_process_group()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[1.0, 1.0]"


def _again(rank: int, address: str) -> None:
    for turn in range(3):
        dist.init_process_group("monarch", init_method=f"{address}{turn}", rank=0, world_size=1)
        group = dist.group.WORLD
        x = _x("xla")
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        assert x.cpu().tolist() == [1.0, 2.0, 3.0, 4.0]
        if turn == 1:
            torch.distributed.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
        with pytest.raises(GroupClosedError):
            group.allreduce([_x("xla")])


def test_destroy_abort_and_init_again() -> None:
    run_ranks(_again, 1, backend=None)


def _refused(rank: int) -> None:
    x, out = _x("xla"), torch.zeros(4, device="xla")
    group = dist.group.WORLD
    lacking = [
        (lambda: dist.recv(x), "recv_anysource on route xla -> xla: torch_xla's group lacks it. Name the source"),
        (lambda: group.allreduce_coalesced([x, out]), "allreduce_coalesced on route xla -> xla"),
    ]
    for call, words in lacking:
        with pytest.raises(NoRouteError, match=words) as caught:
            call()
        assert isinstance(caught.value, NotImplementedError)
        assert "rank 0 of 1" in str(caught.value)
    wrong = [
        (lambda: dist.all_reduce(x, op=OPS.AVG), "all_reduce: torch_xla has no reduce op AVG. Use one of SUM"),
        (lambda: dist.reduce(x, 0, op=OPS.BXOR), "reduce: torch_xla has no reduce op BXOR"),
        (lambda: dist.reduce_scatter(out, [x], op=OPS.AVG), "reduce_scatter: torch_xla has no"),
        (lambda: dist.reduce_scatter_tensor(out, x, op=OPS.AVG), "reduce_scatter_tensor: torch_xla has no"),
        (lambda: dist.all_to_all_single(out, x, [4], [4]), "all_to_all_single: torch_xla has no split sizes"),
    ]
    for call, words in wrong:
        with pytest.raises(CollectiveArgumentError, match=words):
            call()
    dist.all_reduce(x)  # the group still works
    assert x.cpu().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_operations_missing_in_torch_xla_raise_clear_errors(pool: Any) -> None:
    pool(1).run(_refused)


def _settings(rank: int) -> None:
    import datetime

    dist.all_reduce(_x("xla"))
    group = dist.group.WORLD
    group.set_timeout(datetime.timedelta(seconds=9))
    assert group._get_sequence_number_for_group() >= 0
    dist.monitored_barrier()
    seen: list[Any] = []
    group._register_on_completion_hook(seen.append)
    dist.all_reduce(_x("xla"))
    dist.all_reduce(_x("cpu"))
    group._wait_for_pending_works()
    assert [info.op_type for info in seen] == ["allreduce"]  # only the call through Gloo: XLA reports no completion


def test_group_wide_settings_pass_the_xla_route_by() -> None:
    run_ranks(_settings, 1)


def _subgroups(rank: int) -> None:
    import torch_xla.distributed.xla_backend as theirs

    dist.all_reduce(_x("xla"))
    # torch_xla's own new_group knows none of these options, and it replaces torch's function for all callers
    group = dist.new_group([0], group_desc="ours", use_local_synchronization=True)
    assert group.group_desc == "ours"
    x = _x("xla")
    dist.all_reduce(x, group=group)
    dist.broadcast(x, 0, group=group)
    dist.reduce(x, 0, group=group)
    assert x.cpu().tolist() == [1.0, 2.0, 3.0, 4.0]
    given = monarch_backend.Options(by_device={"xla": {"mesh": [[0]]}})
    dist.all_reduce(x, group=dist.new_group([0], pg_options=given))
    dist.destroy_process_group()
    dist.init_process_group("xla", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    assert isinstance(dist.new_group([0]), theirs.ProcessGroupXla)
    assert dist.new_group([0])._mesh == [[0]]  # torch_xla's function is back: only it sets the mesh
    dist.destroy_process_group()


def test_subgroups_and_torch_s_own_new_group() -> None:
    run_ranks(_subgroups, 1)


def _two_worlds(rank: int) -> str:
    xla_backend._is_alone = lambda: False  # type: ignore[assignment] # as if the clients knew each other
    with pytest.raises(NoRouteError) as caught:
        dist.all_reduce(_x("xla"))
    y = torch.ones(2)
    dist.all_reduce(y)
    assert y.tolist() == [2.0, 2.0]
    return str(caught.value)


def test_devices_that_are_not_the_ranks_are_refused() -> None:
    # torch_xla would sum over the devices that it counts, without an error.
    for text in run_ranks(_two_worlds, 2):
        assert "torch_xla counts 1 devices and this one is number 0" in text
        assert "torch.distributed counts 2 ranks" in text
        assert "xla://" in text


def _numbers(rank: int, device: str, *size: int) -> torch.Tensor:
    return (torch.arange(float(torch.Size(size).numel())).view(size) + 10 * rank).to(device)


def _each_way(rank: int, device: str) -> list[Any]:
    """Return the results of each collective of two ranks for these numbers."""
    x, wide = _numbers(rank, device, 4), _numbers(rank, device, 2, 3)
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        found.append(_changed(x, lambda y, op=op: dist.all_reduce(y, op)))
    found.append(_changed(x, lambda y: dist.broadcast(y, 1)))
    found.append(_changed(x, lambda y: dist.reduce(y, 1)) if rank else dist.reduce(x.clone(), 1))
    found.append(_changed(wide.new_zeros(4, 3), lambda y: dist.all_gather_into_tensor(y, wide)))
    found.append(_changed(x.new_zeros(2), lambda y: dist.reduce_scatter_tensor(y, x)))
    found.append(_changed(x.new_zeros(4), lambda y: dist.all_to_all_single(y, x)))
    found.append(_changed(x.new_zeros(2, 4), lambda y: dist.all_gather(list(y.unbind()), x)))
    found.append(_changed(x.new_zeros(4), lambda y: dist.send(x, 1) if rank == 0 else dist.recv(y, 0)))
    found.append(_changed(x.new_zeros(4), lambda y: dist.scatter(y, [x, x * 2] if rank == 0 else None, 0)))
    group: Any = dist.group.WORLD
    found += [funcol.all_reduce(x, op, group) + 0 for op in ("sum", "avg")]
    found += [funcol.all_gather_tensor(wide, 1, group) + 0, funcol.reduce_scatter_tensor(x, "sum", 0, group) + 0]
    found += [funcol.broadcast(x, 1, group) + 0]
    mine = dist.new_group([rank], use_local_synchronization=True)  # torch_xla's own new_group would sum over all ranks
    found.append(funcol.all_reduce(x, "sum", mine) + 0)
    return [None if each is None else each.cpu().tolist() for each in found]


def _changed(x: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    y = x.clone()
    call(y)
    return y


def _through_the_host(rank: int) -> tuple[list[Any], list[Any]]:
    dist.all_reduce(_x("xla"))  # the first collective opens the route, which functional collectives then use
    return _each_way(rank, "xla"), _each_way(rank, "cpu")


def test_processes_with_separate_clients_use_the_host() -> None:
    for found, expected in run_ranks(_through_the_host, 2):
        assert found == expected


def _says_once(rank: int) -> None:
    os.environ["MONARCH_DEBUG"] = "1"
    for _ in range(2):
        dist.all_reduce(_x("xla"))


def test_route_through_the_host_is_logged_once(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(_says_once, 2)
    assert capfd.readouterr().err.count("collectives of XLA tensors go through the host") == 2  # once for each rank


def _ddp(rank: int) -> list[float]:
    torch.manual_seed(0)
    losses = []
    for device in ("xla", "cpu"):
        model = torch.nn.Linear(4, 1)
        torch.nn.init.constant_(model.weight, 0.5)
        torch.nn.init.constant_(model.bias, 0.0)
        model = torch.nn.parallel.DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(_x(device)) - 1).pow(2).sum()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach().cpu()))
    return losses


def test_ddp_trains_on_xla_as_on_the_cpu() -> None:
    [(xla, cpu)] = run_ranks(_ddp, 1)
    assert xla == pytest.approx(cpu, rel=1e-5)


def _spmd(rank: int) -> None:
    import torch_xla.runtime
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_xla warns about the switch and about torch's DTensor
        torch_xla.runtime.use_spmd()
        assert torch_xla.runtime.global_runtime_device_count() == 2
        mesh = init_device_mesh("xla", (2,))
        big = torch.arange(8.0).reshape(4, 2)
        sharded = distribute_tensor(big, mesh, [Shard(0)])
        weights = distribute_tensor(torch.ones(2, 3), mesh, [Replicate()])
        spec = torch_xla._XLAC._get_xla_sharding_spec(sharded.global_tensor)
        assert spec == "{devices=[2,1]0,1}"
        assert (sharded @ weights).global_tensor.cpu().tolist() == (big @ torch.ones(2, 3)).tolist()
    assert "xla" not in monarch_backend.routes()
    with pytest.raises(NoRouteError, match="torch_xla is in SPMD mode, where XLA itself moves the data"):
        dist.all_reduce(torch.ones(2, device="xla"))
    y = torch.ones(2)
    dist.all_reduce(y)
    assert y.tolist() == [1.0, 1.0]


def test_dtensor_on_two_devices_in_spmd_mode() -> None:
    run_ranks(_spmd, 1, env={"CPU_NUM_DEVICES": "2"})


def _mesh(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("xla", (1,))
    assert mesh.size() == 1
    assert dist.group.WORLD._get_backend(torch.device("xla")) is not None


def test_device_mesh_of_one_xla_device() -> None:
    run_ranks(_mesh, 1)
